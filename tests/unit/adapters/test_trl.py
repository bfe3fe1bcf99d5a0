"""The TRL adapters with what they read of TRL's objects (1.16.0), and the parts for TRL's
asynchronous trainer. TRL's own trainers are in tests/contract/test_trl.py.
"""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.client import Pauses
from support.desk_episodes import ByTask, known_tasks
from support.forked_episodes import result_of, sequence, versioned
from support.qwen import tokenizer_for, trl_template
from support.trl_mirror import a_trainer, an_async_config
from support.trl_toy import weight_server

from toolroll.rollout.engine import Engine
from toolroll.rollout.errors import EngineError, RolloutError, UsageError
from toolroll.rollout.model.model import Model
from toolroll.testing import (
    EmbeddedEngine,
    Fault,
    PolicyRequest,
    Reply,
    load_embedded_tokenizer,
    serve_in_thread,
)
from toolroll.trainers.episodes import EpisodePlayer, EpisodeSettings
from toolroll.trainers.trl import async_rollouts, make_rollout_func, reward, weights_from_disk
from toolroll.trainers.trl.loop import Channels, Groups, Job
from toolroll.trainers.trl.rows import Row, group_rows
from toolroll.trainers.trl.weights import DiskTransfer

REFUSED = Fault(status=400, body=b"no such thing")


@contextmanager
def rollouts(
    faults: Any = None, sync_weights: Any = None, **settings: Any
) -> Iterator[tuple[EmbeddedEngine, Any]]:
    embedded = EmbeddedEngine(load_embedded_tokenizer(), ByTask(mistakes=0.0), faults=faults)
    with serve_in_thread(embedded) as engine:
        given: dict[str, Any] = {"engine": engine.url, "sync_weights": sync_weights}
        rollout = make_rollout_func({"env": "desk", **settings}, **given)
        yield engine, rollout
        rollout.close()


# --- a rollout function ---------------------------------------------------------------------------


def test_the_parameters_and_the_columns_are_trl_s() -> None:
    """A completion is cut, and the rest is counted."""
    task = known_tasks()[0]
    with rollouts() as (engine, rollout):
        line = {"index": task, "metadata": {"env": "desk", "split": "test"}}
        whole = rollout([str(task), line], a_trainer(temperature=0.5, top_k=20))
        sent = engine.log[0].sampling_params
        cut = rollout([task], a_trainer(max_completion_length=64))
    assert (sent["temperature"], sent["top_k"], sent["max_new_tokens"]) == (0.5, 20, 4096)
    assert "min_p" not in sent
    first, second = whole["completion_ids"]
    assert first == second and whole["toolroll_reward"] == [1.0, 1.0]
    assert whole["toolroll_left_out_tokens"] == [0, 0]
    assert set(whole["toolroll_weight_versions"][0]) == {"default"}
    assert cut["completion_ids"][0] == first[:64]
    lost = sum(whole["env_mask"][0]) - sum(cut["env_mask"][0])
    assert cut["toolroll_left_out_tokens"] == [lost] and lost > 0
    assert len(cut["toolroll_weight_versions"][0]) < len(whole["toolroll_weight_versions"][0])


def test_an_aborted_episode_has_no_reward_and_a_zero_mask() -> None:
    faults = iter([REFUSED])
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
    problem = r"^all 2 episodes of the batch were aborted; the first one \(engine_error\): .*: no"
    with (
        rollouts(lambda request: REFUSED, reruns=0) as (_, rollout),
        pytest.raises(RolloutError, match=f"{problem} such thing$"),
    ):
        rollout(known_tasks()[:2], a_trainer())


def test_weights_are_synced_once_for_each_step() -> None:
    calls: list[int] = []
    trainer = a_trainer()
    with rollouts(sync_weights=lambda given: calls.append(given.state.global_step)) as (_, rollout):
        for number in (0, 0, 1):
            trainer.state.global_step = number
            rollout([known_tasks()[0]], trainer)
    assert calls == [0, 1]


@pytest.mark.parametrize("success", [True, False])
def test_weights_go_through_a_folder(tmp_path: Path, success: bool) -> None:
    """A PEFT adapter is not saved as a whole model."""
    saved: list[str] = []
    trainer = a_trainer()
    trainer.save_model = saved.append
    status = {} if success else {"/update_weights_from_disk": 400}
    with weight_server(status, success=success) as (url, requests):
        sync = weights_from_disk([url], tmp_path)
        with nullcontext() if success else pytest.raises(EngineError, match="too large"):
            sync(trainer)
        trainer.model.peft_config = {"default": object()}
        with pytest.raises(UsageError, match="PEFT adapter"):
            sync(trainer)
    assert saved == [str(tmp_path)]
    body = {"model_path": str(tmp_path), "weight_version": "0"}
    assert requests == [("/update_weights_from_disk", body)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env": "dsk"}, "there is no environment named 'dsk'; did you mean 'desk'"),
        ({"env": "desk", "split": "tset"}, "desk has no split 'tset'; it has test, "),
        ({"env": "desk", "agent": "tool-caling"}, "there is no agent named 'tool-caling'"),
        ({"env": "desk", "user": "opnai"}, "there is no user simulator named 'opnai'"),
        ({"env": "desk", "parser": "hermez"}, "EpisodeSettings: parser: .*did you mean 'hermes'"),
    ],
)
def test_what_does_not_exist_is_refused_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        make_rollout_func(settings, engine="http://127.0.0.1:1")
    with pytest.raises(UsageError, match=words):
        config = an_async_config()
        async_rollouts(config, settings, model="embedded", prompts=["3"], weights="/nowhere")
    assert "--" not in str(caught.value)


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


# --- the asynchronous trainer: rows ---------------------------------------------------------------


def test_a_forked_episode_gives_a_row_for_each_sequence() -> None:
    first = versioned(sequence((4, 8, None), length=8), "3")
    fork = versioned(sequence((4, 8, "context"), (10, 16, None), length=18), "3", "7,5")
    other = versioned(sequence((4, 8, None), length=8, first_id=5), "9")
    results = [result_of(1.0, first, fork), result_of(None, first), result_of(0.0, other)]
    rows = group_rows(results, 12)
    assert [row.model_version for row in rows] == [3, 5, 9], "the oldest trained turn's"
    assert [row.advantage for row in rows] == [1.0, 1.0, -1.0]
    assert {row.group_id for row in rows} == {12}
    assert [row.completion_mask.tolist() for row in rows] == [
        [0] * 4 + [1] * 4, [0] * 10 + [1] * 6, [0] * 4 + [1] * 4,
    ]  # fmt: skip
    assert rows[1].input_ids.tolist() == list(range(16))
    assert rows[1].old_log_probs.tolist() == [0.0] * 10 + [-1.0] * 6
    columns = {"input_ids": "int64", "completion_mask": "int64", "old_log_probs": "float32"}
    for row in rows:
        assert {name: str(getattr(row, name).dtype) for name in columns} == columns
    for version, shown in (("default", r"\['default'\]"), (None, "missing")):
        played = sequence((4, 8, None), length=8)
        if version is not None:
            versioned(played, version)
        with pytest.raises(UsageError, match=f"must be numbers, not {shown}"):
            group_rows([result_of(1.0, played)], 0)


# --- the asynchronous trainer: the loop -----------------------------------------------------------

TALK = "support.gradients:TALK"
"""Three turns without tools. The third has the reward 1.0 if the model says "All right"."""


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {
        "settings": EpisodeSettings(env=TALK, parser="hermes", verify="off", reruns=0),
        "engine": "", "model": "", "prompts": [(0, {}), (1, {})],
        "params": {"max_new_tokens": 64}, "num_generations": 2, "max_staleness": 4,
        "most_rows": 8, **changes,
    }  # fmt: skip
    return Job(**given)


class Playing:
    """Groups being played; `rows` and `metrics` are what was handed over so far."""

    def __init__(self, model: Model, given: Job) -> None:
        self.model = model
        self.rows: queue.Queue[Row] = queue.Queue()
        self.metrics: queue.Queue[dict[str, Any]] = queue.Queue()
        self.version, self.progress = SimpleNamespace(value=1), SimpleNamespace(value=0.0)
        channels = Channels(self.rows, self.metrics, self.version, self.progress, None)
        self.groups = Groups(given, EpisodePlayer(model, given.settings), channels)

    def take(self, count: int) -> list[Row]:
        return [self.rows.get_nowait() for _ in range(count)]


@asynccontextmanager
async def playing(
    policy: Callable[[PolicyRequest], Any], given: Job, *, tokenizer: Any = None, faults: Any = None
) -> AsyncIterator[tuple[EmbeddedEngine, Playing]]:
    tokenizer = load_embedded_tokenizer() if tokenizer is None else tokenizer
    embedded = EmbeddedEngine(tokenizer, policy, faults=faults, weight_version="1")
    async with embedded as engine:
        args = given.settings.rollout_args(engine=engine.url, model="embedded")
        make = lambda config: Engine(config, sleep=Pauses())
        model = Model.from_args(args, tokenizer=tokenizer, engine=make)
        try:
            yield engine, Playing(model, given)
        finally:
            await model.aclose()


@asynccontextmanager
async def running(playing: Playing, group_id: int = 0) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(playing.groups.run(group_id))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_no_group_is_overtaken_and_what_waits_is_limited() -> None:
    hold = asyncio.Event()

    def says(request: PolicyRequest) -> Reply:
        return Reply("All right.", hold=hold if request.index == 0 else None)

    async with playing(says, job(most_rows=6)) as (engine, play), running(play, 4):
        await engine.until(lambda engine: engine.held == 1 and len(engine.log) >= 1 + 3 * 5)
        assert play.rows.empty(), "the first group is in flight"
        hold.set()
        await until(lambda: play.rows.qsize() == 6)
        assert [row.group_id for row in play.take(1)] == [4], "room for half a group"
        await asyncio.sleep(0.5)
        assert play.rows.qsize() == 5
        assert [row.group_id for row in play.take(5)] == [4, 5, 5, 6, 6]
        await until(lambda: play.rows.qsize() == 6)


async def test_a_group_with_more_rows_than_may_wait_is_in_flight() -> None:
    async with playing(lambda request: "All right.", job(most_rows=1)) as (_, play), running(play):
        await until(lambda: play.rows.qsize() == 2)
        play.take(2)
        await until(lambda: play.rows.qsize() == 2)


async def test_a_group_that_became_too_old_is_dropped_whole() -> None:
    async with playing(lambda request: "All right.", job(max_staleness=1)) as (_, play):
        play.version.value = 3
        async with running(play):
            await until(lambda: play.metrics.qsize() >= 1)
        assert play.rows.empty()
        found = play.metrics.get_nowait()
    expected = {
        "toolroll/dropped_rows_total": 2, "toolroll/handed_over_rows_total": 0,
        "reward": (2.0, 2.0),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


async def test_episodes_have_other_numbers_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a resume: the numbers depend on the group's id alone."""
    numbers: list[tuple[int, int]] = []
    async with playing(lambda request: "All right.", job(most_rows=4)) as (_, play):
        original = play.groups._player.play

        async def play_one(index: int, *given: Any, number: int, **named: Any) -> Any:
            numbers.append((index, number))
            return await original(index, *given, number=number, **named)

        monkeypatch.setattr(play.groups._player, "play", play_one)
        async with running(play, 3):
            await until(lambda: len(numbers) >= 4)
    assert numbers[:4] == [(1, 2), (1, 3), (0, 4), (0, 5)]


async def test_waiting_for_the_trainer_is_progress_and_so_is_a_turn() -> None:
    hold = asyncio.Event()
    says = lambda request: Reply("All right.", hold=hold if request.index == 6 else None)
    async with playing(says, job(most_rows=2)) as (engine, play), running(play):
        await until(lambda: play.rows.qsize() == 2 and play.progress.value > 0)
        before = play.progress.value
        await until(lambda: play.progress.value > before)
        play.take(2)
        await engine.until(lambda engine: engine.held == 1)
        await asyncio.sleep(0.5)
        before = play.progress.value
        await asyncio.sleep(0.5)
        assert play.progress.value == before, "one turn hangs, and the others are done"
        hold.set()


async def test_groups_without_a_row_are_an_error_after_some() -> None:
    faults = lambda request: Fault(status=400, body=b"no such thing")
    async with playing(lambda request: "", job(), faults=faults) as (_, play):
        with pytest.raises(RolloutError, match=r"4 groups in a row .* no such thing"):
            await asyncio.wait_for(play.groups.run(0), 30)
        assert play.metrics.get_nowait()["toolroll/aborted_share"] == (2.0, 2.0)


# --- the asynchronous trainer: settings -----------------------------------------------------------


def job_of(settings: Any = None, **config: Any) -> Any:
    parts = async_rollouts(
        an_async_config(**config), settings or {"env": "desk"}, model="embedded",
        prompts=["3", {"index": 4, "metadata": {"split": "train"}}], weights="/nowhere",
        workers=["http://a", "http://b"],
    )  # fmt: skip
    return parts["rollout_worker"]._job


def test_the_config_is_what_the_process_gets() -> None:
    own = job_of(
        vllm_server_base_url="http://engine:1/", max_tool_calling_iterations=4, token_budget=900,
        max_inflight_tasks=5, num_generations=6, temperature=0.7, max_completion_length=33,
        chat_template_kwargs={"enable_thinking": False}, seed=9,
    )  # fmt: skip
    settings = own.settings
    assert (own.engine, own.model) == ("http://engine:1", "embedded")
    assert own.prompts == [(3, {}), (4, {"split": "train"})]
    assert (settings.max_turns, settings.context_length, settings.concurrency) == (5, 900, 5)
    assert (settings.chat_template_kwargs, settings.seed) == ({"enable_thinking": False}, 9)
    assert (own.num_generations, own.max_staleness) == (6, 4)
    assert own.params == {
        "max_new_tokens": 33, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }  # fmt: skip
    plain = job_of(EpisodeSettings(env="desk", max_turns=3, seed=1), token_budget=-1).settings
    assert (plain.max_turns, plain.seed, plain.context_length) == (3, 1, None)


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({}, 32),
        ({"max_staleness": 0}, 8),
        ({"gradient_accumulation_steps": 2, "world_size": 3, "weight_sync_steps": 2}, 8 * 48),
        ({"queue_maxsize": 10}, 10),
        ({"queue_maxsize": 0}, 32),
    ],
)
def test_what_may_wait_follows_from_the_staleness(config: dict[str, int], rows: int) -> None:
    assert job_of(**config).most_rows == rows


def test_what_the_loss_does_not_know_is_refused() -> None:
    for config, words in (
        ({"top_p": 0.9}, "top_p=0.9 changes what is sampled.*set it to 1.0"),
        ({"top_k": 20}, "top_k=20"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"temperature": 0.0}, "temperature=0.0: TRL's loss divides"),
        ({"token_budget": 999}, "context_length=1000 is above token_budget=999"),
    ):
        with pytest.raises(UsageError, match=words):
            job_of({"env": "desk", "context_length": 1000}, **config)
    assert job_of({"env": "desk", "context_length": 999}, token_budget=999)


# --- the asynchronous trainer: weights ------------------------------------------------------------


class SavedModel:
    def __init__(self, order: list[Any]) -> None:
        self.order = order

    def save_pretrained(self, folder: str, *, state_dict: dict[str, Any]) -> None:
        self.order.append((folder, state_dict))


def transfer_to(urls: list[str], folder: Path, model: Any = None) -> DiskTransfer:
    transfer = DiskTransfer(urls, folder, timeout=10.0)
    transfer.model = model
    return transfer


def test_a_transfer_pauses_saves_loads_and_resumes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with weight_server({}) as (url, requests):
        transfer = transfer_to([url, f"{url}/"], tmp_path, SavedModel(requests))
        transfer.init_weight_transfer()
        for _ in range(2):
            transfer.pause()
            transfer.send_weights(iter([("a", SimpleNamespace(cpu=lambda: 1))]))
            transfer.resume()
        transfer.destroy()
    expected: list[Any] = []
    for number in ("1", "2"):
        loaded = {"model_path": folder, "weight_version": number}
        expected += [("/pause_generation", {"mode": "retract"})] * 2
        expected += [(folder, {"a": 1}), *[("/update_weights_from_disk", loaded)] * 2]
        expected += [("/continue_generation", {})] * 2
    assert requests == expected


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"/update_weights_from_disk": 500}, "update_weights_from_disk"),
        ({}, r"did not load the weights .* too large"),
    ],
)
def test_a_refused_transfer_is_an_error(tmp_path: Path, status: dict[str, int], words: str) -> None:
    with weight_server(status, success=bool(status)) as (url, requests):
        transfer = transfer_to([url], tmp_path, SavedModel(requests))
        with pytest.raises(EngineError, match=words):
            transfer.pause()
            transfer.send_weights(iter([]))


def test_a_transfer_needs_an_engine_and_a_whole_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"http://127.0.0.1:1/pause_generation failed"):
        transfer_to(["http://127.0.0.1:1"], tmp_path).pause()
    model = SimpleNamespace(peft_config={"default": object()})
    with pytest.raises(UsageError, match="PEFT adapter"):
        transfer_to(["http://127.0.0.1:1"], tmp_path, model).init_weight_transfer()


async def test_each_sampled_token_is_in_one_row_of_a_forked_episode() -> None:
    says = lambda request: f"<think>\nHm, {request.index}.\n</think>\n\nAll right."
    tokenizer = tokenizer_for(trl_template("qwen3"))
    async with playing(says, job(), tokenizer=tokenizer) as (engine, play), running(play):
        await until(lambda: play.rows.qsize() >= 6)
        rows = play.take(play.rows.qsize())
        turns = {
            (*entry.input_ids.tolist(), *entry.output_ids): len(entry.output_ids)
            for entry in engine.log
            if entry.status == 200
        }
    for row in rows:
        ids = tuple(row.input_ids.tolist())
        sampled = turns.pop(ids)  # each turn is a sequence, and is trained once
        assert row.completion_mask.tolist() == [0] * (len(ids) - sampled) + [1] * sampled
    groups = {row.group_id for row in rows}
    assert len(rows) == 3 * 2 * len(groups)
    seen = [play.metrics.get_nowait() for _ in groups]
    trained = sum(int(row.completion_mask.sum()) for row in rows)
    assert sum(one["toolroll/handed_over_tokens_total"] for one in seen) == trained
    assert sum(one["toolroll/handed_over_rows_total"] for one in seen) == len(rows)
    assert {one["reward"] for one in seen} == {(2.0, 2.0)}
    assert {one["toolroll/aborted_share"] for one in seen} == {(0.0, 2.0)}
