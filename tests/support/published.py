"""Episodes for the regression tests of published defects, and copies of the published ways to make
tokens, which must fail them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from support.episodes import serving
from support.qwen import tokenizer_for, trl_template
from tokenizers.processors import TemplateProcessing

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.types import InteractionResult, Task, Trajectory
from toolroll.testing import EmbeddedEngine, PolicyRequest, Reply

TOOLS_LAST = (
    "{%- for m in messages %}{%- if m.role == 'user' and tools and loop.last %}"
    "<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
"""A chat template that shows the tools before the last user message, as Mistral's do."""


@cache
def qwen(template: str = "qwen2_5") -> Any:
    """Qwen's small tokenizer with one of trl's chat templates."""
    return tokenizer_for(trl_template(template))


@cache
def with_bos(template: str = "llama3_2") -> Any:
    """A tokenizer that puts a BOS before any text, with Llama's template, which writes one too."""
    tokenizer = tokenizer_for(trl_template(template))
    begin = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        f"{begin} $A", None, [(begin, tokenizer.bos_token_id)]
    )
    return tokenizer


class DiffingAgent(TrainableToolCallingAgent):
    """Its deltas are made as the published example makes them: the text by which two renders of the
    conversation differ in length, without a generation prompt, encoded anew."""

    def _get_token_delta(
        self, tokenizer: Any, messages: Sequence[Any], **options: bool
    ) -> tuple[list[int], list[int]]:
        ids = diffed(tokenizer, messages)
        return ids, [0] * len(ids)


def diffed(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """The ids that the last message seems to add."""
    before, now = (
        tokenizer.apply_chat_template(list(part), tokenize=False)
        for part in (messages[:-1], messages)
    )
    return list(tokenizer(now[len(before) :], add_special_tokens=False)["input_ids"])


def retold(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """A whole conversation as the published example trains it: encoded message by message."""
    first = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
    ids = list(
        tokenizer.apply_chat_template(
            list(messages[:first]), tokenize=True, add_generation_prompt=True, return_dict=False
        )
    )
    for at in range(first, len(messages)):
        ids += diffed(tokenizer, messages[: at + 1])
    return ids


async def episode(
    tokenizer: Any,
    world: Any,
    said: Sequence[str | Reply],
    *,
    kind: type[TrainableToolCallingAgent] = TrainableToolCallingAgent,
    policy: CallPolicy | None = None,
    params: dict[str, Any] | None = None,
    steps: int = 12,
    on_length: str = "stop",
    seed: int = 0,
    **engine: Any,
) -> tuple[InteractionResult, EmbeddedEngine]:
    """One episode, session "s", in which the model says `said`, then goodbye."""

    def speak(request: PolicyRequest) -> str | Reply:
        return said[request.call] if request.call < len(said) else "Goodbye."

    async with serving(tokenizer, speak, **engine) as (embedded, model):
        agent = kind(
            model=model,
            policy=policy or CallPolicy(parallel_calls="first"),
            rollout_args={"verify": "off"},
        )
        agent.on_length = on_length  # type: ignore[assignment]
        given = {"max_new_tokens": 512, "temperature": 1.0} if params is None else params
        result = await agent.asolve(
            world, None, given, max_num_steps=steps, task=Task("t", 0), seed=seed, session_id="s"
        )
        return result, embedded


def text_of(tokenizer: Any, trajectory: Trajectory) -> str:
    return str(tokenizer.decode(trajectory.input_ids, skip_special_tokens=False))


def observed(trajectory: Trajectory, at: int) -> np.ndarray[Any, Any]:
    """The ids between the sampled turns `at` and `at + 1`."""
    ids: np.ndarray[Any, Any] = trajectory.input_ids[
        trajectory.turns[at].stop : trajectory.turns[at + 1].start
    ]
    return ids
