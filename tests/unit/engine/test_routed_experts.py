"""Routed experts: each row comes from the turn that processed its token first, and only once."""

import base64
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from support.client import embedded, request
from support.experts import first_experts

from toolroll import EnvironmentOptions, Episode, Model, RolloutArgs, load_environment
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.engine import Engine
from toolroll.rollout.engine.response import parse_completion
from toolroll.rollout.errors import CompletionError
from toolroll.rollout.runs.episode_file import EpisodeStore, read_episodes
from toolroll.rollout.runtime.routed_experts import ExpertsRecord, compact, new_rows, to_json
from toolroll.testing import EmbeddedEngine, Fault, Reply


def meta_of(rows: np.ndarray[Any, Any], output_ids: list[int]) -> dict[str, Any]:
    return {
        "finish_reason": {"type": "length"},
        "routed_experts": base64.b64encode(rows.astype(np.int32).tobytes()).decode(),
        "output_token_logprobs": [[-1.0, index, None] for index in output_ids],
    }


def routing(
    tokenizer: Any, policy: Any = lambda _: "Hello.", *, experts: bool = True, **engine: Any
) -> AbstractAsyncContextManager[tuple[EmbeddedEngine, Engine]]:
    """An engine, and a client that asks it for experts, or does not."""
    config = {"model_info": None, "return_routed_experts": experts}
    return embedded(tokenizer, policy, config=config, **engine)


async def test_an_episodes_experts_come_from_the_first_pass(tokenizer: Any, tmp_path: Path) -> None:
    """Each later pass has other experts. One turn is aborted in its middle, and resumed."""
    sent: list[int] = []

    def counted(answer: dict[str, Any]) -> dict[str, Any]:
        sent.append(len(base64.b64decode(answer["meta_info"]["routed_experts"])) // 16)
        return answer

    desk = load_environment("desk")
    task = desk.tasks("test")[0]
    engine = EmbeddedEngine(
        tokenizer,
        lambda _: "Thank you.",
        faults=lambda seen: Fault(
            garble=counted, evict=True, abort_after=2 if seen.index == 1 else None
        ),
    )
    async with engine:
        options: Any = {"return_routed_experts": True, "max_resumes": 1}
        args = RolloutArgs(engine=engine.url, model="embedded", parser="hermes", **options)
        async with Model.from_args(args) as served:
            agent = TrainableToolCallingAgent(model=served, sampling_params={"max_new_tokens": 64})
            result = await agent.asolve(
                desk.make(EnvironmentOptions()), task=task, session_id="s", max_num_steps=3
            )
    [trajectory] = result.trajectories
    assert len(trajectory.turns) > 1 and len(engine.log) == len(trajectory.turns) + 1
    expected = first_experts(engine.log, trajectory.input_ids)
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts.dtype == np.uint8
    assert np.array_equal(trajectory.routed_experts, expected)
    assert sum(sent) == len(trajectory) - 1
    with EpisodeStore(tmp_path) as store:
        store.append(Episode("desk", task.id, 0, 0, 0, result))
    [read] = read_episodes(tmp_path)
    [stored] = read.result.trajectories
    assert stored.routed_experts is not None and stored.routed_experts.dtype == np.uint8
    assert np.array_equal(stored.routed_experts, expected)


async def test_an_engine_that_sends_all_rows_is_cut_to_the_new_ones(tokenizer: Any) -> None:
    """As SGLang before 0.5.23. The bytes of the first answer tell how long a row is."""
    older: Any = {"extra": {"routed_experts_start_len": 0}}
    policy = lambda _: Reply(output_ids=[7, 8, 9])
    async with routing(tokenizer, policy) as (served, client):
        whole = await client.generate(request([1, 2, 3], routed_experts_start=2))
        asked = await client.generate(request([1, 2, 3, 7, 8, 9, 4], routed_experts_start=5))
        cut = await client.generate(request([1, 2, 3, 7, 8, 9, 5], routed_experts_start=5, **older))
    starts = (2, 5, 5)
    for completion, entry, start in zip((whole, asked, cut), served.log, starts, strict=True):
        ids = np.concatenate([entry.input_ids, completion.output_ids])
        expected = first_experts(served.log, ids)[start:]
        assert np.array_equal(completion.routed_experts, expected)  # type: ignore[arg-type]


# --- what is refused ------------------------------------------------------------------------------


async def test_experts_that_do_not_come_are_missed_aloud(tokenizer: Any) -> None:
    """As behind router 0.3.2, which drops the field in silence. If nobody asks, there are none."""
    async with routing(tokenizer) as (_, client):
        with pytest.raises(CompletionError, match="--enable-return-routed-experts"):
            await client.generate(request([1, 2], extra={"return_routed_experts": False}))
    async with routing(tokenizer, experts=False) as (_, client):
        assert (await client.generate(request([1, 2, 3]))).routed_experts is None


@pytest.mark.parametrize(
    "encoded",
    ["no base64!", base64.b64encode(b"\0" * 10).decode(), base64.b64encode(b"\0" * 20).decode()],
)
def test_unreadable_experts_are_refused(encoded: str) -> None:
    meta = {**meta_of(np.zeros(0), [7]), "routed_experts": encoded}
    with pytest.raises(CompletionError, match="routed_experts"):
        parse_completion({"output_ids": [7], "meta_info": meta}, request([1, 2, 3]))


@pytest.mark.parametrize("rows", range(8))
def test_another_count_than_all_rows_or_the_new_ones_is_refused(rows: int) -> None:
    """Of 5 + 2 tokens, rows 4 and 5 are new, and 6 are all. Others would be misaligned."""
    numbers = np.arange(rows * 2).reshape(rows, 2)
    body = {"output_ids": [7, 8], "meta_info": meta_of(numbers, [7, 8])}
    asked = request([1, 2, 3, 4, 5], routed_experts_start=4)
    if rows in (2, 6):
        completion = parse_completion(body, asked, experts_per_token=2)
        assert np.array_equal(completion.routed_experts, numbers[-2:])  # type: ignore[arg-type]
    elif rows:
        with pytest.raises(CompletionError, match=f"{rows * 2} numbers are not the experts"):
            parse_completion(body, asked, experts_per_token=2)
    else:
        assert parse_completion(body, asked, experts_per_token=2).routed_experts is None
        with pytest.raises(ValueError, match="are not the experts"):  # without a known length
            new_rows(np.zeros(4, dtype=np.int32), start=4, tokens=7)


async def test_an_abort_without_the_experts_of_its_tokens_is_refused(tokenizer: Any) -> None:
    """SGLang aborts a retracted request in its queue with its tokens, but without experts."""

    def without(answer: dict[str, Any]) -> dict[str, Any]:
        del answer["meta_info"]["routed_experts"]
        return answer

    faults = lambda _: Fault(abort_after=1, garble=without)
    async with routing(tokenizer, faults=faults) as (_, client):
        with pytest.raises(CompletionError, match="retracted"):
            await client.generate(request([1, 2]))


@pytest.mark.parametrize(
    ("least", "highest", "kind"),
    [
        *((0, most, "uint16") for most in (256, 65535)),
        (0, 255, "uint8"),
        (0, 65536, "int32"),
        (-1, 7, "int32"),
    ],
)
def test_rows_are_small_and_json_gives_the_same_array(least: int, highest: int, kind: str) -> None:
    rows = compact(np.array([[least, 0], [1, highest], [2, 3]], dtype=np.int32))
    assert rows.dtype == kind
    read = ExpertsRecord(**to_json(rows)).rows()
    assert read.dtype == rows.dtype
    assert np.array_equal(read, [[least, 0], [1, highest], [2, 3]])


@pytest.mark.parametrize(
    "wrong",
    [{"shape": [3, 3]}, {"dtype": "uint16"}, {"dtype": "float32"}, {"data": "AAA"}, {"data": "!"}],
)
def test_rows_that_do_not_fit_their_shape_are_refused(wrong: dict[str, Any]) -> None:
    record = to_json(compact(np.zeros((3, 2), dtype=np.int32)))
    with pytest.raises(ValidationError):
        ExpertsRecord(**{**record, **wrong})
