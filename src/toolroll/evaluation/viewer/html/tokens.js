// An episode as tokens, colored by loss mask, logprob or weight version.

const CONTEXT = 300; // of a long run of tokens that were not sampled, only this many are shown
const PALETTE = [
  "#7fb3d5",
  "#f5b041",
  "#82c99a",
  "#c39bd3",
  "#e59866",
  "#73c6b6",
  "#f1948a",
  "#aab7b8",
];
const versionColor = n => PALETTE[n % PALETTE.length] + "66";
const heat = logprob =>
  "rgba(224, 62, 45, " + Math.min(0.6, 0.08 - logprob * 0.12).toFixed(3) + ")";

function tokens(panel) {
  const all = panel.detail.sequences;
  if (all === null)
    return [
      make(
        "p",
        { class: "dim" },
        "The tokens of this episode are not in the page. To include more: toolroll view --tokens N",
      ),
    ];
  if (!all.length) return [make("p", { class: "dim" }, "This episode has no tokens.")];
  const part = all[panel.sequence],
    versions = [...new Set(part.turns.flatMap(turn => turn.versions.map(span => span[0])))];
  const choose = (name, list, chosen, set) =>
    list.map(([value, words]) =>
      make(
        "button",
        {
          type: "button",
          class: name + "-" + value,
          "aria-pressed": String(chosen === value),
          on: {
            click: () => {
              set(value);
              drawPanel(panel);
            },
          },
        },
        words,
      ),
    );
  return [
    all.length > 1
      ? make(
          "div",
          { class: "choices" },
          choose(
            "sequence",
            all.map((one, n) => [n, "Sequence " + (n + 1) + (one.forkReason ? " (fork)" : "")]),
            panel.sequence,
            n => {
              panel.sequence = n;
              panel.whole.clear();
            },
          ),
        )
      : null,
    part.forkReason ? make("div", { class: "fork" }, "Forked: " + part.forkReason) : null,
    part.source !== "engine"
      ? make("div", { class: "fork" }, "Made from a " + part.source + ": not to be trained on.")
      : null,
    make(
      "div",
      { class: "choices" },
      make("span", { class: "dim" }, "Color by"),
      choose(
        "color",
        [
          ["mask", "Loss mask"],
          ["logprob", "Logprob"],
          ["version", "Weight version"],
        ],
        state.color,
        value => {
          state.color = value;
        },
      ),
      legend(versions),
    ),
    make(
      "div",
      { class: "token", role: "status" },
      "Point at a token, or use the arrow keys in the text.",
    ),
    sequence(panel, part, versions),
  ].filter(Boolean);
}

function legend(versions) {
  const chip = (words, color) => make("span", { style: "background:" + color }, words);
  if (state.color === "version")
    return make(
      "span",
      { class: "legend" },
      versions.map((version, n) => chip(version, versionColor(n))),
    );
  if (state.color === "logprob")
    return make(
      "span",
      { class: "legend" },
      [1, 0.5, 0.1, 0.01].map(p => chip("p = " + p, heat(Math.log(p)))),
    );
  return make(
    "span",
    { class: "legend" },
    chip("trained", "var(--trained)"),
    chip("sampled, not trained", "var(--excluded)"),
  );
}

// Return which tokens to leave out, as a map from start to stop: all but the last `CONTEXT` tokens
// of each long run of tokens that were not sampled.
function gaps(part) {
  const found = [];
  let end = 0;
  for (const turn of [...part.turns, { start: part.ids.length, stop: part.ids.length }]) {
    if (turn.start - end > CONTEXT * 1.2) found.push([end, turn.start - CONTEXT]);
    end = turn.stop;
  }
  return new Map(found);
}

function sequence(panel, part, versions) {
  const turnOf = new Array(part.ids.length).fill(-1),
    versionOf = new Array(part.ids.length).fill(null),
    starts = new Map();
  part.turns.forEach((turn, n) => {
    starts.set(turn.start, n);
    turnOf.fill(n, turn.start, turn.stop);
    for (const [version, start, stop] of turn.versions) versionOf.fill(version, start, stop);
  });
  const color = k =>
    turnOf[k] < 0
      ? null
      : state.color === "mask"
        ? part.mask[k] === "1"
          ? "var(--trained)"
          : "var(--excluded)"
        : state.color === "logprob"
          ? part.logprobs[k] === null
            ? null
            : heat(part.logprobs[k])
          : versionOf[k] === null
            ? null
            : versionColor(versions.indexOf(versionOf[k]));
  const tell = token => {
    for (const old of box.querySelectorAll(".here")) old.classList.remove("here");
    token.classList.add("here");
    box.parentNode.querySelector(".token").textContent = describeToken(
      part,
      Number(token.dataset.k),
      turnOf,
      versionOf,
    );
  };
  const point = event => {
    const token = event.target.closest("[data-k]");
    if (token) tell(token);
  };
  const step = event => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key],
      all = [...box.querySelectorAll("[data-k]")];
    if (!way) return;
    const next = all[all.findIndex(token => token.classList.contains("here")) + way] || all[0];
    tell(next);
    next.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  };
  const box = make("div", {
    class: "tokens",
    tabindex: 0,
    role: "group",
    "aria-label": "Tokens",
    on: { mouseover: point, click: point, keydown: step },
  });
  const left = gaps(part);
  for (let k = 0; k < part.ids.length; k++) {
    if (left.has(k) && !panel.whole.has(k)) {
      const start = k,
        count = left.get(k) - k;
      box.append(
        make(
          "button",
          {
            type: "button",
            class: "more",
            on: {
              click: () => {
                panel.whole.add(start);
                drawPanel(panel);
              },
            },
          },
          "Show " + number(count) + " tokens that were not sampled",
        ),
        " ",
      );
      k = left.get(k) - 1;
      continue;
    }
    if (starts.has(k)) {
      const turn = part.turns[starts.get(k)];
      box.append(
        make(
          "span",
          { class: "turn" },
          "turn " + (starts.get(k) + 1) + (turn.excluded ? " · not trained: " + turn.excluded : ""),
        ),
      );
    }
    box.append(oneToken(part, k, color(k)));
    if (turnOf[k] >= 0 && turnOf[k + 1] !== turnOf[k])
      box.append(
        make(
          "span",
          { class: "turn" },
          "end of turn " + (turnOf[k] + 1) + ": " + part.turns[turnOf[k]].finish,
        ),
      );
  }
  return box;
}

// Return the element of a token. A line break is shown as a symbol, and also breaks the line.
function oneToken(part, k, back) {
  const token = make("span", {
    "data-k": k,
    "data-mask": part.mask[k],
    style: back && "background:" + back,
  });
  part.texts[k].split("\n").forEach((line, n) => {
    if (n) token.append(make("i", { class: "ws" }, "⏎"), "\n");
    token.append(line);
  });
  if (!part.texts[k]) token.append(make("i", { class: "ws" }, "·")); // a part of a character
  return token;
}

function describeToken(part, k, turnOf, versionOf) {
  const n = turnOf[k],
    turn = n >= 0 ? part.turns[n] : null,
    logprob = part.logprobs[k];
  return [
    JSON.stringify(part.texts[k]),
    "id " + part.ids[k],
    "position " + k,
    "loss_mask " + part.mask[k],
    logprob === null
      ? "not sampled"
      : "logprob " + logprob + " (p = " + Math.exp(logprob).toPrecision(3) + ")",
    versionOf[k] !== null ? "weight_version " + versionOf[k] : null,
    turn
      ? "turn " +
        (n + 1) +
        ": " +
        (turn.stop - turn.start) +
        " tokens in " +
        turn.latency +
        " s, " +
        turn.cached +
        " of " +
        turn.prompt +
        " prompt tokens cached"
      : null,
  ]
    .filter(Boolean)
    .join(" · ");
}
