"""`ProgramAgent`: a program plays Harbor tasks in a sandbox, and every token is in the result."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from clients import captures
from support.episodes import agent as own_agent
from support.episodes import call, judge_tokens, opened_model, serving
from support.http import router_over
from support.program_trials import (
    REWARD,
    WRITE,
    command_of,
    factory,
    play,
    processes_of,
    program,
    refusal,
    replies,
    write_task,
)
from support.qwen import extra_templates, tokenizer_for
from support.toy_environment import Pond
from support.wire import until

from toolroll.environments.harbor import HarborTask
from toolroll.environments.harbor_trial import HarborTrial
from toolroll.environments.programs.output import Exit
from toolroll.environments.programs.program_settings import ProgramSettings
from toolroll.environments.programs.sandbox import Sandbox
from toolroll.environments.sandboxed import SandboxEnvironment
from toolroll.evaluation.environment_check import check
from toolroll.parsers.infer import infer_parser
from toolroll.rollout.environment import Action, EnvironmentOptions, Observation, StepResult, Task
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.environment_class import EnvironmentClass
from toolroll.rollout.runs.runner import task_hash
from toolroll.rollout.settings import RolloutArgs
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Status, StopReason
from toolroll.testing import EmbeddedEngine, Fault, PolicyRequest, Reply, load_embedded_tokenizer

pytestmark = pytest.mark.skipif(bool(refusal()), reason=f"needs user namespaces: {refusal()}")


def scripted(said: list[str]) -> Any:
    """The policy that gives these replies in each session, and repeats the last one."""
    return lambda request: said[min(request.call, len(said) - 1)]


def tasks_in(folder: Path, **options: Any) -> EnvironmentClass:
    """The tasks in `folder`, which gets one if it is empty."""
    if not any(folder.iterdir()):
        write_task(folder)
    return factory(folder, **options)


async def played(
    tmp_path: Path,
    policy: Any = None,
    command: str | None = None,
    *,
    options: dict[str, Any] | None = None,
    faults: Any = None,
    **settings: Any,
) -> Episode:
    """One episode of the task in `tmp_path`, or of a new one. `options` are the task's. `policy`:
    replies too; by default those that solve the task."""
    policy = policy if callable(policy) else scripted(policy or replies())
    async with serving(load_embedded_tokenizer(), policy, faults=faults) as (_, model):
        agent, tasks = program(model, command), tasks_in(tmp_path, **(options or {}))
        [episode] = (await play(tasks, agent, **settings)).values()
        return episode


def error_of(episode: Episode) -> str:
    result = episode.result
    assert result.status is Status.ABORTED
    assert result.reward is None
    return f"{result.stop_reason}: {result.info['error']['message']}"


async def test_a_program_is_played_graded_and_recorded(tmp_path: Path) -> None:
    write_task(tmp_path, "right")
    write_task(tmp_path, "wrong", test=f"echo 0.25 > {REWARD}\n")
    async with serving(load_embedded_tokenizer(), scripted(replies())) as (engine, model):
        agent = program(model, verify="always")
        episodes = await play(factory(tmp_path), agent, samples=3, concurrency=4)
        served = {entry.routing_key for entry in engine.log}
        assert len(served) == 6, "each trial has its own session"
        for (task, _), episode in episodes.items():
            result = episode.result
            assert result.reward == (1.0 if task == "right" else 0.25)
            assert result.stop_reason is StopReason.DONE
            assert [len(each.turns) for each in result.trajectories] == [2]
            [first, last] = result.trajectories[0].turns
            assert [first.reward, last.reward] == [0.0, result.reward]
            assert first.sampling_params["temperature"] == 1.0, "the run's, not the program's"
            assert result.messages[-1]["content"] == "Done."
            assert result.metrics["env/reward"] == result.reward
            assert result.metrics["completion_tokens"] == result.metrics["trained_tokens"] > 0
        for session in served:
            [trajectories] = [
                episode.result.trajectories
                for episode in episodes.values()
                if episode.result.info["program"]["session"] == session
            ]
            judge_tokens(trajectories, engine, session)
    assert processes_of("program_trials") == []


async def test_samples_share_a_key_behind_a_router_and_may_wait(tmp_path: Path) -> None:
    write_task(tmp_path)
    tokenizer, hold = load_embedded_tokenizer(), asyncio.Event()
    command = f'INSTRUCTION="$(yes "$OPENAI_API_KEY" | head -c 6000)" {command_of()}'
    policy = lambda request: Reply("Done.", hold=hold)
    async with (
        EmbeddedEngine(tokenizer, policy, pool=2000) as engine,
        router_over(engine.url) as url,
        Model.from_args(RolloutArgs(engine=url, model="embedded")) as model,
    ):
        trials = play(factory(tmp_path), program(model, command), samples=2, affinity=2)
        playing = asyncio.create_task(trials)

        await until(lambda: engine.held == 1 and model.admission.held == 1, "one of two waits")
        hold.set()
        episodes = await playing
    assert {entry.routing_key for entry in engine.log} == {"harbor/greet#0"}
    held = [episode.result.metrics.get("held_turns") for episode in episodes.values()]
    assert sorted(held, key=bool) == [None, 1.0]


async def test_harbor_ends_its_agent_before_the_sandbox_does(tmp_path: Path) -> None:
    tasks = tasks_in(tmp_path)
    trial = HarborTrial(tasks.make(EnvironmentOptions()), "local", "m")
    try:
        await trial.reset(tasks.tasks("test")[0], 0)
        limits = [
            trial.time_limit(ProgramSettings(harbor_agent="codex", timeout=seconds))
            for seconds in (None, 7200.0)
        ]
    finally:
        await trial.close()
    assert limits == [120 + 60 + 1800, 7200 + 60 + 1800]


async def test_parallel_conversations_are_sequences_of_their_own(tmp_path: Path) -> None:
    source = command_of()
    episode = await played(tmp_path, ["Done."], f"INSTRUCTION=Plan. {source} & {source}; wait")
    assert [len(each.turns) for each in episode.result.trajectories] == [1, 1]
    assert (episode.result.metrics["forks"], episode.result.reward) == (1, 0.0)


async def test_a_program_that_fails_after_an_answer_is_graded(tmp_path: Path) -> None:
    episode = await played(tmp_path, command=f"{command_of()}; exit 7")
    assert episode.result.info["program"]["status"] == 7
    assert (episode.result.stop_reason, episode.result.reward) == (StopReason.DONE, 1.0)


async def test_a_program_that_never_asks_is_aborted(tmp_path: Path) -> None:
    message = error_of(await played(tmp_path, command="no-such-agent", reruns=0))
    assert "environment_error: the program ended (exit status 127)" in message
    assert "no-such-agent: command not found" in message


async def test_a_late_program_is_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Sandbox.run

    async def at_limit(sandbox: Sandbox, command: str, variables: Any, **options: Any) -> Exit:
        """The program reaches its limit exactly when it ends; `tests/test.sh` does not."""
        end = await run(sandbox, command, variables, **options)
        return Exit(None, end.output) if "INSTRUCTION" in variables else end

    monkeypatch.setattr(Sandbox, "run", at_limit)
    episode = await played(tmp_path)
    assert episode.result.stop_reason is StopReason.PROGRAM_TIMEOUT
    assert (episode.result.status, episode.result.reward) == (Status.TRUNCATED, 1.0)


async def test_a_program_at_its_limit_of_turns_is_killed_and_graded(tmp_path: Path) -> None:
    again = [call("bash", command=WRITE)] * 99
    episode = await played(tmp_path, again, f"{command_of()}; sleep 87654", max_turns=3)
    assert (episode.result.stop_reason, episode.result.reward) == (StopReason.MAX_TURNS, 1.0)
    assert episode.result.metrics["turns"] == 3


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("true\n", "wrote no reward"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json\n', "is named `reward`"),
    ],
)
async def test_a_task_without_a_reward_is_refused(tmp_path: Path, test: str, problem: str) -> None:
    write_task(tmp_path, test=test)
    tasks = factory(tmp_path)
    environment = tasks.make(EnvironmentOptions())
    assert isinstance(environment, HarborTask)
    for _ in range(2):  # the check runs once
        with pytest.raises(UsageError, match=f"greet is broken: for untouched files, .*{problem}"):
            await environment.reset(tasks.tasks("test")[0], 0)


class Greet(SandboxEnvironment):
    """An environment that is graded by a function."""

    async def reset(self, task: Task, seed: int) -> Observation:
        self.sandbox = Sandbox()
        await self.sandbox.start()
        return Observation([{"role": "user", "content": "Write hello to greeting.txt."}])

    async def step(self, action: Action) -> StepResult:
        greeting = await self.sandbox.read("/app/greeting.txt")
        return StepResult(reward=float(greeting == b"hello"), done=True)


async def test_an_environment_may_grade_with_a_function(tmp_path: Path) -> None:
    async with serving(load_embedded_tokenizer(), scripted(replies())) as (_, model):
        result = await program(model).asolve(Greet(), None, {}, 0)
        assert (result.reward, result.stop_reason) == (1.0, StopReason.DONE)
        with pytest.raises(UsageError, match="a program cannot play Pond"):
            await program(model).asolve(Pond(), None, {}, 0)


def test_a_task_is_known_by_its_name_and_its_files(tmp_path: Path, monkeypatch: Any) -> None:
    task = write_task(tmp_path)
    monkeypatch.chdir(task)
    assert [each.id for each in HarborTask.tasks()] == ["greet"]
    first, second = (task_hash("harbor", factory(tmp_path).tasks("test")[0]) for _ in range(2))
    (task / "tests" / "test.sh").write_text("exit 1\n")
    assert first == second != task_hash("harbor", factory(tmp_path).tasks("test")[0])


async def test_it_keeps_the_contract_and_the_solution_earns_1(tmp_path: Path) -> None:
    write_task(tmp_path, "a")
    write_task(tmp_path, "b")
    tasks = factory(tmp_path)
    results = await check(tasks, tasks.tasks("test"))
    assert [(each.name, each.detail) for each in results if each.status != "ok"] == []
    assert "2 of 2" in [each.detail for each in results]


async def test_the_library_s_own_agent_plays_the_tasks_too(tmp_path: Path) -> None:
    async with serving(load_embedded_tokenizer(), scripted(replies())) as (_, model):
        [episode] = (await play(tasks_in(tmp_path), own_agent(model))).values()
    assert (episode.result.reward, episode.result.metrics["executed_calls/bash"]) == (1.0, 1)


async def test_an_engine_that_fails_is_infrastructure(tmp_path: Path) -> None:
    def reply(request: PolicyRequest) -> str:
        if request.text.count("<|turn|>assistant") > 1:
            raise RuntimeError("the engine is broken")
        return replies()[0]

    assert error_of(await played(tmp_path, reply, reruns=0)).startswith("engine_error")


async def test_a_refused_request_is_the_program_s_fault(tmp_path: Path) -> None:
    def faults(request: PolicyRequest) -> Fault | None:
        later = request.text.count("<|turn|>assistant") > 1
        return Fault(status=400, body=b"this grammar is not valid") if later else None

    episode = await played(tmp_path, faults=faults, reruns=0)
    assert (episode.result.status, episode.result.reward) == (Status.COMPLETED, 1.0)
    assert "grammar" in episode.result.info["refused"]


async def test_an_ended_sandbox_is_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Sandbox.run

    async def ended(sandbox: Sandbox, command: str, variables: Any, **options: Any) -> Exit:
        """Its memory was short, after the program had asked the model."""
        end = await run(sandbox, command, variables, **options)
        if "INSTRUCTION" in variables:
            os.kill(sandbox._pid, signal.SIGKILL)
            assert sandbox._process is not None
            await sandbox._process.wait()
            await sandbox.kill()
        return end

    monkeypatch.setattr(Sandbox, "run", ended)
    episode = await played(tmp_path, reruns=0)
    assert (episode.result.status, episode.result.reward) == (Status.COMPLETED, 0.0)
    assert "could not be read" in episode.result.info["no_reward"]


async def test_an_abort_by_the_engine_ends_the_trial_at_once(tmp_path: Path) -> None:
    """As before an update of the weights; the program would retry."""
    faults, command = lambda request: Fault(abort_after=2), f"{command_of()}; sleep 87653"
    episode = await played(tmp_path, command=command, faults=faults, reruns=0)
    assert episode.result.stop_reason is StopReason.ENGINE_ABORT
    assert episode.result.reward is None
    assert processes_of("sleep 87653") == []


async def test_a_program_cannot_use_another_session_or_read_its_own(tmp_path: Path) -> None:
    other = 'OPENAI_BASE_URL="${OPENAI_BASE_URL%/v1}x/v1"'
    ask = 'curl -s -H "Authorization: Bearer $OPENAI_API_KEY" "$ANTHROPIC_BASE_URL'
    own = f'{ask}" -X DELETE; {ask}/trace"; {ask}/export" -X POST; {ask}/v1/models"'
    episode = await played(tmp_path, command=f"{command_of()}; {other} {command_of()}; {own}")
    output = episode.result.info["program"]["output"]
    assert "HTTP Error 401" in output
    assert output.count("this key opens only the model") == 3
    assert '"id":"toolroll"' in output
    assert (episode.result.status, episode.result.reward) == (Status.COMPLETED, 1.0)


async def test_an_image_is_refused_unless_it_is_ignored(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    dockerfile = task / "environment" / "Dockerfile"
    dockerfile.write_text("FROM ubuntu:24.04\n\n# a note\nWORKDIR /app\n")
    assert (await played(tmp_path)).result.reward == 1.0
    dockerfile.write_text("FROM ubuntu:24.04\nRUN apt-get install gcc\n")
    tasks = factory(tmp_path)
    with pytest.raises(UsageError, match="needs an image"):
        await HarborTask(str(tmp_path)).reset(tasks.tasks("test")[0], 0)
    episode = await played(tmp_path, options={"image": "ignore"})
    assert episode.result.reward == 1.0


async def test_the_program_sees_the_task_s_files_but_not_its_tests(tmp_path: Path) -> None:
    task = write_task(tmp_path / "tasks")
    look = f"cat notes.txt; ls -A {task.parent} /tests; touch /usr/x /etc/x"
    options = {"folders": [str(task.parent)]}
    episode = await played(task.parent, command=f"{command_of()}; {look}", options=options)
    output = episode.result.info["program"]["output"]
    assert "A note." in output
    assert f"/tests:\n\n{task.parent}:\ntouch: " in output  # both are empty
    assert output.count("Read-only file system") == 2


def test_settings_that_cannot_work_are_named() -> None:
    model: Any = None
    with pytest.raises(UsageError, match="either a command or a harbor_agent"):
        program(model, harbor_agent="codex")
    with pytest.raises(UsageError, match="no setting 'comand'"):
        program(model, comand="x")


QWEN3_5 = extra_templates().get("qwen3_5_think", "")


@pytest.mark.tokens
@pytest.mark.skipif(not QWEN3_5, reason="needs Qwen3.5's template (TOOLROLL_TEST_DATA)")
@pytest.mark.parametrize(
    ("history", "sequences"),
    [("preserve", 1), ("fork", captures.TURNS)],  # with "fork", each reminder begins a sequence
)
async def test_each_token_of_claude_code_is_trained_once(
    tmp_path: Path, history: Any, sequences: int
) -> None:
    """With Qwen3.5's template, which drops thoughts after a user message: the shape of which
    slime's adapter made 64 samples of 8 rollouts (slime#2288)."""
    write_task(tmp_path)
    tokenizer = tokenizer_for(QWEN3_5)
    async with EmbeddedEngine(tokenizer, captures.reply, context_length=200_000) as engine:
        template, parser = ChatTemplate(tokenizer, history=history), infer_parser(tokenizer, None)
        async with opened_model(engine.url, tokenizer, parser, template=template) as model:
            agent = program(model, command_of(captures.PROGRAM), verify="always")
            episodes = await play(
                factory(tmp_path), agent, samples=captures.ROLLOUTS, concurrency=2
            )
        sampled = sum(len(entry.output_ids or ()) for entry in engine.log)
    assert not [each.result.info for each in episodes.values() if each.result.info.get("error")]
    rollouts = [episode.result.trajectories for episode in episodes.values()]
    assert len(rollouts) == captures.ROLLOUTS
    assert sum(part.trained_tokens for parts in rollouts for part in parts) == sampled
    for title, *main in rollouts:
        assert (len(title.turns), len(main)) == (1, sequences)
        assert [len(part.turns) for part in main] == [captures.TURNS // sequences] * sequences
