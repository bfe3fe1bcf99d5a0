"""`ProgramAgent`: plays an episode with a program, such as a coding agent, that calls the model.

The program runs in the environment's sandbox. Its requests, over HTTP, are one session of an
endpoint, which all episodes of a model share. The program's end is the episode's only action, with
the model's last text. The environment then grades the sandbox. So the loop, runs and trainers need
no second form.

Invariants: the result has all sequences of the session. The run's sampling parameters replace those
of the program, except for `max_new_tokens` and `stop`. If the engine, the endpoint or the sandbox
failed, or if the program ended before the model answered once, the episode is ABORTED. A program
that fails after that, or that reaches a limit, is graded. The session ends before the episode is
graded: later requests are refused, and never sampled.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from toolroll.agents.loop.call_policy import CallPolicy, pop_settings
from toolroll.agents.loop.environment_results import MOST_BYTES
from toolroll.agents.loop.episode_agent import EpisodeAgent
from toolroll.agents.loop.play import EpisodeConversation, Played, Rules, build_result, rewarded
from toolroll.endpoint.endpoint import Endpoint
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.errors import ApiError, api_error
from toolroll.endpoint.http.access import session_key
from toolroll.endpoint.http.app import EndpointServer
from toolroll.endpoint.requests.sampling import session_defaults
from toolroll.endpoint.sessions.session_store import SessionStore, session_result, store_settings
from toolroll.environments.harbor_trial import HarborTrial
from toolroll.environments.programs.output import Exit
from toolroll.environments.programs.program_settings import ProgramSettings
from toolroll.environments.sandboxed import SandboxEnvironment, Session
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.engine import ROUTING_KEY
from toolroll.rollout.environment import Environment, Observation
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import EngineError, EnvironmentFailure, RolloutError, UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runtime.threads import BlockingRunner
from toolroll.rollout.settings import AgentSettings
from toolroll.rollout.types import Message, StopReason, Tool

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:@-]+")
_IGNORED_SETTINGS = {*AgentSettings.model_fields} - {"agent", "command", "step_timeout"}
"""The settings of other agents, which have no effect."""


@asynccontextmanager
async def open_server(model: Model, settings: ProgramSettings) -> AsyncIterator[EndpointServer]:
    """Serve `model` to programs on this machine. Each session has its own key.

    If `settings.sessions` names a folder, the sessions of trials that were killed are finished
    there: their answers become episodes without a reward.
    """
    store = None
    if settings.sessions is not None:
        facts = await model.run_in_thread(store_settings, model, model.name)
        store = SessionStore(settings.sessions, facts)
    endpoint_settings = EndpointSettings(
        host=settings.host,
        port=0,
        api_key=secrets.token_hex(16),
        verify=settings.verify,
        server_tools=settings.server_tools,
        idle=7 * 24 * 3600.0,  # a trial drops its own session
    )
    async with EndpointServer(Endpoint(model, endpoint_settings, store), managed=True) as server:
        for live in server.endpoint.sessions.all():
            await server.endpoint.sessions.drop(live.id)
        yield server


@dataclass(eq=False)
class ProgramConversation(EpisodeConversation):
    """The session of an episode, whose only reply is the program's end. This reply is never
    invalid, nothing follows it, and `ProgramAgent.close` ends the checks.
    """

    server: EndpointServer
    settings: ProgramSettings
    environment: SandboxEnvironment
    messages: list[Message]
    episode: str
    max_turns: int
    reason: StopReason = StopReason.DONE
    held_turns: int = 0

    def __post_init__(self) -> None:
        self.tools: list[Tool] = []
        self.info: dict[str, Any] = {}
        short = _NOT_IN_ID.sub("-", self.episode).strip("-.:_@")[:80] or "trial"
        self.name = f"{short}-{uuid.uuid4().hex[:12]}"
        session, key = ROUTING_KEY.get()
        self._routing_key = key if session == self.episode else self.name
        self.live = self.server.endpoint.sessions.empty(self.name)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that lead the program to the session."""
        key = session_key(str(self.server.settings.api_key), self.name)
        url, model = f"{self.server.url}/sessions/{self.name}", self.server.endpoint.model_name
        text = "\n\n".join(str(message["content"]) for message in self.messages)
        return {
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_MODEL": model,
            "OPENAI_API_KEY": key,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_MODEL": model,
            "INSTRUCTION": text,
            "IS_SANDBOX": "1",  # Claude Code runs as root only if this is set
            **self.settings.variables,
        }

    async def reply(self, sampling_params: Mapping[str, Any]) -> AssistantTurn:
        """Run the program to its end, and return the model's last text."""
        began = perf_counter()
        try:
            defaults = session_defaults(sampling_params)
        except ApiError as error:
            raise UsageError(str(error)) from error
        self.live = self.server.endpoint.sessions.create(self.name, defaults)
        self.live.max_turns = self.max_turns
        self.live.keep_failures = True
        self.live.pending.context = copy_context()
        self.live.pending.context.run(ROUTING_KEY.set, (self.name, self._routing_key))
        settable = ("max_new_tokens", "stop")  # the program may set these itself
        self.live.fixed_params = {name: defaults[name] for name in defaults if name not in settable}
        end = await self._run_until_stopped()
        await self.live.end()
        seconds = perf_counter() - began
        output = end.output[-4000:]
        self.info["program"] = {"session": self.name, "status": end.status, "output": output}
        finish_reason = "abort" if self._check(end) else "stop"
        last = self.live.tree.last_turn()
        text = str(last.messages()[-1].get("content") or "") if last is not None else ""
        message = {"role": "assistant", "content": text}
        return AssistantTurn(ParsedReply(text), message, finish_reason, {}, seconds)

    async def _run_until_stopped(self) -> Exit:
        """Run the program until it ends, the engine aborts a request, or a limit is reached."""
        session = Session(self.server, self.live.end)
        play = self.environment.play(self.settings, self.variables, session)
        running = asyncio.ensure_future(play)
        stopped = asyncio.ensure_future(self.live.stopped.wait())
        try:
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
            if self.live.stopped.is_set() and not self.live.failures:
                self.reason = StopReason.MAX_TURNS
                if isinstance(self.environment, HarborTrial):  # which keeps the files
                    await asyncio.wait((running,))
        finally:
            stopped.cancel()
            running.cancel()
            await asyncio.wait((running,))
        try:
            end = Exit(None, "") if running.cancelled() else running.result()
            if running.cancelled():
                await self.environment.stop()
            elif end.status is None:
                self.reason = StopReason.PROGRAM_TIMEOUT
            return end
        except EnvironmentFailure as error:  # the program may have ended the sandbox
            if not self.live.trace:
                raise
            return Exit(1, str(error))

    def _check(self, end: Exit) -> bool:
        """Return whether the engine aborted a request. Raise an error if the trial has no valid
        outcome.
        """
        for error in self.live.failures.values():
            refusal = api_error(error)
            if refusal.code == "engine_aborted":
                return True
            if refusal.code == "engine_refused" and self.live.trace:  # of what the program sent
                self.info["refused"] = str(refusal)
                continue
            raise error if isinstance(error, RolloutError) else EngineError(str(error)) from error
        self.live.check()
        if not self.live.trace:
            raise EnvironmentFailure(
                f"the program ended (exit status {end.status}) before the model answered once: "
                f"{end.output[-1000:]}"
            )
        return False

    async def settle(self) -> None:
        """Abort the requests in flight, and verify the session."""
        await self.live.end()
        self.held_turns += self.live.end_at_engine()
        await self.server.endpoint.settle(self.live)


@dataclass(eq=False)
class ProgramAgent(EpisodeAgent[ProgramConversation]):
    """Plays `model` through a program. The model answers at most `max_num_steps` requests."""

    model: Model
    settings: ProgramSettings
    step_timeout: float | None = None
    max_observation_bytes: int = MOST_BYTES

    @property
    def blocking_runner(self) -> BlockingRunner:
        return self.model

    def rules(
        self, environment: Environment, sampling_params: Mapping[str, Any], max_num_steps: int
    ) -> Rules:
        return Rules(CallPolicy(), sampling_params, max_num_steps=1)

    async def converse(
        self, environment: Environment, first: Observation, name: str, max_num_steps: int
    ) -> ProgramConversation:
        assert isinstance(environment, SandboxEnvironment)
        settings = self.settings
        key = (settings.host, settings.sessions, settings.verify, settings.server_tools)
        server = await self.model.shared(key, partial(open_server, self.model, settings))
        messages = [dict(message) for message in first.messages]
        return ProgramConversation(server, settings, environment, messages, name, max_num_steps)

    def result(self, played: Played[ProgramConversation]) -> InteractionResult:
        """Return the result, with all sequences of the session."""
        without_tokens, conversation = build_result(played), played.conversation
        if conversation is None:
            return without_tokens
        live, info = conversation.live, without_tokens.info | conversation.info
        live.reward = played.reward
        reason = played.reason
        if reason is StopReason.DONE:
            timed_out = info.get("harbor_exception") == "AgentTimeoutError"
            reason = StopReason.PROGRAM_TIMEOUT if timed_out else conversation.reason
        if live.tree.forks:
            info["forks"] = list(live.tree.forks)
        result = session_result(live, played.reward, reason, info)
        turns = sum(
            turn.excluded != "context" for part in result.trajectories for turn in part.turns
        )
        if played.reward is not None:  # it belongs to the last turn
            shares = [*[0.0] * (turns - 1), played.reward]
            result.trajectories = rewarded(result.trajectories, shares)
        metrics = without_tokens.metrics
        held = {"held_turns": float(conversation.held_turns)} if conversation.held_turns else {}
        result.metrics = metrics | result.metrics | {"seconds": metrics["seconds"]} | held
        return result

    async def close(self, conversation: ProgramConversation) -> None:
        """End the session. If sessions are kept, it gets the reward."""
        sessions = conversation.server.endpoint.sessions
        if sessions.get(conversation.name) is conversation.live:
            await sessions.drop(conversation.name)

    def prepare(self, environment: Environment) -> SandboxEnvironment:
        """Return the environment whose sandbox the program runs in."""
        if self.settings.harbor_agent is not None:
            back_end = self.settings.harbor_environment
            environment = HarborTrial(environment, back_end, self.model.name or "toolroll")
        if isinstance(environment, SandboxEnvironment):
            if self.settings.sessions is not None:
                self.settings.sessions.mkdir(parents=True, exist_ok=True)
                environment.hidden = [self.settings.sessions]
            return environment
        name = type(environment).__name__
        raise UsageError(f"a program cannot play {name}, which is no SandboxEnvironment")


def make_program_agent(model: Model, settings: Mapping[str, Any]) -> ProgramAgent:
    """Return the agent of the entry point `program` in the group `toolroll.agents`.

    `settings`: `step_timeout`, `max_observation_bytes` and the fields of `ProgramSettings`.
    """
    remaining = dict(settings)
    limits = pop_settings(remaining, "step_timeout", "max_observation_bytes")
    pop_settings(remaining, *_IGNORED_SETTINGS)
    return ProgramAgent(model, ProgramSettings.read(remaining, where="agent_args"), **limits)
