"""`DrivenEpisode`: an episode for frameworks that sample the tokens themselves.

Such a framework (tinker-cookbook, for example) calls its environment with the ids that it sampled,
and expects the next prompt. The episode runs as usual, with an engine that waits for these ids.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.types import (
    Environment,
    GenerateRequest,
    InteractionResult,
    Task,
    WeightVersion,
)
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.framework_engine import FrameworkEngine, Sampled

_NO_LIMIT = 2**31 - 1


class _WaitingEngine(FrameworkEngine):
    """An engine that passes each request to the caller and waits for the caller's tokens."""

    def __init__(self, *, context_length: int | None, vocab_size: int) -> None:
        super().__init__("the caller", context_length=context_length, vocab_size=vocab_size)
        self.requests: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[Sampled] = asyncio.Queue()

    async def sample(self, request: GenerateRequest) -> Sampled:
        await self.requests.put(request)
        return await self.answers.get()


class DrivenEpisode:
    """One episode of `env` for which you sample: `start` and `step` return a prompt, and `step`
    takes the ids that you sampled for this prompt.

    `tokenizer` must have a chat template. These fields of `settings` have no effect: `env`,
    `env_args`, `split`, `user`, `user_settings`, `reruns` and `concurrency`.

    Example:
        episode = DrivenEpisode(env, task, tokenizer, EpisodeSettings(context_length=32768))
        prompt = await episode.start()
        while prompt is not None:
            ids, logprobs = await sample(prompt)  # yours
            prompt = await episode.step(ids, logprobs)
        print(episode.result.reward, episode.result.trajectories)
    """

    def __init__(
        self,
        env: Environment,
        task: Task,
        tokenizer: Any,
        settings: EpisodeSettings | None = None,
    ) -> None:
        settings = settings or EpisodeSettings()
        self._env, self._task, self._settings = env, task, settings
        length = settings.context_length
        # The caller limits each turn itself. Here, only the context length limits it.
        self._params = {"max_new_tokens": length or _NO_LIMIT}
        self._engine = _WaitingEngine(context_length=length, vocab_size=len(tokenizer))
        self._model = Model.from_args(
            # an episode must not change the collector of the caller's process
            settings.filled(pace_gc=False, concurrency=1).rollout_args(),
            tokenizer=tokenizer,
            engine=lambda config: self._engine,
        )
        self._agent = agent_maker(settings.agent)(self._model, settings.agent_settings)
        self._playing: asyncio.Task[InteractionResult] | None = None
        self._waiting = False

    async def start(self) -> list[int] | None:
        """Reset the environment and return the first prompt. Return None if the episode is over."""
        if self._playing is not None:
            raise UsageError("the episode was started already: make a new DrivenEpisode")
        self._playing = asyncio.create_task(
            self._agent.asolve(
                self._env,
                None,
                self._params,
                self._task.index,
                self._settings.max_turns,
                task=self._task,
                seed=self._settings.seed,
                session_id=uuid.uuid4().hex,
            )
        )
        return await self._next()

    async def step(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        finish_reason: str | None = None,
        weight_version: str | None = None,
    ) -> list[int] | None:
        """Take the ids that you sampled for the last prompt, including the stop token. Return the
        next prompt, or None if the episode is over.

        `finish_reason`: "stop", "length" or "abort". By default, it is "stop" if the last id is a
        stop token of the template, otherwise "length". Raise `UsageError` if no prompt is waiting
        for sampled ids.
        """
        if not self._waiting:
            raise UsageError(
                "no prompt is waiting: call start first, and call step only after start or step "
                "has returned a prompt"
            )
        ended = len(ids) > 0 and ids[-1] in self._model.template.stop_token_ids
        if finish_reason is None:
            finish_reason = "stop" if ended else "length"
        # "": a stop string ended the turn, because the last token is not a stop token
        matched = "" if finish_reason == "stop" and not ended else None
        versions = () if weight_version is None else (WeightVersion(weight_version, 0, len(ids)),)
        self._waiting = False
        await self._engine.answers.put(Sampled(ids, logprobs, finish_reason, versions, matched))
        return await self._next()

    @property
    def result(self) -> InteractionResult:
        """The result of the episode. Raise `UsageError` while the episode is not over."""
        if self._playing is None or not self._playing.done():
            raise UsageError("the episode is not over: call step until it returns None")
        return self._playing.result()

    async def aclose(self) -> None:
        """End the episode early and close its environment."""
        if self._playing is not None and not self._playing.done():
            self._playing.cancel()
            await asyncio.wait([self._playing])

    async def _next(self) -> list[int] | None:
        assert self._playing is not None
        asked = asyncio.ensure_future(self._engine.requests.get())
        try:
            await asyncio.wait([asked, self._playing], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            asked.cancel()
            await self.aclose()
            raise
        if asked.done():
            self._waiting = True
            ids: list[int] = asked.result().input_ids.tolist()
            return ids
        asked.cancel()
        self._playing.result()  # raises errors that do not abort an episode, such as wrong settings
        return None
