// Overlap: one step of each run on one scale, computation above, communication below it.

const HEAD = 0, LANE = 1;

// One lane a line, from the top: a heading for each run, then compute and communication of each rank.
function lanes(chosen) {
  const all = [];
  runs.forEach((run, number) => {
    const line = run.timeline;
    if (!line) return;
    const ranks = chosen === "all" ? line.ranks
      : [chosen === "auto" ? line.first : line.ranks.includes(+chosen) ? +chosen : line.first];
    // Ranks need not keep step: one alone shows its own borders, all together the outermost.
    const steps = ranks.length > 1 ? line.steps : line.own_steps[ranks[0]];
    const own = steps.find((step) => step[0] === line.step);
    const shift = own ? own[1] : 0;
    all.push({ kind: HEAD, run: number, text: "", steps, shift });
    for (const rank of ranks) {
      const who = ranks.length > 1 ? `${rank}: ` : "";
      if (line.compute.includes(1)) all.push({ kind: LANE, run: number, shift, rank, op: "compute", text: `${who}compute` });
      const names = line.lanes.length ? line.lanes : [null];
      for (const op of names) all.push({ kind: LANE, run: number, shift, rank, op, text: `${who}${op || (who || narrow() ? "comm." : "communication")}` });
    }
  });
  return all;
}

// What is drawn: [start, stop, lane, row of the run's columns or -1, state, top, height, faint].
function shapes(all) {
  const drawn = [];
  runs.forEach((run, number) => {
    const line = run.timeline;
    if (!line) return;
    const laneOf = {};
    all.forEach((lane, at) => { if (lane.run === number && lane.kind === LANE) laneOf[`${lane.rank}/${lane.op}`] = at; });
    const depth = depths(line);
    const own = Object.fromEntries(line.ranks.map((rank) => [rank, line.own_steps[rank].find((step) => step[0] === line.step)]));
    const faint = (rank, start, stop) => own[rank] && (stop <= own[rank][1] || start >= own[rank][2]) ? 1 : 0;
    for (let row = 0; row < line.start.length; row += 1) {
      const rank = line.rank[row], op = line.op.names[line.op.at[row]];
      const key = laneKey(line, row);
      const lane = laneOf[`${rank}/${key}`];
      if (lane === undefined) continue;
      const shift = all[lane].shift;
      const height = 1 / depth[key], top = Math.min(line.level[row], depth[key] - 1) * height;
      const start = line.start[row], stop = line.stop[row];
      const state = line.compute[row] ? op : hiddenBy(op);
      drawn.push([start - shift, stop - shift, lane, row, state, top, height, faint(rank, start, stop), number]);
      if (line.compute[row]) continue;
      for (const [from, to] of standing(line, rank, row)) {
        drawn.push([from - shift, to - shift, lane, row, "stall", top, height, faint(rank, from, to), number]);
      }
    }
  });
  return drawn;
}

function laneKey(line, row) {
  if (line.compute[row]) return "compute";
  return line.lanes.length ? line.op.names[line.op.at[row]] : null;
}

function depths(line) {
  const depth = {};
  for (let row = 0; row < line.start.length; row += 1) {
    const key = laneKey(line, row);
    depth[key] = Math.max(depth[key] || 1, line.level[row] + 1);
  }
  return depth;
}

// The parts of a movement beside which nothing computed; without compute rows, its own exposed end.
function standing(line, rank, row) {
  const start = line.start[row], stop = line.stop[row], bare = line.bare[rank];
  if (!bare) {
    const seconds = Math.min(line.exposed[row], stop - start);
    return seconds > 0 ? [[stop - seconds, stop]] : [];
  }
  let low = 0, high = bare.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bare[middle][1] <= start) low = middle + 1; else high = middle;
  }
  const parts = [];
  for (let at = low; at < bare.length && bare[at][0] < stop; at += 1) {
    parts.push([Math.max(bare[at][0], start), Math.min(bare[at][1], stop)]);
  }
  return parts;
}

function drawTimeline() {
  if (!runs.some((run) => run.timeline)) { byId("overlap-section").hidden = true; return; }
  const all = lanes(byId("rank").value || "auto");
  const drawn = shapes(all);
  const span = stretch();
  const left = narrow() ? 84 : 118;
  chart("timeline", all.length * (all.length > 20 ? 22 : 32) + 72, Object.assign(base(), {
    grid: { left, right: 16, top: 4, bottom: 64 },
    xAxis: axis({ min: span.first, max: span.last, axisLabel: { color: colour.soft, hideOverlap: true, formatter: time } }),
    yAxis: axis({
      type: "category", inverse: true, data: all.map((lane) => lane.text), splitLine: { show: false },
      axisTick: { show: false }, axisLine: { show: false },
      axisLabel: { color: colour.soft, interval: 0, width: left - 10, overflow: "truncate", fontSize: narrow() ? 11 : 12 },
    }),
    dataZoom: [
      { type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, startValue: span.from, endValue: span.to },
      { type: "slider", filterMode: "weakFilter", height: 20, bottom: 10, startValue: span.from, endValue: span.to, labelFormatter: time, showDataShadow: false, borderColor: colour.line, textStyle: { color: colour.soft } },
    ],
    series: [blocks(drawn, all), headings(all)],
  }));
  noteTimeline();
}

// The step of each run lies at zero; the neighbours are drawn faintly to both sides.
function stretch() {
  let first = 0, last = 0, to = 0;
  for (const { timeline: line } of runs) {
    if (!line) continue;
    for (const start of line.start) first = Math.min(first, start);
    for (const stop of line.stop) last = Math.max(last, stop);
    const own = line.steps.find((step) => step[0] === line.step);
    if (own) to = Math.max(to, own[2]);
  }
  if (to === 0) return { first, last, from: first, to: last };
  return { first: Math.min(first, -0.02 * to), last: Math.max(last, 1.03 * to), from: -0.02 * to, to: 1.03 * to };
}

function blocks(drawn, all) {
  return {
    type: "custom", clip: true, dimensions: ["start", "stop", "lane"], encode: { x: [0, 1], y: 2 },
    data: drawn.map((shape) => shape.slice(0, 3)), progressive: 4000, progressiveThreshold: 8000,
    renderItem: (params, api) => {
      const [, , lane, , state, top, height, faint] = drawn[params.dataIndex];
      const from = api.coord([api.value(0), lane]), to = api.coord([api.value(1), lane]);
      const full = api.size([0, 1])[1] - 5;
      const area = params.coordSys;
      const shape = echarts.graphic.clipRectByRect(
        { x: from[0], y: from[1] - full / 2 + top * full, width: Math.max(to[0] - from[0], 0.6), height: Math.max(full * height - (height < 1 ? 1 : 0), 1) },
        { x: area.x, y: area.y, width: area.width, height: area.height });
      if (!shape) return undefined;
      const wide = shape.width > 6;
      return {
        type: "rect", shape,
        // A hatch costs far more than a plain fill, and can't be seen on a sliver.
        style: { fill: state !== "stall" ? colour[state] || colour.other : shape.width > 2.5 ? colour.stall : colour.exposed, opacity: faint ? 0.28 : 1,
          stroke: wide ? colour.page : null, lineWidth: wide ? 0.8 : 0 },
      };
    },
    tooltip: { formatter: (params) => describe(drawn[params.dataIndex], all) },
  };
}

function describe([, , lane, row, state, , , , number], all) {
  const shift = all[lane].shift;
  const line = runs[number].timeline;
  const op = line.op.names[line.op.at[row]], label = line.label.names[line.label.at[row]];
  const lines = [`${runs[number].name}, rank ${line.rank[row]}`,
    `${time(line.start[row] - shift)} – ${time(line.stop[row] - shift)}, ${time(line.stop[row] - line.start[row])} long`];
  if (line.merged[row] > 1) lines.push(`stands for ${line.merged[row]} rows`);
  if (!line.compute[row]) {
    lines.push(`${size(line.nbytes[row])} payload, ${size(line.wire[row])} on the wire` + (line.calls[row] > 1 ? ` in ${line.calls[row]} calls` : ""));
    lines.push(`computation stood still for ${time(line.exposed[row])}`);
    if (state === "stall") lines.push("nothing computes beside this part");
  }
  return tip(line.merged[row] > 1 || !label ? op : `${op} ${label}`, lines);
}

// A heading lane: the run's name, and each step as a dimension line with its length.
function headings(all) {
  const marks = [];
  all.forEach((lane, at) => {
    if (lane.kind !== HEAD) return;
    const line = runs[lane.run].timeline;
    let last = at;
    while (last + 1 < all.length && all[last + 1].run === lane.run) last += 1;
    if (!lane.steps.length) marks.push({ value: [0, 0, at], last, run: lane.run, step: null });
    // The step itself comes last, so that its borders lie over its neighbours'.
    const ordered = [...lane.steps].sort((a, b) => (a[0] === line.step) - (b[0] === line.step));
    for (const [number, start, stop] of ordered) {
      marks.push({ value: [start - lane.shift, stop - lane.shift, at], last, run: lane.run, step: number, own: number === line.step });
    }
  });
  return {
    type: "custom", clip: false, silent: true, encode: { x: [0, 1], y: 2 },
    data: marks.map((mark) => mark.value),
    renderItem: (params, api) => heading(marks[params.dataIndex], params.coordSys, api),
  };
}

function heading(mark, area, api) {
  const name = runs[mark.run].name, tint = colour[`run${mark.run % 6}`];
  const [x0, y] = api.coord([mark.value[0], mark.value[2]]), x1 = api.coord([mark.value[1], mark.value[2]])[0];
  const bottom = api.coord([0, mark.last])[1] + api.size([0, 1])[1] / 2;
  const inside = (x) => x >= area.x - 1 && x <= area.x + area.width + 1;
  const children = [];
  const line = (xa, ya, xb, yb, width) => children.push({ type: "line", shape: { x1: xa, y1: ya, x2: xb, y2: yb }, style: { stroke: mark.own ? tint : colour.line, lineWidth: width } });
  const text = (content, x, align, strong) => children.push({ type: "text", style: { text: content, x, y: y + 1, fill: strong ? colour.ink : colour.soft, font: `${strong ? 650 : 400} 13px system-ui, sans-serif`, align, verticalAlign: "middle" } });
  if (mark.step === null || mark.own) {
    children.push({ type: "text", style: { text: name, x: area.x - 8, y: y + 1, fill: colour.ink, font: "650 13px system-ui, sans-serif", align: "right", verticalAlign: "middle", width: area.x - 10, overflow: "truncate" } });
  }
  if (mark.step !== null) {
    for (const x of [x0, x1]) if (inside(x)) line(x, y - 8, x, bottom, mark.own ? 2 : 1);
    const a = Math.max(x0, area.x), b = Math.min(x1, area.x + area.width);
    if (b - a > 4) {
      line(a, y + 8, b, y + 8, mark.own ? 2 : 1);
      const length = time(mark.value[1] - mark.value[0]);
      const words = narrow() ? length : mark.own ? `step ${mark.step}: ${length}` : `step ${mark.step}`;
      if (b - a > words.length * 7.5) text(words, mark.own ? b - 5 : a + 6, mark.own ? "right" : "left", mark.own);
    }
  }
  return { type: "group", children };
}

function noteTimeline() {
  const notes = ["One step of median length of each run on one scale; its neighbours are faint. Drag to move, Ctrl and wheel to zoom."];
  for (const { name, timeline: line } of runs) {
    if (!line) { notes.push(`${name}: no times in the ledger, nothing to draw.`); continue; }
    if (!line.compute.includes(1)) notes.push(`${name}: no compute in the ledger, so hatched is what each transfer itself counts as exposed.`);
    if (line.all_ranks > line.ranks.length) notes.push(`${name}: ${line.ranks.length} of ${line.all_ranks} ranks.`);
    if (line.merged.some((merged) => merged > 1)) notes.push(`${name}: rows that begin within a pixel of each other are drawn as one.`);
  }
  byId("timeline-note").textContent = notes.join(" ");
}

function zoom(how) {
  const span = stretch(), now = charts.timeline.getOption().dataZoom[0];
  let from = now.startValue, to = now.endValue;
  const width = to - from;
  if (how === "in") { from += width / 4; to -= width / 4; }
  if (how === "out") { from -= width / 2; to += width / 2; }
  if (how === "left") { from -= width / 3; to -= width / 3; }
  if (how === "right") { from += width / 3; to += width / 3; }
  if (how === "step") { from = span.from; to = span.to; }
  charts.timeline.dispatchAction({ type: "dataZoom", startValue: Math.max(from, span.first), endValue: Math.min(to, span.last) });
}
