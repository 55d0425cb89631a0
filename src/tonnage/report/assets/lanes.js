// One lane a rank and stream; text reaches the page only as textContent or on a canvas, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const box = document.getElementById("lanes"), select = document.getElementById("step");
const first = data.start.reduce((a, b) => Math.min(a, b), 0);
const last = data.stop.reduce((a, b) => Math.max(a, b), 1);
const narrow = () => document.documentElement.clientWidth < 600;
let chart = null;

function time(micro) {
  const size = Math.abs(micro), digits = (value) => value.toFixed(Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2);
  if (size >= 1e6) return `${digits(micro / 1e6)} s`;
  return size >= 1e3 ? `${digits(micro / 1e3)} ms` : `${digits(micro)} µs`;
}

function hatched(ground, stripe) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 8;
  const pen = canvas.getContext("2d");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = stripe;
  pen.lineWidth = 1.4;
  for (const at of [-8, 0, 8]) {
    pen.beginPath();
    pen.moveTo(at - 1, 9);
    pen.lineTo(at + 9, -1);
    pen.stroke();
  }
  return { image: canvas, repeat: "repeat" };
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const fills = data.kinds.map((kind) => (kind === "waiting" ? hatched(of(kind), of("hatch")) : of(kind)));
  return { fills, ink: of("ink"), soft: of("soft"), line: of("line"), card: of("card") };
}

function tip(row) {
  const made = document.createElement("div");
  made.style.maxWidth = "24rem";
  made.style.whiteSpace = "normal";
  made.style.overflowWrap = "anywhere";
  const add = (tag, text) => { const part = document.createElement(tag); part.textContent = text; made.append(part); };
  add("b", data.texts[data.text[row]]);
  add("div", `${data.lanes[data.lane[row]]}, ${data.words[data.kind[row]]}${data.merged[row] > 1 ? ` × ${data.merged[row]}` : ""}`);
  add("div", `${time(data.stop[row] - data.start[row])}, ${time(data.start[row])} – ${time(data.stop[row])}`);
  return made;
}

function draw() {
  const colour = colours(), left = narrow() ? 96 : 150, count = data.lanes.length;
  const before = chart ? chart.getOption().dataZoom[0] : null;
  box.style.height = `${count * (count > 24 ? 18 : 28) + 76}px`;
  if (!chart) chart = echarts.init(box);
  chart.resize();
  const from = before ? before.startValue : first, to = before ? before.endValue : last;
  chart.setOption({
    animation: false,
    textStyle: { color: colour.ink, fontFamily: "system-ui, sans-serif" },
    tooltip: { confine: true, backgroundColor: colour.card, borderColor: colour.line, textStyle: { color: colour.ink, fontSize: 13 }, formatter: (at) => (at.seriesIndex === 0 ? tip(at.dataIndex) : "") },
    grid: { left, right: 16, top: 20, bottom: 64 },
    xAxis: { type: "value", min: first, max: last, axisLine: { lineStyle: { color: colour.line } }, axisLabel: { color: colour.soft, hideOverlap: true, formatter: time }, splitLine: { lineStyle: { color: colour.line, opacity: 0.5 } } },
    yAxis: { type: "category", inverse: true, data: data.lanes, axisTick: { show: false }, axisLine: { show: false }, splitLine: { show: false }, axisLabel: { color: colour.soft, interval: 0, width: left - 10, overflow: "truncate", fontSize: narrow() ? 10 : 12 } },
    dataZoom: [
      { type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, startValue: from, endValue: to },
      { type: "slider", filterMode: "weakFilter", height: 20, bottom: 10, startValue: from, endValue: to, labelFormatter: time, showDataShadow: false, borderColor: colour.line, textStyle: { color: colour.soft } },
    ],
    series: [pieces(colour), borders(colour)],
  }, { notMerge: true });
}

function pieces(colour) {
  return {
    type: "custom", clip: true, dimensions: ["start", "stop", "lane"], encode: { x: [0, 1], y: 2 },
    data: data.start.map((start, row) => [start, data.stop[row], data.lane[row]]), progressive: 4000, progressiveThreshold: 8000,
    renderItem: (params, api) => {
      const from = api.coord([api.value(0), api.value(2)]), to = api.coord([api.value(1), api.value(2)]);
      const height = Math.max(api.size([0, 1])[1] - 4, 2), area = params.coordSys;
      const shape = echarts.graphic.clipRectByRect(
        { x: from[0], y: from[1] - height / 2, width: Math.max(to[0] - from[0], 0.6), height },
        { x: area.x, y: area.y, width: area.width, height: area.height });
      return shape ? { type: "rect", shape, style: { fill: colour.fills[data.kind[params.dataIndex]] } } : undefined;
    },
  };
}

// Borders of steps as lines over all lanes, with the number above.
function borders(colour) {
  const lines = data.steps.flatMap(([name, start, stop]) => [
    { xAxis: start, label: { formatter: name, position: "start", color: colour.soft, align: "left" } },
    { xAxis: stop, label: { show: false } }]);
  return { type: "custom", renderItem: () => undefined, data: [], markLine: { silent: true, symbol: "none", animation: false, lineStyle: { color: colour.ink, type: "dashed", opacity: 0.55 }, data: lines } };
}

function zoom(how) {
  const now = chart.getOption().dataZoom[0], width = now.endValue - now.startValue;
  const moves = { in: [0.25, -0.25], out: [-0.5, 0.5], left: [-0.5, -0.5], right: [0.5, 0.5] }[how];
  const from = Math.max(first, now.startValue + moves[0] * width), to = Math.min(last, now.endValue + moves[1] * width);
  if (to > from) chart.dispatchAction({ type: "dataZoom", startValue: from, endValue: to });
}

const choose = (text, value) => { const made = document.createElement("option"); made.textContent = text; made.value = value; select.append(made); };
choose("–", "");
data.steps.forEach(([name], at) => choose(name, at));
select.addEventListener("change", () => {
  const step = data.steps[select.value];
  chart.dispatchAction({ type: "dataZoom", startValue: step ? step[1] : first, endValue: step ? step[2] : last });
});
document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => zoom(button.dataset.zoom)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", () => requestAnimationFrame(draw));
draw();
window.tonnageCharts = { lanes: chart };
