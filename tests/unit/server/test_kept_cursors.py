"""The cursor that a turn keeps changes no prompt: each is planned with it and without it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.listed_environment import TOOL
from support.qwen import tokenizer_for, trl_template
from support.served import USER, serve

from toolroll.endpoint.conversation import conversation_tree
from toolroll.endpoint.conversation.conversation_tree import (
    ConversationTree,
    Prompt,
    TurnNode,
)
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.parsers.reasoning import THINK
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.session.session import Session
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.render import Renderer
from toolroll.rollout.types import Completion, Message

TOOLS = ToolList.of([TOOL])
OTHERS = ToolList.of([{"type": "function", "function": {**TOOL["function"], "name": "listen"}}])
PLAIN = (
    "{{ strftime_now('%d') }}{{ mood }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if tools and loop.index0 == 2 %}{{ tools[0].function.name }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows the date, a switch, and the first tool in the third message."""


class Talk:
    """Requests to one tree, and their replies. Each prompt is planned in both ways."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.tree = ConversationTree(Session("s"))
        self.turns: list[TurnNode] = []

    def plan(
        self,
        messages: list[Message],
        tools: ToolList = TOOLS,
        template: ChatTemplate | None = None,
    ) -> Prompt:
        """Return the prompt, which is the same without the kept cursors."""

        def planned() -> Prompt:
            return self.tree.plan(messages, tools, template or self.template, THINK)

        cursors = [turn.cursor for turn in self.turns]
        prompt = planned()
        for turn in self.turns:
            turn.cursor = None
        assert shown(planned()) == shown(prompt)
        for turn, cursor in zip(self.turns, cursors, strict=True):
            turn.cursor = cursor
        return prompt

    def reply(self, prompt: Prompt, text: str = "Hello.", **fields: Any) -> TurnNode:
        """Commit a reply to `prompt`."""
        ids = np.array(self.template.encoder.encode(f"{text}<|im_end|>"), dtype=np.int32)
        message = {"role": "assistant", "content": text, **fields}
        parsed = ParsedTurn(self.template.sampled(ids), text, ParsedReply(text), message)
        completion = Completion(ids, np.zeros(len(ids), np.float32), "stop")
        node = self.tree.session.sample(completion, {}, after=self.tree.observe(prompt))
        self.turns.append(self.tree.commit(prompt, node, parsed))
        return self.turns[-1]


def shown(prompt: Prompt) -> list[Any]:
    """All that a prompt gives to the session and to later requests."""
    cursor = prompt.cursor
    assert cursor is not None
    return [
        prompt.input_ids.tolist(),
        prompt.delta.tolist(),
        prompt.parent,
        prompt.turn,
        prompt.fork_reason,
        prompt.continues,
        prompt.preserved,
        prompt.in_reasoning,
        cursor.text,
        cursor.preserved,
        repr(cursor._head.tools),
        repr(cursor._messages),
        cursor._parts is prompt.template.parts,
    ]


def plain(day: int = 1, **switches: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer_for(PLAIN), now=datetime(2026, 1, day), kwargs=switches)


async def test_a_request_renders_its_own_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    renders, render = list[Any](), Renderer._render

    def counted(*args: Any, **kwargs: Any) -> str:
        renders.append(args)
        return render(*args, **kwargs)

    monkeypatch.setattr(Renderer, "_render", counted)
    async with serve(settings={"verify": "off"}) as bench:
        messages = [USER]
        for _ in range(4):
            renders.clear()
            messages = [*messages, await bench.chat(*messages), USER]
            assert len(renders) == 1


def test_it_belongs_to_the_served_messages() -> None:
    """Not to those that the client repeats, nor to other messages with the same digest."""
    talk = Talk(plain())
    turns = []
    for number in (1, 1.0):
        function = {"name": "look", "arguments": {"at": number}}
        call = {"id": "a", "type": "function", "function": function}
        first = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
        turns.append((first, talk.reply(talk.plan(first))))
    (_, served), (repeated, other) = turns
    assert served.digest == other.digest
    prompt = talk.plan([*repeated, served.reply, USER])
    assert prompt.turn is served and prompt.continues


THINKING = "<think>\nWhat?\n</think>\n\nHello."
STEPS = st.tuples(
    st.integers(0, 5),  # what it continues
    st.booleans(),  # and edits
    st.sampled_from([TOOLS, TOOLS, OTHERS, ToolList.of([])]),
    st.sampled_from([0, 0, 1, 2]),  # its template
)


@pytest.mark.parametrize("history", ["plain", "fork", "preserve"])
@given(steps=st.lists(STEPS, min_size=4, max_size=8))
def test_it_belongs_to_the_tools_the_switches_and_the_time(history: Any, steps: list[Any]) -> None:
    """The last two: Qwen3's template, which rewrites history."""
    text, fields = "Hello.", dict[str, str]()
    if history == "plain":
        templates = [plain(), plain(2), plain(mood="glad")]
    else:
        text, fields = THINKING, {"content": "Hello.", "reasoning_content": "What?"}
        templates = [ChatTemplate(tokenizer_for(trl_template("qwen3")), history=history)]
    talk, talks = Talk(templates[0]), [[USER]]
    for pick, edits, tools, number in steps:
        messages = talks[pick % len(talks)]
        if edits and len(messages) > 1:
            messages = [*messages[:-2], {"role": "assistant", "content": "Edited."}, USER]
        prompt = talk.plan(messages, tools, templates[number % len(templates)])
        talks.append([*messages, talk.reply(prompt, text, **fields).reply, USER])


def test_only_the_last_turns_keep_it() -> None:
    talk = Talk(plain())
    prompt = talk.plan([USER])
    for number in range(2 * conversation_tree._KEPT):
        talk.reply(prompt, f"Reply {number}.")
    kept = [turn for turn in talk.turns if turn.cursor is not None]
    assert kept == talk.turns[-conversation_tree._KEPT :]


@pytest.mark.parametrize("name", ["plain", "qwen3_5_nothink"])
def test_a_continued_turn_can_be_continued_again(name: str) -> None:
    """Its text is freed meanwhile."""
    scaffold = ChatTemplate(tokenizer_for(trl_template("qwen3_5_nothink")), history="scaffold")
    talk = Talk(plain() if name == "plain" else scaffold)
    messages: list[Message] = [USER]

    def planned(last: str) -> Prompt:
        return talk.tree.plan([*messages[:-1], {**USER, "content": last}], TOOLS, talk.template)

    for _ in range(2):
        messages = [*messages, talk.reply(planned("Hi")).reply, USER]
    before, third = planned("Other"), planned("Hi")
    talk.reply(third)
    assert ["text" in vars(turn.cursor) for turn in talk.turns] == [False, False, True]
    after = planned("Other")
    assert before.continues and after.continues and after.turn is before.turn
    assert after.input_ids.tolist() == before.input_ids.tolist()
    assert after.cursor is not None and before.cursor is not None
    assert after.cursor.text == before.cursor.text


def test_plans_that_are_not_committed_keep_nothing() -> None:
    talk = Talk(plain())
    turn, first = talk.reply(talk.plan([USER])), talk.turns[0].cursor
    assert first is not None
    function = {"name": "look", "arguments": {}}
    call = {"id": "a", "type": "function", "function": function}
    for number in range(5):
        function["arguments"] = {"at": number}
        new = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
        talk.tree.plan([USER, turn.reply, *new], TOOLS, talk.template)
    assert turn.cursor is first and len(first._head.texts.objects) == 0
