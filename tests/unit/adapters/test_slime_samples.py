"""The slime adapter's `generate` against slime's own types where it is installed (`peers`), and
against a mirror of them; images, which slime and miles get, and other trainers refuse.
"""

import inspect
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import vision
from support.forked_episodes import result_of, sequence
from support.http import router_over
from support.listed_environment import ListedWorld
from support.slime_mirror import train_data
from support.slime_trainer import (
    every_sampled_token_is_as_served,
    fields_of,
    play,
    reference_lines,
    serving,
)

from toolroll.agents.trainable_agents import TrainableToolCallingAgent
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import TokenError, UsageError
from toolroll.rollout.types import Completion, GenerateRequest, Status, StopReason, Trajectory
from toolroll.testing import Fault, PolicyRequest, fault_at
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.parking import ParkableEpisode
from toolroll.trainers.sequences import select_sequences
from toolroll.trainers.slime import SlimeSettings, generate, read_settings, to_samples
from toolroll.trainers.slime.player import Player


async def test_a_sample_holds_what_was_served_and_sampled(sample_type: Any) -> None:
    given = {"index": 5, "group_index": 1, "label": "L", "session_id": "s"}
    sample = sample_type(prompt="0", metadata={"kept": 1}, **given)
    unchanged = repr(sample)
    async with serving() as (engine, args):
        played = await play(args, sample)
        first_only = await play(args, sample_type(prompt=0), evaluation=True)
    turns = [entry for entry in engine.log if entry.routing_key == "s" and entry.output_ids]
    whole = [*turns[-1].input_ids.tolist(), *turns[-1].output_ids]
    expected = given | {
        "rollout_id": None,
        "status": sample_type.Status.COMPLETED,
        "reward": 1.0,
        "tokens": whole,
        "response_length": len(whole) - len(turns[0].input_ids),
        "weight_versions": ["default"] * len(turns),
    }
    assert fields_of(played, expected) == expected
    assert played.metadata["kept"] == 1 and played.metadata["toolroll"]["stop_reason"] == "done"
    assert len(turns) > 2 and sum(played.loss_mask) == sum(len(turn.output_ids) for turn in turns)
    assert played.prefix_cache_info.total_prompt_tokens == sum(len(t.input_ids) for t in turns)
    train_data([played])
    every_sampled_token_is_as_served([Namespace(samples=[[played]])], engine)
    assert repr(sample) == unchanged
    # slime passes `evaluation` by keyword, if the signature has it; miles calls without it.
    assert "evaluation" in inspect.signature(generate).parameters
    assert isinstance(first_only, sample_type) and first_only.reward == 1.0


async def test_the_samples_of_a_group_share_a_routing_key(sample_type: Any) -> None:
    numbers = {"a": (3, 13), "b": (3, 14), "c": (4, 16), "d": (None, 17)}
    async with serving() as (engine, args), router_over(engine.url) as url:
        args.sglang_router_port, args.toolroll_affinity = int(url.rpartition(":")[2]), 4
        for session, (group, index) in numbers.items():
            sample = sample_type(index=index, group_index=group, prompt="0", session_id=session)
            assert (await play(args, sample)).session_id == session
    keys = list(dict.fromkeys(entry.routing_key for entry in engine.log if entry.output_ids))
    assert keys == ["group 3/3", "group 4/4", "d"]


def refused(call: int) -> Any:
    """Faults that refuse each request in turn `call`."""
    return lambda request: Fault(status=400, body=b"no") if request.call == call else None


ABORTED_FIRST = fault_at({0: Fault(abort_after=3)})


FAILED: dict[str, tuple[Any, int, bool, str | None, int, bool]] = {
    "refused turn": (refused(1), 0, False, "EngineError", 2, True),
    "refused twice": (refused(1), 1, False, "EngineError", 3, False),
    "refused at once": (refused(0), 0, False, "EngineError", 1, False),
    "aborted turn of a stop": (ABORTED_FIRST, 1, True, None, 1, True),
}
"""Faults, reruns, whether slime stops, the error, the requests, and whether ids were sampled."""


@pytest.mark.parametrize("name", FAILED)
async def test_failures_are_aborted_samples(sample_type: Any, slime_state: Any, name: str) -> None:
    """It has no reward and a zero mask, and at least one token in its response."""
    faults, reruns, stops, error, requests, is_sampled = FAILED[name]

    def stopping(request: PolicyRequest) -> Any:
        slime_state.aborted = stops
        return faults(request)

    async with serving(faults=stopping) as (engine, args):
        args.toolroll_reruns = reruns
        played = await play(args, sample_type(prompt=0, index=1))
    assert len(engine.log) == requests
    expected = {"status": sample_type.Status.ABORTED, "reward": None, "remove_sample": True}
    assert fields_of(played, expected) == expected
    assert played.metadata["toolroll"].get("error", {}).get("type") == error
    assert len(played.loss_mask) == len(played.rollout_log_probs) == played.response_length
    assert not any(played.loss_mask)
    if is_sampled:
        assert played.response_length > 1
    else:
        prompt = engine.log[0].input_ids.tolist()
        assert (played.tokens, played.response_length) == (prompt, 1)
        assert played.rollout_log_probs == [0.0]


async def test_an_aborted_turn_is_resumed(sample_type: Any, slime_state: Namespace) -> None:
    """Unless slime stops its rollout."""
    async with serving(faults=ABORTED_FIRST) as (engine, args):
        args.toolroll_max_resumes = 1
        assert (await play(args, sample_type(prompt=0))).reward == 1.0
    first, second, *_ = engine.log
    assert second.input_ids.tolist() == [*first.input_ids.tolist(), *first.output_ids]


async def test_an_agent_with_its_own_call_llm_is_stopped_too(sample_type: Any) -> None:
    """Its requests are sent with `post`, not with `generate`."""

    class OwnRequests(TrainableToolCallingAgent):
        async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
            return await super()._call_llm(url, payload)

    stopped = [False]

    def policy(request: PolicyRequest) -> str:
        stopped[0] = request.call == 1
        return reference_lines(0)[request.call]

    async with serving(policy) as (engine, args):
        player = Player(args, read_settings(args))
        player._episodes._make_agent = lambda model, settings: OwnRequests(model=model)
        [played] = await player.play(
            sample_type(prompt=0, index=0), {"max_new_tokens": 256}, stopped=lambda: stopped[0]
        )
        await player.aclose()
    assert played.status is sample_type.Status.ABORTED and played.reward is None
    assert played.metadata["toolroll"]["stop_reason"] == "engine_abort"
    assert len(engine.log) == 2


def plain(**more: Any) -> Trajectory:
    """A prompt of three tokens and a turn of three."""
    return sequence((3, 6, None), length=6, **more)


def test_forks_are_siblings_with_one_rollout_id(sample_type: Any) -> None:
    rewritten = sequence((5, 9, None), length=9, fork_reason="the template rewrote history")
    metrics = {"prompt_tokens": 10.0, "cached_tokens": 4.0}
    result = result_of(1.0, plain(), rewritten, metrics=metrics)
    sample = sample_type(index=17, group_index=2, prompt="4")
    siblings = to_samples(sample, result)
    names = "rollout_id group_index reward response_length rollout_log_probs"
    assert [list(fields_of(sibling, names).values()) for sibling in siblings] == [
        [17, 2, 1.0, 3, [-1.0] * 3],
        [17, 2, 1.0, 4, [-1.0] * 4],
    ]
    assert [sibling.prefix_cache_info.total_prompt_tokens for sibling in siblings] == [10, 0]
    assert to_samples(sample_type(index=17, rollout_id=99), result)[1].rollout_id == 99
    assert to_samples(sample, result_of(1.0, plain()))[0].rollout_id is None
    with pytest.raises(UsageError, match="neither rollout_id nor index"):
        to_samples(sample_type(), result)
    [keyed] = to_samples(sample, result_of(1.0, plain()), reward_key="score")
    assert keyed.get_reward_value(Namespace(reward_key="score")) == 1.0


def test_what_may_not_be_trained_is_removed(sample_type: Any) -> None:
    excluded = sequence((3, 6, "invalid"), length=6)
    [removed] = to_samples(sample_type(index=0), result_of(1.0, excluded))
    assert removed.remove_sample and removed.reward == 1.0
    counts = removed.prefix_cache_info
    assert (counts.cached_tokens, counts.total_prompt_tokens) == (0, 0), "without metrics"
    nothing = InteractionResult(
        "", None, [], {}, status=Status.ABORTED, stop_reason=StopReason.USER_ERROR
    )
    [filled] = to_samples(sample_type(index=0), nothing, filler=7)
    expected = {"tokens": [7, 7], "response_length": 1, "loss_mask": [0], "remove_sample": True}
    assert fields_of(filled, expected) == expected
    with pytest.raises(UsageError, match="transcript"):
        to_samples(sample_type(index=0), result_of(1.0, plain(source="transcript")))


async def test_limits_and_the_collector_are_settings() -> None:
    given = {
        "engine_timeout": 9, "pace_gc": False, "step_timeout": 7, "max_observation_bytes": 50,
    }  # fmt: skip
    limits = []
    async with serving() as (_, args):
        for settings in ({}, given):
            vars(args).update({f"toolroll_{name}": value for name, value in settings.items()})
            player: Any = Player(args, read_settings(args))
            agent = player._episodes._make_agent(player.model, player.settings.agent_settings)
            size = agent.rollout_args["max_observation_bytes"]
            engine_timeout = player.model.engine.config.engine_timeout
            limits.append((engine_timeout, player.model.args.pace_gc, agent.step_timeout, size))
            await player.aclose()
    assert limits == [(0.0, True, None, 1_000_000), (9.0, False, 7.0, 50)]


@pytest.mark.parametrize(
    ("settings", "sample", "words"),
    [
        ({"toolroll_evn": "desk"}, {}, "did you mean 'toolroll_env'"),
        ({"toolroll_max_turns": 0}, {}, "toolroll_max_turns"),
        ({"toolroll_zzz": 1}, {},
         "there are toolroll_affinity, toolroll_agent, toolroll_agent_args"),
        ({"toolroll_env": None}, {}, "no environment is named"),
        ({"toolroll_user_settings": {"model": "m"}}, {}, "toolroll_user does not say"),
        ({"rollout_top_p": 0.9}, {}, "--rollout-top-p"),
        ({}, {"prompt": "hello"}, "--input-key index"),
        ({}, {"prompt": [{"role": "user"}]}, "--input-key"),
        ({}, {"prompt": 999}, "has tasks 0 to 32"),
        ({}, {"prompt": -1}, "tasks 0"),
        ({}, {"response": "Hello", "response_length": 1, "tokens": [1, 2]},
         "sample 3 already has a response of 1 tokens"),
    ],
)  # fmt: skip
async def test_what_cannot_be_played_is_refused_in_words(
    sample_type: Any, settings: dict[str, Any], sample: dict[str, Any], words: str
) -> None:
    async with serving() as (engine, args):
        vars(args).update(settings)
        with pytest.raises(UsageError, match=words):
            await play(args, sample_type(**{"prompt": 0, "index": 3, **sample}))
        assert engine.log == []


def test_settings_are_documented_and_refused_before_a_job() -> None:
    page = (Path(__file__).parents[3] / "docs" / "slime.md").read_text(encoding="utf-8")
    for name in SlimeSettings.model_fields.keys() - EpisodeSettings.model_fields.keys():
        assert f"`toolroll_{name}`" in page, name  # docs/settings.md has the others
    others = {
        "other": 1,
        "seed": 1,
        "split": "969,30,1",
        "chat_template": "x",
        "max_turns": 3,
        "env_args": None,
        "temperature": 1.0,
        "samples": 2,
    }
    named = Namespace(toolroll_env="desk", toolroll_max_turns=8, toolroll_verify=False, **others)
    assert read_settings(named) == SlimeSettings(env="desk", max_turns=8, verify="off")  # as YAML
    policy = {"toolroll_env": "desk", "toolroll_env_args": {"polcy": "brief"}}
    for given, words in (
        (policy, "only the setting policy"),
        ({"toolroll_chat_template": "none.jinja"}, "'none.jinja' is neither a file nor Jinja text"),
        ({"toolroll_agent": "program"}, "needs either a command or a harbor_agent"),
        (
            {"toolroll_user": "openai", "toolroll_user_settings": {"modl": "x"}},
            "base_url: must be given; model: must be given; modl: is not a setting",
        ),
        ({"toolroll-max-turns": 8}, "did you mean 'toolroll_max_turns'"),
        ({"toolroll-engine": "http://e:1"}, "toolroll-engine .* use slime's --sglang-router-ip"),
        ({"toolroll-max-turn": 8}, "did you mean 'toolroll_max_turns'"),
        ({"toolroll_engine": "http://e:1"}, "use slime's --sglang-router-ip and --sglang-router-p"),
        ({"toolroll_samples": 4}, "toolroll_samples .* use slime's --n-samples-per-prompt instead"),
        ({"toolroll_episode_timeout": 9}, "only `toolroll run` has episode_timeout"),
    ):
        with pytest.raises(UsageError, match=words):
            EpisodeSettings.checked(read_settings(Namespace(**given)))


def test_a_setting_without_the_prefix_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Other code may read it."""
    for args in {"max_turns": 3}, {"max_turns": 4}, {"user": "x", "toolroll_user": None}:
        assert read_settings(Namespace(**args)) == SlimeSettings()
    [message] = caplog.messages
    assert "max_turns has no effect on toolroll: write toolroll_max_turns" in message


# --- images ---------------------------------------------------------------------------------------


async def episode() -> InteractionResult:
    return (await vision.play(ListedWorld(**vision.WORLD)))[0]


async def test_a_sample_has_the_inputs_of_its_images(sample_type: Any) -> None:
    """With text alone, it has none."""
    images = vision.image_tokens(vision.vision_tokenizer())
    result, _ = await vision.play(ListedWorld(), lambda request: "Yes.")
    before = sample_type(index=0)
    before.multimodal_train_inputs = {"pixel_values": 1}  # of an earlier attempt
    assert to_samples(before, result, images=images)[0].multimodal_train_inputs is None
    pytest.importorskip("torch")
    result = await episode()
    [sample] = to_samples(sample_type(index=0), result, images=images)
    media, inputs = result.trajectories[0].media, sample.multimodal_train_inputs
    patches = [4 * image.count for image in media]
    assert inputs["image_grid_thw"].prod(-1).tolist() == patches
    assert len(inputs["pixel_values"]) == sum(patches)
    assert sample.tokens.count(images.placeholder) == sum(image.count for image in media)


async def test_each_sample_of_a_fork_has_the_images_of_its_own_prompt(sample_type: Any) -> None:
    pytest.importorskip("torch")
    source = vision.vision_tokenizer().chat_template.replace(
        "{{- message.content }}", "{{- message.content.split('</think>')[-1] }}"
    )
    users = [vision.shown("One.", 1), vision.shown("Two.", 2)]
    result, _ = await vision.play(
        ListedWorld(user_texts=users), lambda request: "<think>I</think>A.", chat_template=source
    )
    images = vision.image_tokens(vision.vision_tokenizer())
    samples = to_samples(sample_type(index=0), result, images=images)
    assert [len(one.multimodal_train_inputs["image_grid_thw"]) for one in samples] == [1, 2]


async def test_other_images_are_refused(sample_type: Any) -> None:
    pytest.importorskip("torch")
    result = await episode()
    images, [trajectory] = vision.image_tokens(vision.vision_tokenizer()), result.trajectories
    for changes, error in (({"url": ""}, UsageError), ({"count": 1}, TokenError)):
        media = tuple(replace(image, **changes) for image in trajectory.media)
        other = replace(result, trajectories=(replace(trajectory, media=media),))
        with pytest.raises(error):
            to_samples(sample_type(index=0), other, images=images)
    for convert in (lambda: to_samples(sample_type(index=0), result),
                    lambda: select_sequences(result, several=True)):  # fmt: skip
        with pytest.raises(UsageError, match="this trainer takes none"):
            convert()


async def test_a_parked_episode_has_its_images() -> None:
    [trajectory] = (await episode()).trajectories
    turn = trajectory.turns[0]
    request = GenerateRequest(trajectory.input_ids[: turn.start], {}, "s", images=trajectory.media)
    parked = ParkableEpisode("s", lambda: False)
    aborted = Completion(trajectory.input_ids[turn.start : turn.stop], None, "abort")
    parked._aborted = request, aborted
    assert parked.so_far(lambda ids: "").trajectories[0].media == trajectory.media
