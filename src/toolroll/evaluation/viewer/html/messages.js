// The views of an episode's conversation, tools and data.

// The text of a tool's result that reports an error. Only the page's color depends on it.
const FAILED = /^\W{0,3}(error|exception|traceback)\b/i;
const LONG = 2400; // a longer text is cut after this many characters, until it is expanded

function conversation(panel) {
  const { messages, invalid } = panel.detail;
  if (!messages.length) return [make("p", { class: "dim" }, "This episode has no messages.")];
  const calls = messages.flatMap(({ tool_calls }) => tool_calls || []);
  const called = new Map(calls.filter(({ id }) => id).map(call => [call.id, callOf(call).name]));
  return [
    expected(panel),
    make(
      "ol",
      { class: "messages" },
      messages.flatMap((message, n) => {
        const role = String(message.role);
        const bad = new Map(
          invalid.filter(([at]) => at === n).map(([, call, status]) => [call, status]),
        );
        const differs = make("li", { class: "differs" }, "The conversations differ from here");
        const shown = make(
          "li",
          {
            class:
              "message " +
              (/^[a-z]+$/.test(role) ? role : "") +
              (bad.size || (role === "tool" && FAILED.test(message.content)) ? " invalid" : ""),
          },
          make(
            "div",
            { class: "role" },
            make("span", {}, role),
            make("span", { class: "name" }, message.name || called.get(message.tool_call_id) || ""),
            make("span", { class: "place" }, n),
          ),
          message.reasoning_content
            ? make(
                "div",
                { class: "thought" },
                make("span", { class: "label" }, "Reasoning"),
                long(asText(message.reasoning_content)),
              )
            : null,
          message.content
            ? contentOf(message.content, role === "system" ? 600 : LONG, role === "tool")
            : null,
          (message.tool_calls || []).map((call, at) => oneCall(call, bad.get(at))),
        );
        return n === panel.differs ? [differs, shown] : [shown];
      }),
    ),
  ].filter(Boolean);
}

// Return the text of a message, by which conversations are compared.
const messageText = ({ role, content, reasoning_content, tool_calls }) =>
  JSON.stringify([role, content, reasoning_content, (tool_calls || []).map(call => callOf(call).text)]);

// Return the first index at which two lists differ. If they are equal, it is their length.
function firstDifference(left, right) {
  const n = left.findIndex((text, n) => text !== right[n]);
  return n < 0 ? left.length : n;
}

const IMAGE = /^data:image\/(png|jpeg|webp|gif);base64,/;

// Return the elements of a content: a text, or a list of texts and images.
function contentOf(content, shown, code) {
  if (!Array.isArray(content)) return long(asText(content), shown, code);
  return content.map(part => {
    const url = part?.image_url?.url;
    if (IMAGE.test(url)) return make("img", { src: url, alt: "Image of this message" });
    return long(typeof part?.text === "string" ? part.text : pretty(part), shown, code);
  });
}

const asText = value => (typeof value === "string" ? value : pretty(value));

function oneCall(call, status) {
  const named = call.function || call;
  let values = named.arguments;
  try {
    values = pretty(typeof values === "string" ? JSON.parse(values) : values);
  } catch {
    /* not JSON: show it as it is */
  }
  return make(
    "div",
    { class: "call" + (status ? " bad-call" : "") },
    make(
      "div",
      { class: "called" },
      make("b", {}, marked(String(named.name))),
      status ? make("span", { class: "chip bad" }, "invalid: " + status) : null,
    ),
    values === undefined || values === "{}" ? null : long(String(values), LONG, true),
  );
}

// Return an element with the text. A long text is cut, unless it matches the search.
function long(text, shown = LONG, code = false) {
  const box = make(code ? "pre" : "div", { class: "text" });
  const all = () => box.replaceChildren(...marked(text));
  const showAll = () => {
    all();
    box.tabIndex = -1;
    box.focus({ preventScroll: true });
  };
  if (
    text.length <= shown * 1.2 ||
    (state.filters.q && text.toLowerCase().includes(state.filters.q.toLowerCase()))
  ) {
    all();
    return box;
  }
  box.append(
    text.slice(0, shown) + "… ",
    make(
      "button",
      { type: "button", class: "more", on: { click: showAll } },
      "Show all " + number(text.length) + " characters",
    ),
  );
  return box;
}

function tools(panel) {
  const list = panel.detail.tools;
  if (!list.length) return [make("p", { class: "dim" }, "No tools were offered in this episode.")];
  const calls = panel.detail.messages
    .flatMap(message => message.tool_calls || [])
    .map(call => (call.function || call).name);
  return list.map(tool => {
    const named = tool.function || tool,
      count = calls.filter(name => name === named.name).length;
    return make(
      "details",
      { class: "tool" },
      make(
        "summary",
        {},
        make("b", {}, named.name),
        make("span", { class: "dim" }, count ? " called " + count + "×" : " not called"),
      ),
      named.description ? make("p", { class: "text" }, named.description) : null,
      make("pre", { class: "text" }, pretty(named.parameters || {})),
    );
  });
}

function data(panel) {
  const { metrics, info, row } = panel.detail;
  return [
    ["Metrics", metrics],
    ["Info from the environment", info],
    ["Settings of the run", (state.settings[row.run] || {})[row.env] || {}],
  ].map(([words, value]) =>
    make(
      "details",
      { open: "" },
      make("summary", {}, words),
      Object.keys(value).length
        ? make("pre", { class: "text" }, pretty(value))
        : make("p", { class: "dim" }, "None."),
    ),
  );
}
