"""`HarborTask`: which tasks are refused, before a sandbox is made."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from support.program_trials import factory, write_task

from toolroll.environments.harbor import CHECKS, HarborTask
from toolroll.environments.harbor_trial import HarborTrial
from toolroll.environments.programs.sandbox import Sandbox
from toolroll.environments.programs.visible import hidden_places
from toolroll.evaluation.run_config import RunConfig
from toolroll.evaluation.run_setup import prepare
from toolroll.rollout.environment import Action, EnvironmentOptions
from toolroll.rollout.errors import UsageError
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer

IMAGE = 'docker_image = "ubuntu:24.04"'
BACK_ENDS = "docker, podman, daytona, e2b or modal"
AGENT, VERIFIER, ALL, END = "agent", "verifier", "environment", ""
BROKEN = """
from toolroll import Environment
class Broken(Environment):
    tasks = [{}]
    def __init__(self):
        raise OSError("a server does not answer")
    def reset(self, task, seed): ...
    def step(self, action): ...
"""
NO = "no-network"
NO_AGENT, NO_TESTS = (f"its {phase} has network_mode '" for phase in (AGENT, VERIFIER))
STEP = f'[[steps]]\nname = "a"\n[steps.agent]\nnetwork_mode = "{NO}"\n'
NETWORKS: list[tuple[dict[str, str], str, Any]] = [
    # lines of task.toml by their section, or only its network_mode; the option `network`; and what
    # agent and tests get, or why the task is refused
    ({}, "none", ("none", "none")),
    ({}, "host", ("host", "host")),
    ({ALL: NO}, "host", ("none", "none")),
    ({AGENT: NO}, "host", ("none", "host")),
    ({VERIFIER: NO}, "host", ("host", "none")),
    ({ALL: NO, VERIFIER: "public"}, "host", ("none", "host")),
    ({ALL: "allow_internet = false"}, "host", ("none", "none")),  # an old task
    ({AGENT: NO, END: f'[verifier.environment]\nnetwork_mode = "{NO}"'}, "host", ("none", "none")),
    ({ALL: "public"}, "none", NO_AGENT),
    ({VERIFIER: "public"}, "none", NO_TESTS),
    ({AGENT: "allowlist"}, "host", NO_AGENT),
    ({ALL: "offline"}, "host", NO_AGENT),
    ({END: STEP}, "none", f"a step has a network_mode: .*{BACK_ENDS}"),
]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path)


def environment(task: Path, **options: Any) -> HarborTask:
    made = factory(task, **options).make(EnvironmentOptions())
    assert isinstance(made, HarborTask)
    return made


def check(task: Path, **options: Any) -> HarborTask:
    """The environment of `task`, which it can play."""
    env = environment(task, **options)
    env.check_task(factory(task).tasks("test")[0])
    return env


def change(task: Path, section: str, line: str) -> None:
    """Add `line` to `section` of `task.toml`, or to its end."""
    file = task / "task.toml"
    text = file.read_text()
    changed = text.replace(f"[{section}]", f"[{section}]\n{line}") if section else text + line
    file.write_text(changed)


@pytest.mark.parametrize(("lines", "network", "expected"), NETWORKS)
def test_each_phase_has_the_network_of_the_task_or_is_refused(
    lines: dict[str, str], network: str, expected: Any, task: Path
) -> None:
    for section, line in lines.items():
        change(task, section, line if "=" in line else f'network_mode = "{line}"')
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            check(task, network=network)
        return
    env = check(task, network=network)
    networks = env.options("agent")["network"], env.options("verifier")["network"]
    assert networks == expected


def test_shared_tests_cannot_have_a_network_of_their_own(task: Path) -> None:
    change(task, "verifier", 'environment_mode = "shared"\nnetwork_mode = "no-network"')
    assert check(task).shared
    with pytest.raises(UsageError, match=f"two networks: .*{BACK_ENDS}"):
        check(task, network="host")


@pytest.mark.parametrize("name", ["environment", "tests"])
def test_a_link_or_a_task_without_an_instruction_is_refused(name: str, task: Path) -> None:
    (task / name).rename(task.parent / "elsewhere")
    (task / name).symlink_to(task.parent / "elsewhere")
    with pytest.raises(UsageError, match=f"{name} is a link: copy its files"):
        check(task)
    (task / "instruction.md").unlink()
    with pytest.raises(UsageError, match=r"greet cannot be read: .*instruction\.md"):
        check(task)


def test_tasks_to_which_links_of_the_dataset_lead_are_hidden(tmp_path: Path) -> None:
    write_task(tmp_path / "elsewhere", "other")
    write_task(tmp_path / "tasks")
    (tmp_path / "tasks" / "other").symlink_to(tmp_path / "elsewhere" / "other")
    env = environment(tmp_path / "tasks")
    env.read(factory(tmp_path / "tasks").tasks("test")[0])
    hidden = hidden_places([str(tmp_path / "elsewhere")], env.options("agent")["hidden"])
    assert hidden == [str(tmp_path / "elsewhere" / "other")]


HARBOR = {"harbor_agent": "codex"}
WAYS: list[tuple[dict[str, Any], bool]] = [
    # the agent's settings, and whether it refuses a task that needs an image
    ({"agent": "tool-calling"}, True),
    ({"agent": "program", "agent_args": {"command": "true"}}, True),
    ({"agent": "program", "agent_args": HARBOR}, True),
    ({"agent": "program", "agent_args": {**HARBOR, "harbor_environment": "docker"}}, False),
]


@pytest.mark.parametrize(("way", "refused"), WAYS)
async def test_a_task_that_needs_an_image(way: Any, refused: bool, tmp_path: Path) -> None:
    write_task(tmp_path, "a")
    write_task(tmp_path, "b", image=IMAGE)
    async with (
        EmbeddedEngine(load_embedded_tokenizer(), lambda request: "Done.") as engine,
        AsyncExitStack() as stack,
    ):
        common = {"env": "harbor", "env_args": {"path": str(tmp_path)}, "engine": engine.url}
        config = RunConfig(**common, model="embedded", **way)
        if not refused:
            assert len((await prepare(config, stack)).tasks) == 2
            return
        with pytest.raises(UsageError, match=f"/b needs an image, .*{BACK_ENDS}.*image=ignore"):
            await prepare(config, stack)
        one = config.model_copy(update={"tasks": "0"})
        assert len((await prepare(one, stack)).tasks) == 1, "the other task is not played"
        assert not [entry for entry in engine.log if entry.status], "nothing is sampled"


async def test_a_broken_environment_is_left_to_its_episodes(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    async with (
        EmbeddedEngine(load_embedded_tokenizer(), lambda request: "Done.") as engine,
        AsyncExitStack() as stack,
    ):
        config = RunConfig(env=f"{file}:Broken", engine=engine.url, model="embedded")
        assert len((await prepare(config, stack)).tasks) == 1


async def test_checks_at_once_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a trainer begins all trials at once."""
    count = CHECKS + 3
    for number in range(count):
        write_task(tmp_path, f"t{number:02}")
    tasks = factory(tmp_path).tasks("test")
    running = most = 0
    full, proceed = asyncio.Event(), asyncio.Event()

    async def started(sandbox: Sandbox) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == CHECKS:
            full.set()
        await proceed.wait()
        running -= 1

    monkeypatch.setattr(Sandbox, "start", started)
    monkeypatch.setattr(Sandbox, "upload", AsyncMock())
    monkeypatch.setattr(HarborTask, "_test", AsyncMock(return_value=({"reward": 0.0}, None)))
    envs = [environment(tmp_path) for _ in tasks]
    for env, task in zip(envs, tasks, strict=True):
        env.read(task)
    async with asyncio.TaskGroup() as group:
        for env in envs:
            group.create_task(env.check_tests())
        await full.wait()
        proceed.set()
    assert most == CHECKS


async def test_an_outcome_of_harbor_that_is_too_long_is_no_reward(task: Path) -> None:
    """The agent can write `reward.json` if its tests are shared."""
    change(task, "verifier", 'environment_mode = "shared"')
    trial = HarborTrial(environment(task), "local", "m")
    await trial.reset(factory(task).tasks("test")[0], 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            theirs.send(json.dumps({"rewards": {"r" * 2**17: 1.0}}).encode())
        async with AsyncExitStack() as stack:
            await trial._listen(ours, None, stack)  # type: ignore[arg-type]
    graded = await trial.step(Action("Done."))
    await trial.close()
    assert graded.reward == 0.0
    assert "has no numbers" in graded.info["no_reward"]
