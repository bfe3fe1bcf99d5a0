"""Sampled text that the template does not show in history is a rewrite; other spellings are not."""

from __future__ import annotations

import pytest
from support.oracle_scenarios import (
    AGAIN,
    ASK,
    BASE,
    CALL,
    RESULT,
    TOOLS,
    Message,
    call,
    calls,
    said,
    system,
    user,
)
from support.qwen import tokenizer_for, trl_template

from toolroll.evaluation.certify import certify
from toolroll.parsers.openai import to_openai
from toolroll.parsers.registry import get_parser
from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.model.turn import with_call_ids
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.dropped import dropped_part

pytestmark = pytest.mark.tokens

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
        ("llama3_1", f"{THOUGHT_TAGS}{ANSWER}<|eot_id|>", ANSWERED, AGAIN, REWRITE),
        ("qwen3_vl", f"<think>{THOUGHT}", EMPTY, AGAIN, REWRITE),
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
        ("hermes", hermes(CITY.replace('"Paris"', "1e3")), True),
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


def test_check_template_says_that_a_thought_is_dropped() -> None:
    report = certify(ChatTemplate(tokenizer_for(trl_template("qwen2_5"))))
    forks = {probe.name: probe.detail for probe in report.probes if probe.outcome == "fork"}
    assert forks == {"thought_tool": "the template does not show the reasoning of turn 14"}
    assert report.exact


POSITION = """
{%- for m in messages %}
{%- if loop.index0 == 0 %}{{ '<|bos|>' + strftime_now('%H:%M:%S') }}{% endif %}
{%- if m.role == 'user' %}{{ ('' if loop.index0 == 1 else '<|user|>') + m.content + '<|sep|>' }}
{%- elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + '<|eos|>' }}
{%- else %}{{ m.content + ('<|sep|>' if m.role == 'tool' else '<|head|>') }}{% endif %}
{%- endfor %}"""
"""Has no generation prompt. The header of a message depends on its place."""


@pytest.mark.parametrize("history", [BASE, (ASK,)])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("stop", ["", "<|eos|>"])
def test_messages_without_a_generation_prompt(history: Any, count: int, stop: str) -> None:
    template = ChatTemplate(tokenizer_for(POSITION))
    new = [user(f"Question {index}.") for index in range(count)] + [system("Be brief.")]
    delta = template.delta(
        [*history, said("It is half")],
        new,
        sampled_ids=template.encoder.encode(f"Assistant: It is half{stop}"),
        stop_token_ids=[template.encoder.control["<|eos|>"]],
        finish_reason="stop" if stop else "length",
    )
    messages = "".join(f"<|user|>Question {index}.<|sep|>" for index in range(count))
    close = "" if stop else "<|eos|>"
    assert template.encoder.decode(delta) == f"{close}{messages}Be brief.<|head|>"
