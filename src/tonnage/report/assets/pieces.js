// Fusion: the transfers of one step of each run, each as long as its bytes.

function drawPieces() {
  const having = runs.filter((run) => run.pieces);
  if (!having.length) { byId("pieces-section").hidden = true; return; }
  const all = [];
  having.forEach((run, at) => {
    const cut = run.pieces, onWire = cut.wire.some((nbytes) => nbytes > 0);
    let from = 0;
    cut.nbytes.forEach((payload, row) => {
      const length = onWire ? cut.wire[row] : payload;
      all.push({ value: [from, from + length, at], at, row });
      from += length;
    });
  });
  const left = narrow() ? 84 : 118;
  chart("pieces", having.length * 58 + 48, Object.assign(base(), {
    grid: { left, right: 16, top: 4, bottom: 42 },
    xAxis: axis({ name: "bytes that one rank puts on the wire", nameLocation: "middle", nameGap: 26, nameTextStyle: { color: colour.soft }, axisLabel: { color: colour.soft, hideOverlap: true, formatter: size }, max: (range) => range.max }),
    yAxis: axis({ type: "category", inverse: true, data: having.map((run) => run.name), splitLine: { show: false }, axisTick: { show: false }, axisLine: { show: false }, axisLabel: { color: colour.ink, fontWeight: 650, fontSize: 13, width: left - 10, overflow: "truncate" } }),
    series: [{
      type: "custom", encode: { x: [0, 1], y: 2 }, data: all.map((piece) => piece.value), progressive: 4000, progressiveThreshold: 8000,
      renderItem: (params, api) => piece(all[params.dataIndex], having, api),
      tooltip: { formatter: (params) => describePiece(all[params.dataIndex], having) },
    }],
  }));
  byId("pieces").setAttribute("aria-label", having.map((run) => `${run.name}: ${words(run.pieces)}`).join("; "));
  byId("pieces-note").textContent = having.filter((run) => run.pieces.merged > 1)
    .map((run) => `${run.name}: up to ${run.pieces.merged} transfers are drawn as one.`).join(" ");
}

function words(cut) {
  const total = cut.nbytes.reduce((sum, nbytes) => sum + nbytes, 0);
  return `${cut.num_calls} ${cut.num_calls === 1 ? "transfer" : "transfers"}, ${size(total / cut.num_calls)} each on average`;
}

function piece({ value, at, row }, having, api) {
  const [x0, y] = api.coord([value[0], at]), x1 = api.coord([value[1], at])[0];
  const gap = x1 - x0 > 3 ? 1 : 0;
  const children = [{
    type: "rect", shape: { x: x0, y: y - 4, width: Math.max(x1 - x0 - gap, 0.6), height: 24 },
    style: { fill: colour[hiddenBy(having[at].pieces.op.names[having[at].pieces.op.at[row]])], opacity: row % 2 ? 0.78 : 1 },
  }];
  if (row === 0) {
    children.push({ type: "text", style: { text: words(having[at].pieces), x: x0, y: y - 15, fill: colour.ink, font: "13px system-ui, sans-serif", verticalAlign: "middle" } });
  }
  return { type: "group", children };
}

function describePiece({ at, row }, having) {
  const run = having[at], cut = run.pieces;
  const label = cut.label.names[cut.label.at[row]];
  const lines = [run.name, `${size(cut.nbytes[row])} payload, ${size(cut.wire[row])} on the wire`];
  if (cut.calls[row] > 1) lines.push(`${cut.calls[row]} transfers`);
  return tip(`${cut.op.names[cut.op.at[row]]} ${label}`, lines);
}
