// The table. Only the visible rows are in the document.

// In the order of `rank`, as many columns are shown as fit.
const COLUMNS = [
  { key: "task", words: "Task", keep: true, rank: 0 },
  { key: "sample", words: "#", title: "Sample", width: 36, num: true, keep: true, rank: 1 },
  { key: "baseline", words: "Baseline", title: "Reward of the baseline", width: 66, num: true, rank: 1 },
  { key: "reward", words: "Reward", width: 66, num: true, keep: true, rank: 1 },
  { key: "change", words: "Change", title: "Change of the reward", width: 66, num: true, rank: 1 },
  { key: "reason", words: "Reason", title: "Reason for the reward", rank: 2 },
  { key: "turns", words: "Turns", width: 54, num: true, keep: true, rank: 3 },
  { key: "calls", words: "Calls", width: 54, num: true, keep: true, rank: 4 },
  { key: "invalid", words: "Invalid", title: "Invalid calls", width: 60, num: true, rank: 3 },
  { key: "forks", words: "Forks", width: 66, num: true, rank: 4 },
  { key: "tokens", words: "Tokens", width: 68, num: true, keep: true, rank: 5 },
  { key: "trained", words: "Trained", title: "Trained tokens", width: 70, num: true, rank: 6 },
  { key: "seconds", words: "Seconds", width: 76, num: true, keep: true, rank: 7 },
  { key: "status", words: "Status", width: 100, rank: 3 },
  { key: "stop", words: "Stop reason", width: 130, rank: 5 },
  { key: "env", words: "Environment", width: 170, rank: 3 },
  { key: "runName", words: "Run", width: 130, rank: 3 },
];
const COMPARED = ["baseline", "change", "runName"]; // only if runs are compared
const SPARE = 8; // number of rows that are drawn above and below the visible ones
const SCROLLBAR = 16; // pixels
const table = { columns: [], groups: [], items: [], place: new Map(), active: null };

// Leave out columns whose value is the same in all episodes, except those with `keep`, a reason that
// no shown episode has, and columns that do not fit.
function chooseColumns() {
  const shown = table.groups.flatMap(group => group.rows),
    reasons = shown.filter(row => row.reason).length / shown.length,
    longest = key => shown.reduce((most, row) => Math.max(most, row[key].length), 0);
  const differs = key => state.rows.some(row => row[key] !== state.rows[0][key]);
  let space = at("list").clientWidth - 24 - SCROLLBAR;
  // These columns are as wide as their longest text, within limits (in pixels).
  const byContent = {
    task: Math.max(64, Math.min(8 * longest("task") + 36, 150)),
    reason: Math.max(72, Math.round(Math.min(8 * longest("reason") + 24, 0.38 * space))),
  };
  const useful = COLUMNS.filter(({ key, keep }) =>
    key === "reason" ? reasons > 0 : keep || differs(key),
  ).map(column => ({ ...column, width: byContent[column.key] ?? column.width }));
  // The column by which the table is sorted is shown before others, and a reason that few have late.
  const rankOf = ({ key, rank }) =>
    key === "task" ? 0 : key === sortKey() ? 0.5 : key === "reason" && reasons < 1 / 4 ? 5.5 : rank;
  const fitting = useful
    .slice()
    .sort((a, b) => rankOf(a) - rankOf(b))
    .filter(column => {
      if (column.key === "reason" && space >= 100) column.width = Math.min(column.width, space); // cut
      const fits = narrow.matches || column.width <= space || column.key === "task";
      if (fits) space -= column.width;
      return fits;
    });
  const columns = useful.filter(column => fitting.includes(column)),
    left = useful.filter(column => !fitting.includes(column));
  at("left-out").textContent = left.length
    ? "No room for " + left.map(({ words }) => words.toLowerCase()).join(", ")
    : "";
  at("left-out").title = at("left-out").textContent;
  table.columns = columns;
  // The space that is left is for the names of tasks, up to 260 pixels, and then for the reasons.
  const hasReason = columns.some(({ key }) => key === "reason"),
    name = Math.min(9 * longest("task") + 36, 260) + "px",
    most = { task: hasReason ? name : "1fr", reason: "1fr" };
  const size = ({ key, width }) =>
    most[key] ? "minmax(" + width + "px, " + most[key] + ")" : width + "px";
  at("grid").style.setProperty("--columns", columns.map(size).join(" "));
}

const rowHeight = () => (narrow.matches ? 58 : 34);
const idOf = item => (item.row ? "row-" + item.row.i : "group-" + item.group.rows[0].i);

// Draw the table with the matching episodes.
function drawTable() {
  table.groups = groups();
  chooseColumns();
  layRows();
  const count = table.groups.reduce((sum, group) => sum + group.rows.length, 0);
  at("count").textContent =
    (hits.share < 1 ? "Searching " + Math.floor(100 * hits.share) + "% · " : "") +
    number(count) +
    " of " +
    plural(state.rows.length, "episode") +
    (state.group ? " in " + plural(table.groups.length, "task") : "");
  at("empty").hidden = count > 0 || hits.share < 1;
  at("grid").hidden = count === 0;
  if (at("about").open) drawPlots(table.groups.flatMap(group => group.rows));
}

function layRows() {
  table.items = [];
  for (const group of table.groups) {
    if (state.group) table.items.push({ group });
    if (!state.group || state.expanded.has(group.key))
      for (const row of group.rows) table.items.push({ row });
  }
  table.place = new Map(table.items.map((item, n) => [idOf(item), n]));
  const grid = at("grid");
  grid.setAttribute("role", state.group ? "treegrid" : "grid");
  grid.setAttribute("aria-rowcount", table.items.length + 1);
  grid.setAttribute("aria-colcount", table.columns.length);
  drawHead();
  at("rows").style.height = table.items.length * rowHeight() + "px";
  drawRows();
}

function drawHead() {
  const sign = state.sort.startsWith("-") ? "descending" : "ascending";
  keepFocus(() =>
    at("head").replaceChildren(
      make(
        "div",
        { role: "row", "aria-rowindex": 1, class: "line" },
        table.columns.map(({ key, words, title, num }) => {
          const chosen = sortKey() === key;
          return make(
            "div",
            {
              role: "columnheader",
              class: "c-" + key + (num ? " num" : ""),
              "aria-sort": chosen ? sign : null,
            },
            make(
              "button",
              {
                type: "button",
                id: "by-" + key,
                "data-key": key,
                title,
                on: { click: () => sortBy(chosen && sign === "ascending" ? "-" + key : key) },
              },
              words + (chosen ? (sign === "descending" ? " ↓" : " ↑") : ""),
            ),
          );
        }),
      ),
    ),
  );
}

function sortBy(sort) {
  state.sort = sort;
  writeAddress(true);
  drawFilters();
  drawTable();
}

function drawRows() {
  const grid = at("grid"),
    tall = rowHeight(),
    height = grid.clientHeight || 600;
  const first = Math.max(0, Math.floor(grid.scrollTop / tall) - SPARE);
  const last = Math.min(table.items.length, Math.ceil((grid.scrollTop + height) / tall) + SPARE);
  const lines = [];
  for (let n = first; n < last; n++) lines.push(line(table.items[n], n, tall));
  at("rows").replaceChildren(...lines);
  const active = table.active !== null && at(table.active) ? table.active : null;
  if (active) grid.setAttribute("aria-activedescendant", active);
  else grid.removeAttribute("aria-activedescendant");
}

function line(item, n, tall) {
  const { row, group } = item,
    id = idOf(item),
    open = row !== undefined && row === state.open;
  const expanded = group ? state.expanded.has(group.key) : null;
  return make(
    "div",
    {
      role: "row",
      id,
      "aria-rowindex": n + 2,
      "aria-selected": group ? null : String(open),
      "aria-expanded": group && String(expanded),
      "aria-level": state.group ? (group ? 1 : 2) : null,
      style: "transform:translateY(" + n * tall + "px)",
      class:
        "line" +
        (group ? " group" : "") +
        (open ? " open" : "") +
        (row && row === state.pinned ? " pinned" : "") +
        (id === table.active ? " active" : ""),
      on: {
        click: () => {
          activate(id);
          if (group) toggle(group);
          else openRow(row, { step: true, show: true });
        },
      },
    },
    group ? groupCells(group, expanded) : table.columns.map(column => cell(row, column)),
  );
}

function cell(row, { key, num }) {
  const value = row[key],
    sign = key === "change" && value > 0 ? "+" : "",
    text = typeof value === "number" || value === null ? sign + number(value) : value;
  return make(
    "div",
    { role: "gridcell", class: "c-" + key + (num ? " num" : "") + mood(row, key), title: text },
    text,
  );
}

function mood(row, key) {
  if (key === "reward" && row.reward !== null)
    return row.passed ? " good" : row.reward <= 0 ? " bad" : " part";
  if (key === "baseline" && row.pair) return mood(row.pair, "reward");
  if (key === "change" && row.change) return row.change > 0 ? " good" : " bad";
  if (key === "invalid" || key === "forks") return row[key] ? " warn" : " dim";
  return key === "status" && row.status === "aborted"
    ? " bad"
    : key === "reason" || key === "sample"
      ? " dim"
      : "";
}

function groupCells(group, expanded) {
  const rate = group.graded ? group.passed / group.graded : null,
    lost = group.all.length - group.graded,
    hidden = group.all.length - group.rows.length,
    before = group.pairs.filter(row => row.passed).length + "/" + group.pairs.length + " → ",
    text =
      (state.runs.length ? before : "") +
      group.passed +
      "/" +
      group.graded +
      " passed" +
      (lost ? ", " + lost + " lost" : "") +
      (hidden ? ", " + group.rows.length + " shown" : "");
  return [
    make(
      "div",
      { role: "gridcell", class: "c-name", title: group.key },
      make("span", { class: "fold", "aria-hidden": "true" }, expanded ? "▾" : "▸"),
      make("span", {}, group.task),
    ),
    make(
      "div",
      {
        role: "gridcell",
        class:
          "c-rate" +
          (rate === null ? " dim" : rate === 1 ? " good" : rate === 0 ? " bad" : " part"),
      },
      rate === null ? "no reward" : text + " · " + percent(rate),
    ),
    make(
      "div",
      { role: "gridcell", class: "c-bar" },
      make(
        "span",
        { class: "rate", "aria-hidden": "true" },
        make("span", { style: "width:" + 100 * (rate || 0) + "%" }),
      ),
    ),
  ];
}

function toggle(group, wanted) {
  const expand = wanted === undefined ? !state.expanded.has(group.key) : wanted;
  if (expand) state.expanded.add(group.key);
  else state.expanded.delete(group.key);
  layRows();
}

function activate(id) {
  table.active = id;
  const n = table.place.get(id),
    grid = at("grid"),
    tall = rowHeight(),
    head = at("head").offsetHeight;
  if (n !== undefined) {
    if (n * tall < grid.scrollTop) grid.scrollTop = n * tall;
    else if ((n + 1) * tall + head > grid.scrollTop + grid.clientHeight)
      grid.scrollTop = (n + 1) * tall + head - grid.clientHeight;
  }
  drawRows();
}

// Show `row` in the table, with its group expanded.
function reveal(row) {
  if (state.group && !state.expanded.has(taskOf(row))) {
    state.expanded.add(taskOf(row));
    layRows();
  }
  activate("row-" + row.i);
}
