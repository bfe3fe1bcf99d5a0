"""What a conversation keeps changes no prompt: the cursors of its last turns, an index of the
sampled texts, and tool lists, which requests share.
"""

import gc
import json
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.listed_environment import TOOL
from support.qwen import tokenizer_for, trl_template
from support.served import CHAT, USER, serve
from support.work import CountedEncoder

from toolroll.endpoint.conversation import conversation_tree
from toolroll.endpoint.conversation.completions import CompletionIndex
from toolroll.endpoint.conversation.conversation_tree import ConversationTree, Prompt, TurnNode
from toolroll.endpoint.requests import tool_list
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.parsers.reasoning import THINK
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.model.turn import ParsedTurn
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.render import Renderer
from toolroll.rollout.types import Completion, Message

# --- cursors: each prompt is planned with them and without them -----------------------------------

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
        self, messages: list[Message], tools: ToolList = TOOLS, template: ChatTemplate | None = None
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


# --- sampled texts --------------------------------------------------------------------------------


def index_of(encoder: Encoder, texts: list[tuple[str, str]]) -> tuple[CompletionIndex, list[Node]]:
    """Texts of a prompt and what was sampled behind it."""
    session = Session("s")
    index, nodes = CompletionIndex(session), []
    for prompt, sampled in texts:
        completion = Completion(np.array(encoder.encode(sampled), dtype=np.int32), None, "stop")
        after = session.observe(encoder.encode(prompt), after=None)
        nodes.append(session.sample(completion, {}, after=after))
        index.append(nodes[-1])
    return index, nodes


PIECES = st.text("ab é🙂", max_size=3)


@given(
    texts=st.lists(st.tuples(PIECES, st.text("ab é🙂", min_size=1, max_size=3)), max_size=6),
    prompt=st.text("ab é🙂\ud800", max_size=8),
)
def test_a_prompt_is_found_as_if_all_texts_were_compared(
    tokenizer: Any, texts: list[tuple[str, str]], prompt: str
) -> None:
    encoder = Encoder(tokenizer)
    index, nodes = index_of(encoder, texts)
    whole = [before + sampled for before, sampled in texts]
    fitting = {id(n): len(t) for n, t in zip(nodes, whole, strict=True) if prompt.startswith(t)}
    matches = index.before_text(prompt, encoder)
    assert {id(node): length for node, length in matches} == fitting
    stops = [node.stop for node in nodes if id(node) in fitting]
    assert [node.stop for node, _ in matches] == sorted(stops, reverse=True)
    for node in nodes:
        path = index.session.path_ids(node)
        longest = index.before_ids(path)
        assert longest is not None and np.array_equal(index.session.path_ids(longest), path)
        shorter = index.before_ids(path[:-1])
        assert shorter is None or shorter.stop < len(path)


def test_a_text_is_decoded_once(tokenizer: Any) -> None:
    encoder = CountedEncoder(tokenizer)
    texts = [(f"{number} hello world", " and more") for number in range(50)]
    index, nodes = index_of(encoder, texts)
    for number in range(3):
        text = f"{number} hello world and more"
        [(node, length)] = index.before_text(f"{text}, and on", encoder)
        assert node is nodes[number] and length == len(text)
    assert encoder.decoded == sum(node.stop for node in nodes)


# --- tool lists -----------------------------------------------------------------------------------


def offering(default: Any) -> list[Any]:
    parameters = {"type": "object", "properties": {"x": {"default": default}}}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def test_equal_tools_are_one_list_as_long_as_it_is_used() -> None:
    gc.collect()
    before = len(tool_list._USED)
    lists = [ToolList.of(json.loads(json.dumps(offering(f"{number % 2}")))) for number in range(6)]
    assert len({id(tools) for tools in lists}) == 2 and lists[0] == offering("0")
    assert len(tool_list._USED) == before + 2
    del lists
    gc.collect()
    assert len(tool_list._USED) == before


def test_tools_that_are_rendered_differently_are_other_lists() -> None:
    first = ToolList.of(offering(1))
    for default in (1.0, True, "1", None):
        other = ToolList.of(offering(default))
        assert other is not first and repr(other) == repr(offering(default))
    [tool] = offering(1)
    reordered = {"type": "function", "function": dict(reversed(tool["function"].items()))}
    assert ToolList.of([reordered]) is not first


async def test_invalid_tools_are_refused_after_valid_ones() -> None:
    wrong: list[Any] = ["x", {"a": 1}, 7, "", {}, 0, [{"type": "function"}], [1]]
    async with serve() as bench:
        for tools in wrong:
            for valid in ([], [TOOL]):
                await bench.ask(USER, tools=valid)
            for _ in range(2):
                status, _, param = await bench.refusal(CHAT, {"messages": [USER], "tools": tools})
                assert status == 400 and str(param).startswith("tools")
