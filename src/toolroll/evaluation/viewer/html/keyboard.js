// The keyboard shortcuts. `?` shows them.

const KEYS = [
  ["j  k", "next, previous episode"],
  ["↑ ↓  Page Up/Down  Home End", "move in the table"],
  ["← →", "in the table: collapse or expand a task; in the tokens: previous, next token"],
  ["Enter", "in the table: read the episode, or expand the task"],
  ["/", "search"],
  ["1  2  3  4", "conversation, tokens, tools, data"],
  ["g", "group by task"],
  ["c", "compare with another episode"],
  ["← →  Home End", "on the border of the table: move it"],
  ["Esc", "back to the table"],
  ["?", "these keys"],
];

function makeKeys() {
  at("keys").append(
    make("h2", { id: "keys-title" }, "Keys"),
    make(
      "dl",
      {},
      KEYS.map(([keys, words]) => make("div", {}, make("dt", {}, keys), make("dd", {}, words))),
    ),
    make("form", { method: "dialog" }, make("button", {}, "Close")),
  );
  at("keys-open").addEventListener("click", () => at("keys").showModal());
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || at("keys").open) return;
    const field = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
    const run = field ? (event.key === "Escape" ? toTable : null) : SHORTCUTS[event.key];
    if (!run) return;
    event.preventDefault();
    run();
  });
  at("grid").addEventListener("keydown", event => {
    if (event.target !== at("grid") || event.ctrlKey || event.metaKey || event.altKey) return;
    const run = IN_TABLE[event.key];
    if (!run) return;
    event.preventDefault();
    run();
  });
}

const SHORTCUTS = {
  j: () => stepEpisode(1),
  k: () => stepEpisode(-1),
  "/": () => {
    document.body.classList.remove("detail-shown");
    at("filter-q").focus();
    at("filter-q").select();
  },
  1: () => viewKey(0),
  2: () => viewKey(1),
  3: () => viewKey(2),
  4: () => viewKey(3),
  g: () => setGroup(!state.group),
  c: () => {
    if (state.open) pin();
  },
  Escape: () => {
    closeDetail();
    toTable();
  },
  "?": () => at("keys").showModal(),
};

const page = () => Math.max(1, Math.floor(at("grid").clientHeight / rowHeight()) - 1);
const IN_TABLE = {
  ArrowDown: () => moveTo(place() + 1),
  ArrowUp: () => moveTo(place() - 1),
  PageDown: () => moveTo(place() + page()),
  PageUp: () => moveTo(place() - page()),
  Home: () => moveTo(0),
  End: () => moveTo(table.items.length - 1),
  ArrowRight: () => foldKey(true),
  ArrowLeft: () => foldKey(false),
  Enter: enter,
  " ": enter,
};

const toTable = () => at("grid").focus();
const place = () => (table.place.has(table.active) ? table.place.get(table.active) : -1);

function viewKey(n) {
  if (panels.length) setView(VIEWS[n]);
}

function stepEpisode(way) {
  const rows = table.groups.flatMap(group => group.rows),
    here = rows.indexOf(state.open);
  const next = rows[here < 0 ? 0 : here + way];
  if (next) openRow(next, { show: document.body.classList.contains("detail-shown") });
}

function moveTo(n) {
  const item = table.items[Math.max(0, Math.min(n, table.items.length - 1))];
  if (!item) return;
  if (item.row && !narrow.matches) openRow(item.row);
  else activate(idOf(item));
}

function foldKey(expand) {
  const item = table.items[place()];
  if (item && item.group) toggle(item.group, expand);
  else if (item && state.group && !expand) {
    const group = table.groups.find(one => one.rows.includes(item.row));
    toggle(group, false);
    activate(idOf({ group }));
  }
}

function enter() {
  const item = table.items[place()];
  if (item && item.group) toggle(item.group);
  else if (item) openRow(item.row, { step: true, show: true }).then(() => at("detail").focus());
}
