"""Which turn a request goes on from: echoes, edits, equal replies, sub-agents, rewrites."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.episodes import call
from support.listed_environment import TOOL
from support.qwen import qwen3_tokenizer
from support.served import USER, Message, assistant, serve, system, tool_results, user

from toolroll.endpoint.conversation.conversation_tree import (
    EDITED,
    NEW_ROOT,
    SWITCHES_CHANGED,
)
from toolroll.rollout.template.cursor import TOOLS_CHANGED
from toolroll.testing import Reply

Messages = list[Message]
THINKING = "<think>\nWhat now?\n</think>\n\n"
REPLY = [assistant(f"Reply {number}.") for number in range(5)]
"""The replies of `numbered`, as its client has them."""

# --- what a client library changes on its own -----------------------------------------------------


ADDED: Message = {"refusal": None, "audio": None, "annotations": [], "extra": {"refusal": None}}


def _renamed(reply: Message) -> Message:
    named = {{"reasoning_content": "reasoning"}.get(name, name): reply[name] for name in reply}
    return {**named, "content": reply["content"] or "", **ADDED}


def _in_parts(reply: Message) -> Message:
    return {**reply, "content": [{"type": "text", "text": reply["content"] or ""}]}


LIBRARIES: dict[str, Callable[[Message], Message]] = {
    "renames reasoning and adds fields": _renamed,
    "content in parts": _in_parts,
    "regenerates ids": lambda reply: reply,
}
"""How a library sends a reply back. More ways are in `test_random_trees.py`."""


def _with_new_ids(messages: Messages, turn: int) -> Messages:
    """Some libraries name all calls of a conversation anew each time that they send it."""
    text = json.dumps(messages)
    calls = [tool_call for message in messages for tool_call in message.get("tool_calls") or ()]
    for index, tool_call in enumerate(calls):
        text = text.replace(json.dumps(tool_call["id"]), f'"call_{turn}_{index}"')
    renamed: Messages = json.loads(text)
    return renamed


@pytest.mark.parametrize("name", LIBRARIES)
async def test_a_change_of_a_library_forks_nothing(name: str) -> None:
    first, second = call(at="x", b=[1, {"c": 2}]), call(at="y") + call(at="z")
    change = LIBRARIES[name]
    async with serve([THINKING + first, THINKING + second, "Done."], split="random") as bench:
        served: Messages = [USER]
        for turn in range(3):
            messages = [change(each) if each["role"] == "assistant" else each for each in served]
            if name == "regenerates ids":
                messages = _with_new_ids(messages, turn)
            reply = await bench.chat(*messages)
            served = [*served, reply, *tool_results(reply)]
        await bench.one_trajectory(turns=3)


# --- forks of replies without calls ---------------------------------------------------------------


def _edited(place: str, change: str) -> str:
    return f"{EDITED}: message {place} of the served history {change}".rstrip()


LEAD, FOLLOW = system("You lead."), system("You follow.")
COMPACTED = system("You lead. So far: a greeting.")
STEP = [user(f"step {turn}") for turn in range(2)]
LEFT_OUT = "is missing, the last message of its prompt"
NEW_TEXT = "was changed: its text"
FORKS: dict[str, tuple[list[Messages], list[str | None], list[list[str | None]]]] = {
    "a repeated prompt is no edit": (
        [[USER], [USER, REPLY[0], USER], [USER], [USER, REPLY[0], USER]],
        [None, None, None],
        [[None, None], [None], ["context", None]],
    ),
    "an edited user message": (
        [[USER], [USER, REPLY[0], user("One")], [USER, REPLY[0], user("Two")]],
        [None, _edited("2 (user)", NEW_TEXT)],
        [[None, None], ["context", None]],
    ),
    "sub-agents and compacted histories are roots": (
        [
            [LEAD, USER],
            [FOLLOW, USER],
            [LEAD, USER, REPLY[0], USER],
            [FOLLOW, USER, REPLY[1], USER],
            [COMPACTED, USER],
        ],
        [None, NEW_ROOT, NEW_ROOT],
        [[None, None], [None, None], [None]],
    ),
    "another system message before the same reply": (
        [[system("It is 1 pm."), USER], [system("It is 2 pm."), USER, REPLY[0], USER]],
        [None, _edited("0 (system)", NEW_TEXT)],
        [[None], [None]],
    ),
    "another first message and an example": (
        [[USER], [user("Hello"), assistant("An example."), USER]],
        [None, NEW_ROOT],
        [[None], [None]],
    ),
    # OpenClaw 2026.9 ends each prompt with the state of its runtime, and leaves it out then.
    "a last message that the next request leaves out": (
        [
            [LEAD, USER, user("state 0")],
            [LEAD, USER, REPLY[0], STEP[0], user("state 1")],
            [LEAD, USER, REPLY[0], STEP[0], REPLY[1], STEP[1], user("state 2")],
        ],
        [None, _edited("2 (user)", LEFT_OUT), _edited("4 (user)", LEFT_OUT)],
        [[None]] * 3,
    ),
}
"""The messages of each request; of each trajectory its fork reason, and of each of its turns why it
is not trained.
"""
BEFORE, FIX = [LEAD, USER, REPLY[0]], user("Fix it.")
CHANGES: dict[str, tuple[Messages, str, str]] = {
    "a reply left out": ([FIX, user("Format error: no call.")], "4 (assistant)", "is missing"),
    "a reply left out, and another question": ([user("Fix this.")], "3 (user)", NEW_TEXT),
    "a message inserted": (
        [system("Note."), FIX, REPLY[1], USER],
        "3 (system) was inserted before message 3 (user)",
        "",
    ),
    "another reply": ([FIX, assistant("Another."), USER], "4 (assistant)", NEW_TEXT),
}
"""What follows `BEFORE` after a request whose question was `FIX`, and the first change in it."""
FORKS |= {
    name: (
        [[LEAD, USER], [*BEFORE, FIX], [*BEFORE, *changed]],
        [None, _edited(place, change)],
        [[None, None], ["context", None]],
    )
    for name, (changed, place, change) in CHANGES.items()
}


@pytest.mark.parametrize("name", FORKS)
async def test_where_and_why_requests_fork(name: str) -> None:
    requests, reasons, excluded = FORKS[name]
    async with serve(lambda request: f"Reply {request.call}.") as bench:
        for messages in requests:
            await bench.chat(*messages)
        trajectories = await bench.trajectories()
        assert [each["fork_reason"] for each in trajectories] == reasons
        turns = [[turn["excluded"] for turn in each["turns"]] for each in trajectories]
        assert turns == excluded
        assert await bench.forks() == [reason for reason in reasons if reason is not None]
        if any("context" in turn for turn in turns):  # what is shared is stored once
            tokens = sum(len(each["input_ids"]) for each in trajectories)
            assert bench.endpoint.sessions.find("s").session.tokens < tokens


# --- forks of replies with reasoning and calls ----------------------------------------------------


def _calling(*arguments: str) -> list[dict[str, Any]]:
    functions = [{"name": "look", "arguments": each} for each in arguments]
    return [{"id": f"c{n}", "function": function} for n, function in enumerate(functions)]


@pytest.mark.parametrize(
    ("edit", "changed", "shown"),
    [
        ({"content": "Something else."}, "its text", "Something else."),
        ({"reasoning_content": "What else?"}, "its reasoning", "What else?"),
        ({"tool_calls": _calling('{"at": "elsewhere"}', '{"at": "y"}')}, "its calls", "elsewhere"),
        ({"tool_calls": _calling('{"at": "x"}')}, "its calls", "Well."),
    ],
    ids=["content", "reasoning", "arguments", "a call left out"],
)
async def test_an_edited_reply_forks(edit: dict[str, Any], changed: str, shown: str) -> None:
    replies = ["Hello.", THINKING + "Well." + call(at="x") + call(at="y"), "Done."]
    async with serve(replies) as bench:
        served = [USER, await bench.chat(USER), USER]
        reply = {**await bench.chat(*served), **edit}
        await bench.chat(*served, reply, *tool_results(reply))
        first, second = await bench.trajectories()
        assert [turn["excluded"] for turn in first["turns"]] == [None, None]
        assert [turn["excluded"] for turn in second["turns"]] == ["context", None]
        assert second["fork_reason"] == _edited("3 (assistant)", f"was changed: {changed}")
        assert shown in bench.prompt()


@pytest.mark.parametrize("cut", ["<think>\nLong thought that", "One two three four five six."])
async def test_an_edit_behind_a_cut_turn_keeps_its_tokens(cut: str) -> None:
    """What the client changed comes behind it: nothing that was sampled is encoded anew."""
    replies = [cut, "Second.", "Third."]
    async with serve(replies, split="random") as bench:
        served = [USER, await bench.chat(USER, max_completion_tokens=4), USER]
        await bench.chat(*served)
        await bench.chat(*served, assistant("Changed."), USER)
        first, second = await bench.trajectories()
        assert [turn["finish_reason"] for turn in first["turns"]] == ["length", "stop"]
        assert [turn["excluded"] for turn in first["turns"]] == [None, None]
        assert [turn["excluded"] for turn in second["turns"]] == ["context", None]
        assert second["fork_reason"].startswith(f"{EDITED}: message 3 (assistant)")


# --- defaults of arguments ------------------------------------------------------------------------


def _tool(name: str, parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WHERE, NODE = {"$ref": "#/$defs/Where"}, {"$ref": "#/$defs/Node"}
PROPERTIES = {
    "file_path": {"type": "string"},
    "count": {"type": "number", "default": 1.0},
    "replace_all": {"type": "boolean", "default": False},
    "where": WHERE,
    "edits": {"type": "array", "items": WHERE},
    "maybe": {"anyOf": [WHERE, {"type": "null"}]},
    "all": {"allOf": [WHERE]},
    "pair": {"type": "array", "items": {"anyOf": [WHERE, {}]}},
    "mode": {"$ref": "#/$defs/Mode"},
    "width": {"anyOf": [{"default": 5}, {"default": 6}]},
    "labels": {"additionalProperties": {"default": ""}},
    "node": NODE,
}
DEFINITIONS = {
    "Where": {"type": "object", "properties": {"line": {"default": None}}},
    "Mode": {"type": "string", "default": "fast"},
    "Node": {"properties": {"next": {**NODE, "default": {"next": {}}}}},
}
EDIT = _tool("Edit", {"type": "object", "properties": PROPERTIES, "$defs": DEFINITIONS})
SAMPLED = {
    "file_path": "a.py",
    "where": {},
    "edits": [{"line": 1}, {}],
    "maybe": {},
    "all": {},
    "pair": [{}],
    "labels": {},
    "node": {},
}


def _offering(name: str, **schema: Any) -> Any:
    """The tool `name` with an argument `n` that has `schema`."""
    return _tool(name, {"type": "object", "properties": {"n": schema}})


@pytest.mark.parametrize("history", ["fork", "preserve"])
@pytest.mark.parametrize(
    ("echoed", "changed"),
    [
        ({"replace_all": False}, False),
        ({"count": 1, "where": {"line": None}, "edits": [{"line": 1}, {"line": None}]}, False),
        ({"maybe": {"line": None}, "all": {"line": None}, "mode": "fast"}, False),
        ({"pair": [{"line": None}]}, False),
        ({"width": 5}, True),
        ({"labels": {"a": ""}}, True),
        ({"replace_all": 0}, True),
        ({"where": {"line": 2}}, True),
        ({"node": {"next": {"next": {}}}}, False),
        ({"node": {"next": {}}}, True),
        ({"node": {"next": {"next": {"next": {}}}}}, True),
        ({"file_path": "b.py", "replace_all": False}, True),
    ],
    ids=str,
)
async def test_a_default_is_no_change(history: str, echoed: dict[str, Any], changed: bool) -> None:
    """Claude Code validates the input of a call, which fills in defaults."""
    replies = [call("Edit", **SAMPLED)] * 3 + ["Done."]
    async with serve(replies, split="random", history=history) as bench:
        messages: Messages = [USER]
        for turn in range(4):
            reply = await bench.chat(*messages, tools=[EDIT] if turn < 3 else [])
            for tool_call in reply.get("tool_calls") or ():
                tool_call["function"]["arguments"] = json.dumps({**SAMPLED, **echoed})
            messages += [reply, *tool_results(reply, "ok")]
        trajectories, reasons = await bench.trajectories(), await bench.forks()
        if changed:
            assert reasons[0] == _edited("1 (assistant)", "was changed: its calls")
        else:
            assert len(trajectories[0]["turns"]) >= 3
            assert not any(reason.startswith(EDITED) for reason in reasons)


@pytest.mark.parametrize("chosen", [0, 1])
async def test_equal_arguments_win_over_equal_defaults(chosen: int) -> None:
    """The client makes its own call ids, or swaps those of the replies."""
    async with serve([call("look", n=5), call("look"), "Done."]) as bench:
        tools = [_offering("look", default=5)]
        answer = await bench.ask(USER, tools=tools, n=2)
        replies = [choice["message"] for choice in answer["choices"]]
        repeated, other = replies[chosen], replies[1 - chosen]
        arguments = json.loads(repeated["tool_calls"][0]["function"]["arguments"])
        repeated["tool_calls"][0]["id"] = other["tool_calls"][0]["id"]
        await bench.chat(USER, repeated, *tool_results(repeated), tools=tools)
        last = bench.endpoint.sessions.find("s").tree.last_turn()
        assert last is not None and last.parent is not None
        continued = last.parent.reply["tool_calls"][0]["function"]["arguments"]
        assert json.loads(continued) == arguments


@pytest.mark.parametrize(
    "last", [[], [_offering("look", default=6)], [_offering("other")]], ids=["none", "6", "other"]
)
@pytest.mark.parametrize("first", [{"default": 5}, {"default": 6}, {}], ids=str)
async def test_a_new_default_changes_no_old_call(first: dict[str, Any], last: list[Any]) -> None:
    """Two agents of one session may define the same tool. Its first definition counts."""
    replies = [call("look", n=5), call("look", n=6), "Done.", "Done."]
    async with serve(replies) as bench:
        talks = []
        for text, schema in (("Hi", first), ("Hello", {"default": 5})):
            reply = await bench.chat(user(text), tools=[_offering("look", **schema)])
            talks.append([user(text), reply, *tool_results(reply, "ok")])
        for messages in talks:
            await bench.chat(*messages, tools=last)
        reasons = await bench.forks()
        assert [reason for reason in reasons if not reason.startswith(TOOLS_CHANGED)] == [NEW_ROOT]


# --- tools, switches and templates ----------------------------------------------------------------


async def test_other_tools_and_other_switches_fork() -> None:
    qwen = qwen3_tokenizer()
    async with serve(tokenizer=qwen) as bench:
        messages = [USER, await bench.chat(USER), USER]
        await bench.chat(*messages, tools=[_offering("listen")])
        assert "listen" in bench.prompt()
        await bench.chat(*messages, chat_template_kwargs={"enable_thinking": False})
        changed = f"{TOOLS_CHANGED} (added: listen; removed: look)"
        reasons = [each["fork_reason"] for each in await bench.trajectories()]
        assert reasons == await bench.forks() == [changed, SWITCHES_CHANGED]
        prompt = str(qwen.decode(bench.engine.log[-1].input_ids))
        assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


async def test_constant_switches_fork_nothing_among_many_others() -> None:
    async with serve("Hello.", settings={"verify": "off"}) as bench:
        talks: list[Messages] = [[USER] for _ in range(18)]
        for _ in range(2):
            for index, talk in enumerate(talks):
                switches = {"one": index, "two": True}
                fields = {"tools": [], "chat_template_kwargs": switches}
                talk += [await bench.chat(*talk, session=f"s{index}", **fields), USER]
        for index in range(len(talks)):
            assert await bench.forks(f"s{index}") == []
        other = {"two": 1, "one": 0}
        await bench.chat(*talks[0], session="s0", tools=[], chat_template_kwargs=other)
        assert await bench.forks("s0") == [SWITCHES_CHANGED]


# --- equal replies --------------------------------------------------------------------------------

SIBLINGS = ["<think>\nOne.\n</think>\n\nWell.", "<think>\nTwo.\n</think>\n\nWell."]


async def test_equal_replies_after_siblings_belong_to_their_own_branch() -> None:
    """Two answers that say the same with other thoughts, and two that say the same behind them:
    the thoughts tell which goes on.
    """
    async with serve([*SIBLINGS, "Go on.", "Go on.", "Done."]) as bench:
        first, second = (choice["message"] for choice in (await bench.ask(USER, n=2))["choices"])
        assert first != second
        await bench.chat(USER, second, USER, tools=[])
        last = await bench.chat(USER, first, USER, tools=[])
        await bench.chat(USER, first, USER, last, USER, tools=[])
        sampled, _, _, behind, end = (n for n, _ in bench.endpoint.sessions.find("s").trace)
        assert behind.parent is not None and behind.parent.parent == sampled
        assert end.parent is not None and end.parent.parent == behind
        await bench.trajectories()


async def test_equal_siblings_are_told_apart_by_the_ids_of_their_calls() -> None:
    """Of two equal answers with calls of other ids the one that is repeated goes on, however
    often the other has.
    """
    async with serve(call(at="x"), split="random") as bench:
        choices = (await bench.ask(USER, n=2, tools=[TOOL]))["choices"]
        for _ in range(2):
            for choice in choices:
                await bench.chat(USER, choice["message"], *tool_results(choice["message"]))
        first, second, *later = (node for node, _ in bench.endpoint.sessions.find("s").trace)
        assert [node.parent and node.parent.parent for node in later] == [first, second] * 2
        await bench.trajectories()


async def test_a_reply_without_reasoning_is_on_the_next_replys_branch() -> None:
    """It repeats the first sibling; what follows then was said after the second one."""
    async with serve([*SIBLINGS, "Go on.", "Never mind.", "Done."]) as bench:
        _, second = (choice["message"] for choice in (await bench.ask(USER, n=2))["choices"])
        next_reply = await bench.chat(USER, second, USER, tools=[])
        bare = assistant("Well.")
        await bench.chat(USER, bare, USER, tools=[])
        await bench.chat(USER, bare, USER, next_reply, USER, tools=[])
        live = bench.endpoint.sessions.find("s")
        _, _, behind_second, _, last = (node for node, _ in live.trace)
        assert last.parent is not None and last.parent.parent == behind_second
        assert live.tree.forks == []


@pytest.mark.parametrize("cut", [False, True])
async def test_a_call_without_arguments_forks_nothing(cut: bool) -> None:
    first = Reply("<tool_call>" if cut else "<tool_call></tool_call>", stop=not cut)
    async with serve([first, "Done."]) as bench:
        reply = await bench.chat(USER)
        [tool_call] = reply["tool_calls"]
        assert tool_call["function"]["arguments"] == ""
        await bench.chat(USER, reply, *tool_results(reply))
        await bench.one_trajectory(turns=2)
