"""The verl adapter without verl, on a mirror of its server manager (verl 0.9.1); verl's own worker
is in tests/contract/test_verl.py.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from support import verl_mirror
from support.closing import NAME
from support.desk_episodes import ByTask, known_tasks
from support.forked_episodes import episode, result_of, sequence
from support.verl_mirror import Servers, TokenOutput, loop_arguments
from support.vocabulary import Vocabulary

from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import CompletionError, RolloutError, UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.settings import RolloutArgs
from toolroll.rollout.types import GenerateRequest, StopReason
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer
from toolroll.trainers.episodes import EpisodePlayer, why_aborted
from toolroll.trainers.verl import (
    ServerEngine,
    ToolrollAgentLoop,
    VerlSettings,
    agent_loop,
    to_fields,
)

SAMPLING = {"max_new_tokens": 256, "temperature": 1.0}


def engine_of(manager: Any, backend: Any = "vllm", context: int = 64, size: int = 64) -> Any:
    return ServerEngine(manager, Vocabulary(size), backend=backend, context_length=context)


@asynccontextmanager
async def playing(
    backend: str = "sglang", **servers: Any
) -> AsyncIterator[tuple[Servers, EpisodePlayer]]:
    tokenizer = load_embedded_tokenizer()
    async with EmbeddedEngine(tokenizer, ByTask(mistakes=0.0)) as engine:
        manager = Servers(engine.url, vllm=backend == "vllm", **servers)
        wrapped = engine_of(manager, backend, 8192, len(tokenizer))
        model = Model.from_args(RolloutArgs(), tokenizer=tokenizer, engine=lambda config: wrapped)
        player = EpisodePlayer(model, VerlSettings(env="desk", reruns=0))
        yield manager, player
        await player.aclose()


@pytest.fixture
async def loop_of(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Make an agent loop of a server manager. verl's worker keeps its player as long as its
    process.
    """
    verl_mirror.install(monkeypatch)

    def make(manager: Any, *, settings: Any = None, estimator: str = "grpo", **rollout: Any) -> Any:
        given = loop_arguments(manager, load_embedded_tokenizer(), **rollout)
        given["trainer_config"].config.algorithm.adv_estimator = estimator
        return ToolrollAgentLoop(**given, settings={"env": "desk", **(settings or {})})

    yield make
    for player in agent_loop._players.pop():
        await player.aclose()


async def an_episode(player: EpisodePlayer) -> InteractionResult:
    return await player.play(known_tasks()[0], SAMPLING, session_id="s")


def extra(row: dict[str, Any]) -> dict[str, float]:
    numbers: dict[str, float] = row["extra_fields"]["reward_extra_info"]
    return numbers


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
async def test_the_response_is_cut_and_a_long_prompt_continues_in_it(backend: str) -> None:
    """vLLM has other names for parameters."""
    async with playing(backend) as (servers, player):
        result = await an_episode(player)
    [whole] = to_fields(result, prompt_length=8192, response_length=8192)
    assert (whole["reward_score"], whole["extra_fields"]["min_global_steps"]) == (1.0, 3)
    assert ("max_tokens" in servers.seen[0]) == (backend == "vllm")
    [cut] = to_fields(result, prompt_length=8192, response_length=64)
    assert cut["response_ids"] == whole["response_ids"][: len(cut["response_ids"])]
    assert 64 - len(cut["response_ids"]) == whole["response_mask"][:64][::-1].index(1)
    lost = sum(whole["response_mask"]) - sum(cut["response_mask"])
    assert extra(cut)["toolroll_left_out_tokens"] == lost > 0
    [long] = to_fields(result, prompt_length=32, response_length=8192)
    assert long["prompt_ids"] == whole["prompt_ids"][:32]
    moved = whole["prompt_ids"][32:]
    assert long["response_ids"] == moved + whole["response_ids"]
    assert long["response_mask"] == [0] * len(moved) + whole["response_mask"]
    assert long["response_logprobs"] == [0.0] * len(moved) + whole["response_logprobs"]


def test_of_a_fork_the_most_trained_within_the_limits_is_given() -> None:
    """The longer one was chosen, though the limits left less of it."""
    forks = (sequence((5, 8, None), length=8), sequence((40, 50, None), length=50))
    cases = (64, 64, 1, 10), (16, 64, 1, 10), (16, 30, 1, 6), (64, 2, 0, 2), (4, 20, 0, 3)
    for prompt, response, chosen, trained in cases:
        [row] = to_fields(result_of(1.0, *forks), prompt_length=prompt, response_length=response)
        assert len(row["prompt_ids"]) == min(prompt, forks[chosen].prompt_length)
        assert sum(row["response_mask"]) == trained
        assert extra(row)["toolroll_left_out_tokens"] == 13 - trained


def test_a_trainer_that_takes_several_gets_all_of_a_fork() -> None:
    result = episode(1.0, forked=True)
    rows = to_fields(result, prompt_length=64, response_length=64, several=True)
    assert [sum(row["response_mask"]) for row in rows] == [4, 6]
    assert [row["reward_score"] for row in rows] == [1.0, 1.0]
    assert [extra(row)["toolroll_delivered_share"] for row in rows] == [1.0, 1.0]
    [row] = to_fields(result, prompt_length=64, response_length=64)
    assert extra(row)["toolroll_delivered_share"] == 0.6


@pytest.mark.parametrize(
    ("estimator", "row", "several"),
    [("grpo", {"session_id": 0}, True), ("grpo", {}, False), ("rloo", {"session_id": 0}, False)],
)
async def test_a_list_is_returned_only_where_it_counts_once(
    estimator: str, row: dict[str, Any], several: bool, loop_of: Any
) -> None:
    async with playing() as (servers, _):
        loop = loop_of(servers, estimator=estimator, settings={"parser": "hermes"})
        output = await loop.run(dict(SAMPLING), extra_info={"index": known_tasks()[0]}, **row)
    assert isinstance(output, list) is several


async def test_why_an_episode_was_aborted(loop_of: Any) -> None:
    """One that the engine aborts has no error, and the message of none was read."""
    loop = loop_of(Says(token_ids=[], log_probs=[], stop_reason="aborted"))
    with pytest.raises(RolloutError, match="task 0 was aborted: engine_abort"):
        await loop.run({}, extra_info={"index": 0})
    result = InteractionResult("", None, [], {}, stop_reason=StopReason.ENGINE_ABORT)
    assert why_aborted(result) == "engine_abort"
    result.info["error"] = {"type": "EngineError", "message": "no answer"}
    assert why_aborted(result) == "no answer"
    result.info["error"] = "an agent's own text"
    assert why_aborted(result) == "engine_abort"


async def test_an_episode_without_logprobs_is_aborted_with_a_zero_mask() -> None:
    async with playing(without_logprobs=True) as (_, player):
        result = await an_episode(player)
    [row] = to_fields(result, prompt_length=8192, response_length=8192)
    assert row["extra_fields"]["toolroll_status"] == "aborted"
    assert "0 logprobs for" in result.info["error"]["message"]
    assert extra(row)["toolroll_aborted"] == 1.0
    assert sum(row["response_mask"]) == 0 and row["reward_score"] == 0.0
    assert len(row["response_ids"]) == len(row["response_logprobs"]) >= 1


class Says:
    """A server manager that always gives `output`."""

    def __init__(self, **output: Any) -> None:
        self._output = TokenOutput(**output)

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        return self._output


def request(**params: Any) -> GenerateRequest:
    given = {"max_new_tokens": 2, "stop_token_ids": [9], **params}
    return GenerateRequest(np.array([1, 2], dtype=np.int32), given, "s")


async def test_the_turn_of_a_server() -> None:
    """Its stop reason, and both of two steps as its version."""
    turns: list[tuple[list[int], str | None, str, int | None]] = [
        ([4, 9], "completed", "stop", 9),
        ([4, 5], "completed", "length", None),
        ([9], None, "stop", 9),
        ([4], "aborted", "abort", None),
        ([], "abort", "abort", None),
        ([4, 5], "length", "length", None),
    ]
    for ids, given, reason, matched in turns:
        manager = Says(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason=given)
        turn = await engine_of(manager).generate(request())
        assert (turn.finish_reason, turn.matched, turn.weight_versions) == (reason, matched, ())
    steps = {"min_global_steps": 2, "max_global_steps": 3, "global_steps": None}
    manager = Says(token_ids=[9], log_probs=[-1.0], stop_reason="stop", extra_fields=steps)
    assert (await engine_of(manager, "sglang").generate(request())).weight_version == "2-3"
    nothing = Says(token_ids=[], log_probs=[], stop_reason="stop")
    with pytest.raises(CompletionError, match="gave no tokens"):
        await engine_of(nothing).generate(request())


async def test_settings_of_verl_count_or_are_refused(loop_of: Any) -> None:
    for own, turns in (({}, 5), ({"max_turns": 7}, 7)):
        loop = loop_of(Says(token_ids=[9]), multi_turn={"max_assistant_turns": 5}, settings=own)
        assert loop.player.settings.max_turns == turns
    tools = {"multi_turn": {"tool_config_path": "tools.yaml"}}
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (tools, {}, r"multi_turn.tool_config_path is 'tools.yaml'.* at None"),
        ({"name": "trtllm"}, {}, "rollout.name=trtllm"),
        ({}, {"split": "tset"}, "desk has no split 'tset'"),
    ]
    for rollout, settings, words in refused:
        with pytest.raises(UsageError, match=words):
            loop_of(Says(token_ids=[9]), settings=settings, **rollout)


ROWS: list[dict[str, Any]] = [
    {"index": 0, "metadata": {"env": "desk", "split": "test"}},
    {"index": 0, "env": None, "split": None, "metadata": {"env": "desk", "split": "test"}},
    {"index": 0, "env": "desk", "split": "test", "metadata": {"env": "no", "split": "no"}},
    {"index": 0, "env": "desk", "metadata": {"split": "test"}},
    {"metadata": {"index": 0, "env": "desk"}},
    {"index": 0, "env": "desk", "metadata": None},
]


async def test_a_row_names_its_task_in_extra_info(loop_of: Any) -> None:
    """What is directly in `extra_info` wins over its metadata, and both over the settings."""
    async with EmbeddedEngine(load_embedded_tokenizer(), ByTask()) as engine:
        loop = loop_of(Servers(engine.url), settings={"env": NAME})
        outputs = [await loop.run({}, extra_info=row, raw_prompt=[]) for row in ROWS]
    assert {output.extra_fields["toolroll_status"] for output in outputs} == {"completed"}
    [prompt] = {load_embedded_tokenizer().decode(output.prompt_ids) for output in outputs}
    assert "Task 0." not in prompt, "the settings' environment was played"
    with pytest.raises(UsageError, match=r"extra_info\.metadata must be a mapping"):
        await loop.run({}, extra_info={"index": 0, "metadata": "{}"})
