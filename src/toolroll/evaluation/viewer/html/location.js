// The page's address: `#env/task#sample?filters`. It has all state that a link should restore.

const FILTERS = ["q", "env", "reward", "status", "stop", "tool", "flag", "change", "runName"];
const VIEWS = ["conversation", "tokens", "tools", "data"];

const state = {
  all: [], // the rows of all episodes
  rows: [], // the rows in the table, without the baseline's rows of pairs
  runs: [], // the names of the compared runs
  settings: [], // of each run
  texts: [],
  summary: {},
  byKey: new Map(),
  filters: Object.fromEntries(FILTERS.map(name => [name, ""])),
  sort: "", // a column; "-" before it sorts in descending order
  group: false,
  expanded: new Set(), // tasks whose episodes are shown if the table is grouped by task
  open: null, // a row
  pinned: null, // a row
  beside: true, // show the baseline's episode beside an opened one
  view: "conversation",
  color: "mask",
};
state.rows = state.all;

const taskOf = row => row.env + "/" + row.task;
const runOf = row => (state.runs.length ? row.run + ":" : "");
const keyOf = row => runOf(row) + taskOf(row) + "#" + row.sample;
const encodePart = text => encodeURIComponent(text).replace(/%2F/g, "/");

function linkOf(row) {
  return runOf(row) + encodePart(taskOf(row)) + "#" + row.sample;
}

function address() {
  const query = new URLSearchParams(
    FILTERS.filter(name => state.filters[name]).map(name => [name, state.filters[name]]),
  );
  if (state.sort) query.set("sort", state.sort);
  if (state.group) query.set("group", "task");
  if (state.view !== "conversation") query.set("view", state.view);
  if (state.pinned) query.set("with", keyOf(state.pinned));
  const text = query.toString();
  return "#" + (state.open ? linkOf(state.open) : "") + (text ? "?" + text : "");
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// Set the state from the address. Return false if it names an episode that is not in the page.
function readAddress() {
  clearTimeout(addressTimer);
  const [, path, , search] = /^#?([^?]*)(\?(.*))?$/s.exec(location.hash);
  const query = new URLSearchParams(search || "");
  for (const name of FILTERS) state.filters[name] = query.get(name) || "";
  state.sort = COLUMNS.some(column => column.key === (query.get("sort") || "").replace(/^-/, ""))
    ? query.get("sort")
    : "";
  state.group = query.get("group") === "task";
  state.view = VIEWS.includes(query.get("view")) ? query.get("view") : "conversation";
  state.pinned = state.byKey.get(query.get("with")) || null;
  state.open = state.byKey.get(decoded(path)) || null;
  state.beside = state.pinned !== null || !path;
  return !path || state.open !== null;
}

let addressTimer = 0;

// Write the state into the address. `step`: add an entry to the history, so that Back undoes it.
function writeAddress(step) {
  clearTimeout(addressTimer);
  if (step && address() !== (location.hash || "#")) history.pushState(null, "", address());
  if (step) return;
  // Wait, because browsers limit how often a page may change its address.
  addressTimer = setTimeout(() => history.replaceState(null, "", address()), 200);
}
