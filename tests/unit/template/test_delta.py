"""How many renders a delta costs, and that the two ways to find its text agree."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.oracle_scenarios import call, calls, said, system, user
from support.qwen import tokenizer_for

from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.template import ChatTemplate, Cursor
from toolroll.rollout.types import IdArray, Message

pytestmark = pytest.mark.tokens

FIRST = [system("Be brief."), user("Hello.")]
NEW = [user("And now?")]
AND_NOW = "\n<|turn|>user\nAnd now?<|end|>\n<|turn|>assistant\n"
CALL = call(1, {"at": "here", "far": True}, "look")
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
TURN = calls(CALL, content="Look:")


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

    def delta(
        self, messages: list[Message], text: str, new: list[Message], start: Cursor | None = None
    ) -> tuple[IdArray, Cursor]:
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
    turn = calls({**CALL, "function": function}, content="Look:")
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
