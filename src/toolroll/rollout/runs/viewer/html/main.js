// Start the page, and show what its address names.

function follow() {
  const known = readAddress();
  if (!known) notify("This page has no episode " + decoded(location.hash.slice(1).split("?")[0]));
  document.body.classList.toggle("detail-shown", state.open !== null);
  drawFilters();
  drawTable();
  search();
  if (!state.open && !narrow.matches && known)
    state.open = (table.groups.length && table.groups[0].rows[0]) || null;
  if (state.open) reveal(state.open);
  return drawDetail();
}

async function start() {
  const index = await unpack("index");
  state.rows = index.rows.map((row, i) => ({ ...row, i }));
  state.settings = index.settings;
  state.summary = index.summary;
  for (const row of state.rows) if (!state.byKey.has(keyOf(row))) state.byKey.set(keyOf(row), row);
  document.title = at("title").textContent = index.title;
  if (!state.rows.length) {
    document
      .querySelector("main")
      .replaceChildren(make("p", { class: "dim hint" }, "This run has no episodes."));
    document.body.dataset.ready = "1";
    return;
  }
  chooseColumns();
  makeFilters();
  makeKeys();
  drawCards();
  at("about").open = innerWidth >= 1100 && innerHeight > 700;
  at("about").addEventListener("toggle", drawTable);
  at("grid").addEventListener("scroll", () => requestAnimationFrame(drawRows));
  narrow.addEventListener("change", layRows);
  new ResizeObserver(drawRows).observe(at("grid"));
  addEventListener("popstate", follow);
  await follow();
  document.body.dataset.ready = "1";
}

start();
