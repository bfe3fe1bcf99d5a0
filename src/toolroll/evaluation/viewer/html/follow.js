// New episodes of a run that goes on (`toolroll view --follow`).

const PAUSE = 2000; // milliseconds
const followed = { file: 0, position: 0, bad: 0, tokens: 0 };

async function followRun() {
  try {
    if (!document.hidden || !followed.file) await askMore();
    const { bad } = followed,
      skipped = bad ? `, without ${bad} unreadable line${bad > 1 ? "s" : ""}` : "";
    at("live").textContent = "Following the run" + skipped;
  } catch (error) {
    at("live").textContent = "Not following: " + error.message;
  }
  setTimeout(followRun, PAUSE);
}

// Return the answer to `query`. Throw an error whose message says why there is none.
async function answerTo(query) {
  const response = await fetch("more?" + query).catch(() => {
    throw new Error("no connection to toolroll view");
  });
  if (!response.ok) throw new Error("toolroll view answers " + response.status);
  return response.json();
}

async function askMore() {
  const answer = await answerTo(new URLSearchParams({ ...followed, rows: state.all.length })),
    { file, position, bad, tokens, settings, summary, rows } = answer;
  const first = !state.all.length,
    again = !first && answer.first === 0; // it is another file
  Object.assign(followed, { file, position, bad, tokens });
  Object.assign(state, { settings, summary });
  drawCards();
  if (!rows.length && !again) return;
  if (again) forgetEpisodes();
  at("notice").insertAdjacentHTML("afterend", answer.data);
  addRows(rows);
  fillChoices();
  if (first) return showAddress();
  if (again) for (const name of ["open", "pinned"]) state[name] = sameRow(state[name]);
  keepPlace(drawTable);
  await search(true);
}

const sameRow = row => (row && state.byKey.get(keyOf(row))) || null;

function forgetEpisodes() {
  for (const node of document.querySelectorAll("script[type='text/plain']")) node.remove();
  for (const old of [state.byKey, kept, texts, hits.rows]) old.clear();
  state.all.length = 0;
}

// Call `run`, which draws the table, and scroll the table so that the same rows stay in sight.
function keepPlace(run) {
  const grid = at("grid"),
    top = grid.scrollTop / rowHeight(),
    item = top >= 1 ? table.items[Math.floor(top)] : null;
  run();
  const place = item ? table.place.get(idOf(item)) : undefined;
  if (place !== undefined) grid.scrollTop = (place + (top % 1)) * rowHeight();
}
