"""What is the same in OpenAI's chat completions, Anthropic's Messages and OpenAI's Responses."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from support import anthropic_wire, responses_wire
from support.anthropic_wire import events_of
from support.client_scenario import saying
from support.endpoints import endpoint
from support.episodes import call
from support.listed_environment import TOOL
from support.qwen import tokenizer_for, trl_template

from toolroll.endpoint.conversation.conversation_tree import EDITED
from toolroll.parsers.formats.hermes import HermesParser
from toolroll.parsers.types import ParsedReply
from toolroll.testing import Reply

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
WIRES: dict[str, Any] = {"messages": anthropic_wire, "responses": responses_wire}
EACH = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)


def pick(wire: Any, messages: Any, responses: Any) -> Any:
    """The value for `wire`."""
    return messages if wire is anthropic_wire else responses


@pytest.mark.parametrize(
    ("path", "body", "piece", "end"),
    [
        ("/sessions/s/v1/chat/completions", {"messages": [USER]}, b"One", b"data: [DONE]"),
        (anthropic_wire.PATH, anthropic_wire.HELLO, b"text_delta", b"message_stop"),
        (responses_wire.PATH, responses_wire.HELLO, b"output_text.delta", b"response.completed"),
    ],
)
async def test_a_piece_is_sent_before_the_rest_is_sampled(
    tokenizer: Any, path: str, body: Any, piece: bytes, end: bytes
) -> None:
    release = asyncio.Event()
    held = Reply("One two three four five.", hold=release, hold_after=8)
    async with endpoint(tokenizer, lambda request: held) as bench:
        async with bench.http.post(bench.url + path, json={**body, "stream": True}) as response:
            got = b""
            while piece not in got:
                got += await response.content.readany()
            assert end not in got
            release.set()
            got += await response.read()
        assert end in got


def _forgotten(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sent = copy.deepcopy(messages)
    if len(sent) > 3:
        sent[3]["content"][-1]["input"] = {"at": "elsewhere"}
    return sent


def _forgotten_item(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sent = copy.deepcopy(items)
    calls = [item for item in sent if item.get("type") == "function_call"]
    if len(calls) == 3:
        calls[1]["arguments"] = '{"at": "elsewhere"}'
    return sent


@EACH
async def test_a_rewritten_history_says_so(tokenizer: Any, wire: Any) -> None:
    async with endpoint(tokenizer, saying) as bench:
        await wire.play(bench, change=pick(wire, _forgotten, _forgotten_item))
        first, second = await bench.trajectories()
        changed = "message 4 (assistant) of the served history was changed: its calls"
        assert first["fork_reason"] is None
        assert second["fork_reason"] == f"{EDITED}: {changed}"


@EACH
async def test_a_forced_call_and_a_strict_tool_are_grammars(tokenizer: Any, wire: Any) -> None:
    forced = pick(wire, {"type": "any"}, "required")
    named = pick(wire, {"type": "tool", "name": "look"}, {"type": "function", "name": "look"})
    async with endpoint(tokenizer, lambda request: call(at="x")) as bench:
        for choice in (forced, named):
            body = {**wire.HELLO, "tools": [wire.LOOK], "tool_choice": choice}
            await wire.ask(bench, body, path=wire.PATH, stream=False)
            assert '"\\"look\\""' in bench.engine.log[-1].sampling_params["ebnf"]
        body = {**wire.HELLO, "tools": [{**wire.LOOK, "strict": True}]}
        await wire.ask(bench, body, path=wire.PATH, stream=False)
        tag = json.loads(bench.engine.log[-1].sampling_params["structural_tag"])
        schema = tag["format"]["tags"][0]["content"]["json_schema"]
        assert schema == TOOL["function"]["parameters"]


@EACH
async def test_a_provider_tool_is_dropped_if_the_server_is_told_so(
    tokenizer: Any, wire: Any
) -> None:
    kind = pick(wire, "web_search_20250305", "web_search")
    searching = {"type": kind, **pick(wire, {"name": "web_search"}, {})}
    settings = {"server_tools": "drop"}
    async with endpoint(tokenizer, lambda request: "Hello.", settings=settings) as bench:
        body = {**wire.HELLO, "tools": [searching, wire.LOOK]}
        await wire.ask(bench, body, path=wire.PATH, stream=False)
        prompt = bench.served.template.encoder.decode(bench.engine.log[0].input_ids)
        assert "web_search" not in prompt and "look" in prompt


ON = {
    "messages": {"thinking": {"type": "adaptive"}},
    "responses": {"reasoning": {"effort": "high"}},
}
OFF = {
    "messages": {"thinking": {"type": "disabled"}},
    "responses": {"reasoning": {"effort": "none"}},
}
SWITCH = "chat_template_kwargs.enable_thinking"


@pytest.mark.parametrize("name", WIRES)
async def test_thinking_turns_the_templates_switch_and_may_not_contradict_it(name: str) -> None:
    wire, tokenizer = WIRES[name], tokenizer_for(trl_template("qwen3"))
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        prompts = []
        for more in (ON[name], OFF[name]):
            path = wire.PATH.removeprefix("/sessions/s")
            await wire.ask(bench, {**wire.HELLO, **more}, path=path, stream=False)
            prompts.append(bench.served.template.encoder.decode(bench.engine.log[-1].input_ids))
        assert "<think>" not in prompts[0] and prompts[1].endswith("<think>\n\n</think>\n\n")
        body = {**wire.HELLO, "chat_template_kwargs": {"enable_thinking": True}}
        effort = {"output_config": {"effort": "high"}} if name == "messages" else {}
        for more, param in ((ON[name], None), (effort, None), (OFF[name], SWITCH)):
            status, answer = await bench.post(wire.PATH, {**body, **more})
            found = (answer.get("error") or {}).get("param")
            assert (status, found) == (400 if param else 200, param)


class Contradictory(HermesParser):
    """A parser whose stream is not what it parses."""

    def parse(self, text: str, **options: Any) -> ParsedReply:
        return ParsedReply("Something else.")


@EACH
async def test_a_failure_in_a_stream_is_an_event_in_its_form(tokenizer: Any, wire: Any) -> None:
    async with endpoint(tokenizer, lambda request: "One two three.") as bench:
        bench.served.parser = Contradictory()
        events = await events_of(bench, wire.PATH, wire.HELLO)
        last = events[-1]
        if wire is anthropic_wire:
            assert (last["type"], last["error"]["type"]) == ("error", "api_error")
            error = last["error"]
        else:
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert last["type"] == "response.failed"
            error = last["response"]["error"]
        assert error["code"] == "stream_mismatch"
        assert await bench.trajectories(refused=1) == []


# --- the order of text and calls, and calls that are cut ------------------------------------------

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


def shown(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks or items of an answer, without the ids, which name the answer."""
    parts = answer["content"] if "content" in answer else answer["output"]
    return [
        {name: value for name, value in part.items() if name not in ("id", "call_id")}
        for part in parts
    ]


@pytest.mark.parametrize("name", WIRES)
async def test_both_forms_of_an_answer_have_the_order_of_the_model_and_can_be_continued(
    tokenizer: Any, name: str
) -> None:
    wire, path = WIRES[name], f"/sessions/{{}}/v1/{name}"
    body = {**wire.HELLO, "tools": [wire.LOOK]}
    body = pick(wire, {**body, "max_tokens": 400, "messages": [USER]}, {**body, "input": [USER]})
    async with endpoint(tokenizer, lambda request: REPLY) as bench:
        plain = await wire.ask(bench, body, path=path.format("plain"), stream=False)
        stream = await wire.ask(bench, body, path=path.format("stream"), stream=True)
        assert shown(plain) == shown(stream)
        assert [KINDS[part["type"]] for part in shown(plain)] == ORDER
        for session, answer in (("plain", plain), ("stream", stream)):
            again = {**body, **continued(body, answer)}
            await wire.ask(bench, again, path=path.format(session), stream=False)
            [trajectory] = await bench.trajectories(session)
            assert len(trajectory["turns"]) == 2


def continued(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The body of the next request, with results for all calls."""
    if "content" in answer:
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        reply = {"role": "assistant", "content": answer["content"]}
        return {"messages": [*body["messages"], reply, {**USER, "content": results or "Go on"}]}
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return {"input": [*body["input"], *answer["output"], *(outputs or [USER])]}


CUT = '<tool_call>{"name": "look", "arguments": {"at": "x", "b'
CUT_REPLIES: dict[str, tuple[dict[str, Any], Any]] = {
    "chat/completions": (
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]},
        lambda a: (
            [each["function"] for each in a["choices"][0]["message"]["tool_calls"]],
            a["choices"][0]["finish_reason"],
        ),
    ),
    "messages": (
        {**anthropic_wire.HELLO, "tools": [anthropic_wire.LOOK]},
        lambda a: (
            [
                {"name": block["name"], "arguments": block["input"]["_unparsed_arguments"]}
                for block in a["content"]
            ],
            {"max_tokens": "length"}[a["stop_reason"]],
        ),
    ),
    "responses": (
        {**responses_wire.HELLO, "tools": [responses_wire.LOOK]},
        lambda a: (
            [{"name": item["name"], "arguments": item["arguments"]} for item in a["output"]],
            {"max_output_tokens": "length"}[a["incomplete_details"]["reason"]],
        ),
    ),
}


@pytest.mark.parametrize("path", CUT_REPLIES)
async def test_a_cut_call_means_the_same_in_every_dialect(tokenizer: Any, path: str) -> None:
    body, meaning = CUT_REPLIES[path]
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    tokens = len(tokenizer.encode(CUT, add_special_tokens=False))
    body = {**body, limit: tokens}
    async with endpoint(tokenizer, lambda request: CUT + '": 1}}</tool_call>') as bench:
        _, answer = await bench.post(f"/v1/{path}", body)
        [called], reason = meaning(answer)
        assert reason == "length"
        assert called["arguments"] in CUT and '"at": "x"' in called["arguments"]
