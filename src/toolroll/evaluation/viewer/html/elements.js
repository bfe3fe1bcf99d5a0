// Create elements. All text from episodes becomes text nodes, so it is never parsed as markup.

const at = id => document.getElementById(id);
const narrow = matchMedia("(max-width: 760px)");

// `on` holds event listeners; an attribute that is null, undefined or false is left out.
function make(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "on")
      for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(key, value);
  }
  node.append(
    ...children
      .flat()
      .filter(child => child !== null && child !== undefined)
      .map(child => (child instanceof Node ? child : String(child))),
  );
  return node;
}

// Return the text as nodes. What matches the search is in `mark` elements.
function marked(text) {
  const wanted = state.filters.q.toLowerCase(),
    lower = text.toLowerCase();
  if (!wanted || lower.length !== text.length) return [text];
  const nodes = [];
  let from = 0;
  for (let found = lower.indexOf(wanted); found >= 0; found = lower.indexOf(wanted, from)) {
    nodes.push(text.slice(from, found), make("mark", {}, text.slice(found, found + wanted.length)));
    from = found + wanted.length;
  }
  return [...nodes, text.slice(from)];
}

// Call `run`, which replaces elements, and then focus the element that replaces the focused one.
function keepFocus(run) {
  const old = document.activeElement;
  run();
  if (old.isConnected) return;
  const next =
    (old.id && at(old.id)) ||
    (old.className && document.getElementsByClassName(old.className)[0]) ||
    at("detail");
  next.focus({ preventScroll: true });
}

function number(value) {
  if (value === null || value === undefined) return "–";
  return Number(value.toFixed(Math.abs(value) < 100 ? 3 : 1)).toLocaleString("en");
}

const percent = share => Math.round(100 * share) + "%";
const pretty = value => JSON.stringify(value, null, 2);
const plural = (count, noun) => number(count) + " " + noun + (count === 1 ? "" : "s");

let noticeTimer = 0;

function notify(text) {
  at("notice").textContent = text;
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => {
    at("notice").textContent = "";
  }, 2500);
}

async function copy(text, notice) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard API needs a permission; this older way does not.
    const area = make("textarea", { "aria-label": "Text to copy" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  notify(notice);
}
