"""`generate_resumed`: a turn that the engine aborted goes on, and stays one turn."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.client import Pauses, client, request
from support.tiers import costly

from toolroll.rollout.engine import generate_resumed
from toolroll.rollout.engine.resume import join
from toolroll.rollout.engine.stream import Progress
from toolroll.rollout.types import Completion, GenerateRequest, WeightVersion
from toolroll.testing import EmbeddedEngine, Fault, FaultPlan, Reply, fault_at

IDS = list(range(100, 130))


def aborting(cuts: list[int]) -> FaultPlan:
    """Request n is aborted after `cuts[n]` tokens."""
    return fault_at({number: Fault(abort_after=cut) for number, cut in enumerate(cuts)})


async def resumed(
    engine: EmbeddedEngine, params: dict[str, Any], resumes: int = 3, **fields: Any
) -> tuple[Completion, Pauses]:
    """The completion of a request to `engine`, and the pauses before its resumed parts."""
    pauses = Pauses()
    sent = request(sampling_params=params, **fields)
    async with engine, client(engine.url) as calls:
        whole = await generate_resumed(calls, sent, max_resumes=resumes, sleep=pauses)
    return whole, pauses


def sampling(tokenizer: Any, **options: Any) -> EmbeddedEngine:
    """An engine that samples `IDS`."""
    return EmbeddedEngine(tokenizer, lambda seen: Reply(output_ids=IDS), **options)


def part(ids: list[int], finish_reason: str = "abort", **fields: Any) -> Completion:
    return Completion(
        np.array(ids, dtype=np.int32), fields.pop("logprobs", None), finish_reason, **fields
    )


@costly(2)
@given(
    cuts=st.lists(st.integers(0, 9), max_size=3),
    resumes=st.integers(0, 4),
    limit=st.integers(1, 40),
)
async def test_the_parts_are_what_one_answer_would_have_been(
    tokenizer: Any, cuts: list[int], resumes: int, limit: int
) -> None:
    engine = sampling(tokenizer, faults=aborting(cuts), stop_token_ids=[IDS[-1]])
    params = {"max_new_tokens": limit}
    whole, pauses = await resumed(engine, params, resumes, input_ids_json=b"5,6,7")
    assert whole.output_ids.tolist() == IDS[: len(whole.output_ids)]
    given_back = [entry for entry in engine.log if entry.status == 200]
    assert whole.logprobs is not None
    joined = [value for entry in given_back for value in entry.logprobs]
    assert np.array_equal(whole.logprobs, np.array(joined, dtype=np.float32))
    assert len(given_back) <= resumes + 1
    left = limit
    for earlier, later in pairwise(given_back):
        left -= len(earlier.output_ids)
        assert later.input_ids.tolist() == [*earlier.input_ids.tolist(), *earlier.output_ids]
        assert later.sampling_params["max_new_tokens"] == left
    if whole.finish_reason == "abort":
        assert len(given_back) == resumes + 1 <= len(cuts)
    else:
        assert len(whole.output_ids) == min(limit, len(IDS))
    assert whole.prompt_tokens == 3
    assert len(pauses) == len(given_back) - 1


async def test_the_weight_versions_stay_per_token(tokenizer: Any) -> None:
    faults = fault_at({0: Fault(abort_after=4, weight_version="new", switch_after=2)})
    policy = lambda seen: Reply(output_ids=IDS[:10], stop=False)
    engine = EmbeddedEngine(tokenizer, policy, faults=faults)
    whole, _ = await resumed(engine, {"max_new_tokens": 10}, 1)
    assert whole.weight_versions == (WeightVersion("default", 0, 2), WeightVersion("new", 2, 10))
    assert whole.attempts == 2 and whole.finish_reason == "length"


def test_join_counts_the_prompt_of_the_first_part() -> None:
    """An abort in the queue tells none: then it is the second part's, less the first's samples. If
    a part has no logprobs, the whole has none.
    """
    rest = part([3], "stop", prompt_tokens=9, cached_tokens=8, text="b", logprobs=np.zeros(1))
    whole = join(part([1, 2], prompt_tokens=7, cached_tokens=3, text="a"), rest)
    assert (whole.output_ids.tolist(), whole.text, whole.logprobs) == ([1, 2, 3], "ab", None)
    assert (whole.prompt_tokens, whole.cached_tokens) == (7, 3)
    assert join(part([1, 2]), rest).prompt_tokens == 7


def test_join_keeps_all_experts() -> None:
    """The prompt has two tokens. The second request asks for what the first one does not have."""

    def sampled(ids: list[int], rows: int, expert: int) -> Completion:
        return part(ids, routed_experts=np.full((rows, 1), expert, dtype=np.int32))

    first, rest = sampled([1, 2], 3, 7), sampled([3], 1, 9)
    aborted, whole = sampled([], 0, 9), sampled([3], 2, 9)
    for before, after, experts in (
        (first, rest, [7, 7, 7, 9]),
        (first, aborted, [7, 7, 7]),
        (aborted, whole, [9, 9]),
    ):
        joined = join(before, after).routed_experts
        assert joined is not None and joined.ravel().tolist() == experts
    assert join(part([1]), rest).routed_experts is None


@pytest.mark.parametrize(
    ("params", "reason", "matched"),
    [
        ({"max_new_tokens": 4}, "length", None),
        ({"max_new_tokens": 20, "stop_token_ids": [IDS[3]]}, "stop", IDS[3]),
        ({"max_new_tokens": 4, "stop_token_ids": [IDS[3]]}, "stop", IDS[3]),
        ({"max_new_tokens": 4, "stop_token_ids": [IDS[3]], "ignore_eos": True}, "length", None),
    ],
)
async def test_an_abort_with_the_last_token_leaves_nothing_to_resume(
    tokenizer: Any, params: dict[str, Any], reason: str, matched: int | None
) -> None:
    """SGLang reports the abort, also if the token would have ended the turn."""
    engine = sampling(tokenizer, faults=aborting([4]))
    whole, _ = await resumed(engine, params)
    assert len(engine.log) == 1
    assert (whole.finish_reason, whole.matched) == (reason, matched)
    assert whole.output_ids.tolist() == IDS[:4]


class Answers:
    """An engine that has these answers. `stops`: the trainer stops with the first one."""

    def __init__(self, *answers: Completion, stops: bool = False) -> None:
        self._answers = iter(answers)
        self._stops = stops
        self.asked: list[GenerateRequest] = []

    def stopped(self) -> bool:
        return self._stops

    async def generate(
        self, request: GenerateRequest, *, progress: Progress | None = None
    ) -> Completion:
        self.asked.append(request)
        return next(self._answers)


@pytest.mark.parametrize("ignored", [False, True])
async def test_an_aborted_turn_ends_at_its_stop_token(ignored: bool) -> None:
    """With speculative decoding, an aborted answer may go on behind a stop token."""

    def aborted(ids: list[int], start: int, count: int) -> Completion:
        return part(
            ids,
            logprobs=np.arange(start, start + len(ids), dtype=np.float32),
            weight_versions=(WeightVersion("a", 0, 2), WeightVersion("b", 2, len(ids))),
            routed_experts=np.arange(count, dtype=np.int32)[:, None],
            top_logprobs=[[(0.0, each)] for each in ids],
        )

    answers = aborted([1, 2, 3], 0, 5), aborted([4, 9, 5, 9], 3, 4), part([], "length")
    engine: Any = Answers(*answers)
    params = {"max_new_tokens": 20, "stop_token_ids": [9], "ignore_eos": ignored}
    whole = await generate_resumed(
        engine, request(sampling_params=params), max_resumes=2, sleep=Pauses()
    )
    if ignored:
        assert whole.output_ids.tolist() == [1, 2, 3, 4, 9, 5, 9] and len(engine.asked) == 3
        return
    assert len(engine.asked) == 2
    assert whole.output_ids.tolist() == [1, 2, 3, 4, 9]
    assert (whole.finish_reason, whole.matched) == ("stop", 9)
    assert whole.logprobs is not None and whole.logprobs.tolist() == [0, 1, 2, 3, 4]
    spans = (("a", 0, 2), ("b", 2, 3), ("a", 3, 5))
    assert whole.weight_versions == tuple(WeightVersion(*span) for span in spans)
    assert whole.routed_experts is not None
    assert whole.routed_experts.ravel().tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert whole.top_logprobs is not None
    assert [pairs[0][1] for pairs in whole.top_logprobs] == [1, 2, 3, 4, 9]


@pytest.mark.parametrize(
    ("ids", "kept", "ended"), [([1, 9, 7], [1, 9], ("stop", 9)), ([1, 7, 9], [1], ("length", 7))]
)
async def test_a_placeholder_behind_a_stop_cuts_nothing(ids: Any, kept: Any, ended: Any) -> None:
    engine: Any = Answers(part(ids))
    sent = request(sampling_params={"max_new_tokens": 20, "stop_token_ids": [7, 9]})
    whole = await generate_resumed(engine, sent, max_resumes=2, placeholders={7})
    assert whole.output_ids.tolist() == kept and (whole.finish_reason, whole.matched) == ended


@pytest.mark.parametrize(
    "name", ["json_schema", "regex", "ebnf", "structural_tag", "stop", "stop_regex"]
)
async def test_a_grammar_or_stop_string_is_not_started_again(tokenizer: Any, name: str) -> None:
    """For each request, the engine reads a grammar from its beginning."""
    engine = sampling(tokenizer, faults=aborting([0, 4, 9]))
    whole, _ = await resumed(engine, {"max_new_tokens": 20, name: "{}"})
    assert len(engine.log) == 2, "an abort before the first token may be resumed, and no other"
    assert (whole.output_ids.tolist(), whole.finish_reason) == (IDS[:4], "abort")


async def test_the_least_number_of_tokens_counts_over_all_parts(tokenizer: Any) -> None:
    engine = sampling(tokenizer, faults=aborting([4, 3]))
    await resumed(engine, {"max_new_tokens": 20, "min_new_tokens": 6})
    assert [entry.sampling_params["min_new_tokens"] for entry in engine.log] == [6, 2, 0]


async def test_after_a_stop_an_aborted_turn_is_not_resumed() -> None:
    """Also if nothing can wait for the trainer."""
    aborted = part([1], logprobs=np.zeros(1, dtype=np.float32))
    engine: Any = Answers(aborted, stops=True)
    whole = await generate_resumed(engine, request(), max_resumes=3, sleep=Pauses())
    assert (whole.output_ids.tolist(), whole.finish_reason, len(engine.asked)) == ([1], "abort", 1)
