"""How many renders a delta costs, that the two ways to find its text agree, and that sampled text
which the template does not show in history is a rewrite, but another spelling is none."""

import json
from typing import Any

import pytest
from support.oracle_scenarios import (
    AGAIN,
    BASE,
    CALL,
    RESULT,
    TOOLS,
    call,
    calls,
    said,
    system,
    user,
)
from support.qwen import tokenizer_for, trl_template

from toolroll.parsers.openai import to_openai
from toolroll.parsers.registry import get_parser
from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.model.turn import with_call_ids
from toolroll.rollout.template import ChatTemplate, Cursor
from toolroll.rollout.template.dropped import dropped_part
from toolroll.rollout.types import IdArray, Message

pytestmark = pytest.mark.tokens

FIRST = [system("Be brief."), user("Hello.")]
NEW = [user("And now?")]
AND_NOW = "\n<|turn|>user\nAnd now?<|end|>\n<|turn|>assistant\n"
LOOK = call(1, {"at": "here", "far": True}, "look")
ECHOING = """
{%- set ns = namespace(last='') %}
{%- for message in messages %}
{{- '<|turn|>' + message.role + '\\n' }}
ECHO
{{- (message.content or '') }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '<|end|>\\n' }}
{%- if message.role == 'assistant' %}{% set ns.last = message.content %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}
"""  # noqa: E501
KEEPING = ECHOING.replace("\nECHO", "")
"""Carries the last turn through history; it rewrites nothing."""
SAID = (
    'Look:<tool_call>{"name": "look", "arguments": {"at": "here", "far": true}}</tool_call><|end|>'
)
COMPACT = SAID.replace(", ", ",").replace(": ", ":")
UNCLOSED = '{"name": "look", "arguments": {"at": '
TURN = calls(LOOK, content="Look:")


class Counted:
    """A template whose renders are counted."""

    def __init__(self, tokenizer: Any, source: str | None = None, **settings: Any) -> None:
        self.template = ChatTemplate(tokenizer, chat_template=source, **settings)
        self.renders = 0
        render = self.template.renderer.render_prepared

        def counted(*args: Any, **kwargs: Any) -> str:
            self.renders += 1
            return render(*args, **kwargs)

        self.template.renderer.render_prepared = counted  # type: ignore[method-assign]

    def delta(self, messages: Any, text: str, new: list[Message], start: Any = None) -> Any:
        sampled = self.template.sampled(self.template.encoder.encode(text))
        self.renders = 0
        return (start or self.template.start(messages[:-1])).after(sampled, [messages[-1], *new])


@pytest.fixture
def counting(tokenizer: Any) -> Counted:
    return Counted(tokenizer, KEEPING)


def text(counted: Counted, delta: tuple[IdArray, Cursor]) -> str:
    return counted.template.encoder.decode(delta[0])


@pytest.mark.parametrize("sampled", [SAID, COMPACT])
def test_a_turn_in_the_templates_words_costs_few_renders(counting: Counted, sampled: str) -> None:
    delta = counting.delta([*FIRST, TURN], sampled, NEW)
    assert counting.renders == 2
    assert text(counting, delta) == AND_NOW
    render = counting.template.renderer.render
    assert delta[1].text == render([*FIRST, TURN, *NEW], None, generate=True)
    again = [*FIRST, TURN, *NEW, said("Nothing.")]
    next_delta = counting.delta(again, "Nothing.<|end|>", NEW, delta[1])
    assert counting.renders == 1
    assert text(counting, next_delta) == text(counting, delta)


@pytest.mark.parametrize("history", ["fork", "scaffold", "preserve"])
@pytest.mark.parametrize("sampled_text", [SAID, COMPACT, "Look:<|end|>"])
def test_another_close_in_history_is_a_rewrite(history: Any, sampled_text: str) -> None:
    """As with gpt-oss, whose models sample `<|return|>`."""
    close = "'<|done|>' if loop.last and not add_generation_prompt else '<|end|>'"
    source = KEEPING.replace("'<|end|>\\n'", close)
    template = ChatTemplate(tokenizer_for(source), history=history)
    turn = TURN if "tool_call" in sampled_text else said("Look:")
    ids = template.encoder.encode(sampled_text.replace("<|end|>", "<|done|>"))
    sampled = template.sampled(ids)
    cursor = template.start(FIRST)
    if history != "preserve":
        with pytest.raises(HistoryRewrittenError, match=r"not close turn 1 with '<\|done\|>'"):
            cursor.after(sampled, [turn, *NEW])
        return
    delta, after = cursor.after(sampled, [turn, *NEW])
    assert template.encoder.decode(delta) == "<|turn|>user\nAnd now?<|end|><|turn|>assistant\n"
    assert after.preserved is not None and "does not close turn 1" in after.preserved


@pytest.mark.parametrize("cut", ["", '"here"', '"here"}', None])
def test_a_truncated_call_is_closed_and_never_completed(counting: Counted, cut: str | None) -> None:
    """`cut`: the call as far as it was sampled after the key `at`, or None for a whole call."""
    whole = cut is None
    sampled = '{"name":"look","arguments":{"at":"here"}}' if whole else UNCLOSED + str(cut)
    function = {"name": "look", "arguments": {"at": "here"} if whole else "unreadable"}
    turn = calls({**LOOK, "function": function}, content="Look:")
    template = counting.template
    ids = template.encoder.encode(f"Look:<tool_call>{sampled}")
    delta = template.delta([*FIRST, turn], NEW, sampled_ids=ids, finish_reason="length")
    close = "</tool_call>" if whole else ""
    assert template.encoder.decode(delta).startswith(f"{close}<|end|>\n")


def test_other_words_are_told_apart_from_other_white_space(counting: Counted) -> None:
    delta = counting.delta([*FIRST, TURN], SAID.replace("here", "there"), NEW)
    assert counting.renders > 2, "the message does not say what was sampled: by the sentinel"
    assert text(counting, delta) == AND_NOW


@pytest.mark.parametrize("history", ["fork", "preserve"])
def test_a_rewrite_is_seen_in_the_same_renders(tokenizer: Any, history: Any) -> None:
    """Its head counts the messages: nothing that was served stays."""
    source = "<|turn|>system\n{{ messages | length }}<|end|>\n" + KEEPING
    counted = Counted(tokenizer, source, history=history)
    turn = said("Hi.")
    words = "the prompt that was served is no longer rendered as it was"
    if history == "fork":
        with pytest.raises(HistoryRewrittenError, match=words):
            counted.delta([*FIRST, turn], "Hi.<|end|>", NEW)
        assert counted.renders == 2
    else:
        delta = counted.delta([*FIRST, turn], "Hi.<|end|>", NEW)
        assert delta[1].preserved == words
        assert text(counted, delta) == AND_NOW


def test_a_turn_that_is_quoted_later_is_left_to_the_sentinel(counting: Counted) -> None:
    """A template that shows a turn's text behind its calls would have it appended twice; a user
    who quotes it only costs renders."""
    quoted = [user("What do you mean by Look: ?")]
    delta = counting.delta([*FIRST, TURN], SAID, quoted)
    assert counting.renders > 2
    assert text(counting, delta) == AND_NOW.replace("And now?", "What do you mean by Look: ?")


_AFTER = "{%- if not loop.first and loop.previtem.role == 'assistant' %}"
ECHOES = {
    "the last turn": _AFTER + "{{- '[re: ' + loop.previtem.content + ']' }}",
    "the last turn, by a variable": "{%- if message.role != 'assistant' and ns.last %}{{- '[re: ' "
    "+ ns.last + ']' }}",
    "the task": _AFTER + "{{- '[task: ' + messages[0].content + ']' }}",
    "a call": _AFTER + "{{- '[of: ' + (loop.previtem.tool_calls[0].function | tojson) + ']' }}",
}


@pytest.mark.parametrize("repeats", ECHOES)
def test_what_a_template_repeats_is_that_of_this_conversation(tokenizer: Any, repeats: str) -> None:
    counted = Counted(tokenizer, ECHOING.replace("ECHO", ECHOES[repeats] + "{% endif %}"))
    template = counted.template
    tasks = [*[("Go.", "OK.")] * 3, ("Go.", "Yes."), ("Stop.", "OK."), ("Stop.", "No.")]
    for number, (task, answer) in enumerate(tasks):
        first, turn, text_said = [system(task), FIRST[1]], said(answer), answer
        if repeats == "a call":
            looked = call(1, {"at": answer}, "look")
            turn = calls(looked)
            text_said = f"<tool_call>{json.dumps(looked['function'])}</tool_call>"
        delta = counted.delta([*first, turn], text_said + "<|end|>", NEW)
        whole = template.renderer.render([*first, turn, *NEW], None, generate=True)
        prompt = template.renderer.render(first, None, generate=True)
        assert prompt + text_said + "<|end|>" + text(counted, delta) == whole, number


# --- sampled text that history does not show -----------------------------------------------------

THOUGHT = "I weigh the options"
ANSWER = "It is sunny."
THINK = {"reasoning_content": THOUGHT}
ARGUMENTS = '{"city":"Paris Zw7Qmark"}'
WEATHER = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
COMMENTARY = f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALLED, EMPTY, ANSWERED = {**CALL, **THINK}, said("", **THINK), said(ANSWER, **THINK)
LOOKED = {**CALLED, "content": "I look."}
BOTH, ROME = calls(call(1, {"city": "Rome"}), call(2, {"city": "Oslo"})), 'get_weather(city="Rome")'
QWEN_THOUGHT, THOUGHT_TAGS = f"<think>\n{THOUGHT}\n</think>\n\n", f"<think>{THOUGHT}</think>"
AQUILA = calls(call(1, {"city": "L'Aquila"}))
REWRITE = "the template does not show the reasoning of turn 1"
CITY = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
SECOND = CITY.replace("Paris", "Rome")
QWEN_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n{}</function>\n"
    "</tool_call><|im_end|>"
)
MORE_TEXT = "<parameter=city>\nRome\n</parameter>\n"
CONSTRAINED = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"


def steps(name: str, sampled: str, turn: Message, new: Message) -> tuple[str | None, str | None]:
    """The reason for a fork, and what `history="preserve"` counts."""
    tokenizer = tokenizer_for(trl_template(name))
    reasons: list[str | None] = []
    for history in ("fork", "preserve"):
        template = ChatTemplate(tokenizer, history=history)
        ids = template.encoder.encode(sampled)
        finish_reason = "stop" if ids[-1] in template.stop_token_ids else "length"
        cursor = template.start(BASE, list(TOOLS))
        try:
            _, after = cursor.after(template.sampled(ids, finish_reason=finish_reason), [turn, new])
            reasons.append(after.preserved)
        except HistoryRewrittenError as error:
            reasons.append(error.reason)
    return reasons[0], reasons[1]


@pytest.mark.parametrize(
    ("name", "sampled", "turn", "new", "reason"),
    [
        ("qwen3", f"<think>\n{THOUGHT}", EMPTY, AGAIN, REWRITE),
        ("qwen3", f"{QWEN_THOUGHT}<|im_end|>", EMPTY, AGAIN, REWRITE),
        ("qwen2_5", f"{THOUGHT_TAGS}{ANSWER}<|im_end|>", ANSWERED, AGAIN, REWRITE),
        ("qwen2_5", f"{THOUGHT_TAGS}{WEATHER}<|im_end|>", CALLED, RESULT, REWRITE),
        # refuses `thinking`, which transformers 5.24 adds, besides text and calls
        ("gptoss", f"{ANALYSIS}{PREAMBLE}{COMMENTARY}<|call|>", LOOKED, RESULT, REWRITE),
        ("qwen3", f"{QWEN_THOUGHT}{WEATHER}<|im_end|>", CALLED, RESULT, None),
        ("qwen3", f"{ANSWER}<|im_end|>", said(ANSWER), AGAIN, None),
        ("qwen2_5", f" {ANSWER}\n\n<|im_end|>", said(ANSWER), AGAIN, None),
        ("gptoss", f"{ANALYSIS}{COMMENTARY}<|call|>", CALLED, RESULT, None),
        ("lfm2_2_5", THOUGHT_TAGS, CALLED, RESULT, None),
    ],
)
def test_a_thought_that_the_template_never_shows_is_a_rewrite(
    name: str, sampled: str, turn: Message, new: Message, reason: str | None
) -> None:
    if name == "lfm2_2_5":  # the call in the template's own notation
        renderer = ChatTemplate(tokenizer_for(trl_template(name))).renderer
        text = renderer.render([*BASE, turn], TOOLS, generate=False)
        sampled += text.rpartition("</think>")[2].rstrip("\n").replace("'", '"')
    assert steps(name, sampled, turn, new) == (reason, reason)


@pytest.mark.parametrize(
    ("turn", "sampled", "shown", "part"),
    [
        (said("No.", reasoning_content="No."), "<think>No.</think>No.", "No.", "reasoning"),
        (said("OK", reasoning_content="OK then"), "OK then</think>OK", "OK then OK", None),
        (said("a"), "a", "b", "text"),
        (said('say "é"\nx'), 'say "é"\nx', r'"say \"\u00e9\"\nx"', None),
        (said("two\nthree"), "two<call>three", "two three", None),
        (said("unseen"), "", "", None),
        (BOTH, f"{ROME} {ROME.replace('Rome', 'Oslo')}", ROME, "calls"),
        (said("AB C", **THINK), f"A<call>B C{THOUGHT}", f"A{THOUGHT}", "text"),
        (said("AB C", **THINK), f"A<call>B C{THOUGHT}", f"AB C{THOUGHT}", None),
        (AQUILA, "get_weather L'Aquila", r"get_weather L\'Aquila", None),
        (said("<'&amp;\n"), "<'&amp;\n", "&lt;&#39;&amp;amp;", None),
        (said('{"a": "\n"}'), '{"a": "\n"}', r"{\"a\": \"\\n\"}", None),
        (calls(call(1, '{"city": "Zür')), 'get_weather {"city": "Zür', "get_weather {}", None),
    ],
)
def test_what_counts_as_dropped(turn: Message, sampled: str, shown: str, part: str | None) -> None:
    assert dropped_part(turn, sampled, shown) == part


def hermes(*parts: str) -> str:
    return "".join(
        f"<tool_call>\n{part}\n</tool_call>" if part[0] == "{" else part for part in parts
    )


@pytest.mark.parametrize(
    ("kind", "sampled", "unshown"),
    [
        ("hermes", hermes(CITY), False),
        ("hermes", hermes("I look.\n", CITY.replace('": ', '":')), False),
        ("hermes", hermes(f'{{"arguments": {{"city": "Paris"}}, {CITY[1:22]}}}'), False),
        ("hermes", hermes(CITY.replace("Paris", r"Z\u00fcrich\nS\u00dcD \"1\"")), False),
        ("hermes", hermes(CITY.replace('"Paris"', "-2.50")), True),
        ("hermes", hermes(CITY.replace('{"c', '{"city": "Rome", "c')), True),
        ("hermes", hermes(CITY.replace(', "a', ', "why": "because", "a')), True),
        ("hermes", hermes(CITY, "\nThen Rome.\n", SECOND), True),
        ("hermes", hermes(CITY, "\nThen Rome."), True),
        ("hermes", hermes(CITY[:-1]), True),
        ("hermes", hermes('{"name": "get_weather", "arguments": null}'), True),  # shown in itself
        ("qwen3_coder", QWEN_CALL.format(""), False),
        ("qwen3_coder", QWEN_CALL.format(MORE_TEXT), True),
        ("gpt-oss", f"{COMMENTARY}<|call|>", False),
        ("gpt-oss", f"{CONSTRAINED}{ARGUMENTS}<|call|>", False),
    ],
)
def test_text_that_history_does_not_show_is_counted(kind: str, sampled: str, unshown: bool) -> None:
    name = {"hermes": "qwen2_5", "qwen3_coder": "qwen3_5_nothink", "gpt-oss": "gptoss"}[kind]
    template = ChatTemplate(tokenizer_for(trl_template(name)))
    ids = template.encoder.encode(sampled + "<|im_end|>" * (kind == "hermes"))
    text = template.sampled(ids, finish_reason="stop")
    reply = get_parser(kind).parse(text.body, in_reasoning=False)
    turn = to_openai(with_call_ids(reply, "t"))
    results = [
        {**RESULT, "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in turn["tool_calls"]
    ]
    _, after = template.start(BASE, list(TOOLS)).after(text, [turn, *results])
    assert (after.preserved, after.unshown) == (None, unshown)
