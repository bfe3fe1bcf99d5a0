// Start the page, and show what its address names.

function showAddress() {
  const known = readAddress();
  if (!known) notify("This page has no episode " + decoded(location.hash.slice(1).split("?")[0]));
  document.body.classList.toggle("detail-shown", state.open !== null);
  drawFilters();
  drawTable();
  search();
  if (!state.open && !narrow.matches && known) {
    state.open = (table.groups.length && table.groups[0].rows[0]) || null;
    if (state.runs.length) pairUp();
  }
  if (state.open) reveal(state.open);
  return drawDetail();
}

function addRows(rows) {
  for (const row of rows) {
    row.i = state.all.length;
    state.all.push(row);
    if (!state.byKey.has(keyOf(row))) state.byKey.set(keyOf(row), row);
  }
}

// Show the baseline's episodes beside those with which they are paired. First in the table are the
// pairs that flipped, then the other pairs by their change, and then the episodes without a pair.
function pairRows() {
  for (const row of state.all) {
    row.runName = state.runs[row.run];
    row.pair =
      row.base === null ? null : state.byKey.get(keyOf({ ...row, run: 0, sample: row.base }));
    row.baseline = row.pair && row.pair.reward;
    row.change = row.pair && row.reward - row.pair.reward;
  }
  const bases = new Set(state.all.map(row => row.pair));
  const ranks = row =>
    row.pair
      ? [0, Number(row.passed === row.pair.passed), -Math.abs(row.change), Number(row.change > 0)]
      : [1, 0, 0, 0];
  state.rows = state.all
    .filter(row => !bases.has(row))
    .map(row => [ranks(row), row])
    .sort(([a], [b]) => a.map((rank, n) => rank - b[n]).find(Boolean) || 0)
    .map(([, row]) => row);
}

async function start() {
  const index = await unpack("index");
  for (const name of ["runs", "settings", "summary", "texts"])
    if (index[name]) state[name] = index[name];
  addRows(index.rows);
  if (state.runs.length) pairRows();
  document.title = at("title").textContent = index.title;
  if (!state.all.length && !index.follow) {
    document
      .querySelector("main")
      .replaceChildren(make("p", { class: "dim hint" }, "This run has no episodes."));
    document.body.dataset.ready = "1";
    return;
  }
  makeFilters();
  makePane();
  makeKeys();
  drawCards();
  at("about").open = innerWidth >= 1100 && innerHeight > 700;
  at("about").addEventListener("toggle", drawTable);
  at("grid").addEventListener("scroll", () => requestAnimationFrame(drawRows));
  narrow.addEventListener("change", fitTable);
  new ResizeObserver(fitTable).observe(at("grid"));
  addEventListener("popstate", showAddress);
  if (index.follow) await followRun();
  else await showAddress();
  document.body.dataset.ready = "1";
}

start();
