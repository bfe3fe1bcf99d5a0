"""Answers that no honest engine gives are refused, with what was received."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from aiohttp import web
from support.client import INFO, Pauses, answering, client_of, flaky, request
from support.hostile import ASKED, HOSTILE, IDS, RID, honest
from support.http import completion

from toolroll.rollout.engine import ModelInfo, parse_completion
from toolroll.rollout.engine.stream import EventReader
from toolroll.rollout.errors import CompletionError, EngineError, TokenError


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


# --- through the client ---------------------------------------------------------------------------


NO_ANSWERS = [b"", b"{", b'{"output_ids": [NaN]}', b"\xff\xfe", b"[]", b"7", b'"x"', b"[1, 2]"]


@pytest.mark.parametrize("body", [*NO_ANSWERS, b"<html></html>"])
async def test_what_is_no_answer_is_an_error_of_the_engine(body: bytes) -> None:
    seen, handle = flaky(web.Response(body=body))
    words = r"the engine's answer is not (JSON|a JSON object)"
    async with answering(handle) as calls:
        with pytest.raises(CompletionError, match=words):
            await calls.generate(request())
    assert len(seen) == 1


def of_length(index: int) -> dict[str, Any]:
    return completion([index], finish_reason={"type": "length", "length": 1})


async def test_no_answer_disables_the_vocabulary_check() -> None:
    """`INFO` name 5,000 ids, and a model may have 4,096 more."""
    wrong, outside = (2**31 - 1, 9096, -1), "outside the vocabulary of 5000"
    _, handle = flaky(*map(of_length, (*wrong, 3)))
    async with answering(handle) as calls:
        for index in wrong:
            words = rf"output_ids\[0\] is {index}, expected an id from 0 to 9095"
            with pytest.raises(CompletionError, match=words):
                await calls.generate(request())
            with pytest.raises(TokenError, match=outside):
                await calls.generate(request([5, index]))
        assert (await calls.generate(request())).output_ids.tolist() == [3]
        with pytest.raises(TokenError, match=outside):
            await calls.generate(request([5, 5000]))
    assert INFO.sampled_limit == 9096


async def test_an_unknown_vocabulary_still_has_a_highest_id() -> None:
    routes = {"/generate": flaky(of_length(2**31 - 1))[1]}
    async with client_of(routes, model_info=ModelInfo()) as calls:
        with pytest.raises(CompletionError, match="2147483647"):
            await calls.generate(request())


async def test_another_requests_answer_is_asked_for_again() -> None:
    others = (completion([4], id=letter * 32) for letter in "fe")
    seen, generate = flaky(*others, completion([3]))
    aborted, abort = flaky({})
    routes, pauses = {"/generate": generate, "/abort_request": abort}, Pauses()
    async with client_of(routes, sleep=pauses) as calls:
        answer = await calls.generate(request())
    assert (answer.output_ids.tolist(), answer.attempts, len(pauses)) == ([3], 3, 2)
    assert [body["rid"] for body in aborted] == [body["rid"] for body in seen[:2]]


async def test_answers_with_another_request_id_are_an_error() -> None:
    _, handle = flaky(completion([4], id="f" * 32))
    words = f"another request: meta_info.id is '{'f' * 32}', expected .* after 3 attempts"
    async with answering(handle, retries=2) as calls:
        with pytest.raises(EngineError, match=words):
            await calls.generate(request())


async def streamed(*events: dict[str, Any], rid: str = RID) -> tuple[list[list[int]], Any]:
    """What progress was told, and what came of the stream: its last event, or an error."""
    told: list[list[int]] = []

    async def chunks() -> Any:
        for event in events:
            yield b"data: " + orjson.dumps(event) + b"\n\n"

    def check(given: Any) -> None:
        if len(given) > 8 or not all(type(each) is int and 0 <= each < 100 for each in given):
            raise CompletionError(f"the ids {given}")

    reader = EventReader(lambda ids: told.append(list(ids)), rid, check)
    try:
        return told, await reader.read(chunks())  # pyright: ignore[reportArgumentType]
    except CompletionError as error:
        return told, error


def part(found: list[int], **fields: Any) -> dict[str, Any]:
    return completion(found, **{"id": RID, "finish_reason": None, **fields})


WAS = r"output_ids\[%d\] was %d, now it is"


@pytest.mark.parametrize(
    ("events", "told", "words"),
    [
        ([part([3, 4]), part([3])], [[3, 4]], rf"{WAS % (1, 4)} missing \(2 ids before, 1 now\)"),
        ([part([3, 4]), part([3, 5, 6])], [[3, 4]], f"{WAS % (1, 4)} 5"),
        ([part([3]), part([])], [[3]], f"{WAS % (0, 3)} missing"),
        ([part([3]), completion([4], id=RID)], [[3]], f"{WAS % (0, 3)} 4"),
        ([part([3]), completion([], id=RID)], [[3]], "changed ids that it had already sent"),
        ([part([3]), part([3, -1])], [[3]], r"the ids \[3, -1\]"),
        ([part([3]), part([3, 2**31 - 1])], [[3]], "2147483647"),
        ([part([3]), part([3, None])], [[3]], "None"),  # type: ignore[list-item]
        ([part([3]), part([3, 4.5])], [[3]], "4.5"),  # type: ignore[list-item]
        ([part([3] * 9)], [], "the ids"),
    ],
)
async def test_ids_that_were_told_are_never_taken_back(
    events: list[dict[str, Any]], told: list[list[int]], words: str
) -> None:
    found, error = await streamed(*events)
    assert found == told
    with pytest.raises(CompletionError, match=words):
        raise error


@pytest.mark.parametrize(
    "other", [part([4], id="f" * 16), completion([4], id="f" * 16), part([4], id=5)]
)
async def test_a_stream_with_another_request_id_reports_no_progress(other: dict[str, Any]) -> None:
    told, failure = await streamed(other)
    assert (told, failure.retry) == ([], True)
    assert "answer is for another request" in failure.message
    told, failure = await streamed(part([3]), other)
    assert told == [[3]]
    assert "answer is for another request" in failure.message


async def test_an_honest_stream_is_told_as_it_comes() -> None:
    told, last = await streamed(part([3]), part([3, 4]), completion([3, 4, 5], id=RID))
    assert told == [[3], [3, 4], [3, 4, 5]] and last["output_ids"] == [3, 4, 5]
