// The open episode, alone or beside a pinned one.

const panels = []; // objects `{detail, node, sequence, whole}`, the pinned episode's first

// Open `row`. `step`: add an entry to the browser's history. `show`: on a narrow screen, which
// shows either the table or the episode, show the episode.
function openRow(row, { step = false, show = false } = {}) {
  state.open = row;
  if (state.runs.length) pairUp();
  writeAddress(step);
  if (show) document.body.classList.add("detail-shown");
  if (row) reveal(row);
  return drawDetail();
}

// Pin the episode of the baseline that is the open one's pair.
function pairUp() {
  if (state.open && state.rows.includes(state.open))
    state.pinned = state.beside ? state.open.pair : null;
}

function closeDetail() {
  document.body.classList.remove("detail-shown");
  if (!narrow.matches) return;
  state.open = null;
  state.pinned = null;
  writeAddress(true);
  drawTable();
}

// Pin the open episode, and open the next sample of its task beside it.
function pin() {
  if (state.runs.length) {
    state.beside = state.pinned === null;
    const row = state.rows.find(row => row === state.open || row.pair === state.open);
    return openRow(row, { step: true });
  }
  state.pinned = state.pinned ? null : state.open;
  const others = state.pinned
    ? state.rows.filter(row => row.env === state.open.env && row.task === state.open.task)
    : [];
  const next = others[(others.indexOf(state.open) + 1) % others.length];
  if (state.pinned && next === state.pinned) notify("Choose the second episode in the table.");
  return openRow(next || state.open, { step: true });
}

async function drawDetail() {
  const rows = [...new Set([state.pinned, state.open])].filter(Boolean),
    wanted = rows.map(keyOf).join(" ");
  at("detail").dataset.wanted = wanted;
  if (!rows.length) {
    panels.length = 0;
    at("detail").replaceChildren(
      make("p", { class: "dim hint" }, "Choose an episode in the table."),
    );
    return;
  }
  const details = await Promise.all(rows.map(loadEpisode));
  if (at("detail").dataset.wanted !== wanted) return; // another episode was opened meanwhile
  panels.splice(
    0,
    panels.length,
    ...details.map((detail, n) => ({
      id: "panel-" + n,
      detail,
      sequence: 0,
      whole: new Set(),
      node: make("article", { class: "panel", id: "panel-" + n }),
    })),
  );
  const [left, right] = panels.map(panel => panel.detail.messages.map(messageText));
  const differs = right && rows[0].task === rows[1].task ? firstDifference(left, right) : -1;
  for (const panel of panels) panel.differs = differs;
  panels.forEach(fillPanel);
  at("detail").classList.toggle("double", panels.length > 1);
  keepFocus(() =>
    at("detail").replaceChildren(
      toolbar(),
      make(
        "div",
        { class: "panels" },
        panels.map(panel => panel.node),
      ),
    ),
  );
  at("detail").scrollTop = 0;
  const mark = at("detail").querySelector("mark");
  if (mark && panels.length === 1) mark.scrollIntoView({ block: "center" });
}

function toolbar() {
  const button = (id, words, run, attributes) =>
    make("button", { id, type: "button", ...attributes, on: { click: run } }, words);
  return make(
    "div",
    { class: "toolbar" },
    button("back", "←", closeDetail, { "aria-label": "Back to the table" }),
    make(
      "div",
      { role: "tablist", "aria-label": "View" },
      VIEWS.map(view =>
        make(
          "button",
          {
            id: "view-" + view,
            type: "button",
            role: "tab",
            "aria-selected": String(state.view === view),
            "aria-controls": "panel-0",
            tabindex: state.view === view ? 0 : -1,
            on: { click: () => setView(view), keydown: stepView },
          },
          view[0].toUpperCase() + view.slice(1),
        ),
      ),
    ),
    make(
      "span",
      { class: "actions" },
      button("previous", "↑", () => stepEpisode(-1), {
        "aria-label": "Previous episode",
        title: "Previous episode (k)",
      }),
      button("next", "↓", () => stepEpisode(1), {
        "aria-label": "Next episode",
        title: "Next episode (j)",
      }),
      button("compare", "Compare", pin, {
        "aria-pressed": String(state.pinned !== null),
        title: state.pinned ? "Stop comparing (c)" : "Compare with another episode (c)",
      }),
      button("copy-link", "Copy link", () =>
        copy(location.href.split("#")[0] + address(), "Link copied"),
      ),
      button("copy-json", "Copy JSON", () =>
        copy(pretty(panels.length > 1 ? panels.map(asJson) : asJson(panels[0])), "JSON copied"),
      ),
    ),
  );
}

function setView(view) {
  state.view = view;
  writeAddress(true);
  keepFocus(() => at("detail").querySelector(".toolbar").replaceWith(toolbar()));
  panels.forEach(drawPanel);
}

function stepView(event) {
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!way) return;
  setView(VIEWS[(VIEWS.indexOf(state.view) + way + VIEWS.length) % VIEWS.length]);
  at("view-" + state.view).focus();
}

function asJson({ detail }) {
  // Leave out the fields that only the page uses.
  const { i, block, place, hasTokens, called, run, base, pair, ...row } = detail.row;
  const { row: _, tools, sequences, ...rest } = detail;
  return { ...row, ...rest, tools, sequences };
}

function drawPanel(panel) {
  keepFocus(() => fillPanel(panel));
}

function fillPanel(panel) {
  const { detail } = panel,
    { row } = detail;
  const fact = (words, value, mood) =>
    make("div", { class: "fact" }, make("dt", {}, words), make("dd", { class: mood }, value));
  const kinds = Object.entries(detail.metrics)
    .filter(([name]) => name.startsWith("invalid_calls/"))
    .map(([name, count]) => name.slice(14) + " " + count);
  const error = detail.info.error;
  const parts = [
    state.runs.length
      ? make(
          "p",
          { class: "run" },
          row.run ? "Candidate: " : "Baseline: ",
          make("a", { href: "#" + linkOf(row), title: "Only this episode" }, row.runName),
        )
      : null,
    make(
      "h2",
      {},
      make("span", { class: "dim" }, row.env + " / "),
      row.task + " ",
      make("span", { class: "dim" }, "#" + row.sample),
    ),
    make(
      "div",
      { class: "verdict" },
      make(
        "span",
        { class: "chip" + (row.reward === null ? "" : mood(row, "reward")) },
        row.reward === null ? "no reward" : "reward " + number(row.reward),
      ),
      error
        ? make("span", { class: "bad error" }, error.type + ": " + error.message)
        : make(
            "span",
            { class: "reason" + (row.reason ? "" : " dim") },
            row.reason || (row.passed ? "" : "No reason was given."),
          ),
    ),
    make(
      "dl",
      { class: "facts" },
      fact("Status", row.status, mood(row, "status").trim()),
      fact("Stop reason", row.stop),
      fact("Turns", number(row.turns)),
      fact("Calls", number(row.calls)),
      detail.info.regrade ? fact("Recorded reward", number(detail.info.regrade.reward)) : null,
      row.invalid
        ? fact(
            "Invalid calls",
            row.invalid + (kinds.length ? " (" + kinds.join(", ") + ")" : ""),
            "warn",
          )
        : null,
      detail.metrics.lookalike_calls
        ? fact("Text that looks like a call", detail.metrics.lookalike_calls, "warn")
        : null,
      row.forks ? fact("Forks", row.forks, "warn") : null,
      detail.info.session?.fork_advice
        ? fact("To avoid forks", detail.info.session.fork_advice, "warn")
        : null,
      fact("Tokens", number(row.tokens)),
      fact("Trained", number(row.trained)),
      fact("Seconds", number(row.seconds)),
      fact("Seed", row.seed),
      detail.stepRewards.length > 1
        ? fact("Step rewards", detail.stepRewards.map(number).join(", "))
        : null,
    ),
    make(
      "div",
      { class: "view", role: "tabpanel", "aria-label": state.view },
      { conversation, tokens, tools, data }[state.view](panel),
    ),
  ];
  panel.node.replaceChildren(...parts.filter(Boolean));
}
