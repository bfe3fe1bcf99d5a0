"""Which turn a request goes on from: echoes, edits, sub-agents, rewriting templates."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.listed_environment import TOOL
from support.loop_clock import skip
from support.memory import kept
from support.qwen import qwen3_tokenizer

from toolroll.endpoint.answers.result import CompletionResult
from toolroll.endpoint.conversation import conversation_tree
from toolroll.endpoint.conversation.conversation_tree import (
    EDITED,
    NEW_ROOT,
    SWITCHES_CHANGED,
    ConversationTree,
)
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.rollout.session.session import Session
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.cursor import TOOLS_CHANGED

USER: Any = {"role": "user", "content": "Hi"}
THINKING = "<think>\nWhat now?\n</think>\n\n"


async def ask(bench: Bench, messages: list[Any], **more: Any) -> Any:
    return (
        (
            await bench.client().chat.completions.create(
                model="m",
                messages=messages,
                tools=[TOOL],
                **more,
            )
        )
        .choices[0]
        .message
    )


def answers(message: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": wanted.id, "content": f"seen {at}"}
        for at, wanted in enumerate(message.tool_calls or ())
    ]


def _results(reply: dict[str, Any]) -> list[Any]:
    calls = reply.get("tool_calls") or ()
    return [{"role": "tool", "tool_call_id": each["id"], "content": "ok"} for each in calls]


def turned(message: dict[str, Any], change: str) -> dict[str, Any]:
    """The echo of `message` as some client library leaves it."""
    calls = message.get("tool_calls") or []
    if change == "reasoning dropped":
        message.pop("reasoning_content", None)
    if change == "reasoning by its other name":
        message["reasoning"] = message.pop("reasoning_content", None)
    if change == "keys reordered":
        for given in calls:
            arguments = json.loads(given["function"]["arguments"])
            given["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
    if change == "ids regenerated":
        for at, given in enumerate(calls):
            given["id"] = f"call_{at}_{len(message['tool_calls'])}"
    if change == "content empty":
        message["content"] = message.get("content") or ""
    if change == "content in parts":
        message["content"] = [{"type": "text", "text": message.get("content") or ""}]
    if change == "library fields":
        message |= {
            "refusal": None,
            "audio": None,
            "annotations": [],
            "provider_specific_fields": {"refusal": None},
        }
    return message


@pytest.mark.parametrize(
    "change",
    [
        "reasoning dropped", "reasoning by its other name", "keys reordered", "ids regenerated",
        "content empty", "content in parts",
        "library fields",
    ],
)  # fmt: skip
@pytest.mark.parametrize("split", ["canonical", "random"])
async def test_what_client_libraries_change_does_not_break_a_conversation(
    tokenizer: Any, change: str, split: Any
) -> None:
    said = [
        THINKING + call(at="x", b=[1, {"c": 2}]),
        THINKING + call(at="y") + call(at="z"),
        "Done.",
    ]
    async with endpoint(tokenizer, lambda request: said[request.call], split=split) as bench:
        messages: list[Any] = [USER]
        for _ in range(3):
            message = await ask(bench, messages)
            echo = turned(message.model_dump(exclude_none=True), change)
            ids = [given["id"] for given in echo.get("tool_calls") or ()]
            messages += [
                echo,
                *({"role": "tool", "tool_call_id": each, "content": "seen"} for each in ids),
            ]
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 3


@pytest.mark.parametrize("edit", ["content", "reasoning", "arguments", "a call left out"])
async def test_an_edited_reply_forks(tokenizer: Any, edit: str) -> None:
    said = ["Hello.", THINKING + "Well." + call(at="x") + call(at="y"), "Done."]
    async with endpoint(tokenizer, lambda request: said[request.call]) as bench:
        messages: list[Any] = [USER]
        messages += [await ask(bench, messages), USER]
        message = (await ask(bench, messages)).model_dump(exclude_none=True)
        if edit == "content":
            message["content"] = "Something else."
        elif edit == "reasoning":
            message["reasoning_content"] = "What else?"
        elif edit == "arguments":
            message["tool_calls"][0]["function"]["arguments"] = '{"at": "elsewhere"}'
        else:
            message["tool_calls"] = message["tool_calls"][:1]
        results = [
            {"role": "tool", "tool_call_id": each["id"], "content": "seen"}
            for each in message["tool_calls"]
        ]
        await ask(bench, [*messages, message, *results])
        first, second = await bench.trajectories()
        assert [turn["excluded"] for turn in first["turns"]] == [None, None]
        assert [turn["excluded"] for turn in second["turns"]] == ["context", None]
        changed = {
            "content": "its text",
            "reasoning": "its reasoning",
        }.get(edit, "its calls")
        place = "message 3 (assistant) of the served history was changed"
        assert second["fork_reason"] == f"{EDITED}: {place}: {changed}"
        text = tokenizer.decode(second["input_ids"])
        assert {
            "content": "Something else.",
            "reasoning": "What else?",
            "arguments": "elsewhere",
        }.get(edit, "Well.") in text


async def test_an_edited_user_message_forks_behind_what_was_shared(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: f"Reply {request.call}.") as bench:
        first = [USER]
        first += [await ask(bench, first)]
        await ask(bench, [*first, {"role": "user", "content": "One"}])
        await ask(bench, [*first, {"role": "user", "content": "Two"}])
        trajectories = await bench.trajectories()
        assert [len(found["turns"]) for found in trajectories] == [2, 2]
        live = bench.endpoint.sessions.find("s")
        assert live.session.tokens < sum(len(found["input_ids"]) for found in trajectories)


async def test_a_sub_agent_is_another_root(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: f"Reply {request.call}.") as bench:
        main: list[Any] = [{"role": "system", "content": "You lead."}, USER]
        main += [await ask(bench, main), USER]
        sub: list[Any] = [{"role": "system", "content": "You follow."}, USER]
        sub += [await ask(bench, sub), USER]
        await ask(bench, main)
        await ask(bench, sub)
        compacted: list[Any] = [
            {"role": "system", "content": "You lead. So far: a greeting."},
            USER,
        ]
        await ask(bench, compacted)
        trajectories = await bench.trajectories()
        assert [len(found["turns"]) for found in trajectories] == [2, 2, 1]
        assert [found["fork_reason"] for found in trajectories] == [None, NEW_ROOT, NEW_ROOT]


async def test_a_root_says_that_the_client_changed_what_was_before_a_reply(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: f"Reply {request.call}.") as bench:
        reply = await ask(bench, [{"role": "system", "content": "It is 1 pm."}, USER])
        await ask(bench, [{"role": "system", "content": "It is 2 pm."}, USER, reply, USER])
        found = await bench.trajectories()
        place = "message 0 (system) of the served history was changed"
        changed = f"{EDITED}: {place}: its text"
        assert [one["fork_reason"] for one in found] == [None, changed]


async def test_a_root_says_that_the_client_changed_the_first_reply(tokenizer: Any) -> None:
    """So smolagents and autogen send a reply back: as other text, or the reasoning as content."""
    replies = [THINKING + call(at="x"), "Second.", "Third."]
    async with endpoint(tokenizer, lambda request: replies[request.call]) as bench:
        reply = await ask(bench, [USER])
        messages: list[Any] = [USER, {"role": "assistant", "content": "Calling tools: [...]"}, USER]
        await ask(bench, messages)
        messages[1] = {"role": "assistant", "content": reply.reasoning_content}
        await ask(bench, messages)
        found = await bench.trajectories()
        assert [len(one["turns"]) for one in found] == [1, 1, 1]
        changed = f"{EDITED}: message 1 (assistant) of the served history was changed: its text"
        assert found[0]["fork_reason"] is None
        assert found[1]["fork_reason"] == found[2]["fork_reason"] == changed


async def test_a_root_with_other_first_messages_is_another_conversation(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: f"Reply {request.call}.") as bench:
        await ask(bench, [USER])
        other = {"role": "user", "content": "Hello"}
        await ask(bench, [other, {"role": "assistant", "content": "An example."}, USER])
        found = await bench.trajectories()
        assert [one["fork_reason"] for one in found] == [None, NEW_ROOT]


def _user(text: str) -> Any:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("left out", "message {reply} (assistant) of the served history is missing"),
        ("left out, and the message before it changed",
         "message {asked} (user) of the served history was changed: its text"),
        ("the message before it left out", "message {asked} (user) of the served history is "
         "missing, the last message of its prompt"),
        ("a message inserted", "message {asked} (system) was inserted before message {asked} "
         "(user) of the served history"),
        ("an edited reply", "message {reply} (assistant) of the served history was changed: its "
         "text"),
    ],
)  # fmt: skip
async def test_the_fork_reason_names_what_the_client_changed(
    tokenizer: Any, change: str, expected: str, turns: int
) -> None:
    async with endpoint(tokenizer, lambda request: "All good.") as bench:
        before: list[Any] = [{"role": "system", "content": "Be brief."}, _user("Hi")]
        if turns:
            before += [await ask(bench, before), _user("Well?")]
        served = [*before, _user("Fix it.")]
        reply = await ask(bench, served)
        if change == "left out":
            await ask(bench, [*served, _user("Format error: no call found.")])
        elif change == "left out, and the message before it changed":
            await ask(bench, [*before, _user("Fix this.")])
        elif change == "the message before it left out":
            await ask(bench, [*before, reply, _user("Go on.")])
        elif change == "a message inserted":
            inserted = {"role": "system", "content": "Note."}
            await ask(bench, [*before, inserted, _user("Fix it."), reply, _user("Go on.")])
        else:
            edited = {"role": "assistant", "content": "All Good."}
            await ask(bench, [*served, edited, _user("Go on.")])
        first, second = await bench.trajectories()
        text = expected.format(reply=len(served), asked=len(before))
        another = change.startswith("left out, and") and not turns
        assert first["fork_reason"] is None
        assert second["fork_reason"] == (NEW_ROOT if another else f"{EDITED}: {text}")
        assert (await bench.get("/sessions/s/trajectories"))["forks"] == [second["fork_reason"]]


async def test_a_repeated_prompt_is_not_an_edit(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: f"Reply {request.call}.") as bench:
        first: list[Any] = [USER, await ask(bench, [USER]), USER]
        for _ in range(2):
            await ask(bench, first)
            await ask(bench, [USER])
        assert (await bench.get("/sessions/s/trajectories"))["forks"] == []


EDIT: Any = {
    "type": "function",
    "function": {
        "name": "Edit",
        "parameters": {
            "type": "object",
            "properties": {
                "file_path": {"type": "string"},
                "count": {"type": "number", "default": 1.0},
                "replace_all": {"type": "boolean", "default": False},
                "where": {"$ref": "#/$defs/Where"},
                "edits": {"type": "array", "items": {"$ref": "#/$defs/Where"}},
                "maybe": {"anyOf": [{"$ref": "#/$defs/Where"}, {"type": "null"}]},
                "all": {"allOf": [{"$ref": "#/$defs/Where"}]},
                "pair": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Where"}, {}]}},
                "mode": {"$ref": "#/$defs/Mode"},
                "width": {"anyOf": [{"default": 5}, {"default": 6}]},
                "labels": {"additionalProperties": {"default": ""}},
            },
            "required": ["file_path"],
            "$defs": {
                "Where": {"type": "object", "properties": {"line": {"default": None}}},
                "Mode": {"type": "string", "default": "fast"},
            },
        },
    },
}
SAMPLED = {
    "file_path": "a.py",
    "where": {},
    "edits": [{"line": 1}, {}],
    "maybe": {},
    "all": {},
    "pair": [{}],
    "labels": {},
}


@pytest.mark.parametrize("history", ["fork", "preserve"])
@pytest.mark.parametrize(
    ("echoed", "changed"),
    [
        ({"replace_all": False}, False),
        ({"count": 1, "where": {"line": None}, "edits": [{"line": 1}, {"line": None}]}, False),
        ({"maybe": {"line": None}, "all": {"line": None}}, False),
        ({"pair": [{"line": None}], "mode": "fast"}, False),
        ({"width": 5}, True),
        ({"labels": {"a": ""}}, True),
        ({"replace_all": True}, True),
        ({"replace_all": 0}, True),
        ({"where": {"line": 2}}, True),
        ({"edits": [{"line": 1}]}, True),
        ({"file_path": "b.py", "replace_all": False}, True),
    ],
)
async def test_an_argument_that_equals_its_default_is_no_change(
    tokenizer: Any, history: str, echoed: dict[str, Any], changed: bool
) -> None:
    """Claude Code validates the input of a call, which fills in defaults."""
    said = [call("Edit", **SAMPLED)] * 3 + ["Done."]
    saying = lambda request: said[request.call]
    async with endpoint(tokenizer, saying, split="random", history=history) as bench:
        messages: list[Any] = [USER]
        for turn in range(4):
            offered = {"tools": [EDIT]} if turn < 3 else {}
            body = {"messages": messages, **offered}
            _, answer = await bench.post("/sessions/s/v1/chat/completions", body)
            reply = answer["choices"][0]["message"]
            for wanted in reply.get("tool_calls") or ():
                wanted["function"]["arguments"] = json.dumps({**SAMPLED, **echoed})
            messages = [*messages, reply, *_results(reply)]
        found = await bench.trajectories()
        forks = (await bench.get("/sessions/s/trajectories"))["forks"]
        if changed:
            place = "message 1 (assistant) of the served history was changed"
            assert forks[0] == f"{EDITED}: {place}: its calls"
        else:
            assert len(found[0]["turns"]) >= 3
            assert not any(reason.startswith(EDITED) for reason in forks)


@pytest.mark.parametrize("first", [0, 1])
async def test_of_replies_that_differ_by_a_default_the_one_with_equal_arguments_continues(
    tokenizer: Any, first: int
) -> None:
    """The client makes its own call ids, or swaps those of the replies."""
    replies = [call("look", n=5), call("look"), "Done."]
    saying = lambda request: replies[request.call]
    async with endpoint(tokenizer, saying) as bench:
        body = {"messages": [USER], "tools": [offering("look", default=5)]}
        _, answer = await bench.post("/sessions/s/v1/chat/completions", {**body, "n": 2})
        messages = [choice["message"] for choice in answer["choices"]]
        chosen, other = messages[first], messages[1 - first]
        arguments = json.loads(chosen["tool_calls"][0]["function"]["arguments"])
        chosen["tool_calls"][0]["id"] = other["tool_calls"][0]["id"]
        again = {**body, "messages": [USER, chosen, *_results(chosen)]}
        assert (await bench.post("/sessions/s/v1/chat/completions", again))[0] == 200
        tree = bench.endpoint.sessions.find("s").tree
        last = tree.last_turn()
        assert last is not None and last.parent is not None
        continued = last.parent.reply["tool_calls"][0]["function"]["arguments"]
        assert json.loads(continued) == arguments


@pytest.mark.parametrize(
    ("argument", "same"), [({}, False), ({"next": {"next": {}}}, False), ({"next": {}}, True)]
)
async def test_a_default_that_contains_itself_is_compared_once(
    tokenizer: Any, argument: Any, same: bool
) -> None:
    node = {"properties": {"next": {"$ref": "#/$defs/Node", "default": {"next": {}}}}}
    parameters = {"$ref": "#/$defs/Node", "$defs": {"Node": node}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    async with endpoint(tokenizer, lambda request: [call("look"), "Done."][request.call]) as bench:
        body = {"messages": [USER], "tools": [tool]}
        _, answer = await bench.post("/sessions/s/v1/chat/completions", body)
        reply = answer["choices"][0]["message"]
        reply["tool_calls"][0]["function"]["arguments"] = json.dumps({"next": argument})
        again = {**body, "messages": [USER, reply, *_results(reply)]}
        assert (await bench.post("/sessions/s/v1/chat/completions", again))[0] == 200
        assert (len(await bench.trajectories()) == 1) is same


def offering(name: str, **count: Any) -> Any:
    """The tool `name` with an argument `n` that has the schema `count`."""
    parameters = {"type": "object", "properties": {"n": count}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("last", [[], [offering("look", default=6)], [offering("other")]])
@pytest.mark.parametrize("first", [{"default": 5}, {"default": 6}, {}])
async def test_a_default_that_changes_changes_no_earlier_call(
    tokenizer: Any, first: dict[str, Any], last: list[Any]
) -> None:
    """Two agents of one session may define the same tool. Its first definition counts."""
    said = [call("look", n=5), call("look", n=6), "Done.", "Done."]
    saying = lambda request: said[request.call]
    async with endpoint(tokenizer, saying) as bench:
        talks: list[list[Any]] = []
        for user, count in (("Hi", first), ("Hello", {"default": 5})):
            messages: list[Any] = [{"role": "user", "content": user}]
            body = {"messages": messages, "tools": [offering("look", **count)]}
            _, answer = await bench.post("/sessions/s/v1/chat/completions", body)
            reply = answer["choices"][0]["message"]
            talks.append([*messages, reply, *_results(reply)])
        for messages in talks:
            body = {"messages": messages, "tools": last}
            await bench.post("/sessions/s/v1/chat/completions", body)
        forks = (await bench.get("/sessions/s/trajectories"))["forks"]
        assert [reason for reason in forks if not reason.startswith(TOOLS_CHANGED)] == [NEW_ROOT]


async def test_other_tools_fork_where_the_template_shows_them(tokenizer: Any) -> None:
    other: Any = {
        "type": "function",
        "function": {"name": "listen", "parameters": {"type": "object", "properties": {}}},
    }
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        messages: list[Any] = [USER]
        messages += [await ask(bench, messages), USER]
        await bench.client().chat.completions.create(model="m", messages=messages, tools=[other])
        trajectories = await bench.trajectories()
        reason = f"{TOOLS_CHANGED} (added: listen; removed: look)"
        assert [found["fork_reason"] for found in trajectories] == [None, reason]
        assert "listen" in tokenizer.decode(trajectories[1]["input_ids"])


async def test_a_template_that_strips_thoughts_forks(tokenizer: Any) -> None:
    qwen = qwen3_tokenizer()
    async with endpoint(qwen, lambda request: THINKING + "Hello.") as bench:
        messages: list[Any] = [USER]
        for _ in range(3):
            messages += [await ask(bench, messages), USER]
        trajectories = await bench.trajectories()
        assert len(trajectories) == 3
        assert (
            sum(turn["excluded"] is None for found in trajectories for turn in found["turns"]) == 3
        )
        assert all(
            "rewrite" in found["fork_reason"] or "render" in found["fork_reason"]
            for found in trajectories[1:]
        )
        assert bench.endpoint.sessions.find("s").tree.forks == [
            found["fork_reason"] for found in trajectories[1:]
        ]


async def test_tool_cycles_of_a_thinking_model_stay_together(tokenizer: Any) -> None:
    qwen = qwen3_tokenizer()
    said = [THINKING + call(at="x"), THINKING + call(at="y"), THINKING + "Done."]
    async with endpoint(qwen, lambda request: said[request.call], split="random") as bench:
        messages: list[Any] = [USER]
        for _ in range(3):
            message = await ask(bench, messages)
            messages += [
                {"role": "assistant", "content": message.content, "tool_calls": message.tool_calls},
                *answers(message),
            ]
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 3


async def test_other_switches_fork(tokenizer: Any) -> None:
    qwen = qwen3_tokenizer()
    async with endpoint(qwen, lambda request: "Hello.") as bench:
        messages: list[Any] = [USER]
        messages += [await ask(bench, messages), USER]
        await ask(bench, messages, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        trajectories = await bench.trajectories()
        assert trajectories[-1]["fork_reason"] == SWITCHES_CHANGED
        assert qwen.decode(bench.engine.log[-1].input_ids).endswith(  # pyright: ignore[reportAttributeAccessIssue]
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )


async def test_a_conversation_continues_after_a_truncated_turn(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "One two three four five six.") as bench:
        reply = await bench.client().chat.completions.create(
            model="m", messages=[USER], max_completion_tokens=3
        )
        assert reply.choices[0].finish_reason == "length"
        await bench.client().chat.completions.create(
            model="m",
            messages=[USER, reply.choices[0].message, USER],  # type: ignore[list-item]
        )
        [trajectory] = await bench.trajectories()
        assert [turn["finish_reason"] for turn in trajectory["turns"]] == ["length", "stop"]


async def test_a_stop_string_ends_what_is_shown_and_nothing_of_what_is_kept(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "One STOP two.") as bench:
        reply: Any = await bench.client().chat.completions.create(
            model="m", messages=[USER], stop=["STOP"]
        )
        assert reply.choices[0].message.content == "One"
        assert reply.choices[0].stop_reason == "STOP"
        assert "STOP" in tokenizer.decode(reply.choices[0].token_ids)
        await bench.client().chat.completions.create(
            model="m", messages=[USER, reply.choices[0].message, USER]
        )
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2


async def test_memory_is_linear_in_the_conversation(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: f"Reply {request.call}.") as bench:
        messages: list[Any] = [USER]
        for _ in range(20):
            messages += [await ask(bench, messages), USER]
        [trajectory] = await bench.trajectories()
        live = bench.endpoint.sessions.find("s")
        assert live.session.tokens == len(trajectory["input_ids"])
        # what the client has gone on from is not kept for a retry
        assert len(live.pending._by_key) <= 1


async def test_answers_that_no_retry_can_request_are_dropped(tokenizer: Any) -> None:
    """Neither the siblings of the answer that the client went on from, nor answers that it never
    went on from.
    """
    async with endpoint(
        tokenizer, lambda request: f"Reply {request.call}.", settings={"grace": 600}
    ) as bench:
        client, messages, ids = bench.client(), [USER], set()
        for _ in range(3):
            reply: Any = await client.chat.completions.create(model="m", messages=messages, n=2)
            ids.add(reply.id)
            messages = [
                *messages,
                {"role": "assistant", "content": reply.choices[0].message.content},
                USER,
            ]
        live = bench.endpoint.sessions.find("s")
        skip(601)
        while live.pending.all():
            await asyncio.sleep(0)
        gc.collect()
        assert [
            found.id
            for found in gc.get_objects()
            if type(found) is CompletionResult and found.id in ids
        ] == []
        assert len(await bench.trajectories()) == 4


@pytest.mark.parametrize("said", ["<think>\nLong thought that", "One two three four five six."])
async def test_an_edit_behind_a_cut_turn_keeps_its_tokens(tokenizer: Any, said: str) -> None:
    """What the client changed comes behind it: nothing that was sampled is encoded anew."""
    replies = [said, "Second.", "Third."]
    async with endpoint(tokenizer, lambda request: replies[request.call], split="random") as bench:
        first: list[Any] = [USER, await ask(bench, [USER], max_completion_tokens=4), USER]
        await ask(bench, first)
        await ask(bench, [*first, {"role": "assistant", "content": "Changed."}, USER])
        one, two = await bench.trajectories()
        assert [turn["excluded"] for turn in one["turns"]] == [None, None]
        assert [turn["excluded"] for turn in two["turns"]] == ["context", None]
        assert two["fork_reason"].startswith(f"{EDITED}: message 3 (assistant)")


async def test_ids_that_are_new_in_every_request_do_not_break_a_conversation(
    tokenizer: Any,
) -> None:
    """Some libraries name all calls of a conversation anew each time that they send it."""
    said = [call(at="x") + call(at="y"), call(at="z"), "Done."]
    async with endpoint(tokenizer, lambda request: said[request.call], split="random") as bench:
        messages: list[Any] = [USER]
        for turn in range(3):
            text = json.dumps(messages)
            for given in [
                each["id"] for message in messages for each in message.get("tool_calls") or ()
            ]:
                text = text.replace(given, f"{given[:8]}{turn}")
            messages = json.loads(text)
            message = await ask(bench, messages)
            messages += [message.model_dump(exclude_none=True), *answers(message)]
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 3


def test_a_plan_stores_nothing(tokenizer: Any) -> None:
    """A count of tokens is a plan that is never committed."""
    tree, template = ConversationTree(Session("s")), ChatTemplate(tokenizer)

    def plan(at: int) -> None:
        function = {**TOOL["function"], "description": f"{at}" + " word" * 2000}
        tools = ToolList.of([{"type": "function", "function": function}])
        tree.plan([USER], tools, template)

    def plan_all() -> None:
        for at in range(10):
            plan(at)

    assert kept(plan_all, conversation_tree) < 10_000


async def test_a_session_with_constant_switches_never_forks_however_many_others_there_are(
    tokenizer: Any,
) -> None:
    async with endpoint(tokenizer, lambda request: "Hello.", settings={"verify": "off"}) as bench:
        made: dict[int, list[Any]] = {}
        for _ in range(2):
            for at in range(18):
                body = {
                    "messages": made.get(at, [USER]),
                    "chat_template_kwargs": {"one": at, "two": True},
                }
                path = f"/sessions/s{at}/v1/chat/completions"
                status, answer = await bench.post(path, body)
                assert status == 200
                made[at] = [*body["messages"], answer["choices"][0]["message"], USER]
        for at in range(18):
            assert (await bench.get(f"/sessions/s{at}/trajectories"))["forks"] == []
        body = {"messages": made[0], "chat_template_kwargs": {"two": 1, "one": 0}}
        await bench.post("/sessions/s0/v1/chat/completions", body)
        forks = (await bench.get("/sessions/s0/trajectories"))["forks"]
        assert forks == [SWITCHES_CHANGED]
