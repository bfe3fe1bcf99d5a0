// Search in messages, calls and results. The search reads one block after another, and lets the
// page handle events in between.

const hits = { query: "", rows: new Set(), share: 1 };
const texts = new Map(); // the searched text of each conversation, in lower case, by block

// Return true if the task, the reason or the conversation of `row` contains the query. During a
// search, only the conversations that were already read are considered.
function found(row) {
  const query = state.filters.q.toLowerCase();
  return (
    keyOf(row).toLowerCase().includes(query) ||
    row.reason.toLowerCase().includes(query) ||
    (hits.query === query && (hits.rows.has(row.i) || (row.pair && hits.rows.has(row.pair.i))))
  );
}

function textOf(conversation) {
  const parts = [];
  for (const message of conversation.messages) {
    for (const text of [message.reasoning_content, message.content]) {
      if (text) parts.push(typeof text === "string" ? text : JSON.stringify(text));
    }
    for (const call of message.tool_calls || []) {
      const named = call.function || call;
      parts.push(
        named.name,
        typeof named.arguments === "string" ? named.arguments : JSON.stringify(named.arguments),
      );
    }
  }
  return parts.join("\n").toLowerCase();
}

// `again`: there are new episodes, so search for the same query again.
async function search(again = false) {
  const query = state.filters.q.toLowerCase();
  if (hits.query === query && !again) return;
  if (!again) Object.assign(hits, { query, rows: new Set(), share: query ? 0 : 1 });
  if (!query) return;
  const blocks = new Map();
  for (const row of state.all) {
    if (!blocks.has(row.block)) blocks.set(row.block, []);
    blocks.get(row.block).push(row);
  }
  let read = 0,
    shownAt = performance.now();
  for (const [id, rows] of blocks) {
    if (!texts.has(id)) texts.set(id, (await unpack("block-" + id)).map(textOf));
    if (hits.query !== query) return; // another search has started
    for (const row of rows) if (texts.get(id)[row.place].includes(query)) hits.rows.add(row.i);
    hits.share = ++read / blocks.size;
    if (performance.now() - shownAt > 150) {
      drawTable();
      await new Promise(done => setTimeout(done));
      if (hits.query !== query) return;
      shownAt = performance.now();
    }
  }
  drawTable();
}
