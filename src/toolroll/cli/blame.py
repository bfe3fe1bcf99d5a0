"""`toolroll blame`: lists the faults of the simulated user in the failed episodes of a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolroll.cli.display import shortened
from toolroll.evaluation.export.exported_run import is_graded
from toolroll.evaluation.export.messages import text_of
from toolroll.evaluation.user_faults import UserFault, instruction_of, user_faults
from toolroll.rollout.errors import EnvironmentFailure, UsageError
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.pass_at_k import passed
from toolroll.rollout.runs.registry import judge_maker
from toolroll.rollout.runs.run_directory import refuse_no_run
from toolroll.rollout.runs.runner import session_id
from toolroll.rollout.types import Episode

VERDICTS_NAME = "judge.jsonl"
_AT_ONCE = 64  # episodes that are judged
_NO_TOKENS: Any = {"trajectories": (), "tokens": [], "loss_mask": [], "logprobs": None}
_FAULTY = 0.5
"""A judge's score below which the simulated user is at fault."""
_LONGEST = 160
_RUBRIC = """The record is a conversation of an agent with a simulated user, and before it the instruction that the simulated user was to follow.
The conversation failed. Grade the simulated user, and not the agent.
Score 0 if the simulated user made the conversation fail: it contradicts or leaks its instruction, invents facts, leaves out or gives up
what it was to ask for, answers in the agent's place, or ends the conversation before the agent could do what was agreed.
Score 1 if a person with this instruction could have written each line."""  # noqa: E501


async def blame(folder: Path, judge: Mapping[str, Any] | None) -> list[str]:
    """Return the lines to print about the run in `folder`.

    `judge`: the settings of a judge that also reads these episodes. Its verdicts are kept in the
    folder, so that the same command asks only for those that are missing.
    """
    refuse_no_run(folder)
    bad_lines: list[str] = []
    has_user, failed = False, list[Episode]()
    for episode in read_episodes(folder, on_bad_line=bad_lines.append):
        if "user_calls" in episode.result.metrics:
            has_user = True
            if is_graded(episode) and not passed(episode.result.reward or 0.0):
                failed.append(replace(episode, result=replace(episode.result, **_NO_TOKENS)))
    if not has_user:
        raise UsageError(
            f"{folder} has no simulated user (user_calls in the metrics of an episode)"
        )
    grade = judge_maker("openai")(_RUBRIC, cache=folder / VERDICTS_NAME, **judge) if judge else None
    not_judged: list[str] = []
    judged: dict[int, list[UserFault]] = {}
    rest = iter(enumerate(failed))

    async def work() -> None:
        for number, episode in rest:
            judged[number] = await _faults(episode, grade, not_judged)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(_AT_ONCE, len(failed))):
            group.create_task(work())
    faulty = [(failed[number], faults) for number, faults in sorted(judged.items()) if faults]
    kinds = Counter(fault.kind for _, faults in faulty for fault in faults)
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    total = f"faults of the simulated user in {len(faulty)} of {len(failed)} failed episodes"
    return [
        *(_shown(episode, fault) for episode, faults in faulty for fault in faults),
        f"{folder}: {total}{f': {counts}' if counts else ''}",
        *shortened(sorted(not_judged)),
        *shortened(bad_lines),
    ]


async def _faults(episode: Episode, judge: Any, not_judged: list[str]) -> list[UserFault]:
    """Return the faults by rule, and the one that the judge sees. If it gives no verdict, add a
    message to `not_judged`.
    """
    result = episode.result
    faults = user_faults(result)
    if judge is None:
        return faults
    names = {"user": "simulated user", "assistant": "agent", "tool": "tool"}
    record = [
        {"role": names[m["role"]], "content": [m.get("content"), *(m.get("tool_calls") or ())]}
        for m in result.messages
        if m.get("role") in names
    ]
    order = {"role": "instruction", "content": instruction_of(result.info) or "(unknown)"}
    try:
        verdict = await judge.verdict([order, *record])
    except EnvironmentFailure as error:
        not_judged.append(f"{_name(episode)} is not judged: {error}")
        return faults
    if verdict.score < _FAULTY:
        faults.append(UserFault("judge", None, f"{verdict.score:g}: {verdict.reason}"))
    return faults


def _shown(episode: Episode, fault: UserFault) -> str:
    name = _name(episode)
    if fault.position is None:
        return f"{name}: {fault.kind}: {fault.why}"
    line = " ".join(text_of(episode.result.messages[fault.position]["content"]).split())
    quote = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
    return f"{name}, message {fault.position}: {fault.kind}: {fault.why}: {quote}"


def _name(episode: Episode) -> str:
    return session_id(episode.env, episode.task_id, episode.sample)
