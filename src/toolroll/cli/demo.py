"""`toolroll demo`: plays two environments on the embedded engine. In desk, the engine samples from
the model that comes with the package. In BFCL, the engine's replies are scripted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from toolroll.cli.display import print_line
from toolroll.cli.run_command import Outcome, play
from toolroll.cli.view import PAGE_NAME
from toolroll.evaluation.files_read import FilesRead
from toolroll.evaluation.report import FILE_NAME as SUMMARY_NAME
from toolroll.evaluation.run_config import RunConfig
from toolroll.evaluation.run_setup import Plan, served_agents, with_identity
from toolroll.rollout.environment import EnvironmentFactory, EnvironmentOptions, Task
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.tokenizers import DESK_MODEL, desk_model_path
from toolroll.rollout.runs.episode_file import FILE_NAME
from toolroll.rollout.runs.registry import choose_tasks, find_environment
from toolroll.rollout.runs.run_directory import SETTINGS_NAME, make_folder
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer, load_engine
from toolroll.testing.reference_policy import play_references, reference_policy

SCRIPTED = "bfcl/multi_turn_base"
SAMPLED = "desk"
HELD_OUT = 100
"""The number of desk's held-out tasks that are played."""

MISTAKES = 0.3
"""The share of episodes in which the scripted engine makes a mistake, so that rewards differ."""


async def run_demo(console: Console, out: Path, *, samples: int, seed: int) -> dict[str, Outcome]:
    """Play the demo's environments. Replace the episodes of an earlier demo in `out`.

    Return the results by column title. The held-out results are written to a folder next to `out`,
    whose name ends in `-held-out`.
    """
    print_line(
        console,
        f"On {SAMPLED}, the engine samples {DESK_MODEL}, the model in this package. It was trained "
        "on generated tasks: it solves most of those that it has not seen (held-out), and few of "
        f"those written by hand. On {SCRIPTED}, the engine replies with the reference actions, "
        f"with a mistake in {MISTAKES:.0%} of the episodes.",
    )
    results: dict[str, Outcome] = {}
    for title, config, tasks in _parts(console, out, samples=samples, seed=seed):
        results[title] = await _played(console, config, tasks)
        if results[title].stopped is not None or results[title].error is not None:
            break
    return results


def _parts(
    console: Console, out: Path, *, samples: int, seed: int
) -> list[tuple[str, RunConfig, Sequence[Task]]]:
    """Return the column title, the settings and the tasks of each part of the demo. A part is one
    split of an environment. Leave out environments that are not installed, and print a message.
    """
    parts: list[tuple[str, RunConfig, Sequence[Task]]] = []
    named = out if out.name not in ("", "..") else out.resolve()
    beside = named.with_name(f"{named.name}-held-out")  # a folder has one split of an environment
    for title, env, model, split, folder in (
        (f"{SAMPLED}, held-out\n({DESK_MODEL})", SAMPLED, DESK_MODEL, "held-out", beside),
        (f"{SAMPLED}\n({DESK_MODEL})", SAMPLED, DESK_MODEL, "test", out),
        (f"{SCRIPTED}\n(references)", SCRIPTED, "embedded", "test", out),
    ):
        env_args = {"policy": "brief"} if env == SAMPLED else {}
        factory = find_environment(env, env_args)
        command = factory.missing()
        if command is not None:
            print_line(console, f"{env} is skipped; to install it: {command}")
            continue
        _emptied(folder)
        config = RunConfig(
            env=env,
            split=split,
            env_args=env_args,
            tasks=f"0-{HELD_OUT - 1}" if split == "held-out" else None,
            engine="http://127.0.0.1",
            model=model,
            parser="hermes",
            samples=samples,
            max_new_tokens=1024,
            max_turns=60 if model == "embedded" else 16,
            seed=seed,
            out=folder,
        )
        parts.append((title, config, choose_tasks(factory, split, config.tasks)))
    return parts


def _emptied(folder: Path) -> None:
    """Create the folder, or remove an earlier demo's files from it. Raise `UsageError` if it has
    others.
    """
    make_folder(folder)
    names = (FILE_NAME, SETTINGS_NAME, SUMMARY_NAME, PAGE_NAME)
    for file in sorted(folder.iterdir()):
        if file.name not in names and not file.name.startswith("."):
            raise UsageError(f"--out {folder} holds other files ({file.name}): name another folder")
    for name in names:
        (folder / name).unlink(missing_ok=True)


async def _played(console: Console, config: RunConfig, tasks: Sequence[Task]) -> Outcome:
    factory = find_environment(config.env, config.env_args)
    async with _engine(config, factory, tasks) as engine:
        config = config.model_copy(update={"engine": engine.url})
        async with Model.from_args(config, tokenizer=engine.tokenizer) as served:
            agents = served_agents(config, served)
            options = EnvironmentOptions()
            plan = Plan(config, factory, tasks, agents, options, {}, served)
            plan = with_identity(plan, FilesRead(config.env))
            return await play(plan, console, produced_by=_policy(config))


def _policy(config: RunConfig) -> dict[str, str | None]:
    """Return what `run.json` records about the engine's replies: the policy, and the SHA-256 hash
    of its weights (None if the replies are scripted).
    """
    if config.env != SAMPLED:
        policy = f"reference actions, with a mistake in {MISTAKES:.0%} of the episodes"
        return {"policy": policy, "weights_sha256": None}
    weights = (desk_model_path() / "model.safetensors").read_bytes()
    return {"policy": DESK_MODEL, "weights_sha256": hashlib.sha256(weights).hexdigest()}


def _engine(
    config: RunConfig, factory: EnvironmentFactory, tasks: Sequence[Task]
) -> AbstractAsyncContextManager[Any]:
    if config.env == SAMPLED:
        return load_engine(desk_model_path(), seed=config.seed, keep_log=False)
    lines = play_references(
        factory, tasks, samples=config.samples, mistakes=MISTAKES, seed=config.seed
    )
    policy = reference_policy(lines)
    return EmbeddedEngine(load_embedded_tokenizer(), policy, context_length=131072)
