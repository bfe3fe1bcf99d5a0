"""What a run writes can be read, whatever an engine or an environment gave: a value is refused
before the episode is written, or it is in the line that a reader takes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.http import completion
from support.results import content
from support.scripted_runs import Scripted, ScriptedFactory, play

from toolroll.rollout.engine import parse_completion
from toolroll.rollout.errors import CompletionError
from toolroll.rollout.runs.episode_file import from_line, to_line
from toolroll.rollout.session import Session
from toolroll.rollout.types import (
    Episode,
    GenerateRequest,
    InteractionResult,
    StepResult,
    StopReason,
    Task,
)

NUMBERS = st.sampled_from(
    [None, True, -1, 0, 1, 2, 2**31 - 1, 2**31, -(2**31), 2**63, 10**400]
) | st.sampled_from(
    [-0.0, 0.5, 1e15, 1e308, float("nan"), float("inf"), np.float32(0.5), np.int64(7)]
)
TEXTS = st.sampled_from(["", "x", "\ud800", "\x00", "\u2028", "🦆" * 100])
ANY = NUMBERS | TEXTS | st.lists(NUMBERS | TEXTS, max_size=2) | st.dictionaries(TEXTS, NUMBERS)
ANSWER_FIELDS = (
    "prompt_tokens completion_tokens cached_tokens weight_version weight_versions finish_reason "
    "e2e_latency output_token_logprobs output_top_logprobs"
).split()
RESULT_FIELDS = "messages reward done info".split()


def read_back(written: Episode) -> Episode:
    again = from_line(to_line(written))
    assert content(again) == content(from_line(to_line(again)))
    return again


@given(name=st.sampled_from(ANSWER_FIELDS), value=ANY)
def test_an_engines_answer(name: str, value: Any) -> None:
    asked = GenerateRequest(np.array([1, 2, 3], dtype=np.int32), {}, "s")
    try:
        found = parse_completion(completion([7, 8], **{name: value}), asked)
    except CompletionError:
        return
    session = Session("s")
    session.sample(found, {}, after=session.observe(asked.input_ids, after=None))
    trajectories = tuple(session.trajectories())
    result = InteractionResult.of(
        trajectories, messages=[], stop_reason=StopReason.DONE, reward=1.0, prompt="", info={}
    )
    [again] = read_back(Episode("e", "t", 0, 0, 0, result)).result.trajectories
    assert again.turns == trajectories[0].turns


@given(name=st.sampled_from([*RESULT_FIELDS, "metrics", "truncated_reward"]), value=ANY)
def test_an_environments_result(name: str, value: Any) -> None:
    values = {name: value}
    if name in RESULT_FIELDS:
        more = [{"role": "user", "content": "More."}]
        values = {"step": StepResult(**{"messages": more, "done": True, name: value})}

    def act(method: str, task: Task) -> Any:
        return values.get(method)

    [written] = asyncio.run(play(ScriptedFactory(lambda: Scripted(act), count=1)))
    read_back(written)
