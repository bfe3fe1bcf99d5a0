// The data blocks of the page. viewer/data.py describes them.

async function unpack(id) {
  const bytes = Uint8Array.from(atob(at(id).textContent), char => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const KEPT_BLOCKS = 8;
const kept = new Map(); // the most recently used blocks, by id

function block(id) {
  const found = kept.get(id) || unpack(id);
  kept.delete(id);
  kept.set(id, found);
  if (kept.size > KEPT_BLOCKS) kept.delete(kept.keys().next().value);
  return found;
}

// Return one episode: its conversation, tools and sequences (null if they are not in the page).
async function loadEpisode(row) {
  const conversation = (await block("block-" + row.block))[row.place];
  const [tools, sequences] = await Promise.all([
    block("tools-" + conversation.tools),
    row.hasTokens ? block("tokens-" + row.i) : null,
  ]);
  return { ...conversation, row, tools, sequences };
}
