// The loss after each step of each run.

// Curves that lie on each other are all seen when the first is the widest.
function drawLoss() {
  const having = runs.map((run, number) => ({ run, number })).filter(({ run }) => run.losses.loss.length);
  if (!having.length) { byId("loss-section").hidden = true; return; }
  chart("loss", 260, Object.assign(base(), {
    grid: { left: 56, right: 16, top: 34, bottom: 40 },
    legend: { icon: "rect", itemHeight: 6, top: 0, left: 0, data: having.map(({ run }) => run.name), textStyle: { color: colour.ink } },
    tooltip: Object.assign(base().tooltip, {
      trigger: "axis",
      formatter: (points) => tip(`step ${points[0].value[0]}`, points.map((point) => `${having[point.seriesIndex].run.name}: ${point.value[1] === null ? "no number" : Number(point.value[1].toPrecision(7))}`)),
    }),
    xAxis: axis({ name: "step", nameLocation: "middle", nameGap: 24, nameTextStyle: { color: colour.soft }, max: "dataMax", splitLine: { show: false } }),
    yAxis: axis({ scale: true }),
    series: having.map(({ run, number }, place) => ({
      type: "line", name: run.name, showSymbol: run.losses.loss.length === 1, sampling: "lttb", z: 2 + place,
      data: run.losses.step.map((step, at) => [step, run.losses.loss[at]]),
      color: colour[`run${number % 6}`],
      lineStyle: { width: 2 + 3.5 * (having.length - 1 - place), opacity: place === having.length - 1 ? 1 : 0.55, color: colour[`run${number % 6}`] },
    })),
  }));
}
