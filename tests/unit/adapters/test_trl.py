"""The TRL adapter with the trainer's attributes that it reads (TRL 1.16.0); TRL's own trainer is in
tests/contract/test_trl.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.desk_episodes import ByTask, known_tasks
from support.trl_mirror import a_trainer, an_async_config
from support.trl_toy import weight_server

from toolroll.rollout.errors import EngineError, RolloutError, UsageError
from toolroll.testing import EmbeddedEngine, Fault, load_embedded_tokenizer, serve_in_thread
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.trl import async_rollouts, make_rollout_func, reward, weights_from_disk


@contextmanager
def rollouts(faults: Any = None, **settings: Any) -> Iterator[tuple[EmbeddedEngine, Any]]:
    embedded = EmbeddedEngine(load_embedded_tokenizer(), ByTask(mistakes=0.0), faults=faults)
    with serve_in_thread(embedded) as engine:
        rollout = make_rollout_func({"env": "desk", **settings}, engine=engine.url)
        yield engine, rollout
        rollout.close()


def test_the_parameters_and_the_columns_are_trl_s() -> None:
    task = known_tasks()[0]
    with rollouts() as (engine, rollout):
        line = {"index": task, "metadata": {"env": "desk", "split": "test"}}
        output = rollout([str(task), line], a_trainer(temperature=0.5, top_k=20))
    sent = engine.log[0].sampling_params
    assert (sent["temperature"], sent["top_k"], sent["max_new_tokens"]) == (0.5, 20, 4096)
    assert "min_p" not in sent
    first, second = output["completion_ids"]
    assert first == second and output["toolroll_reward"] == [1.0, 1.0]
    assert output["toolroll_left_out_tokens"] == [0, 0]
    assert set(output["toolroll_weight_versions"][0]) == {"default"}


def test_a_completion_is_cut_and_the_rest_is_counted() -> None:
    task = known_tasks()[0]
    with rollouts() as (_, rollout):
        whole = rollout([task], a_trainer())
        cut = rollout([task], a_trainer(max_completion_length=64))
    assert cut["completion_ids"][0] == whole["completion_ids"][0][:64]
    lost = sum(whole["env_mask"][0]) - sum(cut["env_mask"][0])
    assert cut["toolroll_left_out_tokens"] == [lost] and lost > 0
    assert len(cut["toolroll_weight_versions"][0]) < len(whole["toolroll_weight_versions"][0])


def test_an_aborted_episode_has_no_reward_and_a_zero_mask() -> None:
    faults = iter([Fault(status=400, body=b"no")])
    logged: dict[str, float] = {}
    with rollouts(lambda request: next(faults, None), reruns=0, concurrency=1) as (_, rollout):
        output = rollout(known_tasks()[:2], a_trainer())
    assert output["toolroll_status"][0] == "aborted" and sum(output["env_mask"][0]) == 0
    fields = {name: value for name, value in output.items() if name.startswith("toolroll_")}
    rewards = reward(completions=["", ""], log_metric=logged.__setitem__, **fields)
    assert rewards[0] is None and rewards[1] is not None
    assert logged["toolroll/aborted_share"] == 0.5


def test_a_batch_of_aborted_episodes_is_an_error() -> None:
    """Without an engine, for example, TRL would train on nothing."""
    problem = r"^all 2 episodes of the batch were aborted; the first one \(engine_error\): .*: no$"
    with (
        rollouts(lambda request: Fault(status=400, body=b"no"), reruns=0) as (_, rollout),
        pytest.raises(RolloutError, match=problem),
    ):
        rollout(known_tasks()[:2], a_trainer())


def test_weights_are_synced_once_for_each_step() -> None:
    calls: list[int] = []
    trainer = a_trainer()
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), ByTask())) as engine:
        rollout = make_rollout_func(
            EpisodeSettings(env="desk"),
            engine=engine.url,
            sync_weights=lambda given: calls.append(given.state.global_step),
        )
        for step in (0, 0, 1):
            trainer.state.global_step = step
            rollout([known_tasks()[0]], trainer)
        rollout.close()
    assert calls == [0, 1]


@pytest.mark.parametrize("success", [True, False])
def test_weights_go_through_a_folder(tmp_path: Path, success: bool) -> None:
    saved: list[str] = []
    trainer = a_trainer()
    trainer.save_model = saved.append
    status = {} if success else {"/update_weights_from_disk": 400}
    with weight_server(status, success=success) as (url, requests):
        sync = weights_from_disk([url], tmp_path)
        with nullcontext() if success else pytest.raises(EngineError, match="too large"):
            sync(trainer)
    assert saved == [str(tmp_path)]
    body = {"model_path": str(tmp_path), "weight_version": "0"}
    assert requests == [("/update_weights_from_disk", body)]


def test_a_peft_adapter_is_not_saved_as_a_whole_model(tmp_path: Path) -> None:
    saved: list[str] = []
    trainer = a_trainer()
    trainer.save_model, trainer.model.peft_config = saved.append, {"default": object()}
    with pytest.raises(UsageError, match="PEFT adapter"):
        weights_from_disk(["http://127.0.0.1:1"], tmp_path)(trainer)
    assert not saved


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env": "dsk"}, "there is no environment named 'dsk'; did you mean 'desk'"),
        ({"env": "none.py:env"}, "none.py"),
        ({"env": "desk", "split": "tset"}, "desk has no split 'tset'; it has test, "),
        ({"env": "desk", "agent": "tool-caling"}, "there is no agent named 'tool-caling'"),
        ({"env": "desk", "user": "opnai"}, "there is no user simulator named 'opnai'"),
        ({"env": "desk", "user_settings": {"model": "m"}}, "user_settings is set, but user does"),
        ({"env": "desk", "parser": "hermez"}, "EpisodeSettings: parser: .*did you mean 'hermes'"),
        ({"env": "desk", "max_turn": 3}, "max_turn"),
    ],
)
def test_what_does_not_exist_is_refused_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as made:
        make_rollout_func(settings, engine="http://127.0.0.1:1")
    with pytest.raises(UsageError, match=words):
        config = an_async_config()
        async_rollouts(config, settings, model="embedded", prompts=["3"], weights="/nowhere")
    assert "--" not in str(made.value)


def test_what_cannot_be_played_is_refused() -> None:
    """With tools, TRL's own loop runs after the episode, and env_mask is not read."""
    with_tools = a_trainer()
    with_tools.tools = [print]
    with rollouts() as (engine, rollout):
        for prompt, trainer, words in (
            ("What is 2 + 2?", a_trainer(), "a prompt must be a task's index"),
            ("0", with_tools, "drop env_mask"),
            ("0", a_trainer(vllm_structured_outputs_regex="a+"), "structured_outputs_regex has no"),
        ):
            with pytest.raises(UsageError, match=words):
                rollout([prompt], trainer)
        assert not engine.log
