"""The slime adapter's `generate` against slime's own types where it is installed (`peers`), and
against a mirror of them.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.slime_mirror import train_data
from support.slime_trainer import (
    SAMPLING,
    every_sampled_token_is_as_served,
    real_slime,
    reference_lines,
    says,
    serving,
)

from toolroll.agents.trainable_agents import TrainableToolCallingAgent
from toolroll.rollout.adapters.slime import generate, keep_group, read_settings, to_samples
from toolroll.rollout.adapters.slime.player import Player
from toolroll.rollout.errors import UsageError
from toolroll.rollout.testing import (
    Fault,
    PolicyRequest,
    Reply,
    embedded_tokenizer_path,
)
from toolroll.rollout.types import InteractionResult, Status, StopReason

# --- generate -------------------------------------------------------------------------------------


async def test_a_sample_holds_what_was_served_and_sampled(sample_type: Any) -> None:
    async with serving() as (engine, args):
        asked = sample_type(
            index=5, group_index=1, prompt="0", label="L", metadata={"kept": 1}, session_id="s"
        )
        made = await generate(args, asked, dict(SAMPLING))
    assert made.status is sample_type.Status.COMPLETED and made.reward == 1.0
    assert (made.index, made.group_index, made.rollout_id, made.label, made.session_id) == (
        5,
        1,
        None,
        "L",
        "s",
    )
    assert made.metadata["kept"] == 1 and made.metadata["toolroll"]["stop_reason"] == "done"
    train_data([made])
    turns = [entry for entry in engine.log if entry.output_ids]
    assert len(turns) > 2 and {entry.routing_key for entry in turns} == {"s"}
    last = [*turns[-1].input_ids.tolist(), *turns[-1].output_ids]
    assert made.tokens == last
    cut = len(last) - made.response_length
    assert cut == len(turns[0].input_ids)
    mask, logprobs = [0] * len(last), [0.0] * len(last)
    for turn in turns:
        at = len(turn.input_ids)
        mask[at : at + len(turn.output_ids)] = [1] * len(turn.output_ids)
        logprobs[at : at + len(turn.output_ids)] = turn.logprobs
    assert made.loss_mask == mask[cut:]
    assert (
        made.rollout_log_probs == np.array(logprobs[cut:], dtype=np.float32).astype(float).tolist()
    )
    assert made.weight_versions == ["default"] * len(turns)
    assert made.prefix_cache_info.total_prompt_tokens == sum(len(turn.input_ids) for turn in turns)
    assert (
        asked.tokens == []
        and asked.reward is None
        and asked.prefix_cache_info.total_prompt_tokens == 0
    ), "the sample given was changed"


FILE = """
from toolroll import tool_environment

def make(word: str):
    task = {"prompt": "Say something.", "word": word}
    return tool_environment(
        tools=[], tasks=[task], reward=lambda task, final: float(task["word"] in final)
    )
"""


@pytest.mark.parametrize(("word", "reward"), [("o", 1.0), ("absent", 0.0)])
async def test_an_environment_of_a_file_is_played_with_its_arguments(
    sample_type: Any, tmp_path: Path, word: str, reward: float
) -> None:
    (tmp_path / "say.py").write_text(FILE)
    async with serving() as (_, args):
        args.toolroll_env = f"{tmp_path / 'say.py'}:make"
        args.toolroll_env_args = {"word": word}
        made = await generate(args, sample_type(prompt=0), dict(SAMPLING))
        assert made.reward == reward
        args.toolroll_env_args = {"wort": word}
        with pytest.raises(UsageError, match="there is no argument 'wort'; did you mean 'word'"):
            await generate(args, sample_type(prompt=0), dict(SAMPLING))


async def test_both_arities_and_evaluation(sample_type: Any) -> None:
    # slime passes evaluation by keyword, if the signature has it; miles calls with three arguments.
    assert "evaluation" in inspect.signature(generate).parameters
    async with serving() as (_, args):
        three = await generate(args, sample_type(prompt=0), dict(SAMPLING))
        four = await generate(args, sample_type(prompt=0), dict(SAMPLING), evaluation=True)
    assert three.reward == four.reward == 1.0


async def test_an_episode_that_failed_has_no_reward_and_a_zero_mask(sample_type: Any) -> None:
    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(status=400, body=b"no") if request.call == 1 else None

    async with serving(faults=faults) as (engine, args):
        args.toolroll_reruns = 0
        made = await generate(args, sample_type(prompt=0, index=1), dict(SAMPLING))
        args.toolroll_reruns = 1
        again = await generate(
            args, sample_type(prompt=0, index=1, session_id="other"), dict(SAMPLING)
        )
    assert (
        made.status is again.status is sample_type.Status.ABORTED
        and made.reward is None
        and made.remove_sample
    )
    assert (
        set(made.loss_mask) == {0}
        and len(made.loss_mask) == made.response_length == len(made.rollout_log_probs) > 1
    )
    assert made.metadata["toolroll"]["error"]["type"] == "EngineError"
    assert [entry.status for entry in engine.log if entry.routing_key == "other"].count(400) == 2, (
        "it was to be played once more"
    )


async def test_a_failure_before_the_first_token_still_makes_a_sample(sample_type: Any) -> None:
    async with serving(faults=lambda request: Fault(status=400)) as (engine, args):
        made = await generate(args, sample_type(prompt=0), dict(SAMPLING))
    assert made.response_length == 1 and made.loss_mask == [0] and made.rollout_log_probs == [0.0]
    assert made.tokens == engine.log[0].input_ids.tolist()
    nothing = InteractionResult(
        "", None, [], {}, status=Status.ABORTED, stop_reason=StopReason.USER_ERROR
    )
    [made] = to_samples(sample_type(index=0), nothing, filler=7)
    assert (made.tokens, made.response_length, made.loss_mask, made.remove_sample) == (
        [7, 7],
        1,
        [0],
        True,
    )


async def test_an_abort_by_the_engine_gives_back_an_aborted_sample(sample_type: Any) -> None:
    async with serving(
        faults=lambda request: Fault(abort_after=3) if request.call == 1 else None
    ) as (engine, args):
        made = await generate(args, sample_type(prompt=0), dict(SAMPLING))
    assert (
        made.status is sample_type.Status.ABORTED
        and made.reward is None
        and set(made.loss_mask) == {0}
    )
    assert len(engine.log) == 2, (
        "an abort is the trainer's will and is neither resumed nor played again"
    )


async def test_no_turn_begins_once_slime_stops_its_rollout(
    sample_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Namespace(aborted=False)
    module = ModuleType("slime.rollout.sglang_rollout")
    vars(module)["GenerateState"] = lambda args: state
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def policy(request: PolicyRequest) -> str:
        state.aborted = True
        return reference_lines(0)[request.call]

    async with serving(policy) as (engine, args):
        made = await generate(args, sample_type(prompt=0), dict(SAMPLING))
    assert made.status is sample_type.Status.ABORTED and len(engine.log) == 1


async def test_an_agent_with_its_own_call_llm_is_stopped_too(sample_type: Any) -> None:
    """Its requests are sent with `post`, not with `generate`."""

    class Calling(TrainableToolCallingAgent):
        async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
            return await super()._call_llm(url, payload)

    stopped = [False]

    def policy(request: PolicyRequest) -> str:
        stopped[0] = request.call == 1
        return reference_lines(0)[request.call]

    async with serving(policy) as (engine, args):
        player = Player(args, read_settings(args))
        player._episodes._make_agent = lambda model, settings: Calling(model=model)
        params = {"max_new_tokens": 256}
        asked = sample_type(prompt=0, index=0)
        [made] = await player.play(asked, params, stopped=lambda: stopped[0])
        await player.aclose()
    assert made.status is sample_type.Status.ABORTED and made.reward is None
    assert made.metadata["toolroll"]["stop_reason"] == "engine_abort"
    assert len(engine.log) == 2


@pytest.mark.parametrize("stopping", [False, True])
async def test_an_aborted_turn_is_resumed_unless_slime_stops_its_rollout(
    sample_type: Any, monkeypatch: pytest.MonkeyPatch, stopping: bool
) -> None:
    state = Namespace(aborted=False)
    module = ModuleType("slime.rollout.sglang_rollout")
    vars(module)["GenerateState"] = lambda args: state
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def faults(request: PolicyRequest) -> Fault | None:
        state.aborted = stopping
        return Fault(abort_after=3) if request.index == 0 else None

    async with serving(faults=faults) as (engine, args):
        args.toolroll_max_resumes = 1
        made = await generate(args, sample_type(prompt=0), dict(SAMPLING))
    first, *rest = engine.log
    if stopping:
        assert made.status is sample_type.Status.ABORTED and rest == []
    else:
        assert made.reward == 1.0
        assert rest[0].input_ids.tolist() == [*first.input_ids.tolist(), *first.output_ids]


async def test_a_response_is_refused_or_begun_anew(sample_type: Any) -> None:
    """slime's fully asynchronous rollout passes an aborted sample again, as `generate` gave it."""
    failing: list[bool] = []

    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(abort_after=3) if failing and failing.pop() else None

    async with serving(faults=faults) as (_, args):
        begun = sample_type(prompt=0, index=3, response="Hello", response_length=1, tokens=[1, 2])
        with pytest.raises(UsageError, match="sample 3 already has a response of 1 tokens"):
            await generate(args, begun, dict(SAMPLING))
        args.toolroll_partial = "restart"
        for partial in (True, False):
            args.partial_rollout = partial
            failing.append(True)
            asked = sample_type(prompt=0, index=3, metadata={"a": 1})
            cut = await generate(args, asked, dict(SAMPLING))
            assert cut.status is sample_type.Status.ABORTED and cut.reward is None
            assert not any(cut.loss_mask) and cut.remove_sample and len(cut) == 1
            cut.session_id = None  # the test's policy counts the turns of a session
            again = await generate(args, cut, dict(SAMPLING))
            assert again.reward == 1.0 and any(again.loss_mask) and not again.remove_sample
            assert again.metadata["a"] == 1 and again.index == 3
            assert again.metadata["toolroll"]["metrics"]["restarts"] == 1
            train_data(again)


@pytest.mark.peers
async def test_slime_s_own_loop_plays_our_generate(slime_loop: Any) -> None:
    """Groups as slime begins them, with a weight update in the middle of one, and what it makes
    of an aborted episode.
    """
    sample, filters = (
        real_slime("slime.utils.types").Sample,
        real_slime("slime.rollout.filter_hub.base_types"),
    )

    def policy(request: PolicyRequest) -> str | Reply:
        gives_up = request.routing_key[-1] in "13"
        return "I cannot help you. Goodbye." if gives_up else says()(request)

    def faults(request: PolicyRequest) -> Fault | None:
        if request.routing_key == "g1-3":
            return Fault(status=400)
        return (
            Fault(weight_version="2", switch_after=4)
            if request.routing_key == "g0-0" and request.call == 1
            else None
        )

    async with serving(policy, faults=faults, weight_version="1") as (engine, args):
        vars(args).update(
            hf_checkpoint=str(embedded_tokenizer_path()),
            custom_generate_function_path="toolroll.rollout.adapters.slime.generate",
            rollout_skip_special_tokens=False,
            mask_offpolicy_in_partial_rollout=False,
            custom_rm_path=None,
            sglang_dp_size=None,
        )
        groups = [
            [sample(prompt=0, index=4 * g + at, session_id=f"g{g}-{at}") for at in range(4)]
            for g in range(2)
        ]
        params = slime_loop.GenerateState(args).sampling_params
        played = await asyncio.gather(
            *(slime_loop.generate_and_rm_group(args, group, dict(params)) for group in groups)
        )
    first, second = played
    assert [made.reward for made in first] == [1.0, 0.0, 1.0, 0.0] and first[0].weight_versions[
        :3
    ] == ["1", "1", "2"]
    train_data(list(first))
    assert (
        second[3].status is sample.Status.ABORTED
        and second[3].reward is None
        and not any(second[3].loss_mask)
    )
    kept = [filters.call_dynamic_filter(keep_group, args, list(group)).keep for group in played]
    assert kept == [True, False]
    output = Namespace(samples=[list(first)])
    every_sampled_token_is_as_served([output], engine)
