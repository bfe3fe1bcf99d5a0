"""The deltas of every format are the message of the finished answer, however its ids come; streams
over HTTP.
"""

import asyncio
import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import orjson
import pytest
from support.adversarial.zoo import EXACT, tokenizer_of_kind
from support.calls import pieces_of
from support.episodes import call
from support.examples import EXAMPLES, TOOLS
from support.formats import FORMATS, Format, apertus, cohere, lfm2, mistral, python_calls
from support.listed_environment import TOOL
from support.parsing import tool
from support.served import CHAT, TEXT, USER, ServedBench, in_session, serve
from support.tiers import by_code, fuzz_texts
from support.work import CountedEncoder
from tokenizers import AddedToken

from toolroll.endpoint.answers.result import ChoiceStream, CompletionResult, TextStream
from toolroll.endpoint.dialects.openai_chat import ChatCompletions, ChatWriter
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.requests.request_bodies import ChatRequest
from toolroll.parsers.registry import built_in_parsers
from toolroll.parsers.types import Delta
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.turn import ParsedTurn, parse_options, parse_turn
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Completion
from toolroll.testing import Reply, TokenSplitter, load_embedded_tokenizer

NAMES = by_code([kind.name for kind in built_in_parsers()], str)
SEED = "session/17"
OPENED = "{% if add_generation_prompt %}<think>\n{% endif %}"
DIALECT = ChatCompletions(Encoder(load_embedded_tokenizer()), openrlhf=False)
Fields = dict[str, Any]

# --- a client puts deltas together ----------------------------------------------------------------


def chat_deltas(steps: Iterable[Delta]) -> list[Fields]:
    """The pieces of one choice as the deltas of a chat completion."""
    ids = np.zeros(0, dtype=np.int32)
    result = CompletionResult(id="x", created=0, model="m", prompt_ids=ids)
    writer = ChatWriter(DIALECT, ChatRequest(messages=[{}]), result)
    list(writer.start())
    events = [event for step in steps for event in writer.add(0, step)]
    return [event["choices"][0]["delta"] for event in events]


def message_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from the deltas of one choice."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"id": part["id"], "name": part["function"]["name"], "arguments": ""}
                )
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    return message


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message of choice `index`, from the chunks of all choices."""
    choices = [choice for choice in choices_of(chunks) if choice["index"] == index]
    return message_of(choice["delta"] for choice in choices)


def whole(message: Fields) -> Fields:
    """The same of a message that came in one piece."""
    calls = message.get("tool_calls") or ()
    texts = {name: message.get(name) or "" for name in ("content", "reasoning_content")}
    return {**texts, "tool_calls": [{"id": it["id"], **it["function"]} for it in calls]}


# --- deltas of every format -----------------------------------------------------------------------


@cache
def models(name: str, *, control: bool) -> list[Model]:
    """Models of the format `name`, one whose prompt opens the reasoning. `control`: the format's
    markers are special tokens.
    """
    [kind] = [kind for kind in built_in_parsers() if kind.name == name]
    tokenizer = load_embedded_tokenizer()
    marks = [*kind.openers, *kind.markers] if control else []
    marks = [mark for mark in marks if "<" in mark or "[" in mark]
    marks = [mark for mark in marks if not any(one in mark and one != mark for one in marks)]
    if marks:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    found = []
    for end in ("", OPENED):
        template = ChatTemplate(tokenizer, chat_template=tokenizer.chat_template + end)
        parser = kind(template.encoder.control)
        found.append(Model(Engine(EngineConfig(engine="http://127.0.0.1:1")), template, parser))
    return found


@dataclass(frozen=True)
class Case:
    """A finished reply and how it is read."""

    served: Model
    completion: Completion
    tools: list[dict[str, Any]] | None
    stop_strings: tuple[str, ...] = ()

    @cached_property
    def in_reasoning(self) -> bool:
        cursor = self.served.template.start([{"role": "user", "content": "x"}])
        return cursor.opens_reasoning(self.served.parser.reasoning)

    @cached_property
    def turn(self) -> ParsedTurn:
        return parse_turn(
            self.served,
            self.served.template,
            self.completion,
            {},
            tools=self.tools,
            seed=SEED,
            in_reasoning=self.in_reasoning,
            stop_strings=self.stop_strings,
            streamed=True,
        )

    def stream(self) -> ChoiceStream:
        template = self.served.template
        options = parse_options(self.tools, in_reasoning=self.in_reasoning, streamed=True)
        return ChoiceStream(
            TextStream(template.encoder, template.stop_token_ids, self.stop_strings),
            self.served.parser.stream(**options),
            SEED,
        )

    def streamed(self, picks: random.Random) -> list[dict[str, Any]]:
        """The deltas of the ids in pieces."""
        stream, ids, deltas = self.stream(), self.completion.output_ids.tolist(), []
        stop = 0
        while stop < len(ids):
            stop = min(len(ids), stop + picks.choice((1, 1, 1, 2, 7, 100)))
            deltas += stream.feed(ids[:stop])
        return chat_deltas(deltas + stream.finish(self.completion, self.turn.text, self.turn))


def ended(served: Model, text: str, picks: random.Random) -> Case:
    """`text` as a model may sample it, ended in one of the ways in which a reply ends."""
    encoder, stop_strings = served.template.encoder, ()
    ids = encoder.encode(text, previous=0)
    if picks.random() < 0.5:
        ids = TokenSplitter(encoder.tokenizer).split(ids, picks)
    way = picks.choice(("stop", "stop", "length", "own", "string", "string"))
    reason, matched = "stop", None
    if way == "length":
        ids, reason = ids[: picks.randint(0, len(ids))], "length"
    elif way == "string":
        at = picks.randint(0, len(text))
        wanted = text[at : at + picks.choice((1, 2, 4, 12))] or "STOP"
        stop_strings = (wanted, "\x02" + wanted)  # type: ignore[assignment]
        size = next(
            (size for size in range(len(ids)) if wanted in encoder.decode(ids[: size + 1])), None
        )
        ids, matched = (ids, None) if size is None else (ids[: size + 1], wanted)
    if reason == "stop" and matched is None:
        special = sorted(map(encoder.control.__getitem__, encoder.special))
        matched = picks.choice(special) if way == "own" else served.template.stop_token_ids[0]  # type: ignore[assignment]
        ids = [*ids, matched]  # type: ignore[list-item]
    completion = Completion(np.array(ids, dtype=np.int32), None, reason, matched)
    tools = picks.choice((None, TOOLS, TOOLS, [tool("x", {"id": {"type": "string"}})]))
    return Case(served, completion, tools, stop_strings)


def texts(name: str, picks: random.Random) -> list[str]:
    """Replies in the format: the examples, whole and broken, and some that nobody would write."""
    [kind] = [kind for kind in built_in_parsers() if kind.name == name]
    example = EXAMPLES.get(name)
    found = [example.good, *example.broken.values()] if example is not None else []
    found += ["".join(pieces_of(kind, picks)) for _ in range(fuzz_texts() // 25)]
    leads = ("", "", "日本 🙂 ", "<think>\nHm 🙂.\n</think>\n\nYes. ", "I think.</think>", "\ufffd")
    return [picks.choice(leads) + text for text in found]


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_deltas_are_the_message(name: str, control: bool) -> None:
    picks = random.Random(f"{name}/{control}")
    for text in texts(name, picks):
        case = ended(picks.choice(models(name, control=control)), text, picks)
        assert message_of(case.streamed(picks)) == whole(case.turn.message), text


@pytest.mark.parametrize("kind", (*EXACT, "legacy_prepend", "metaspace_never"))
def test_any_ids_have_the_text_and_the_offsets_of_the_whole(kind: str) -> None:
    """Also ids that are parts of characters, or bytes that are no text."""
    picks = random.Random(kind)
    encoder = Encoder(tokenizer_of_kind(kind, ["<a>", "<b>"], "<b>"))
    ordinary = encoder.encode("A café in 日本 🙂🙂.\n")
    for _ in range(fuzz_texts() // 10):
        ids: list[int] = []
        for _ in range(picks.randint(0, 12)):
            anything = [picks.randrange(len(encoder.tokenizer)) for _ in range(3)]
            ids += picks.choice((anything, ordinary, ordinary[: picks.randrange(len(ordinary))]))
        text, spans, stop = "", [], 0
        stream = TextStream(encoder, (), ())
        pieces = []
        while stop < len(ids):
            stop = min(len(ids), stop + picks.choice((1, 1, 3, 80)))
            pieces.append(stream.feed(ids[:stop]))
        pieces.append(stream.finish(ids, encoder.decode(ids)))
        for piece, tokens in pieces:
            spans += [(start + len(text), end + len(text)) for start, end in tokens]
            text += piece
        assert text == encoder.decode(ids)
        offsets = encoder.window_offsets(ids, text)
        assert encoder.offsets(ids, text) == offsets
        assert spans == [span for span in offsets if span[0] < len(text)], ids


def test_a_stream_decodes_each_id_a_bounded_number_of_times(tokenizer: Any) -> None:
    encoder = CountedEncoder(tokenizer)
    ids = (encoder.encode("One two 🙂 three. ") * 2000)[:2000]
    stream, encoder.decoded = TextStream(encoder, (), ("STOP",)), 0
    for stop in range(1, len(ids) + 1):
        stream.feed(ids[:stop])
    stream.finish(ids, encoder.decode(ids))
    assert encoder.decoded < 20 * len(ids)


def test_a_finished_text_that_is_another_one_is_an_error() -> None:
    [served, _] = models("hermes", control=False)
    ids = served.template.encoder.encode("One two three four.", previous=0)
    stream = TextStream(served.template.encoder, (), ())
    assert stream.feed(ids)[0] == "One two three four."
    with pytest.raises(ApiError, match="differs from the finished answer"):
        stream.finish(ids, "One too many.")


def sent(name: str, text: str, tools: Any) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """The text so far, and a function that returns the message so far, at each token but the stop
    token.
    """
    served = models(name, control=True)[0]
    ids = served.template.encoder.encode(text, previous=0)
    completion = Completion(np.array(ids, dtype=np.int32), None, "stop")
    stream, deltas = Case(served, completion, tools).stream(), list[Any]()
    steps: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for stop in range(1, len(ids) + 1):
        deltas += stream.feed(ids[:stop])
        message = lambda sent=tuple(deltas): message_of(chat_deltas(sent))
        steps.append((served.template.encoder.decode(ids[:stop]), message))
    return steps


SENTENCE = "I look it up, since I do not know it by heart."
MESSAGES = {"gpt-oss", "beam", "muse", "inkling"}
"""Formats whose replies are messages: one is a call if its header says so."""
LISTS = {mistral, python_calls, lfm2, cohere, apertus}
"""Formats that write all calls as one list, which is read when it is closed."""


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["none", "tools"])
@pytest.mark.parametrize("name", NAMES)
def test_text_is_sent_as_it_is_sampled(name: str, tools: Any) -> None:
    lead = "<|channel|>final<|message|>" if name in ("gpt-oss", "beam") else ""
    for text, message in sent(name, lead + SENTENCE, tools):
        said = text[len(lead) :]
        if name == "inkling" and " " not in said:
            said = ""  # the first word may be the name of a tool
        assert message()["content"] == said.strip()


@pytest.mark.parametrize(
    "form",
    by_code([form for form in FORMATS if form.parallel], lambda form: form.name),
    ids=lambda form: form.name,
)
def test_a_call_is_sent_before_the_next_one_is_finished(form: Format) -> None:
    """Without tools it is sent as text."""
    name = {"glm47": "glm45"}.get(form.name, form.name)
    text = form.write([("get_weather", {"city": city, "days": 2}) for city in ("Paris", "Rome")])
    before = [message for said, message in sent(name, text, TOOLS) if "Rome" not in said]
    assert len(before[-1]()["tool_calls"]) == (form.write not in LISTS)
    steps = sent(name, text, None)
    assert not steps[-1][1]()["tool_calls"]
    known = next(index for index, (said, _) in enumerate(steps) if "Paris" in said)
    assert ("Paris" in steps[known][1]()["content"]) == (name not in MESSAGES)
    known = next(index for index, (said, _) in enumerate(steps) if "Rome" in said)
    assert "Paris" in steps[known][1]()["content"]


# --- over HTTP ------------------------------------------------------------------------------------

PATH, TEXT_PATH = in_session(CHAT), in_session(TEXT)
Chunks = list[Fields]


async def events(
    bench: ServedBench, path: str = PATH, /, *, begun: Any = lambda: None, **fields: Any
) -> Chunks:
    """The events of a stream before "[DONE]". `begun` is called when the first of them has come."""
    body = {"stream": True, **({"messages": [USER]} if path == PATH else {}), **fields}
    async with bench.http.post(bench.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        text = await response.content.readany()
        begun()
        text += await response.read()
    data = [line.removeprefix(b"data: ") for line in text.split(b"\n\n") if line]
    assert data[-1] == b"[DONE]"
    return [orjson.loads(line) for line in data[:-1]]


def choices_of(chunks: Chunks) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def streamed(bench: ServedBench, **fields: Any) -> Chunks:
    """The events of a stream whose deltas are the message that is kept."""
    chunks = await events(bench, **fields)
    [turn] = bench.endpoint.sessions.find("s").tree._turns.values()
    assert joined(chunks) == whole(turn[0].reply)
    [last] = [each for each in chunks if each["choices"][0]["finish_reason"]]
    [entry] = bench.engine.log
    assert last["choices"][0]["token_ids"] == entry.output_ids
    assert last["prompt_token_ids"] == entry.input_ids.tolist()
    return chunks


async def test_choices_of_one_stream_are_told_apart() -> None:
    answer = lambda request: f"Answer {request.index}." + call(at="x")
    usage = {"include_usage": True}
    fields: Fields = {"tools": [TOOL], "n": 3, "logprobs": True, "stream_options": usage}
    async with serve(answer, token_latency=0.001) as bench:
        chunks = await events(bench, **fields)
        messages = [joined(chunks, index) for index in range(3)]
        assert [message["content"] for message in messages] == [f"Answer {n}." for n in range(3)]
        assert len({message["tool_calls"][0]["id"] for message in messages}) == 3
        assert chunks[-1]["choices"] == []
        sampled = sum(len(entry.output_ids) for entry in bench.engine.log)
        assert chunks[-1]["usage"]["completion_tokens"] == sampled
        for last in filter(lambda choice: choice["finish_reason"], choices_of(chunks)):
            ids = [entry["token_id"] for entry in last["logprobs"]["content"]]
            assert ids == last["token_ids"]
        assert len(await bench.trajectories()) == 3


@pytest.mark.parametrize("forced", [False, True], ids=["aborted", "a forced call is missing"])
async def test_a_failure_in_a_stream_is_an_event_and_trains_nothing(forced: bool) -> None:
    release = asyncio.Event()
    held = Reply("One two three four five six seven.", hold=release, hold_after=8)
    async with serve(held) as bench:
        abort = lambda: bench.engine.abort(every=True)
        begun = release.set if forced else abort
        fields: Fields = {"tools": [TOOL], "tool_choice": "required"} if forced else {}
        chunks = await events(bench, begun=begun, **fields)
        assert chunks[-1]["error"]["code"] == ("engine_error" if forced else "engine_aborted")
        assert await bench.trajectories(refused=1) == []


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({"tool_choice": "required"}, 2),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, 2),
        ({"parallel_tool_calls": False}, 1),
        ({"tool_choice": "none"}, 0),
        ({"stop": ["</tool_call>"]}, 1),
        ({"stop_token_ids": [300]}, 2),
    ],
    ids=["required", "named", "one", "none", "a stop string", "a stop token"],
)
async def test_a_stream_follows_the_choice_of_tools(fields: dict[str, Any], calls: int) -> None:
    reply = call(at="x") + call(at="y")
    async with serve(reply) as bench:
        message = joined(await streamed(bench, tools=[TOOL], **fields))
        assert len(message["tool_calls"]) == calls
        assert message["content"] == ("" if calls else reply)
        await bench.trajectories()


@pytest.mark.parametrize("stop", [None, ["six"]])
async def test_text_completions_stream(stop: Any) -> None:
    fields: Fields = {"prompt": "Count:", "max_tokens": 200, "stop": stop, "logprobs": 0}
    fields["stream_options"] = {"include_usage": True}
    async with serve("One two 日本 🙂 three six seven.", split="random") as bench:
        chunks = await events(bench, TEXT_PATH, **fields)
        choices = choices_of(chunks)
        text = "".join(choice["text"] for choice in choices)
        assert text == "One two 日本 🙂 three " + ("" if stop else "six seven.")
        assert choices[-1]["logprobs"]["token_ids"] == bench.engine.log[0].output_ids
        [pending] = bench.endpoint.sessions.find("s").pending.all()
        answer = pending.task.result()
        assert answer.id.startswith("cmpl-")
        assert {(each["id"], each["created"]) for each in chunks} == {(answer.id, answer.created)}
        await bench.trajectories()
