// The calls of the task's reference, beside the calls of the episode.

const SIGNS = { same: "=", other: "≠", missing: "missing", extra: "extra" };
let expectedOpen = false;

function expected(panel) {
  const wanted = panel.detail.expected.map(callOf),
    made = panel.detail.messages.flatMap(message => message.tool_calls || []).map(callOf);
  if (!wanted.length) return null;
  const pairs = aligned(wanted, made),
    same = pairs.filter(pair => pair.kind === "same").length;
  const text =
    "Expected calls: " + same + " of " + wanted.length + " made; other calls: " + (made.length - same);
  const box = make(
    "details",
    { class: "expected", open: expectedOpen && "" },
    make("summary", {}, text),
    make(
      "table",
      {},
      make("tr", {}, ["Expected", "Match", "Made"].map(words => make("th", { scope: "col" }, words))),
      pairs.map(({ kind, want, call }) =>
        make(
          "tr",
          { class: kind },
          [want ? want.words : "", SIGNS[kind], call ? call.words : ""].map(words =>
            make("td", {}, words),
          ),
        ),
      ),
    ),
  );
  box.addEventListener("toggle", () => {
    expectedOpen = box.open;
    for (const other of document.querySelectorAll(".expected")) other.open = box.open;
  });
  return box;
}

// Return a call as `{name, text, words}`. Calls with the same name and arguments have the same text.
function callOf(call) {
  const named = call.function || call,
    name = String(named.name);
  let values = named.arguments;
  try {
    if (typeof values === "string") values = JSON.parse(values);
  } catch {
    /* not JSON: compare it as it is */
  }
  const text = name + " " + JSON.stringify(inOrder(values || {}));
  return { name, text, words: text.replace(/ \{\}$/, "") };
}

// Return a copy of a JSON value in which the keys of objects are sorted.
function inOrder(value) {
  if (Array.isArray(value)) return value.map(inOrder);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(
    Object.keys(value)
      .sort()
      .map(key => [key, inOrder(value[key])]),
  );
}

// Return `[{kind, want, call}]`: both lists in order, with as many equal calls side by side as
// possible, and then as many calls with the same name.
function aligned(wanted, made) {
  const whole = wanted.length + made.length + 1;
  const gain = (want, call) =>
    want.text === call.text ? whole : want.name === call.name ? 1 : -Infinity;
  const best = Array.from({ length: wanted.length + 1 }, () => new Array(made.length + 1).fill(0));
  const both = (i, j) => best[i + 1][j + 1] + gain(wanted[i], made[j]);
  for (let i = wanted.length - 1; i >= 0; i--)
    for (let j = made.length - 1; j >= 0; j--)
      best[i][j] = Math.max(best[i + 1][j], best[i][j + 1], both(i, j));
  const pairs = [];
  for (let i = 0, j = 0; i < wanted.length || j < made.length; ) {
    const want = i < wanted.length && wanted[i],
      call = j < made.length && made[j];
    if (want && call && best[i][j] === both(i, j)) {
      pairs.push({ kind: want.text === call.text ? "same" : "other", want, call });
      i++;
      j++;
    } else if (want && (!call || best[i][j] === best[i + 1][j])) {
      pairs.push({ kind: "missing", want });
      i++;
    } else {
      pairs.push({ kind: "extra", call });
      j++;
    }
  }
  return pairs;
}
