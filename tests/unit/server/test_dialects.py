"""What is the same in OpenAI's chat completions, Anthropic's Messages and OpenAI's Responses;
clients of the recorded shape of Codex and of Claude Code, whose histories have no forks.
"""

import asyncio
import copy
import json
from typing import Any

import pytest
from support.anthropic_wire import events_of
from support.client_scenario import one_episode, saying
from support.dialect_bodies import DIALECTS, PATHS, Dialect
from support.episodes import call
from support.listed_environment import TOOL
from support.qwen import tokenizer_for, trl_template
from support.recorded_shapes import ClaudeCode, Codex
from support.served import RESPONSES, in_session, serve
from support.wires import BODIES, WIRES, ask, continued, play

from toolroll.endpoint.conversation.conversation_tree import NEW_ROOT
from toolroll.parsers.formats.hermes import HermesParser
from toolroll.parsers.types import ParsedReply
from toolroll.testing import Reply

EACH = pytest.mark.parametrize("name", WIRES)
EVERY = pytest.mark.parametrize("name", DIALECTS)
Parts = list[dict[str, Any]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "more"),
    [("messages", {}), ("responses", {}), ("responses", {"stored": True})],
    ids=["messages", "responses", "stored responses"],
)
async def test_an_episode_is_one_exact_trajectory(
    any_tokenizer: Any, name: str, more: dict[str, Any], stream: bool
) -> None:
    async with serve(saying, tokenizer=any_tokenizer, split="random") as bench:
        last = await play(bench, name, stream=stream, **more)
        await one_episode(bench)
        assert await bench.forks() == []
        sampled = bench.engine.log[-1]
        usage = last["usage"]
        assert usage["output_tokens"] == len(sampled.output_ids)
        if name == "messages":
            thought, text = last["content"]
            assert (last["stop_reason"], bool(thought["signature"])) == ("end_turn", True)
            assert (thought["thinking"], text["text"]) == ("What now?", "All seen: <b>x</b>.")
            cached = usage["cache_read_input_tokens"]
            assert usage["input_tokens"] + cached == len(sampled.input_ids)
        else:
            thought, message = last["output"]
            assert last["status"] == "completed"
            assert thought["summary"] == [{"type": "summary_text", "text": "What now?"}]
            assert message["content"][0]["text"] == "All seen: <b>x</b>."
            assert usage["input_tokens"] == len(sampled.input_ids)
            reasoning = usage["output_tokens_details"]["reasoning_tokens"]
            before = any_tokenizer.decode(sampled.output_ids[:reasoning])
            assert "What now?" in before and "All" not in before


def _tagged(items: Parts) -> Parts:
    """As pydantic-ai: plain items, a thought as a message of its own."""
    sent: Parts = []
    for item in items:
        if item.get("type") == "reasoning":
            thought = f"<think>\n{item['summary'][0]['text']}\n</think>"
            sent.append({"role": "assistant", "content": thought})
        elif item.get("type") == "message":
            sent.append({"role": "assistant", "content": item["content"][0]["text"]})
        else:
            sent.append({name: item[name] for name in item if name not in ("id", "status")})
    return sent


async def test_a_tagged_thought_and_the_text_after_it_are_one_reply() -> None:
    reply = "<think>\nHm.\n</think>\n\nI look. " + call(at="x")
    async with serve([reply, "Done."]) as bench:
        await play(bench, "responses", change=lambda items: _tagged(copy.deepcopy(items)))
        await bench.one_trajectory(turns=2)


CHOICES: dict[str, list[Any]] = {
    "messages": [{"type": "any"}, {"type": "tool", "name": "look"}],
    "responses": ["required", {"type": "function", "name": "look"}],
}
SEARCHES: dict[str, dict[str, Any]] = {
    "messages": {"type": "web_search_20250305", "name": "web_search"},
    "responses": {"type": "web_search"},
}


@EACH
async def test_tools_are_grammars_or_dropped(name: str) -> None:
    """A forced call and a strict tool, and a provider's tool if the server is told so."""
    wire = WIRES[name]
    async with serve(call(at="x"), settings={"server_tools": "drop"}) as bench:
        for choice in CHOICES[name]:
            await ask(bench, {**wire.HELLO, "tools": [wire.LOOK], "tool_choice": choice})
            assert '"\\"look\\""' in bench.engine.log[-1].sampling_params["ebnf"]
        await ask(bench, {**wire.HELLO, "tools": [{**wire.LOOK, "strict": True}]})
        tag = json.loads(bench.engine.log[-1].sampling_params["structural_tag"])
        schema = tag["format"]["tags"][0]["content"]["json_schema"]
        assert schema == TOOL["function"]["parameters"]
        await ask(bench, {**wire.HELLO, "tools": [SEARCHES[name], wire.LOOK]})
        assert "web_search" not in bench.prompt() and "look" in bench.prompt()


SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": ({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled"}}),
    "responses": ({"reasoning": {"effort": "high"}}, {"reasoning": {"effort": "none"}}),
}
"""The fields that switch thinking on and off."""
SWITCH = "chat_template_kwargs.enable_thinking"


@EACH
async def test_thinking_is_the_templates_switch(name: str) -> None:
    """It may not contradict the switch in the request."""
    wire, (on, off) = WIRES[name], SWITCHES[name]
    async with serve(tokenizer=tokenizer_for(trl_template("qwen3"))) as bench:
        for number, fields in enumerate((on, off)):
            await ask(bench, {**wire.HELLO, **fields}, session=f"s{number}")
        assert "<think>" not in bench.prompt(0)
        assert bench.prompt(1).endswith("<think>\n\n</think>\n\n")
        body = {**wire.HELLO, "chat_template_kwargs": {"enable_thinking": True}}
        effort = {"output_config": {"effort": "high"}} if name == "messages" else {}
        for fields, param in ((on, None), (effort, None), (off, SWITCH)):
            status, answer = await bench.post(wire.PATH, {**body, **fields})
            refused = (answer.get("error") or {}).get("param")
            assert (status, refused) == (400 if param else 200, param)


PIECES = {
    "chat": (b"One", b"data: [DONE]"),
    "messages": (b"text_delta", b"message_stop"),
    "responses": (b"output_text.delta", b"response.completed"),
}


@EVERY
async def test_a_piece_is_sent_before_the_rest_is_sampled(name: Dialect) -> None:
    piece, end = PIECES[name]
    release = asyncio.Event()
    async with serve(Reply("One two three four five.", hold=release, hold_after=8)) as bench:
        url, body = bench.url + in_session(PATHS[name]), {**BODIES[PATHS[name]], "stream": True}
        async with bench.http.post(url, json=body) as response:
            received = b""
            while piece not in received:
                received += await response.content.readany()
            assert end not in received
            release.set()
            received += await response.read()
        assert end in received


class Contradictory(HermesParser):
    """A parser whose stream is not what it parses."""

    def parse(self, text: str, **options: Any) -> ParsedReply:
        return ParsedReply("Something else.")


@EVERY
async def test_a_failure_in_a_stream_is_an_event_in_its_form(name: Dialect) -> None:
    async with serve("One two three.") as bench:
        bench.served.parser = Contradictory()
        body = {**BODIES[PATHS[name]], "stream": True}
        async with bench.http.post(bench.url + in_session(PATHS[name]), json=body) as response:
            text = await response.text()
        lines = [line.removeprefix("data: ") for line in text.split("\n") if "data: " in line]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        last = events[-1]
        if name == "messages":
            assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        if name == "responses":
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert last["type"] == "response.failed"
        error = last["response"]["error"] if name == "responses" else last["error"]
        assert error["code"] == "stream_mismatch"
        assert await bench.trajectories(refused=1) == []


REPLY = (
    f"<think>\nHm\n</think>\n\nBefore. {call(at='a')} Between. "
    f'<tool_call>{{"name": "look", "arguments": oops}}</tool_call>{call(at="b")} After.'
)
ORDER = ["thought", "text", "call", "text", "call", "call", "text"]
KINDS = {
    "thinking": "thought",
    "text": "text",
    "tool_use": "call",
    "reasoning": "thought",
    "message": "text",
    "function_call": "call",
}


def _shown(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs in each: ids, times, and what was found in the cache."""
    shown = {name: answer[name] for name in answer if name not in ("id", "created_at", "usage")}
    parts = "content" if "content" in answer else "output"
    shown[parts] = [
        {name: value for name, value in part.items() if name not in ("id", "call_id")}
        for part in answer[parts]
    ]
    return shown


@EACH
async def test_a_stream_and_a_plain_answer_are_the_same(name: str) -> None:
    """Both have the order of the model, and can be continued."""
    wire = WIRES[name]
    body = {**wire.HELLO, "tools": [wire.LOOK]}
    body |= {"max_tokens": 400} if name == "messages" else {}
    async with serve(REPLY) as bench:
        plain = await ask(bench, body, session="plain")
        events = await events_of(bench, f"/sessions/stream/v1/{name}", body)
        start = events[0]["message" if name == "messages" else "response"]
        start = copy.deepcopy(start)
        whole = wire.message_of(events) if name == "messages" else wire.response_of(events)
        assert _shown(plain) == _shown(whole)
        assert start["id"] == whole["id"] != plain["id"]
        assert whole["usage"]["output_tokens"] == len(bench.engine.log[1].output_ids)
        if name == "messages":
            cached = start["usage"]["cache_read_input_tokens"]
            assert start["usage"]["input_tokens"] + cached == len(bench.engine.log[1].input_ids)
        parts = plain["content"] if name == "messages" else plain["output"]
        assert [KINDS[part["type"]] for part in parts] == ORDER
        for session, answer in (("plain", plain), ("stream", whole)):
            await ask(bench, continued(body, answer), session=session)
            await bench.one_trajectory(turns=2, session=session)


CUT = '<tool_call>{"name": "look", "arguments": {"at": "x", "b'


LIMITS = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}


@EVERY
async def test_a_cut_call_means_the_same_in_every_dialect(tokenizer: Any, name: Dialect) -> None:
    limit = len(tokenizer.encode(CUT, add_special_tokens=False))
    tools = [TOOL if name == "chat" else WIRES[name].LOOK]
    body = {**BODIES[PATHS[name]], "tools": tools, LIMITS[name]: limit}
    async with serve(CUT + '": 1}}</tool_call>') as bench:
        answer = await bench.send(in_session(PATHS[name]), body)
        if name == "chat":
            [choice] = answer["choices"]
            [tool_call] = choice["message"]["tool_calls"]
            ended = choice["finish_reason"], tool_call["function"]["arguments"]
        elif name == "messages":
            [block] = answer["content"]
            ended = answer["stop_reason"], block["input"]["_unparsed_arguments"]
        else:
            [item] = answer["output"]
            ended = answer["incomplete_details"]["reason"], item["arguments"]
        reason, arguments = ended
        assert reason == ("length" if name == "chat" else LIMITS[name])
        assert arguments in CUT and '"at": "x"' in arguments


DROP: dict[str, Any] = {"server_tools": "drop"}
KEPT: dict[str, Any] = {"split": "random", "history": "preserve"}
"""`--history preserve`: Qwen3's template drops the thoughts before a user's message."""
THOUGHT = "<think>\nWhat is next?\n</think>\n\n"


def replies(first: str, second: str) -> list[str]:
    """The replies of one task, with calls of two tools."""
    return [
        "I look first. " + call(first, command="ls"),
        THOUGHT
        + call(first, command="cat a.txt")
        + "\n"
        + call(second, command="it\u2019s \u201cso\u201d"),
        THOUGHT + "Then this. " + call(second, command="x <|im_end|> y"),
        call(first, command="make"),
        THOUGHT + "Done.",
    ]


CODEX = replies("shell", "notes__write")


def trained(trajectory: dict[str, Any]) -> int:
    return int(sum(trajectory["loss_mask"]))


async def test_codex_in_two_tasks_is_one_trajectory(any_tokenizer: Any) -> None:
    async with serve(CODEX * 2, tokenizer=any_tokenizer, settings=DROP, **KEPT) as bench:
        codex = Codex(bench, "t1")
        assert await codex.run("Make it.") == "Done."
        assert await codex.run("Again.") == "Done."
        trajectory = await bench.one_trajectory(turns=10)
        assert trained(trajectory) == sum(len(entry.output_ids) for entry in bench.engine.log)
        assert await bench.forks() == []
        assert trajectory["lineage"]["thread_id"] == "t1"


async def test_a_websocket_is_refused_so_that_codex_uses_http() -> None:
    async with serve() as bench:
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        url = bench.url + in_session(RESPONSES)
        async with bench.http.get(url, headers=headers) as response:
            assert response.status == 426


async def test_sub_agents_and_compacted_windows_are_labeled_siblings() -> None:
    async with serve(CODEX * 3, settings=DROP) as bench:
        first = Codex(bench, "t1")
        await first.run("Make it.")
        await Codex(bench, "t2", agent="helper", parent="t1").run("Help.")
        first.compact("It is made.")
        await first.run("Again.")
        await bench.send("/sessions/s/reward", {"reward": 1.0})
        assert (await bench.get("/sessions/s/trajectories"))["reward"] == 1.0
        trajectories = await bench.trajectories()
        assert [each["fork_reason"] for each in trajectories] == [None, NEW_ROOT, NEW_ROOT]
        labels = [each["lineage"] for each in trajectories]
        assert [label["context_window_id"] for label in labels] == ["t1-0", "t2-0", "t1-0+"]
        assert [label["agent_name"] for label in labels] == ["/root", "helper", "/root"]
        assert "installed" not in str(labels)
        assert labels[1]["parent_thread_id"] == "t1"
        assert [len(each["turns"]) for each in trajectories] == [5, 5, 5]


async def test_claude_code_is_one_trajectory_and_a_title(any_tokenizer: Any) -> None:
    turns = ["A title.", *replies("Bash", "Read") * 2]
    async with serve(turns, tokenizer=any_tokenizer, **KEPT) as bench:
        agent = ClaudeCode(bench)
        assert await agent.title("Make it.") == "A title."
        assert await agent.run("Make it.") == "Done."
        assert await agent.run("Again.") == "Done."
        title, trajectory = await bench.trajectories()
        assert len(title["turns"]) == 1 and trajectory["fork_reason"] == NEW_ROOT
        log = bench.engine.log
        assert trained(trajectory) == sum(len(entry.output_ids) for entry in log[1:])
        line = trajectory["lineage"].pop("x-anthropic-billing-header")
        assert line.startswith("cc_version=2.1.173; cc_entrypoint=cli; cch=")
        assert trajectory["lineage"] == {"session_id": "episode"}
        assert all("cch=" not in bench.prompt(request) for request in range(len(log)))
