"""Conversations, endpoint sessions, slime samples and episode files whose tokens must not change.

Each function returns the items by name, as plain JSON. Refactorings compare them before and after
(`tests/unit/test_frozen.py`).
"""

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support import slime_mirror
from support.adversarial.dialogues import dialogues
from support.adversarial.episodes import control_words, play_episodes, tokenizer_of
from support.adversarial.templates import by_hand
from support.adversarial.token_judge import Judge
from support.endpoints import endpoint
from support.episodes import agent, call, serving
from support.listed_environment import TOOL
from support.slime_trainer import SAMPLING, TASKS, reference_lines, says
from support.slime_trainer import serving as trainer

from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.runs.episode_file import EpisodeStore
from toolroll.rollout.runs.registry import load_environment
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import Trajectory
from toolroll.testing import (
    PolicyRequest,
    Reply,
    load_embedded_tokenizer,
    play_references,
    reference_policy,
)
from toolroll.trainers.slime import generate

Items = dict[str, Any]

TEMPLATES = 20
DIALOGUES = 10
SESSIONS = 50
SAMPLES = 20
EPISODES = 100


def of_trajectory(trajectory: Trajectory) -> Items:
    """What is trained on, and why it begins and ends where it does."""
    return {
        "input_ids": trajectory.input_ids.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "logprobs": [None if value != value else value for value in trajectory.logprobs.tolist()],
        "prompt_length": trajectory.prompt_length,
        "fork_reason": trajectory.fork_reason,
        "turns": [[t.start, t.stop, t.finish_reason, t.excluded] for t in trajectory.turns],
    }


async def conversations() -> Items:
    """Dialogues of ten kinds under templates of many styles."""
    found: Items = {}

    def keep(dialogue: Conversation) -> None:
        found[dialogue.session.session_id] = {
            "trajectories": [of_trajectory(one) for one in dialogue.session.trajectories()],
            "messages": dialogue.messages,
        }

    for template in by_hand()[:TEMPLATES]:
        words = control_words(Judge(tokenizer_of(template), template))
        scripts = dialogues(f"{template.name}/frozen", words)[:DIALOGUES]
        await play_episodes(template, scripts, keep=keep)
    return found


async def sessions() -> Items:
    """Sessions of the endpoint: turns with and without calls, edits, branches, cuts, choices."""

    def policy(request: PolicyRequest) -> Reply:
        # by the prompt, because the requests of one `n` arrive in any order
        length = len(request.input_ids)
        rng = random.Random(f"{request.routing_key}/{length}")
        said = [
            "A reply.",
            f"I look. {call(at=f'x{length}', b=[1])}",
            f"<think>\nHm {length}?\n</think>\n\nA reply.",
            call(at=str(length)) * 2,
        ]
        return Reply(rng.choice(said))

    found: Items = {}
    async with endpoint(load_embedded_tokenizer(), policy) as bench:
        for number in range(SESSIONS):
            name = f"frozen-{number}"
            answers = await _talk(bench, name, random.Random(name))
            kept = (await bench.get(f"/sessions/{name}/trajectories"))["trajectories"]
            found[name] = {"answers": answers, "trajectories": [_steady(one) for one in kept]}
    return found


async def _talk(bench: Any, session: str, rng: random.Random) -> list[Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You look."}]
    answers: list[Any] = []
    for turn in range(rng.randint(2, 6)):
        answering = [
            {"role": "tool", "tool_call_id": it["id"], "content": f"seen {turn}"}
            for it in messages[-1].get("tool_calls") or ()
        ]
        messages += answering or [{"role": "user", "content": f"Go on {turn} <|end|>"}]
        if rng.random() < 0.2 and turn > 1:
            messages[1] = {"role": "user", "content": f"Edited {turn}"}
        cut = {"max_tokens": 3} if rng.random() < 0.1 else {}
        body = {"messages": messages, "tools": [TOOL], "n": rng.choice([1, 1, 2]), **cut}
        status, answer = await bench.post(f"/sessions/{session}/v1/chat/completions", body)
        choices = answer.get("choices", [])
        answers.append([status, answer.get("prompt_token_ids"), choices, answer.get("error")])
        if not choices:
            break
        messages = [*messages, rng.choice(choices)["message"]]
    return answers


def _steady(trajectory: Mapping[str, Any]) -> Items:
    """Without the times that requests took, and without the rewards of turns, which are newer."""
    left_out = ("latency", "reward")
    turns = [{k: v for k, v in turn.items() if k not in left_out} for turn in trajectory["turns"]]
    return {**trajectory, "turns": turns}


async def samples() -> Items:
    """slime's samples of the desk's tasks; every third model says something of its own first."""
    found: Items = {}
    with pytest.MonkeyPatch.context() as patch:
        slime_mirror.install(patch)
        lines = {
            f"s{n}": [*(["Let me see."] if n % 3 == 0 else []), *reference_lines(n % len(TASKS))]
            for n in range(SAMPLES)
        }
        async with trainer(says(lines)) as (_, args):
            args.toolroll_parallel_calls = "first"  # instead of the desk's own rule
            for n in range(SAMPLES):
                prompt = str(n % len(TASKS))
                asked = slime_mirror.Sample(index=n, prompt=prompt, session_id=f"s{n}")
                made = await generate(args, asked, dict(SAMPLING))
                found[f"s{n}"] = {
                    "tokens": made.tokens,
                    "loss_mask": made.loss_mask,
                    "logprobs": made.rollout_log_probs,
                    "response_length": made.response_length,
                    "reward": made.reward,
                    "status": made.status.value,
                    "weight_versions": made.weight_versions,
                }
    return found


async def episodes(folder: Path) -> Items:
    """Episodes of the desk as the file keeps them, without what depends on their order."""
    desk = load_environment("desk")
    tasks = desk.tasks("test")
    each = -(-EPISODES // len(tasks))
    lines = play_references(desk, tasks, samples=each, mistakes=0.5, seed=7)
    async with serving(load_embedded_tokenizer(), reference_policy(lines)) as (_, served):
        settings = RunSettings(
            sampling_params={"max_new_tokens": 256, "temperature": 1.0}, samples=each, pace_gc=False
        )
        runner = Runner(desk, lambda: agent(served), settings)
        with EpisodeStore(folder) as store:
            await runner.run(tasks, store.append)
    found: Items = {}
    for line in (folder / "episodes.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[f"{record['task_id']}#{record['sample']}"] = _steady_record(record)
    return dict(sorted(found.items())[:EPISODES])


def _steady_record(value: Any) -> Any:
    if isinstance(value, dict):
        if "finish_reason" in value:  # a turn: files from before its reward was added lack it
            value = {key: kept for key, kept in value.items() if key != "reward"}
        # the last six follow from the rest; older files do not have them
        left_out = (
            *("latency", "seconds", "cached_tokens", "constrained", "bad_calls", "reward_reason"),
            *("task_hash", "expected_calls", "environment", "recomputed_tokens"),
        )
        return {
            key: _steady_record(kept)
            for key, kept in value.items()
            if not any(word in key for word in left_out)
        }
    return [_steady_record(one) for one in value] if isinstance(value, list) else value


def play_all(folder: Path) -> dict[str, Items]:
    """All four kinds."""
    return {
        "conversations": asyncio.run(conversations()),
        "sessions": asyncio.run(sessions()),
        "samples": asyncio.run(samples()),
        "episodes": asyncio.run(episodes(folder)),
    }
