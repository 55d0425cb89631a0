// Draws all, and draws again when the page's width or colours change.

function draw() {
  readColours();
  drawTimeline();
  drawPieces();
  drawLoss();
}

function fillRanks() {
  const ranks = [...new Set(runs.flatMap((run) => (run.timeline ? run.timeline.ranks : [])))].sort((a, b) => a - b);
  const select = byId("rank");
  const first = runs.find((run) => run.timeline);
  for (const rank of ranks) element("option", String(rank), select).value = rank;
  element("option", "all", select).value = "all";
  if (first) select.value = String(first.timeline.first);
}

if (runs.length) {
  fillRanks();
  runs.forEach((run, number) => { element("option", run.name, byId("step-run")).value = number; });
  fillSteps();
  draw();
}
byId("rank").addEventListener("change", drawTimeline);
byId("step-run").addEventListener("change", fillSteps);
byId("step-number").addEventListener("change", fillStep);
document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => zoom(button.dataset.zoom)));
document.querySelectorAll(".csv").forEach((button) => button.addEventListener("click", () => save(button.dataset.table)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
matchMedia("print").addEventListener("change", draw);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  requestAnimationFrame(draw);
});
window.tonnageCharts = charts;
