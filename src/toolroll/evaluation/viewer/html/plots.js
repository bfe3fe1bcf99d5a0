// The summary: a card for each environment, and histograms of the episodes in the table.

function drawCards() {
  const interval = rate =>
    number(rate.value) +
    " [" +
    rate.low.toFixed(2) +
    ", " +
    rate.high.toFixed(2) +
    "] (" +
    (rate.tasks < rate.of_tasks ? rate.tasks + " of " : "") +
    plural(rate.of_tasks, "task") +
    ")";
  at("cards").replaceChildren(
    ...state.texts.map(text => {
      const [lines, ...table] = text.trim().split("\n\n");
      return make("pre", { class: "card", tabindex: 0 }, make("span", {}, lines), table);
    }),
    ...Object.entries(state.summary).map(([env, part]) => {
      const most = Number(Object.keys(part["pass^k"] || {}).at(-1));
      const facts = [
        ...playedWith(part.settings || {}, part.provenance || []),
        plural(part.episodes, "episode"),
        part.reward ? "reward " + interval(part.reward) : null,
        most > 1 ? "pass^" + most + " " + interval(part["pass^k"][most]) : null,
        part.pass_bounds && part.pass_bounds["pass@k"][1]
          ? "pass^1 between " +
            part.pass_bounds["pass@k"][1].map(number).join(" and ") +
            ", by the results of lost episodes"
          : null,
        part.do_nothing ? "do-nothing baseline " + passedOf(part.do_nothing) : null,
        part.trainable === false ? "not trainable" : null,
        part.prefix_trie && part.prefix_trie.ratio
          ? number(part.prefix_trie.flat_tokens) +
            " tokens" +
            (part.prefix_trie.ratio > 1
              ? ", " + number(part.prefix_trie.trie_tokens) + " if shared prefixes count once"
              : "")
          : null,
      ];
      return make(
        "div",
        { class: "card" },
        make("strong", {}, env),
        facts.filter(Boolean).map(text => make("span", {}, text)),
      );
    }),
  );
}

const passedOf = ({ passed, episodes, aborted }) =>
  passed + "/" + (episodes - aborted) + (aborted ? " (" + aborted + " aborted)" : "");

const SAMPLING = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "frequency_penalty",
  "presence_penalty",
  "repetition_penalty",
  "max_new_tokens",
];

// Return the model, the sampling parameters and the latest date of a run, and what it regrades.
function playedWith(settings, provenance) {
  const own = Object.fromEntries(SAMPLING.map(name => [name, settings[name]])),
    params = Object.entries({ ...own, ...settings.sampling_params })
      .filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => name + " " + (typeof value === "object" ? pretty(value) : value));
  const dates = provenance.map(entry => (entry.date || "").slice(0, 10)).sort();
  const regraded = provenance.map(entry => entry.regraded).filter(Boolean).at(-1);
  const split = settings.split ? "split " + settings.split : null,
    given = Object.keys(settings.env_args || {}).length ? pretty(settings.env_args) : null;
  const from = regraded ? "regraded from " + regraded : null;
  return [split, settings.model, given, params.join(", "), dates.at(-1), from];
}

const BINS = 16;

const MOST_ENVIRONMENTS = 4; // with histograms of their own

function drawPlots(rows) {
  const names = [...new Set(rows.map(row => row.env))];
  const alone = names.length <= MOST_ENVIRONMENTS;
  const parts = alone ? names.map(name => [name, rows.filter(row => row.env === name)]) : [["", rows]];
  at("plots").replaceChildren(
    ...parts.map(([env, some]) =>
      make(
        "div",
        { class: "histograms" },
        names.length > 1 ? make("div", {}, env || "all environments") : null,
        ["reward", "tokens", "turns"].map(key =>
          histogram(
            key,
            some.map(row => row[key]).filter(value => value !== null),
          ),
        ),
      ),
    ),
  );
}

function histogram(name, values) {
  if (!values.length) return make("figure", {}, make("figcaption", {}, name + ": none"));
  let low = Infinity,
    high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const bins = new Array(BINS).fill(0);
  for (const value of values)
    bins[high > low ? Math.min(BINS - 1, Math.floor((BINS * (value - low)) / (high - low))) : 0] +=
      1;
  const most = Math.max(...bins),
    caption = name + ", mean " + number(mean(values));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const put = (kind, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    svg.append(node);
  };
  for (const [key, value] of [
    ["width", 9.5 * BINS],
    ["height", 44],
    ["role", "img"],
    ["aria-label", "Histogram of " + caption],
  ])
    svg.setAttribute(key, value);
  bins.forEach((count, bin) => {
    const tall = (28 * count) / most;
    put("rect", { x: 9.5 * bin, y: 30 - tall, width: 8, height: tall });
  });
  put("text", { x: 0, y: 42 }, number(low));
  if (high > low) put("text", { x: 9.5 * BINS - 2, y: 42, "text-anchor": "end" }, number(high));
  return make("figure", {}, svg, make("figcaption", {}, caption));
}
