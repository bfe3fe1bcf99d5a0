// The search field and the filters above the table.

const unique = values => [...new Set(values)].sort(COLLATOR.compare);

function choices() {
  const same = values => values.map(value => [value, value]);
  return [
    ["env", "Environment", same(unique(state.rows.map(row => row.env)))],
    [
      "reward",
      "Reward",
      [
        ["pass", "Reward 1 (passed)"],
        ["part", "Above 0, not passed"],
        ["zero", "Reward 0"],
        ["none", "No reward"],
      ],
    ],
    ["status", "Status", same(unique(state.rows.map(row => row.status)))],
    ["stop", "Stop reason", same(unique(state.rows.map(row => row.stop)))],
    ["tool", "Tool", same(unique(state.rows.flatMap(row => row.called)))],
    [
      "flag",
      "Contains",
      [
        ["invalid", "Invalid calls"],
        ["lookalike", "Text that looks like a call"],
        ["toolErrors", "Failed tool results"],
        ["forks", "Forks"],
      ],
    ],
    [
      "change",
      "Change",
      state.runs.length
        ? [
            ["failed", "Passed, now fails"],
            ["passed", "Failed, now passes"],
            ["worse", "Worse"],
            ["better", "Better"],
            ["same", "No change"],
          ]
        : [],
    ],
    ["runName", "Run", same(unique(state.rows.map(row => row.runName || "")))],
  ];
}

function makeFilters() {
  const select = ([name, label]) =>
    make("select", {
      id: "filter-" + name,
      "aria-label": label,
      on: { change: event => setFilter(name, event.target.value, true) },
    });
  const columns = COLUMNS.filter(({ key }) => state.runs.length || !COMPARED.includes(key));
  const sorts = columns.flatMap(({ key, words, title }) =>
    [
      ["", " ↑"],
      ["-", " ↓"],
    ].map(([sign, arrow]) =>
      make("option", { value: sign + key }, "Sort by " + (title || words).toLowerCase() + arrow),
    ),
  );
  at("filters").replaceChildren(
    make("input", {
      id: "filter-q",
      type: "search",
      placeholder: "Search messages, calls, results",
      "aria-label": "Search tasks, messages, calls and results",
      autocomplete: "off",
      spellcheck: "false",
      on: { input: event => setFilter("q", event.target.value, false) },
    }),
    make(
      "details",
      { id: "more" },
      make("summary", {}, "Filters ", make("span", { id: "active" })),
      make(
        "div",
        { class: "selects" },
        choices().map(select),
        make(
          "select",
          { id: "sort", "aria-label": "Sort", on: { change: event => sortBy(event.target.value) } },
          make("option", { value: "" }, "In the order played"),
          sorts,
        ),
      ),
    ),
  );
  fillChoices();
  at("more").open = !narrow.matches;
  at("bar").append(
    make(
      "button",
      { id: "group", type: "button", on: { click: () => setGroup(!state.group) } },
      "Group by task",
    ),
  );
  at("clear").addEventListener("click", () => {
    for (const name of FILTERS) state.filters[name] = "";
    changed(true);
    at("filter-q").focus();
  });
}

// Update the options of the filters. A filter without a choice is hidden.
function fillChoices() {
  for (const [name, label, options] of choices()) {
    const select = at("filter-" + name);
    select.hidden = options.length < 2 && name !== "tool";
    select.replaceChildren(
      make("option", { value: "" }, label),
      ...options.map(([value, words]) => make("option", { value }, words)),
    );
    select.value = state.filters[name];
  }
}

// Update the search field and the filters from the state.
function drawFilters() {
  for (const name of FILTERS)
    if (at("filter-" + name) && at("filter-" + name).value !== state.filters[name])
      at("filter-" + name).value = state.filters[name];
  at("sort").value = state.sort;
  at("group").setAttribute("aria-pressed", String(state.group));
  const active = FILTERS.filter(name => name !== "q" && state.filters[name]).length;
  at("active").textContent = active ? "(" + active + ")" : "";
}

function setFilter(name, value, step) {
  state.filters[name] = value;
  changed(step);
}

function setGroup(group) {
  state.group = group;
  if (state.open) state.expanded.add(taskOf(state.open));
  changed(true);
  if (state.open) reveal(state.open);
}

function changed(step) {
  writeAddress(step);
  drawFilters();
  at("grid").scrollTop = 0;
  drawTable();
  search();
}
