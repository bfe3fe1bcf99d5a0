"""`DrivenEpisode`: an episode for frameworks that sample the tokens themselves.

Such a framework (tinker-cookbook, for example) calls its environment with the ids that it sampled,
and expects the next prompt. The episode runs as usual, with an engine that waits for these ids.
`DrivenPlayer` makes such episodes for tasks of a named environment.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from toolroll.rollout.environment import Environment, Task
from toolroll.rollout.episode import Agent, InteractionResult
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.runs.registry import agent_maker
from toolroll.rollout.types import GenerateRequest, WeightVersion
from toolroll.trainers.episodes import EpisodePlayer, EpisodeSettings
from toolroll.trainers.framework_engine import FrameworkEngine, Sampled

_NO_LIMIT = 2**31 - 1

Play = Callable[[Mapping[str, Any], str], Coroutine[Any, Any, InteractionResult]]
"""Plays an episode. Takes the sampling parameters and the session id."""


class _WaitingEngine(FrameworkEngine):
    """An engine that passes each request to the episode's caller and waits for the caller's tokens.

    `episodes` has the running episodes by session id.
    """

    requires_logprobs = False

    def __init__(self, tokenizer: Any, *, context_length: int | None) -> None:
        super().__init__("the caller", tokenizer, context_length=context_length)
        # The caller limits each turn itself. Here, only the context length limits it.
        self.params = {"max_new_tokens": context_length or _NO_LIMIT}
        self.episodes: dict[str, TurnByTurn] = {}

    async def sample(self, request: GenerateRequest) -> Sampled:
        episode = self.episodes.get(request.session_id)
        if episode is None:  # an agent that names its session itself, such as `program`
            if len(self.episodes) != 1:
                raise UsageError(
                    f"the agent changes the session id to {request.session_id!r}, so that its "
                    "episodes cannot share a model: use DrivenEpisode"
                )
            [episode] = self.episodes.values()
        await episode.requests.put(request)
        return await episode.answers.get()


def _waiting(tokenizer: Any, settings: EpisodeSettings) -> tuple[_WaitingEngine, Model]:
    engine = _WaitingEngine(tokenizer, context_length=settings.context_length)
    # an episode must not change the collector of the caller's process
    args = settings.filled(pace_gc=False).rollout_args()
    return engine, Model.from_args(args, tokenizer=tokenizer, engine=lambda config: engine)


class TurnByTurn:
    """One episode for which you sample: `start` and `step` return a prompt, and `step` takes the
    ids that you sampled for this prompt. `DrivenEpisode` and `DrivenPlayer` make it.
    """

    def __init__(self, engine: _WaitingEngine, play: Play) -> None:
        self._engine, self._play = engine, play
        self.requests: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[Sampled] = asyncio.Queue()
        self._playing: asyncio.Task[InteractionResult] | None = None
        self._waiting = False
        self.stop_token_ids: list[int] = []
        """The ids at which the turn of the last prompt must stop."""

    async def start(self) -> list[int] | None:
        """Reset the environment and return the first prompt. Return None if the episode is over."""
        if self._playing is not None:
            raise UsageError("the episode was started already: make a new one")
        session, episodes = uuid.uuid4().hex, self._engine.episodes
        episodes[session] = self
        self._playing = asyncio.create_task(self._play(self._engine.params, session))
        self._playing.add_done_callback(lambda task: episodes.pop(session))
        return await self._next()

    async def step(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        *,
        finish_reason: str | None = None,
        weight_version: str | None = None,
    ) -> list[int] | None:
        """Take the ids that you sampled for the last prompt, including the stop token. Return the
        next prompt, or None if the episode is over.

        Without `logprobs`, the turn's logprobs are NaN in the trajectory, and
        `training_sequences` refuses it. `finish_reason`: "stop", "length" or "abort". By default,
        it is "stop" if the last id is one of `stop_token_ids`, otherwise "length". "stop" needs a
        stop token or a special token as the last id: otherwise the episode is aborted. Raise
        `UsageError` if no prompt is waiting for sampled ids.
        """
        if not self._waiting:
            raise UsageError(
                "no prompt is waiting: call start first, and call step only after start or step "
                "has returned a prompt"
            )
        if finish_reason is None:
            finish_reason = "stop" if len(ids) and ids[-1] in self.stop_token_ids else "length"
        versions = () if weight_version is None else (WeightVersion(weight_version, 0, len(ids)),)
        self._waiting = False
        await self.answers.put(Sampled(ids, logprobs, finish_reason, versions))
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
        next_request = asyncio.ensure_future(self.requests.get())
        try:
            await asyncio.wait([next_request, self._playing], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            next_request.cancel()
            await self.aclose()
            raise
        if next_request.done():
            self._waiting = True
            request = next_request.result()
            self.stop_token_ids = list(request.sampling_params["stop_token_ids"])
            ids: list[int] = request.input_ids.tolist()
            return ids
        next_request.cancel()
        self._playing.result()  # raises errors that do not abort an episode, such as wrong settings
        return None


class DrivenEpisode(TurnByTurn):
    """One episode of `env` for which you sample.

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
        engine, model = _waiting(tokenizer, settings.filled(concurrency=1))
        agent: Agent = agent_maker(settings.agent)(model, settings.agent_settings)

        def play(params: Mapping[str, Any], session: str) -> Coroutine[Any, Any, InteractionResult]:
            places = env, None, params, task.index, settings.max_turns
            return agent.asolve(*places, task=task, seed=settings.seed, session_id=session)

        super().__init__(engine, play)


class DrivenPlayer:
    """Makes driven episodes of the environment that `settings` name, in one event loop. They share
    one model. It can be pickled if `tokenizer` can: the copy makes its own model.

    The setting `reruns` has no effect, because a rerun would begin inside the caller's episode.
    """

    def __init__(self, tokenizer: Any, settings: EpisodeSettings) -> None:
        self.tokenizer, self.settings = tokenizer, settings.model_copy(update={"reruns": 0})
        self._engine, model = _waiting(tokenizer, self.settings)
        self._player = EpisodePlayer(model, self.settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return DrivenPlayer, (self.tokenizer, self.settings)

    def episode(
        self, index: int, *, metadata: Mapping[str, Any] | None = None, number: int = 0
    ) -> TurnByTurn:
        """Return a new episode of the task `index`. See `EpisodePlayer.play` for the arguments."""

        def play(params: Mapping[str, Any], session: str) -> Coroutine[Any, Any, InteractionResult]:
            return self._player.play(
                index, params, metadata=metadata, number=number, session_id=session
            )

        return TurnByTurn(self._engine, play)

    async def aclose(self) -> None:
        """Close the user simulators and the model. No episode may be running."""
        await self._player.aclose()
