"""`toolroll run`: opens the model, starts or continues a run, shows its progress, and stores the
results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError
from rich.console import Console

from toolroll.cli.display import RunDisplay, listed, print_line, shortened
from toolroll.endpoint.endpoint_settings import sampling_defaults
from toolroll.evaluation.certify import certify
from toolroll.evaluation.do_nothing import play_floor
from toolroll.evaluation.ray_runner import RayRunner
from toolroll.evaluation.recorded_run import RecordedRun
from toolroll.evaluation.report import read_summary, report, write_summary
from toolroll.evaluation.run_config import RunConfig, SamplingOptions, sampling_of
from toolroll.evaluation.run_setup import Plan, open_runner, prepare
from toolroll.rollout.engine.health import check_endpoint
from toolroll.rollout.engine.outage import Outage
from toolroll.rollout.environment import Task
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import UsageError, error_in
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.tokenizers import DESK_MODEL
from toolroll.rollout.runs.provenance import Provenance, provenance
from toolroll.rollout.runs.registry import choose_tasks
from toolroll.rollout.runs.run_directory import RunDirectory, is_complete
from toolroll.rollout.runs.runner import EpisodeKey, Runner, RunStoppedError, remaining
from toolroll.rollout.runs.summary import Summary
from toolroll.rollout.runtime.complaints import complaints
from toolroll.rollout.runtime.event_loop import stop_signals
from toolroll.rollout.runtime.garbage import paced_garbage
from toolroll.rollout.runtime.targets import absolute_target
from toolroll.rollout.settings import split_credentials
from toolroll.rollout.types import Status


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of playing one environment.

    `stopped`: the signal that ended the run early. `failure`: the reason why the last aborted
    episode of the run was aborted, in one line. `error`: the error that ended the run early.
    `folder`: where the episodes are.
    """

    summary: Summary
    report: dict[str, Any]
    folder: Path | None
    stopped: int | None = None
    failure: str = ""
    error: Exception | None = None


async def run(config: RunConfig, console: Console, recorded: RecordedRun | None = None) -> Outcome:
    """Check the servers and the template, then play `config.env`. If the run repeats a `recorded`
    one, print what differs.
    """
    if config.baseline_url is None:
        _check_sampling(config.sampling_params)
    async with AsyncExitStack() as stack:
        with console.status("Loading the environment and the tokenizer"):
            plan = await prepare(config, stack)
            complete = _is_complete(plan)
        if complete:  # its table needs no server
            return await play(replace(plan, served=None), console)
        stopped, error = await _end(_check_servers(plan, config, console), config.baseline_url)
        if error is not None:
            raise error
        if stopped is not None:
            print_line(console, "Stopped while waiting; the same command continues from here.")
            raise typer.Exit(128 + stopped)
        return await play(plan, console, recorded=recorded, sampling=_sampling(config, plan))


async def _check_servers(plan: Plan, settings: RunConfig, console: Console) -> None:
    """Wait for the servers of the run with these `settings`, and check the chat template."""
    user_url = settings.user_url if settings.user_model is not None else None
    servers = {"--baseline-url": settings.baseline_url, "--user-url": user_url}
    with console.status(f"Waiting for the {'engine' if plan.served else 'server'}") as status:
        await _check_addresses(servers, seconds=settings.engine_timeout)
        if plan.served is not None:
            allow = settings.allow_model_mismatch
            await _check_engine(plan.served, console, allow_mismatch=allow)
            status.update("Checking the chat template")
            await _check_template(plan.served, console)
            if settings.model == DESK_MODEL and settings.env_args.get("policy") != "brief":
                print_line(console, _NOT_TRAINED)


def _is_complete(plan: Plan) -> bool:
    """Return True if the folder of the run has all its episodes."""
    out, planned = plan.config.out, remaining(plan.tasks, plan.config.samples, ())
    return out is not None and is_complete(out, plan.factory.name, planned)


def _check_sampling(params: Mapping[str, Any]) -> None:
    """Raise `UsageError` if SGLang does not take `params`."""
    try:
        sampling_defaults(params)
    except ValidationError as error:
        raise UsageError(f"--sampling-params: {complaints(error)}") from error


def _sampling(settings: RunConfig, plan: Plan) -> str:
    """Return a line with the sampling parameters, and which of them come from the model's
    generation_config.json. Return "" without a served model.
    """
    if plan.served is None:
        return ""
    names, used = SamplingOptions.model_fields, plan.config
    filled = [name for name in names if getattr(settings, name) != getattr(used, name)]
    origin = f"; from the model's generation_config.json: {', '.join(filled)}" if filled else ""
    return f"sampling: {listed(sampling_of(used.identity))}{origin}"


async def play(
    plan: Plan,
    console: Console,
    *,
    produced_by: Mapping[str, Any] | None = None,
    recorded: RecordedRun | None = None,
    sampling: str = "",
) -> Outcome:
    """Play the episodes of `plan` that are not yet in the folder `config.out`, and show the
    progress. `produced_by` is added to the provenance in `run.json`. The line `sampling` is printed
    if the folder can be continued.

    SIGINT and SIGTERM end the run early.
    """
    env, out = plan.factory.name, plan.config.out
    now = await provenance(plan.served, plan.factory) | dict(produced_by or {})
    now["options"] = plan.config.options
    if recorded is not None:
        for line in recorded.differences(plan.identity, now) or ["nothing that moves a reward"]:
            print_line(console, f"{env}: different from the recorded run: {line}")
    if out is None:
        if sampling:
            print_line(console, sampling)
        summary = Summary(env)
        return await _play(plan, console, summary, summary.add, frozenset(), [now])
    with RunDirectory(
        out,
        env,
        plan.identity,
        sync=plan.config.sync,
        provenance=now,
        planned=remaining(plan.tasks, plan.config.samples, ()),
    ) as folder:
        if sampling:
            print_line(console, sampling)
        await _close_left(plan, out)
        # A damaged file is an error before the episodes, not after them.
        earlier = read_summary(out).get(env, {})
        if folder.done:
            print_line(console, f"{env}: {len(folder.done)} episodes are in {out} already")
        if _has_others(folder.done, plan):
            print_line(console, f"{env}: the table also covers other tasks or samples in {out}")
        for message in shortened(folder.bad_lines):
            print_line(console, f"WARNING: {message} (its episode is played again)")
        if folder.dropped:
            print_line(console, f"{env}: {folder.dropped} aborted episodes will be retried")

        def keep(episode: Episode) -> None:
            if plan.read is not None:
                folder.keep_read(plan.read.hashes())
            folder.append(episode)

        outcome = await _play(
            plan, console, folder.summary, keep, folder.done, folder.provenance, earlier
        )
        await _close_left(plan, out)  # of worker processes that died
        try:
            write_summary(out, {env: outcome.report})
        except UsageError:
            if outcome.error is None:  # otherwise the disk has probably ended the run
                raise
        return outcome


async def _close_left(plan: Plan, out: Path) -> None:
    """Close the sessions that killed processes of the run left open at the engine."""
    if plan.served is not None:
        await plan.served.engine.close_left_sessions(out)
        plan.served.engine.keep_sessions(out)


def _has_others(done: Collection[EpisodeKey], plan: Plan) -> bool:
    """Return True if `done` contains an episode of a task or sample that is not in `plan`."""
    tasks = {task.id for task in plan.tasks}
    return any(task not in tasks or sample >= plan.config.samples for task, sample in done)


async def _play(
    plan: Plan,
    console: Console,
    summary: Summary,
    keep: Callable[[Episode], None],
    done: Collection[EpisodeKey],
    history: Sequence[Provenance],
    earlier: Mapping[str, Any] = {},
) -> Outcome:
    """Play, and return the result. If no episode is played, the do-nothing baseline is that of the
    `earlier` report, if it has one. Its time is added, or if nothing is left to play, kept.
    """
    config, before = plan.config, summary.episodes
    runner = runner_of(plan)
    failure = ""
    floor: Summary | None = None
    served = plan.served
    sampled = (lambda: (0, 0)) if served is None else (lambda: served.sampled)
    split = config.split if config.split not in (None, plan.factory.splits[0]) else ""
    total = len(plan.tasks) * config.samples
    with RunDisplay(console, summary, total, sampled, split=split) as display:

        def take(episode: Episode) -> None:
            nonlocal failure
            keep(episode)
            display.show(episode)
            if episode.result.status is Status.ABORTED:
                failure = _failure(error_in(episode.result.info), config.baseline_url)

        with paced_garbage(enabled=config.pace_gc):
            stopped, error = await _end(
                runner.run(plan.tasks, take, done=done), config.baseline_url
            )

    async def play_do_nothing() -> None:
        nonlocal floor
        floor = await play_floor(plan.factory, _played(plan, summary), config.model_dump())

    if error is not None and not summary.episodes:
        raise error
    names = ["do_nothing"] * (summary.episodes == before)
    names += ["seconds"] * (not remaining(plan.tasks, config.samples, done))
    reused = {name: earlier[name] for name in names if earlier.get(name) is not None}
    if config.do_nothing and stopped is None and error is None and "do_nothing" not in reused:
        with console.status("Playing the do-nothing baseline"):
            stopped, error = await _end(play_do_nothing(), config.baseline_url)
    environment_report = report(
        summary,
        floor=floor,
        settings=plan.identity,
        seconds=display.seconds + (earlier.get("seconds") or 0.0),
        planned={task.id: config.samples for task in plan.tasks},
        allow_unequal=config.allow_unequal,
        provenance=history,
    )
    return Outcome(summary, environment_report | reused, config.out, stopped, failure, error)


async def _end(
    run: Awaitable[None], baseline_url: str | None
) -> tuple[int | None, Exception | None]:
    """Await `run`. At the first SIGINT or SIGTERM, cancel it and wait until it ends. Return the
    signal or the error that ended it early, if any.
    """
    task = asyncio.ensure_future(run)
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:  # a second signal must not interrupt the clean-up
            received.append(number)
            task.cancel()

    try:
        with stop_signals(stop):
            await task
    except asyncio.CancelledError:
        if received:
            return received[0], None
        task.cancel()
        raise
    except Exception as error:  # noqa: BLE001 - raised after the table of what was played
        if isinstance(error, RunStoppedError):
            message = f"{error}{no_such_address(error.failure, baseline_url)}"
            return None, RunStoppedError(message, error.failure)
        return None, error
    return None, None


def _played(plan: Plan, summary: Summary) -> list[Task]:
    """Return the tasks in the result: the tasks of `plan`, and the tasks that earlier runs stored
    in the folder.
    """
    names = {task.id for task in plan.tasks} | {*summary.samples, *summary.aborted}
    return [
        task for task in choose_tasks(plan.factory, plan.config.split, None) if task.id in names
    ]


def _failure(error: Mapping[str, Any], baseline_url: str | None) -> str:
    message = " ".join(str(error.get("message", "unknown error")).split())
    return f"{message}{no_such_address(error, baseline_url)}"


def no_such_address(error: Mapping[str, Any], baseline_url: str | None) -> str:
    """Return a hint about the address if the baseline's endpoint answered 404, else ""."""
    if baseline_url is None or error.get("status") != 404:
        return ""
    return f" ({split_credentials(baseline_url)[0]} answers 404: does the address end in /v1?)"


def runner_of(plan: Plan) -> Runner | RayRunner:
    """Return the runner for `plan`: in this process, or in processes of a Ray cluster."""
    config = plan.config
    if config.processes == 1 and config.ray is None:
        return Runner(plan.factory, plan.make_agent, config, plan.options)
    # a worker may run in another folder
    places = {"env": absolute_target(config.env), "out": config.out and config.out.absolute()}
    return RayRunner(
        partial(open_runner, config.model_copy(update=places)),
        processes=config.processes,
        concurrency=config.concurrency,
        samples=config.samples,
        address=config.ray or "local",
    )


async def _check_addresses(servers: Mapping[str, str | None], *, seconds: float) -> None:
    """Wait up to `seconds` for each of `servers`, whose address an option gives. Raise an
    error if one of them does not respond.
    """
    for option, url in servers.items():
        if url is None:
            continue
        address, authorization = split_credentials(url.rstrip("/"))
        probe = partial(check_endpoint, address, authorization)
        server = f"{option}: the server at {address}"
        health = await Outage(server, probe, timeout=seconds).wait_until_healthy()
        if not health.ok:
            raise UsageError(f"{server}: {health.why}: is the server running there?")


async def _check_engine(served: Model, console: Console, *, allow_mismatch: bool) -> None:
    """Wait until the engine responds. Raise `UsageError` if it does not, or if it serves a model
    with another tokenizer than `served`. If `allow_mismatch` is True, only warn about the
    tokenizer. Print the warnings.
    """
    health = await served.engine.wait_until_healthy()
    if not health.ok:
        raise UsageError(f"the engine at {served.url}: {health.why}")
    info = await served.engine.model_info()  # raises an error if this is not an engine's address
    if info.session_cache is not None:
        print_line(console, _SESSION_CACHE[info.session_cache])
    for line in await served.check_identity(allow_mismatch=allow_mismatch):
        print_line(console, f"WARNING: {line}")


_NOT_TRAINED = (
    f"WARNING: {DESK_MODEL} was trained only on desk with these options, so expect rewards of 0: "
    """--split held-out --env-args '{"policy": "brief"}'"""
)
_SESSION_CACHE = {
    True: "SGLang's cache keeps the prefixes of running episodes.",
    False: "SGLang's cache may drop the prefixes of running episodes "
    "(--enable-session-radix-cache keeps them, but not behind sglang-router 0.3.2).",
}


async def _check_template(served: Model, console: Console) -> None:
    """Print whether tool episodes fork with the chat template. If tool calling is not exact with
    it, also print what it does to the tokens.
    """
    certificate = await served.run_in_thread(certify, served.template)
    history = served.template.history
    if forks := certificate.forks(history):
        print_line(console, forks)
    if certificate.exact_with(history):
        return
    console.print(
        "[yellow]The chat template does not append tool results to the earlier tokens:[/]"
    )
    for line in certificate.remarks():
        print_line(console, f"- {line}")
