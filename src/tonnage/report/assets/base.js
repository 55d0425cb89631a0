// What every picture and table needs: the data, numbers as people write them, colours, a chart.
// Text from ledgers reaches the page only as textContent or on a canvas, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const byId = (id) => document.getElementById(id);
const charts = {};
let colour = {};

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

function time(micro) {
  const size = Math.abs(micro);
  if (size === 0) return "0 s";
  if (size >= 999500) return `${digits(micro / 1e6)} s`;
  return size >= 999.5 ? `${digits(micro / 1e3)} ms` : `${digits(micro)} µs`;
}

function size(nbytes) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let value = nbytes, unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return unit ? `${digits(value)} ${units[unit]}` : `${Math.round(value)} B`;
}

function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function tip(title, lines) {
  const box = document.createElement("div");
  box.style.maxWidth = "22rem";
  box.style.whiteSpace = "normal";
  box.style.overflowWrap = "anywhere";
  element("b", title, box);
  for (const line of lines) element("div", line, box);
  return box;
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["page", "ink", "soft", "line", "card", "forward", "backward", "optimizer", "other",
    "hidden", "hidden2", "exposed", "hatch", "run0", "run1", "run2", "run3", "run4", "run5"];
  colour = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  colour.stall = hatched(colour.exposed, colour.hatch);
}

const hiddenBy = (op) => (op === "all-gather" ? "hidden2" : "hidden");

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

function base() {
  return {
    animation: false,
    textStyle: { color: colour.ink, fontFamily: "system-ui, sans-serif" },
    tooltip: {
      confine: true, backgroundColor: colour.card, borderColor: colour.line,
      textStyle: { color: colour.ink, fontSize: 13 },
    },
  };
}

function axis(more) {
  return Object.assign({
    type: "value",
    axisLine: { lineStyle: { color: colour.line } },
    axisLabel: { color: colour.soft, hideOverlap: true },
    splitLine: { lineStyle: { color: colour.line, opacity: 0.5 } },
  }, more);
}

function chart(id, height, option) {
  const box = byId(id);
  box.style.height = `${height}px`;
  if (!charts[id]) charts[id] = echarts.init(box);
  charts[id].resize();
  charts[id].setOption(option, { notMerge: true });
  return charts[id];
}

const narrow = () => document.documentElement.clientWidth < 600;
