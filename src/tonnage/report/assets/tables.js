// The table of single steps, and tables as CSV files.

function fillSteps() {
  const steps = runs[+byId("step-run").value].steps;
  const select = byId("step-number");
  select.replaceChildren();
  for (const step of steps.kept) element("option", String(step), select).value = step;
  byId("step-note").textContent = !steps.all ? "No movement belongs to a step."
    : steps.kept.length < steps.all ? `${steps.kept.length} of ${steps.all} steps, evenly spaced, are in this page.` : "";
  fillStep();
}

// A bare number and how it is shown; a time that nobody measured is neither zero nor a number.
const seconds = (micro) => (micro === null ? [null, "–"] : [micro / 1e6, time(micro)]);

function fillStep() {
  const steps = runs[+byId("step-run").value].steps, chosen = +byId("step-number").value;
  const table = byId("single-step");
  table.replaceChildren();
  element("caption", "Movements of one step, sum of its rows", table);
  const head = element("tr", undefined, element("thead", undefined, table));
  for (const name of ["rank", "kind", "op", "calls", "payload", "wire", "time", "exposed"]) element("th", name, head).scope = "col";
  const body = element("tbody", undefined, table);
  steps.step.forEach((step, row) => {
    if (step !== chosen) return;
    const line = element("tr", undefined, body);
    element("th", String(steps.rank[row]), line).scope = "row";
    element("td", steps.kind.names[steps.kind.at[row]], line);
    element("td", steps.op.names[steps.op.at[row]], line);
    for (const [value, shown] of [[steps.calls[row], String(steps.calls[row])], [steps.nbytes[row], size(steps.nbytes[row])],
      [steps.wire[row], size(steps.wire[row])], seconds(steps.seconds[row]), seconds(steps.exposed[row])]) {
      const cell = element("td", shown, line);
      cell.className = "number";
      if (value !== null) cell.dataset.value = value;
    }
  });
}

// A cell that a spreadsheet would take for a formula gets a quote before it.
function csv(table) {
  const quoted = (text) => `"${text.replace(/"/g, '""')}"`;
  return [...table.rows].map((row) => [...row.cells].map((cell) => {
    if (cell.dataset.value !== undefined) return cell.dataset.value;
    return quoted(/^[=+\-@\t\r]/.test(cell.textContent) ? `'${cell.textContent}` : cell.textContent);
  }).join(",")).join("\r\n") + "\r\n";
}

function save(name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv(byId(name))], { type: "text/csv" }));
  link.download = `tonnage-${name}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
