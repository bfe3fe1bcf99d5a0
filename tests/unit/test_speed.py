"""Guards on speed that no clock can upset: counts of calls, of bytes and of objects, and ratios within one run.

Each count is compared with the one in `BASELINE`, and fails where it has grown by more than half. A change that is meant to cost
more changes the number here, in its own commit. How fast things are is measured by `make bench` (docs/speed.md).
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import orjson
import pytest
from support.http import completion
from support.qwen import all_templates, tokenizer_for

from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import Engine, ModelFacts, parse_completion
from toolroll.rollout.engine.connections import Connections
from toolroll.rollout.session import Session
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.features import History
from toolroll.rollout.types import Completion, GenerateRequest, Message, Tool, WeightVersion

BASELINE = {
    "calls of a framed delta": 82,
    "calls of a known first prompt": 111,
    "calls of a request body": 9,
    "calls of a posted request": 138,
    "calls of a parsed completion": 44,
    "calls of a parsed reply with a tool call": 285,
    "collected objects a turn": 0.5,
}
PARAMS = {"temperature": 1.0, "max_new_tokens": 512, "stop_token_ids": [2]}
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": f"look_{at}",
            "description": "Look at something. " * 8,
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
    for at in range(12)
]
FIRST: list[Message] = [{"role": "system", "content": "Rules of conduct. " * 150}, {"role": "user", "content": "Hello."}]


def calls(step: Callable[[], object]) -> int:
    """How many functions, of Python and of C, one `step` calls; after one that is not counted."""
    step()
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # a round of it may call what others registered
    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def within(name: str, found: float) -> None:
    assert found <= 1.5 * BASELINE[name], f"{name}: {found}, more than half above {BASELINE[name]}"


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """A template whose history is long and varied, as a process has it after a while."""
    return ChatTemplate(tokenizer_for(all_templates()["qwen3_instruct_2507"]))


class Played:
    """A conversation of so many turns, a call and its result each, or an answer and a user's."""

    def __init__(self, template: ChatTemplate, turns: int) -> None:
        self.template = template
        self.history = History(template.features)
        self.history.extend(FIRST)
        self.messages = list(FIRST)
        self.session = Session("s")
        self.session.observe(template.first_prompt(FIRST, TOOLS)[1].input_ids)
        self.tools_key = orjson.dumps(TOOLS)
        self.framed = 0
        for at in range(turns):
            self.turn(at)
        self.say(0)

    def say(self, at: int) -> None:
        called = at % 3 == 0
        arguments = json.dumps({"at": "x"})
        made = [{"id": f"callid{at:03d}", "type": "function", "function": {"name": "look_1", "arguments": arguments}}]
        turn: Message = {"role": "assistant", "content": "" if called else "Fine.", **({"tool_calls": made} if called else {})}
        self.ids = np.array([*self.template.encoder.encode("Fine."), self.template.tokenizer.eos_token_id], dtype=np.int32)
        self.sampled = self.template.sampled(self.ids)
        self.session.sample(Completion(self.ids, np.zeros(len(self.ids), dtype=np.float32), "stop"), PARAMS)
        self.messages.append(turn)
        self.history.add(turn)
        body = {"role": "tool", "tool_call_id": f"callid{at:03d}", "name": "look_1", "content": "{" + '"seen": "a thing", ' * 20 + "}"}
        self.new: list[Message] = [body if called else {"role": "user", "content": "And then? " * 12}]

    def delta(self) -> Any:
        return self.template.delta_after(
            self.history.key,
            self.messages,
            self.new,
            tools=TOOLS,
            sampled=self.sampled,
            sampled_ids=self.ids,
            tools_key=self.tools_key,
        )

    def turn(self, at: int) -> None:
        self.say(at)
        delta = self.delta()
        self.framed += delta.framed
        self.session.observe(delta.input_ids)
        self.messages += self.new
        self.history.extend(self.new)


# --- counts --------------------------------------------------------------------------------------------------------------


def test_a_framed_delta_makes_as_many_calls_at_turn_30_as_at_turn_5(template: ChatTemplate) -> None:
    early, late = Played(template, 5), Played(template, 30)
    assert early.delta().framed and late.delta().framed
    counts = [calls(early.delta), calls(late.delta)]
    assert counts[0] == counts[1]
    within("calls of a framed delta", counts[1])


def test_nearly_every_delta_is_framed(template: ChatTemplate) -> None:
    Played(template, 9)
    assert Played(template, 40).framed >= 38


def test_a_known_first_prompt(template: ChatTemplate) -> None:
    for at in range(70):  # beyond the prompts that are checked one by one
        template.first_prompt([FIRST[0], {"role": "user", "content": f"Hello {at}."}], TOOLS)
    within("calls of a known first prompt", calls(lambda: template.first_prompt(FIRST, TOOLS)))


@pytest.mark.parametrize("length", [1_000, 12_000])
def test_a_request_body(length: int) -> None:
    engine, session = Engine("http://127.0.0.1:1", facts=ModelFacts()), Session("s")
    session.observe(np.arange(length, dtype=np.int32))

    def body() -> bytes:
        asked = GenerateRequest(session.input_ids, PARAMS, "s", input_ids_json=session.input_ids_json)
        return engine._body(asked, "0" * 32, stream=False)

    within("calls of a request body", calls(body))


async def test_a_posted_request() -> None:
    """With the calls of a bare server, which is in the same event loop."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

    class Server(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(answer)

    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect_timeout=10)
    headers = {"Content-Type": "application/json", "x-smg-routing-key": "s"}
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    await connections.post("/generate", b"{}", headers, seconds=60)
    sys.setprofile(seen)
    try:
        for _ in range(10):
            await connections.post("/generate", b"{}", headers, seconds=60)
    finally:
        sys.setprofile(None)
        connections.close()
        server.close()
    within("calls of a posted request", count / 10)


@pytest.mark.parametrize("tokens", [10, 2_000])
def test_a_completion_is_read_without_a_call_for_each_token(tokens: int) -> None:
    asked = GenerateRequest(np.zeros(3, dtype=np.int32), {}, "s")
    answer = completion(list(range(tokens)))
    within("calls of a parsed completion", calls(lambda: parse_completion(answer, asked)))


def test_a_reply_with_a_plain_call_is_not_validated_at_length(template: ChatTemplate) -> None:
    said = '<tool_call>\n{"name": "look_1", "arguments": {"at": "x"}}\n</tool_call>'
    parser = get_parser("hermes", template.encoder.control)
    assert parser.parse(said, tools=TOOLS).tool_calls[0].ok
    within("calls of a parsed reply with a tool call", calls(lambda: parser.parse(said, tools=TOOLS)))


# --- bytes and objects -----------------------------------------------------------------------------------------------------


def live(turns: int, tokens: int) -> Session:
    """A session of so many tokens, a third of them its prompt."""
    session = Session("s")
    session.observe(np.arange(tokens // 3, dtype=np.int32) + 50_000)
    each = (tokens - tokens // 3) // (2 * turns)
    for _ in range(turns):
        ids = np.arange(each, dtype=np.int32) + 50_000
        spans = (WeightVersion("default", 0, each),)
        session.sample(Completion(ids.copy(), np.zeros(each, dtype=np.float32), "stop", 2, "word " * each, spans), dict(PARAMS))
        session.observe(ids.copy())
    return session


@pytest.mark.parametrize("turns", [10, 40])
def test_a_live_episode_holds_15_bytes_a_token(turns: int) -> None:
    live(turns, 12_000)
    gc.collect()
    tracemalloc.start()
    try:
        kept = [live(turns, 12_000) for _ in range(4)]
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held / sum(map(len, kept)) <= 15


def test_the_garbage_collector_sees_few_objects() -> None:
    live(20, 2_000)
    gc.collect()
    before = len(gc.get_objects())
    kept = [live(20, 2_000) for _ in range(50)]
    gc.collect()
    gc.collect()
    within("collected objects a turn", (len(gc.get_objects()) - before) / (20 * len(kept)))


# --- ratios in one run ---------------------------------------------------------------------------------------------------------


def ratio(step: Callable[[], object], floor: Callable[[], object], rounds: int = 20, repeat: int = 10) -> float:
    """The CPU of `step` over that of `floor`: the least of rounds in turns, as what else the machine does can only add to it."""
    least = [sys.maxsize, sys.maxsize]
    for _ in range(rounds):
        for which, each in enumerate((step, floor)):
            began = time.thread_time_ns()
            for _ in range(repeat):
                each()
            least[which] = min(least[which], time.thread_time_ns() - began)
    return least[0] / least[1]


def test_a_delta_costs_little_more_than_encoding_what_is_new(template: ChatTemplate) -> None:
    """Goal 1.3 on the bodies of tau-bench, which are longer than these; here at most half above what was seen (1.1 to 1.2)."""
    played = Played(template, 30)
    encode = template.tokenizer.backend_tokenizer.encode
    floor = lambda: encode(played.new[0]["content"], add_special_tokens=False).ids
    assert ratio(played.delta, floor) <= 1.5 * 1.2


def test_a_request_costs_a_fraction_of_encoding_its_ids_anew() -> None:
    engine, session = Engine("http://127.0.0.1:1", facts=ModelFacts()), Session("s")
    session.observe(np.arange(100_000, 132_000, dtype=np.int32))
    asked = GenerateRequest(session.input_ids, PARAMS, "s", input_ids_json=session.input_ids_json)
    whole = session.input_ids.tolist()
    assert ratio(lambda: engine._body(asked, "0" * 32, stream=False), lambda: orjson.dumps(whole)) <= 0.5


def test_reading_a_completion_costs_little_beside_decoding_its_json() -> None:
    text = orjson.dumps(completion(list(range(100_000, 102_000))))
    answer, asked = orjson.loads(text), GenerateRequest(np.zeros(3, dtype=np.int32), {}, "s")
    assert ratio(lambda: parse_completion(answer, asked), lambda: orjson.loads(text)) <= 1.5
