"""Answers that no honest engine gives: each is refused with what was received, and none is corrected, trained or rewarded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from aiohttp import web
from support.client import FACTS, Pauses, client, flaky, request
from support.episodes import agent, judge, serving
from support.http import completion, http_server
from support.worlds import ListedWorld

from toolroll.rollout.engine import ModelFacts, parse_completion
from toolroll.rollout.engine.stream import EventReader
from toolroll.rollout.errors import CompletionError, EngineError, TokenError
from toolroll.rollout.testing import Fault, fault_at
from toolroll.rollout.types import Status, StopReason, Task

Spoil = Callable[[dict[str, Any]], Any]

RID = "0123456789abcdef"
ASKED = request([5, 6, 7], sampling_params={"max_new_tokens": 8, "stop": ["END"], "stop_token_ids": [9]})
IDS = [7, 8, 9]


def honest(**meta: Any) -> dict[str, Any]:
    return completion(IDS, id=RID, prompt_tokens=3, **meta)


def ids(value: Any) -> Spoil:
    """Other ids, with logprobs and counts that fit them."""

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        items = value if isinstance(value, list) else []
        made = completion(items, id=RID, finish_reason={"type": "length", "length": len(items)})
        return {**made, "output_ids": value}

    return spoil


def meta(**fields: Any) -> Spoil:
    return lambda answer: {**answer, "meta_info": {**answer["meta_info"], **fields}}


def without(name: str) -> Spoil:
    return lambda answer: {**answer, "meta_info": {key: value for key, value in answer["meta_info"].items() if key != name}}


def top(**fields: Any) -> Spoil:
    return lambda answer: {**answer, **fields}


def logprob(value: Any, at: int = 1) -> Spoil:
    return item([value, IDS[at], None], at)


def item(value: Any, at: int = 1) -> Spoil:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"]["output_token_logprobs"][at] = value
        return answer

    return spoil


def stop(matched: Any) -> Spoil:
    return meta(finish_reason={"type": "stop", "matched": matched})


def tops(*places: Any) -> Spoil:
    return meta(output_top_logprobs=list(places))


NO_LIST = ["output_ids is no list of token ids"]
NO_ID = ["an id from 0 to 9095, the model's vocabulary"]
COUNTED = ["the engine counts", "sampled tokens and sent 3 output_ids"]
READ = ["the engine read a prompt of", "where 3 were sent"]
FINISH = ["the engine's finish_reason is", "expected one of stop, length, abort"]
MATCHED = ["the engine stopped at", "requested stop strings ['END']"]
NUMBER = ["a logprob is no [logprob, id, text] with a number first"]
POSITIVE = ["a logprob is not a number or above zero"]
LOW = ["a logprob is", "expected a finite number of at least -1e+06"]
SPAN = ["a weight version is no span with version, start and end"]
TOP = ["a top logprob is", "expected [logprob, id, text] with an id below 9096"]

HOSTILE: dict[str, tuple[Spoil, list[str]]] = {
    # whose answer it is
    "another's id": (meta(id="f" * 16), ["answered another request", "'ffffffffffffffff'", f"expected '{RID}'"]),
    "an empty id": (meta(id=""), ["answered another request", "meta_info.id is ''"]),
    "an id that begins with ours": (meta(id=RID + "_0"), ["answered another request", f"'{RID}_0'"]),
    "an id that is a number": (meta(id=7), ["answered another request", "meta_info.id is 7"]),
    "an id in a list": (meta(id=[RID]), ["answered another request"]),
    # the answer as a whole
    "null": (lambda answer: None, ["no output_ids and meta_info", "None"]),
    "a list of two": (lambda answer: [answer, answer], ["no output_ids and meta_info"]),
    "a string": (lambda answer: "x", ["no output_ids and meta_info: x"]),
    "no ids": (lambda answer: {"text": "", "meta_info": answer["meta_info"]}, ["no output_ids and meta_info"]),
    "no meta_info": (lambda answer: {"text": "", "output_ids": IDS}, ["no output_ids and meta_info"]),
    "meta_info is a list": (top(meta_info=[]), ["no output_ids and meta_info"]),
    "text is a number": (top(text=5), ["the engine's text is '5' (int)", "expected a string"]),
    "text is a list": (top(text=["x"]), ["(list)", "expected a string"]),
    # ids
    "the highest int32": (ids([7, 2**31 - 1]), ["output_ids[1] is 2147483647", *NO_ID]),
    "the first id outside": (ids([9096]), ["output_ids[0] is 9096", *NO_ID]),
    "minus one": (ids([7, -1, 9]), ["output_ids[1] is -1", *NO_ID]),
    "the lowest int32": (ids([-(2**31)]), ["output_ids[0] is -2147483648", *NO_ID]),
    "beyond int32": (ids([2**31]), NO_LIST),
    "beyond int64": (ids([2**63]), NO_LIST),
    "a float": (ids([7, 8.0]), NO_LIST),
    "true": (ids([7, True]), [*NO_LIST, "True", "bool"]),
    "false": (ids([False, 7]), [*NO_LIST, "False", "bool"]),
    "null for an id": (ids([7, None]), NO_LIST),
    "a string for an id": (ids(["7"]), NO_LIST),
    "a list for an id": (ids([[7]]), NO_LIST),
    "ids are a string": (ids("789"), NO_LIST),
    "ids are a number": (ids(3), NO_LIST),
    "ids are an object": (ids({"0": 7}), NO_LIST),
    "nine where eight were asked for": (ids(list(range(10, 19))), ["sent 9 output_ids", "at most max_new_tokens = 8"]),
    "999 where eight were asked for": (ids([7] * 999), ["sent 999 output_ids", "at most max_new_tokens = 8"]),
    # counts
    "fewer counted": (meta(completion_tokens=2), [*COUNTED, "counts 2"]),
    "more counted": (meta(completion_tokens=4), [*COUNTED, "counts 4"]),
    "counted in words": (meta(completion_tokens="3"), [*COUNTED, "counts '3'"]),
    "counted in a float": (meta(completion_tokens=3.0), [*COUNTED, "counts 3.0"]),
    "a shorter prompt": (meta(prompt_tokens=2), [*READ, "of 2 tokens"]),
    "a longer prompt": (meta(prompt_tokens=4), [*READ, "of 4 tokens"]),
    "a prompt of none": (meta(prompt_tokens=0), [*READ, "of 0 tokens"]),
    "a prompt in words": (meta(prompt_tokens="3"), [*READ, "of '3' tokens"]),
    # logprobs
    "no logprobs": (without("output_token_logprobs"), ["3 sampled ids came with 0 logprobs"]),
    "logprobs are null": (meta(output_token_logprobs=None), ["3 sampled ids came with 0 logprobs"]),
    "a logprob too few": (meta(output_token_logprobs=[[-1.0, 7, None]] * 2), ["3 sampled ids came with 2 logprobs"]),
    "a logprob too many": (meta(output_token_logprobs=[[-1.0, 7, None]] * 4), ["3 sampled ids came with 4 logprobs"]),
    "logprobs are a string": (meta(output_token_logprobs="abc"), NUMBER),
    "logprobs are numbers": (meta(output_token_logprobs=[-1.0, -1.0, -1.0]), NUMBER),
    "another token's": (item([-0.5, 9, None]), ["logprob 1 belongs to token 9", "output_ids has 8 there"]),
    "of no token": (item([-0.5, None, None]), ["logprob 1 belongs to token None"]),
    "nan": (logprob(math.nan), POSITIVE),
    "infinite": (logprob(math.inf), POSITIVE),
    "minus infinity": (logprob(-math.inf), [*LOW, "-inf"]),
    "-1e300": (logprob(-1e300), [*LOW, "-1e+300"]),
    "-1e38, which float32 holds": (logprob(-1e38), LOW),
    "positive": (logprob(0.5), [*POSITIVE, "0.5"]),
    "one": (logprob(1), POSITIVE),
    "true for a logprob": (logprob(True), POSITIVE),
    "false for a logprob": (logprob(False), ["a logprob is False, expected a number"]),
    "null for a logprob": (logprob(None), NUMBER),
    "a string for a logprob": (logprob("-0.5"), NUMBER),
    # the end
    "no finish_reason": (without("finish_reason"), ["no finish_reason: None"]),
    "finish_reason is null": (meta(finish_reason=None), ["no finish_reason: None"]),
    "finish_reason is a string": (meta(finish_reason="stop"), ["no finish_reason: 'stop'"]),
    "finish_reason without a type": (meta(finish_reason={"matched": 9}), ["no finish_reason"]),
    "an unknown type": (meta(finish_reason={"type": "banana"}), [*FINISH, "'banana'"]),
    "another API's type": (meta(finish_reason={"type": "tool_calls"}), [*FINISH, "'tool_calls'"]),
    "a type that is a list": (meta(finish_reason={"type": ["stop"]}), FINISH),
    "a type that is null": (meta(finish_reason={"type": None}), FINISH),
    "stopped at a token before the last": (stop(8), ["the engine stopped at token 8, but output_ids end with 9"]),
    "stopped at a token that is nowhere": (stop(4), ["the engine stopped at token 4, but output_ids end with 9"]),
    "stopped at a string that nobody asked for": (stop("FIN"), [*MATCHED, "'FIN'"]),
    "an id that SGLang replaced": (stop("NaN happened"), [*MATCHED, "'NaN happened'"]),
    "stopped at true": (stop(True), [*MATCHED, "True"]),
    "stopped at a float": (stop(9.0), [*MATCHED, "9.0"]),
    "stopped at a list": (stop([9]), [*MATCHED, "[9]"]),
    "stopped before anything": (
        lambda answer: completion([], finish_reason={"type": "stop", "matched": 9}),
        ["there are no output_ids: the stop token is one"],
    ),
    # the rest
    "a weight version without an end": (meta(weight_versions=[{"version": "a", "start": 0}]), SPAN),
    "a weight version from a float": (meta(weight_versions=[{"version": "a", "start": 0.0, "end": 3}]), SPAN),
    "a weight version to a string": (meta(weight_versions=[{"version": "a", "start": 0, "end": "3"}]), SPAN),
    "a weight version of too many": (meta(weight_versions=[{"version": "a", "start": 0, "end": 4}]), ["cover 4 of 3 sampled"]),
    "weight versions with a gap": (
        meta(weight_versions=[{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 2, "end": 3}]),
        ["gap or overlap at token 1"],
    ),
    "cached tokens in words": (meta(cached_tokens="many"), ["cannot be read"]),
    "too few top logprobs": (tops([[-0.5, 7, None]]), ["3 sampled ids came with 1 lists of top logprobs"]),
    "a top logprob outside": (tops([], [[-0.5, 2**31 - 1, None]], []), TOP),
    "a top logprob below": (tops([], [[-0.5, -1, None]], []), TOP),
    "a top logprob that is nan": (tops([], [[math.nan, 5, None]], []), TOP),
    "a top logprob that is positive": (tops([], [[3.0, 5, None]], []), TOP),
    "a top logprob of no id": (tops([], [[-0.5, "5", None]], []), TOP),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_with_what_was_received(name: str) -> None:
    spoil, words = HOSTILE[name]
    with pytest.raises(CompletionError) as raised:
        parse_completion(spoil(honest()), ASKED, rid=RID, vocab_size=9096)
    assert [word for word in words if word not in str(raised.value)] == []


def test_the_honest_answer_is_none_of_them() -> None:
    found = parse_completion(honest(), ASKED, rid=RID, vocab_size=9096)
    assert (found.output_ids.tolist(), found.finish_reason, found.matched) == (IDS, "stop", 9)
    at_the_edge = completion([0, 1, 9095], id=RID, finish_reason={"type": "stop", "matched": "END"})
    assert parse_completion(at_the_edge, ASKED, rid=RID, vocab_size=9096).matched == "END"


# --- through the client --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{", b'{"output_ids": [NaN]}', b"\xff\xfe", b"[]", b"7", b'"x"', b"[1, 2]", b"<html></html>"])
async def test_what_is_no_answer_is_an_error_of_the_engine(body: bytes) -> None:
    seen, handle = flaky(web.Response(body=body))
    async with http_server({"/generate": handle}) as url, client(url) as calls:
        with pytest.raises(CompletionError, match="the engine's answer is no JSON"):
            await calls.generate(request())
    assert len(seen) == 1


async def test_no_answer_disables_the_vocabulary_check() -> None:
    """`FACTS` name 5,000 ids, and a model may have 4,096 more."""
    answers = [completion([found], finish_reason={"type": "length", "length": 1}) for found in (2**31 - 1, 9096, -1, 3)]
    _, handle = flaky(*answers)
    async with http_server({"/generate": handle}) as url, client(url) as calls:
        for found in (2**31 - 1, 9096, -1):
            with pytest.raises(CompletionError, match=rf"output_ids\[0\] is {found}, expected an id from 0 to 9095"):
                await calls.generate(request())
            with pytest.raises(TokenError, match="outside the vocabulary of 5000"):
                await calls.generate(request([5, found]))
        assert (await calls.generate(request())).output_ids.tolist() == [3]
        with pytest.raises(TokenError, match="outside the vocabulary of 5000"):
            await calls.generate(request([5, 5000]))
    assert FACTS.sampled_limit == 9096


async def test_an_unknown_vocabulary_still_has_a_highest_id() -> None:
    _, handle = flaky(completion([2**31 - 1], finish_reason={"type": "length", "length": 1}))
    async with http_server({"/generate": handle}) as url, client(url, facts=ModelFacts()) as calls:
        with pytest.raises(CompletionError, match="2147483647"):
            await calls.generate(request())


async def test_anothers_answer_is_asked_for_again_and_our_own_request_aborted() -> None:
    seen, handle = flaky(completion([4], id="f" * 32), completion([4], id="e" * 32), completion([3]))
    aborted: list[str] = []

    async def abort(http: web.Request) -> web.Response:
        aborted.append(orjson.loads(await http.read())["rid"])
        return web.Response()

    pauses = Pauses()
    async with http_server({"/generate": handle, "/abort_request": abort}) as url, client(url, sleep=pauses) as calls:
        answer = await calls.generate(request())
    assert (answer.output_ids.tolist(), answer.attempts, len(pauses)) == ([3], 3, 2)
    assert aborted == [body["rid"] for body in seen[:2]]


async def test_nothing_but_others_answers_is_an_error_that_says_whose() -> None:
    _, handle = flaky(completion([4], id="f" * 32))
    async with http_server({"/generate": handle}) as url, client(url, attempts=3) as calls:
        with pytest.raises(EngineError, match=f"answered another request: meta_info.id is '{'f' * 32}', expected .* after 3 attempts"):
            await calls.generate(request())


# --- streams -------------------------------------------------------------------------------------------------------------


async def streamed(*events: dict[str, Any], rid: str = RID, limit: int = 8) -> tuple[list[list[int]], Any]:
    """What progress was told, and what came of the stream: its last event, or an error."""
    told: list[list[int]] = []

    async def chunks() -> Any:
        for event in events:
            yield b"data: " + orjson.dumps(event) + b"\n\n"

    def check(given: Any) -> None:
        if len(given) > limit or not all(type(index) is int and 0 <= index < 100 for index in given):
            raise CompletionError(f"the ids {given}")

    try:
        return told, await EventReader(lambda ids: told.append(list(ids)), rid, check).read(chunks())
    except CompletionError as error:
        return told, error


def part(found: list[int], **fields: Any) -> dict[str, Any]:
    return completion(found, **{"id": RID, "finish_reason": None, **fields})


@pytest.mark.parametrize(
    ("events", "told", "words"),
    [
        ([part([3, 4]), part([3])], [[3, 4]], r"output_ids\[1\] was 4, now it is missing \(2 ids before, 1 now\)"),
        ([part([3, 4]), part([3, 5, 6])], [[3, 4]], r"output_ids\[1\] was 4, now it is 5"),
        ([part([3]), part([])], [[3]], r"output_ids\[0\] was 3, now it is missing"),
        ([part([3]), completion([4], id=RID)], [[3]], r"output_ids\[0\] was 3, now it is 4"),
        ([part([3]), completion([], id=RID)], [[3]], "takes ids back"),
        ([part([3]), part([3, -1])], [[3]], r"the ids \[3, -1\]"),
        ([part([3]), part([3, 2**31 - 1])], [[3]], "2147483647"),
        ([part([3]), part([3, None])], [[3]], "None"),
        ([part([3]), part([3, 4.5])], [[3]], "4.5"),
        ([part([3] * 9)], [], "the ids"),
    ],
)
async def test_ids_that_were_told_are_never_taken_back(events: list[dict[str, Any]], told: list[list[int]], words: str) -> None:
    found, error = await streamed(*events)
    assert found == told
    with pytest.raises(CompletionError, match=words):
        raise error


@pytest.mark.parametrize("other", [part([4], id="f" * 16), completion([4], id="f" * 16), part([4], id=5)])
async def test_of_anothers_stream_nothing_is_told(other: dict[str, Any]) -> None:
    told, failure = await streamed(other)
    assert (told, failure.retry, failure.foreign) == ([], True, True)
    assert "answered another request" in failure.message
    told, failure = await streamed(part([3]), other)
    assert (told, failure.foreign) == ([[3]], True)


async def test_an_honest_stream_is_told_as_it_comes() -> None:
    told, last = await streamed(part([3]), part([3, 4]), completion([3, 4, 5], id=RID))
    assert told == [[3], [3, 4], [3, 4, 5]] and last["output_ids"] == [3, 4, 5]


# --- whole episodes ------------------------------------------------------------------------------------------------------


def spoiled_ids(found: int) -> Spoil:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        return completion([*answer["output_ids"][:-1], found], id=answer["meta_info"]["id"])

    return spoil


EPISODES: dict[str, tuple[Spoil, str]] = {
    "an id that no model has": (spoiled_ids(2**31 - 1), "2147483647"),
    "a negative id": (spoiled_ids(-5), "is -5, expected an id"),
    "an unknown end": (meta(finish_reason={"type": "banana"}), "'banana'"),
    "999 tokens": (lambda answer: completion([7] * 999, id=answer["meta_info"]["id"]), "999 output_ids"),
    "a logprob of -1e300": (
        lambda answer: meta(output_token_logprobs=[[-1e300, index, None] for index in answer["output_ids"]])(answer),
        "-1e+300",
    ),
    "another's answer": (meta(id="f" * 32), "answered another request"),
}


@pytest.mark.parametrize("name", EPISODES)
@pytest.mark.parametrize("turn", [0, 1])
async def test_its_episode_is_aborted_and_the_next_is_not_touched(tokenizer: Any, name: str, turn: int) -> None:
    spoil, words = EPISODES[name]
    faults = fault_at({turn: Fault(garble=spoil)})
    async with serving(tokenizer, lambda seen: "Hello.", faults=faults, config={"attempts": 1}) as (engine, served):
        results = [
            await agent(served).asolve(ListedWorld(user_texts=["One.", "Two."]), task=Task(which, 0), session_id=which)
            for which in ("hostile", "next")
        ]
    bad, good = results
    assert (bad.status, bad.stop_reason, bad.reward) == (Status.ABORTED, StopReason.ENGINE_ERROR, None)
    assert words in bad.info["error"]["message"]
    assert good.status is Status.COMPLETED and good.reward is not None
    judge(good, engine, "next")
    judge(bad, engine, "hostile", refused=1)
    assert engine.killed == 0
