"""The TRL adapter with the trainer's attributes that it reads (TRL 1.16.0); TRL's own trainer is in
tests/contract/test_trl.py.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from support.desk_episodes import ByTask, known_tasks
from support.trl_mirror import a_trainer

from toolroll.rollout.adapters.episodes import EpisodeSettings
from toolroll.rollout.adapters.trl import (
    environment_class,
    environment_rows,
    finish_episodes,
    make_rollout_func,
    reward,
    weights_from_disk,
)
from toolroll.rollout.adapters.trl.environments import _end_tokens
from toolroll.rollout.errors import EngineError, EnvironmentFailure, UsageError
from toolroll.rollout.testing import (
    EmbeddedEngine,
    Fault,
    PolicyRequest,
    load_embedded_tokenizer,
    serve_in_thread,
)


@contextmanager
def rollouts(faults: Any = None, **settings: Any) -> Iterator[tuple[EmbeddedEngine, Any]]:
    embedded = EmbeddedEngine(load_embedded_tokenizer(), ByTask(mistakes=0.0), faults=faults)
    with serve_in_thread(embedded) as engine:
        rollout = make_rollout_func({"env": "desk", **settings}, engine=engine.url)
        yield engine, rollout
        rollout.close()


def test_a_completion_is_what_was_served_and_sampled() -> None:
    task = known_tasks()[0]
    with rollouts() as (engine, rollout):
        line = {"index": task, "metadata": {"env": "desk", "split": "test"}}
        output = rollout([str(task), line], a_trainer(temperature=0.5, top_k=20))
    asked = engine.log[0].sampling_params
    assert (asked["temperature"], asked["top_k"], asked["max_new_tokens"]) == (0.5, 20, 4096)
    assert "min_p" not in asked
    last = max(engine.log, key=lambda entry: len(entry.input_ids))
    whole = [*last.input_ids.tolist(), *last.output_ids]
    for at in (0, 1):
        ids, mask = output["completion_ids"][at], output["env_mask"][at]
        assert output["prompt_ids"][at] + ids == whole
        assert len(ids) == len(mask) == len(output["logprobs"][at]) and {0, 1} == set(mask)
        assert all(
            value == 0.0 for value, one in zip(output["logprobs"][at], mask, strict=True) if not one
        )
    assert output["toolroll_reward"] == [1.0, 1.0]
    assert output["toolroll_left_out_tokens"] == [0, 0]
    assert set(output["toolroll_weight_versions"][0]) == {"default"}


def test_a_completion_is_cut_to_its_limit_and_the_rest_is_counted() -> None:
    task = known_tasks()[0]
    with rollouts() as (_, rollout):
        whole = rollout([task], a_trainer())
        cut = rollout([task], a_trainer(max_completion_length=64))
    assert cut["completion_ids"][0] == whole["completion_ids"][0][:64]
    lost = sum(whole["env_mask"][0]) - sum(cut["env_mask"][0])
    assert cut["toolroll_left_out_tokens"] == [lost] and lost > 0
    assert len(cut["toolroll_weight_versions"][0]) < len(whole["toolroll_weight_versions"][0])


def test_an_aborted_episode_has_no_reward_and_a_zero_mask() -> None:
    def faults(request: PolicyRequest) -> Fault | None:
        return Fault(status=400, body=b"no") if request.call == 1 else None

    logged: dict[str, float] = {}
    with rollouts(faults, reruns=0) as (_, rollout):
        output = rollout([known_tasks()[0]], a_trainer())
    assert output["toolroll_status"] == ["aborted"] and sum(output["env_mask"][0]) == 0
    fields = {name: value for name, value in output.items() if name.startswith("toolroll_")}
    assert reward(completions=[""], log_metric=logged.__setitem__, **fields) == [None]
    assert logged["toolroll/aborted_share"] == 1.0


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
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            self.send_response(200 if success else 400)
            self.end_headers()
            self.wfile.write(json.dumps({"success": success, "message": "no such file"}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    saved: list[str] = []
    trainer = a_trainer()
    trainer.save_model = saved.append
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        sync = weights_from_disk([f"http://127.0.0.1:{server.server_port}"], tmp_path)
        if success:
            sync(trainer)
        else:
            with pytest.raises(EngineError, match="no such file"):
                sync(trainer)
        thread.join()
    assert saved == [str(tmp_path)]
    body = {"model_path": str(tmp_path), "weight_version": "0"}
    assert asked == [("/update_weights_from_disk", body)]


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(UsageError, match="max_turn"):
        make_rollout_func({"env": "desk", "max_turn": 3}, engine="http://127.0.0.1:1")
    with (
        rollouts() as (_, rollout),
        pytest.raises(UsageError, match="a prompt must be a task's index"),
    ):
        rollout(["What is 2 + 2?"], a_trainer())


def test_options_that_trl_would_not_follow_are_refused() -> None:
    """With tools, TRL's own loop runs after the episode, and env_mask is not read."""
    with rollouts() as (engine, rollout):
        trainer = a_trainer()
        trainer.tools = [print]
        with pytest.raises(UsageError, match="drop env_mask"):
            rollout(["0"], trainer)
        with pytest.raises(UsageError, match="vllm_structured_outputs_regex has no effect"):
            rollout(["0"], a_trainer(vllm_structured_outputs_regex="a+"))
        assert not engine.log


# --- environment_factory --------------------------------------------------------------------------

ADDING = '''
from typing import Literal

from toolroll import tool_environment


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def paint(color: Literal["red", "blue"], times: list[int]) -> str:
    """Paint something."""
    if color == "red":
        raise ValueError("no red left")
    return color


adding = tool_environment(
    tools=[add, paint],
    tasks=[{"prompt": "What is 2 + 3?", "answer": "5"}],
    reward=lambda task, final: float(task["answer"] in final),
    system="Use the tools.",
)
'''


@pytest.fixture
def adding(tmp_path: Path) -> str:
    (tmp_path / "adding.py").write_text(ADDING)
    return f"{tmp_path / 'adding.py'}:adding"


def test_the_tools_of_an_environment_are_methods_with_their_schemas(adding: str) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    instance = environment_class(adding)()
    add = get_json_schema(instance.add)["function"]
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["required"] == ["a"]
    first = add["parameters"]["properties"]["a"]
    assert (first["type"], first["description"]) == ("integer", "The first one.")
    paint = get_json_schema(instance.paint)["function"]["parameters"]["properties"]
    assert paint["color"]["enum"] == ["red", "blue"]
    assert paint["times"]["type"] == "array" and paint["times"]["items"] == {"type": "integer"}


@pytest.mark.parametrize(("reply", "graded"), [("It is 5.", 1.0), ("It is 6.", 0.0)])
def test_an_episode_is_graded_by_its_last_reply(adding: str, reply: str, graded: float) -> None:
    instance = environment_class(adding)()
    (row,) = environment_rows(adding)
    assert [one["role"] for one in row["prompt"]] == ["system", "user"]
    assert instance.reset(**row) == "What is 2 + 3?"
    assert instance.add(a=3) == "5"
    assert "no red left" in instance.paint(color="red", times=[1])
    assert instance.get_reward() is None
    completions = [[{"role": "assistant", "content": reply}]]
    assert finish_episodes(completions, [instance]) == [None]
    assert instance.get_reward() == graded
    instance.reset(**row)
    assert instance.get_reward() is None
    finish_episodes([[{"role": "assistant", "content": "", "tool_calls": [{}]}]], [instance])
    assert instance.get_reward() == 0.0, "the episode ran out of tokens"


class Trainer:
    """What TRL passes to reward functions belongs to its trainer."""

    eos_token_ids: ClassVar = [7, 8]

    def log_metric(self, name: str, value: float) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("ids", "graded"), [([5, 7], 1.0), ([5, 8], 1.0), ([5, 5], -1.0), ([], 1.0), (None, 1.0)]
)
def test_a_last_reply_that_was_cut_is_truncated(
    tmp_path: Path, ids: list[int] | None, graded: float
) -> None:
    """It was graded as the whole answer."""
    (tmp_path / "cut.py").write_text(CUT)
    instance = environment_class(f"{tmp_path / 'cut.py'}:Asking")()
    instance.reset(**environment_rows(f"{tmp_path / 'cut.py'}:Asking")[0])
    completions = [[{"role": "assistant", "content": "It is 4 because"}]]
    given: dict[str, Any] = {} if ids is None else {"completion_ids": [ids]}
    finish_episodes(completions, [instance], **given, log_metric=Trainer().log_metric)
    assert instance.get_reward() == graded


@pytest.mark.parametrize("given", [{"eos_token_ids": ids} for ids in (7, [7], None)] + [{}])
def test_end_tokens_are_read_in_every_form(given: dict[str, Any]) -> None:
    """TRL 1.16 always has a list; the configuration of a model may have a number or None."""
    trainer = SimpleNamespace(processing_class=SimpleNamespace(eos_token_id=7), **given)
    assert _end_tokens(MethodType(Trainer.log_metric, trainer)) == {7}
    assert _end_tokens(None) == frozenset()


CUT = """
from toolroll.rollout.types import Environment, Observation, StepResult


class Asking(Environment):
    tasks = [{}]

    def reset(self, task, seed):
        return Observation([{"role": "user", "content": "What is 2 + 2?"}])

    def step(self, action):
        return StepResult(done=True, reward=1.0)

    def truncated_reward(self):
        return -1.0
"""


def test_trl_s_trainer_has_its_end_tokens() -> None:
    """They are read from the trainer, because reward functions do not get them."""
    grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="install trl")
    source = inspect.getsource(grpo.GRPOTrainer)
    assert 'reward_kwargs["log_metric"] = self._log_metric' in source
    assert "self.eos_token_ids" in source
    assert "completion_ids=completion_ids_list" in source


def test_a_row_with_another_system_message_is_refused(adding: str) -> None:
    instance = environment_class(adding)()
    with pytest.raises(UsageError, match="system message"):
        instance.reset(index=0, prompt=[{"role": "user", "content": ""}])
    with pytest.raises(UsageError, match="column 'index'"):
        instance.reset(prompt=[])


CLOSED = """
from toolroll.rollout.types import Environment, Observation, StepResult

closed = []


class Plain(Environment):
    tasks = [{}]

    def reset(self, task, seed):
        return Observation([{"role": "user", "content": "Hi."}])

    def step(self, action):
        return StepResult(done=True, reward=1.0)

    def close(self):
        closed.append(self)


class Async(Plain):
    async def close(self):
        closed.append(self)


class Yes(Plain):
    def step(self, action):
        return StepResult(done=True, reward=True)


class Infinite(Plain):
    def step(self, action):
        return StepResult(done=True, reward=float("inf"))


class Later(Plain):
    fails = []

    async def reset(self, task, seed):
        if self.fails:
            raise OSError("no such task")
        return Plain.reset(self, task, seed)


class Broken(Plain):
    def reset(self, task, seed):
        raise OSError("no such task")
"""


@pytest.fixture
def closings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of environments, with a list of those that were closed."""
    (tmp_path / "trl_closings.py").write_text(CLOSED)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("trl_closings")
    del sys.modules["trl_closings"]


@pytest.mark.parametrize("kind", ["Plain", "Async"])
def test_each_environment_is_closed_once(closings: Any, kind: str) -> None:
    """By the next reset, or when TRL drops its instances."""
    make = environment_class(f"trl_closings:{kind}")
    row = environment_rows(f"trl_closings:{kind}")[0]
    before = len(closings.closed)
    pool = [make(), make()]
    for at in (0, 1, 0, 1):
        pool[at].reset(**row)
    finish_episodes([[{"role": "assistant", "content": "Hi."}]], pool[:1])
    assert pool[0].get_reward() == 1.0
    assert len(closings.closed) == before + 2
    pool.clear()
    gc.collect()
    closed = closings.closed[before:]
    assert len(closed) == len(set(closed)) == 4


def test_a_reward_is_a_finite_float(closings: Any) -> None:
    reply = [[{"role": "assistant", "content": "Bye."}]]
    instance = environment_class("trl_closings:Yes")()
    instance.reset(index=0)
    finish_episodes(reply, [instance])
    assert type(instance.get_reward()) is float and instance.get_reward() == 1.0
    instance = environment_class("trl_closings:Infinite")()
    instance.reset(index=0)
    with pytest.raises(EnvironmentFailure, match="the reward inf: it must be a finite number"):
        finish_episodes(reply, [instance])
    assert instance.get_reward() is None


def test_an_environment_dropped_in_the_loop_s_own_thread_is_closed(closings: Any) -> None:
    """The garbage collector runs in any thread."""
    make: Any = environment_class("trl_closings:Async")
    pool = [make()]
    pool[0].reset(**environment_rows("trl_closings:Async")[0])
    before = len(closings.closed)

    async def dropped() -> None:
        pool.clear()
        gc.collect()

    background = make._background
    background.run(dropped())
    background.run(asyncio.sleep(0))
    assert len(closings.closed) == before + 1


def test_an_environment_whose_first_reset_fails_is_closed(closings: Any) -> None:
    with pytest.raises(OSError, match="no such task"):
        environment_class("trl_closings:Broken")
    assert len(closings.closed) == 1


def test_an_environment_whose_reset_fails_is_closed_at_once(closings: Any) -> None:
    make, row = environment_class("trl_closings:Later"), environment_rows("trl_closings:Later")[0]
    before, instance = len(closings.closed), make()
    closings.Later.fails.append(True)
    with pytest.raises(OSError, match="no such task"):
        instance.reset(**row)
    assert len(closings.closed) == before + 1 and instance.get_reward() is None
    closings.Later.fails.clear()
    with pytest.raises(UsageError, match="system message"):
        instance.reset(**{**row, "prompt": [{"role": "system", "content": "Other."}]})
    assert len(closings.closed) == before + 2
    instance.reset(**row)
    assert len(closings.closed) == before + 2
