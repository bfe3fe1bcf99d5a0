// Which episodes the table shows, in which order, and in which groups.

const REWARDS = {
  pass: row => row.passed,
  part: row => row.reward !== null && row.reward > 0 && !row.passed,
  zero: row => row.reward !== null && row.reward <= 0,
  none: row => row.reward === null,
};

const CHANGES = {
  failed: row => row.pair.passed && !row.passed,
  passed: row => !row.pair.passed && row.passed,
  worse: row => row.change < 0,
  better: row => row.change > 0,
  same: row => row.change === 0,
};

function matches(row) {
  const f = state.filters;
  return (
    (!f.env || row.env === f.env) &&
    (!f.status || row.status === f.status) &&
    (!f.stop || row.stop === f.stop) &&
    (!f.tool || row.called.includes(f.tool)) &&
    (!REWARDS[f.reward] || REWARDS[f.reward](row)) &&
    (!f.flag || row[f.flag] > 0) &&
    (!f.runName || row.runName === f.runName) &&
    (!CHANGES[f.change] || (row.pair && CHANGES[f.change](row))) &&
    (!f.q || found(row))
  );
}

// Compare two values. null comes last in ascending and in descending order.
function compare(x, y, sign) {
  if (x === y) return 0;
  if (x === null || y === null) return x === null ? 1 : -1;
  return sign * (typeof x === "string" ? COLLATOR.compare(x, y) : x - y);
}

const COLLATOR = new Intl.Collator("en", { numeric: true });
const mean = values => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

function sorted(things, value) {
  if (!state.sort) return things;
  const sign = state.sort.startsWith("-") ? -1 : 1;
  return things
    .map((thing, n) => [value(thing), n, thing])
    .sort((a, b) => compare(a[0], b[0], sign) || a[1] - b[1])
    .map(entry => entry[2]);
}

const sortKey = () => state.sort.replace(/^-/, "");

// Return the matching episodes as groups `{key, env, task, rows, all, graded, passed}`. `all` has the
// task's episodes that do not match, too, and is what is counted. If the table is not grouped, return
// one group that has only `rows`.
function groups() {
  const rows = sorted(state.rows.filter(matches), row => row[sortKey()]);
  if (!state.group) return [{ rows }];
  const byTask = new Map();
  for (const row of rows) {
    const key = taskOf(row);
    if (!byTask.has(key)) byTask.set(key, { key, env: row.env, task: row.task, rows: [], all: [] });
    byTask.get(key).rows.push(row);
  }
  for (const row of state.rows) byTask.get(taskOf(row))?.all.push(row);
  for (const group of byTask.values()) {
    const graded = group.all.filter(row => row.reward !== null);
    group.graded = graded.length;
    group.passed = graded.filter(row => row.passed).length;
    group.pairs = group.all.map(row => row.pair).filter(Boolean);
  }
  return sorted([...byTask.values()], group => {
    const values = group.rows.map(row => row[sortKey()]).filter(value => value !== null);
    return typeof values[0] === "string" ? values[0] : mean(values);
  });
}
