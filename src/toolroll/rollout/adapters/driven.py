"""`DrivenEpisode`: an episode for frameworks that sample the tokens themselves.

Such a framework (tinker-cookbook, for example) calls its environment with the ids that it sampled,
and expects the next prompt. The episode runs as usual, with an engine that waits for these ids.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.parsers.infer import infer_parser
from toolroll.parsers.registry import get_parser
from toolroll.rollout.adapters.framework_engine import FrameworkEngine, Sampled
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import (
    Environment,
    GenerateRequest,
    InteractionResult,
    Task,
    WeightVersion,
)

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

    `tokenizer` must have a chat template. `context_length` is the model's limit in tokens.
    `tool_call_parser` is SGLang's name of a parser, or "auto" to infer the parser from the chat
    template. `settings` are the agent's settings, such as `parallel_calls` or `on_invalid_call`.

    Example:
        episode = DrivenEpisode(env, task, tokenizer, context_length=32768)
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
        *,
        context_length: int | None = None,
        tool_call_parser: str = "auto",
        max_turns: int = 30,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._env, self._task, self._seed, self._max_turns = env, task, seed, max_turns
        # The caller limits each turn itself. Here, only the context length limits it.
        self._params = {"max_new_tokens": context_length or _NO_LIMIT}
        self._template = ChatTemplate(tokenizer)
        self._engine = _WaitingEngine(context_length=context_length, vocab_size=len(tokenizer))
        name = infer_parser(tokenizer, None) if tool_call_parser == "auto" else tool_call_parser
        parser = get_parser(name, self._template.encoder.control)
        self._model = Model(self._engine, self._template, parser, threads=1)
        self._agent = agent_maker("tool-calling")(self._model, dict(settings or {}))
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
                self._max_turns,
                task=self._task,
                seed=self._seed,
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
        ended = len(ids) > 0 and ids[-1] in self._template.stop_token_ids
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
