"""A load for a small prefix cache, and what the engine computed again under it: long agents among
short episodes."""

import asyncio
import random
import threading
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from support.episodes import opened_model
from support.qwen import qwen3_tokenizer

from toolroll.agents.environments.tool_environment import tool_environment
from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.rollout.episode import Agent, Episode
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings

POOL = 3_000
"""The tokens of the server's cache (--max-total-tokens)."""
CALL = r"<tool_call>\{\"name\": \"look\", \"arguments\": \{\}\}</tool_call>"
BIAS = {"151657": 100.0, "151658": 100.0, "151643": -100.0}
"""Without it, the random model spells <tool_call> with other tokens, which is no call, or ends a
turn with <|endoftext|>, which is a fork. Temperature 0: which tokens these are changes nothing
here, and SGLang needs a third of its time on a CPU to sample from 151,936."""
PARAMS: dict[str, Any] = {
    "temperature": 0.0,
    "max_new_tokens": 48,
    "regex": CALL,
    "logit_bias": BIAS,
}
SHORT_PARAMS: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 4}
AGENTS, BETWEEN = 4, 9
"""The long agents. `BETWEEN` short episodes end between two turns of an agent, and
use more tokens than the cache has."""


def look() -> str:
    """Look around."""
    return "Nothing."


@dataclass(frozen=True, slots=True)
class Played:
    """Episodes, and the sums over all their turns but the first."""

    episodes: Sequence[Episode]

    @property
    def later(self) -> list[Any]:
        parts = [part for episode in self.episodes for part in episode.result.trajectories]
        return [turn for part in parts for turn in part.turns[1:]]

    @property
    def cached_share(self) -> float:
        """The share of the later turns' prompts that came from the cache."""
        prompts = sum(turn.prompt_tokens for turn in self.later)
        return sum(turn.cached_tokens for turn in self.later) / prompts

    @property
    def recomputed(self) -> int:
        return int(sum(e.result.metrics["recomputed_tokens"] for e in self.episodes))


def model_at(url: str, *, session_cache: bool) -> AbstractAsyncContextManager[Model]:
    config = {"session_cache": session_cache}
    return opened_model(url, qwen3_tokenizer(), "qwen25", config=config)


class Gate:
    """Lets a long agent go on once `BETWEEN` more short episodes have ended, or all of them."""

    def __init__(self, shorts: int) -> None:
        self._ended, self._all = 0, shorts
        self._changed = threading.Condition()

    def wait(self) -> None:
        with self._changed:
            until = min(self._ended + BETWEEN, self._all)
            self._changed.wait_for(lambda: self._ended >= until)

    def short_ended(self, episode: Episode) -> None:
        with self._changed:
            self._ended += 1
            self._changed.notify_all()


async def play_long_among_short(url: str, *, session_cache: bool, turns: int) -> Played:
    """Play `AGENTS` agents of `turns` turns among short episodes. Return the long ones."""
    shorts = (turns + 5) * BETWEEN  # some are left at the end
    gate, long = Gate(shorts), list[Episode]()

    def slow() -> str:
        """Look around."""
        gate.wait()
        return look()

    slow.__name__ = "look"

    async with model_at(url, session_cache=session_cache) as model:
        agents = runner(model, slow, [text(f"agent {n}", 5) for n in range(AGENTS)], turns)
        texts = [text(f"short {n}", 60) for n in range(shorts)]
        others = runner(model, look, texts, 1, at_once=1, params=SHORT_PARAMS)
        await asyncio.gather(
            agents.run(agents.factory.tasks("test"), long.append),
            others.run(others.factory.tasks("test"), gate.short_ended),
        )
    return Played(long)


def runner(
    model: Any, tool: Any, systems: Any, turns: int, *, at_once: int = AGENTS, params: Any = PARAMS
) -> Runner:
    """Return a runner of one task for each system message, each cut after `turns` turns."""
    tasks = [
        {"id": system.split(":")[0], "messages": [{"role": "system", "content": system}, GO]}
        for system in systems
    ]
    factory = tool_environment(tools=[tool], tasks=tasks, reward=lambda: 1.0, name="looks")

    def agent() -> Agent:
        policy = CallPolicy(max_invalid_in_a_row=100)
        player = TrainableToolCallingAgent(model=model, policy=policy)
        player.on_length = "continue"
        return player

    settings = RunSettings(sampling_params=dict(params), concurrency=at_once, max_turns=turns)
    return Runner(factory, agent, settings)


GO = {"role": "user", "content": "Look around."}


def text(name: str, words: int) -> str:
    """Return a text that begins with `name` and is different from its first token on."""
    numbers = random.Random(name)
    return f"{name}: " + " ".join(str(numbers.randrange(100, 1000)) for _ in range(words))
