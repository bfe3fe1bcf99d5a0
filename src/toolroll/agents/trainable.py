"""`TrainableAgentMixin`: plays one episode of an environment against an SGLang router, and returns
the episode's exact tokens.

All hooks of slime's tau-bench example (its module `trainable_agents`) exist here, and may be
overridden. The token ids that `_prepare_prompt_tokens` and `_get_token_delta` return are sent to
the engine unchanged, and compared with the chat template's own ids. A mismatch is counted and
excludes the sample from training.

Invariants (I7 and I9: docs/guarantees.md): an episode ends with a status and a stop reason, never
with an exception, except `UsageError`, `EngineUnreachableError` and `CancelledError` (I7). If a
failure that the model did not cause ends an episode, the episode is ABORTED and its reward is None
(I9).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import getattr_static
from types import SimpleNamespace
from typing import Any, Literal

from toolroll.agents.loop.adapt import as_environment
from toolroll.agents.loop.call_policy import ONE_CALL_A_TURN, CallPolicy
from toolroll.agents.loop.environment_results import check_messages
from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.agents.loop.episode_tracker import EpisodeTracker
from toolroll.agents.loop.hook_environment import (
    HookEnvironment,
    ObservationText,
    call_hook,
    execute_with,
    reset_hook,
    step_hook,
)
from toolroll.agents.loop.hook_value import hook_value, reading
from toolroll.agents.loop.play import Played, Rules, build_result, play
from toolroll.agents.loop.published_hooks import (
    ModelAdapter,
    episode_arguments,
    finish_with,
    proposed_ids,
    proposing,
    with_episode_arguments,
    wrap_call_llm,
    wrap_parse_tool,
)
from toolroll.parsers.openai import create_openai_adapter
from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.environment import Observation, Task
from toolroll.rollout.episode import InteractionResult, response_text
from toolroll.rollout.errors import EnvironmentFailure, UsageError
from toolroll.rollout.model.conversation import Conversation, DeltaHook
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.rollout_args import read_args
from toolroll.rollout.runtime.foreign import guarded
from toolroll.rollout.settings import RolloutArgs
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.transcript import last_message_delta
from toolroll.rollout.types import Message, Tool

TOOL_INSTRUCTION = (
    "Call at most one function in each of your turns, and wait for its result before you go on. "
    "A turn either calls one function or speaks to the user; it never does both."
)
"""Replaces the sentence in a prompt that invites several calls, for agents that make one call per
turn.
"""

_INVITATION = "You may call one or more functions to assist with the user query."


def one_call_a_turn(text: str) -> str:
    """Return `text`, the start of a prompt (system text and tools), with `TOOL_INSTRUCTION` in
    place of the sentence that invites several calls.
    """
    return text.replace(_INVITATION, TOOL_INSTRUCTION)


def _args_of(model: Model, raw_args: Any) -> RolloutArgs:
    """Return `raw_args` as `RolloutArgs`. If they are None, return the model's own, if any."""
    return model.args if raw_args is None and model.args is not None else read_args(raw_args)


class TrainableAgentMixin:
    """An agent that plays episodes and returns their exact tokens.

    Subclasses set `tools_info`, `wiki`, `rollout_args` and `sampling_params`.

    Example:
        class MyAgent(TrainableAgentMixin):
            rollout_args = {
                "engine": "http://127.0.0.1:30000",
                "model": "Qwen/Qwen3-8B",
            }
            sampling_params = {"temperature": 1.0, "max_new_tokens": 1024}

        agent = MyAgent()
        result = await agent.asolve(env, task=task, seed=0)  # result.tokens, result.loss_mask
        await agent.aclose()

    `openai_adapter`: parses the replies in place of the model's parser, if it is set and not None
    (see `create_openai_adapter`). `model`: a `Model` that several agents share. Without it, the
    agent opens its own from `rollout_args`, and closes its connections while no episode is running.
    `on_length`: what happens if `max_new_tokens` truncates a turn. "stop" ends the episode
    (TRUNCATED). "continue" adds the text that closes the turn (mask 0), and continues the episode.
    `step_timeout`: the time limit in seconds for one call to the environment, including the user
    simulator. A call that takes longer aborts the episode. Hooks may be overridden in a subclass or
    set on an instance.
    """

    tools_info: Sequence[Tool] = ()
    wiki: str = ""
    rollout_args: Any = None
    sampling_params: Mapping[str, Any] | None = None
    policy: CallPolicy = ONE_CALL_A_TURN
    model: Model | str | None = None
    on_length: Literal["stop", "continue"] = "stop"
    step_timeout: float | None = None
    _adapter: Any = None
    _own_template: tuple[ChatTemplate, ChatTemplate] | None = None
    _bare_template: ChatTemplate | None = None
    _opened: Model | None = None
    _playing: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapter = getattr_static(cls, "openai_adapter")
        if adapter is not TrainableAgentMixin.openai_adapter:
            cls._adapter = adapter
            cls.openai_adapter = TrainableAgentMixin.openai_adapter  # type: ignore[method-assign]
        owner = next(base for base in cls.__mro__ if "asolve" in vars(base))
        if owner is cls or not issubclass(owner, TrainableAgentMixin):  # another mixin may have one
            asolve = with_episode_arguments(vars(owner)["asolve"])
            cls.asolve = asolve  # type: ignore[method-assign]

    async def asolve(
        self,
        env: Any,
        rollout_args: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        task_index: int | None = None,
        max_num_steps: int = 30,
        *,
        task: Task | None = None,
        seed: int | None = None,
        session_id: str | None = None,
    ) -> InteractionResult:
        """Play one episode of `env`, with at most `max_num_steps` model turns, and return its
        result.

        `env`: an `Environment`, or any object that `as_environment` accepts, such as a tau-bench
        environment. `task_index` chooses the task if no `task` is given. Without both, the
        environment draws it, as in slime's example, and the result's `info["task_index"]` is what
        the environment says of it, or None. A `seed` of None is 0.
        Raise `UsageError` for settings that cannot work, `EngineUnreachableError` (only if an
        `engine_timeout` is set), and `CancelledError`. Every other failure becomes the result's
        status, stop reason and `info["error"]`.
        """
        task, seed, name = episode_arguments(self, task_index, task, seed, session_id)
        params = sampling_params if sampling_params is not None else self.sampling_params or {}
        raw_args = rollout_args if rollout_args is not None else self.rollout_args
        model = self._open(raw_args)
        environment = as_environment(env, wiki=self.wiki, tools_info=self.tools_info)
        policy = self.policy.under(environment)
        runner = EnvironmentRunner(
            environment,
            task,
            seed,
            model.run_in_thread,
            self.step_timeout,
            max_observation_bytes=_args_of(model, raw_args).max_observation_bytes,
        )
        rules = Rules(policy, params, max_num_steps, self.on_length)
        if self._has("_execute_tool"):
            rules = replace(rules, execute=execute_with(self._execute_tool))
        begin = lambda tracker: self._begin(model, runner, tracker, name, policy, raw_args)
        self._playing += 1
        end_session = model.open_session(name)
        try:
            played = await play(runner, begin, rules, session_id=name)
        finally:
            held = end_session()
            self._playing -= 1
            if model is self._opened and self._playing == 0:  # published code never calls `aclose`
                await model.engine.aclose()  # a later episode opens new connections
        if held:
            played.tracker.counts["held_turns"] = held
        return self._finish(played)

    @property
    def openai_adapter(self) -> Any:
        """The adapter that was set. If it is None, a `ModelAdapter`, or the adapter of slime's
        example if a hook is called directly and no model is named.
        """
        if self._adapter is not None:
            return self._adapter
        if not self._has_model():
            return create_openai_adapter(self.tools_info)
        return ModelAdapter(self.tools_info, self._open(self.rollout_args))

    @openai_adapter.setter
    def openai_adapter(self, adapter: Any) -> None:
        self._adapter = adapter

    # --- its parts --------------------------------------------------------------------------------

    def _open(self, rollout_args: Any) -> Model:
        """Return `self.model`. If it is not a `Model`, open one from `rollout_args`, once."""
        if isinstance(self.model, Model):
            return self.model
        if self._opened is None:
            self._opened = Model.from_args(read_args(rollout_args))
            weakref.finalize(self, self._opened.release)
        return self._opened

    def _has_model(self) -> bool:
        """Return True if a model is open, or if `rollout_args` names one. It may be False only if a
        hook is called directly, outside an episode.
        """
        opened = isinstance(self.model, Model) or self._opened is not None
        return opened or bool(read_args(self.rollout_args).model)

    async def aclose(self) -> None:
        """Close the model if this agent opened it."""
        if self._opened is not None:
            await self._opened.aclose()
            self._opened = None

    async def _begin(
        self,
        model: Model,
        runner: EnvironmentRunner,
        tracker: EpisodeTracker,
        session_id: str,
        policy: CallPolicy,
        raw_args: Any,
    ) -> Conversation:
        """Call the hooks that reset the environment, and open the conversation.
        `_prepare_prompt_tokens` gets the tokenizer and `raw_args`.
        """
        tokenizer = model.template.tokenizer
        state = SimpleNamespace(tokenizer=tokenizer, args=raw_args)
        obs, info = await self._first(runner)
        tracker.info.update(info)
        first, runner.first = runner.first, None
        messages = hook_value("_build_initial_messages", self._build_initial_messages(obs))
        check_messages("_build_initial_messages", messages)
        parsers = self._has("_parse_tool"), self._has("openai_adapter"), self._adapter is not None
        return Conversation(
            model,
            messages,
            (first.tools if first is not None else ()) or self.tools_info,
            session_id=session_id,
            template=self._template(model.template, policy),
            verify=_args_of(model, raw_args).verify,
            generate=wrap_call_llm(model, self._call_llm) if self._has("_call_llm") else None,
            parse=wrap_parse_tool(self._parse_tool) if any(parsers) else None,
            prompt_hook=self._token_hook("_prepare_prompt_tokens", state, position=1),
            delta_hook=self._token_hook("_get_token_delta", tokenizer, position=0),
        )

    def _token_hook(self, name: str, first: Any, *, position: int) -> DeltaHook | None:
        """Return the token hook `name`, wrapped for a `Conversation`, or None if it is not
        overridden. The hook gets `first` and the messages (see `proposing`).
        """
        if not self._has(name):
            return None
        return proposing(name, partial(getattr(self, name), first), position=position)

    async def _first(self, runner: EnvironmentRunner) -> tuple[str, Mapping[str, Any]]:
        """Reset the environment. Return the user's first text, and info for the result."""
        if not self._has("_initialize_environment"):
            returned: Any = await self._initialize_environment(runner, runner.task.index)
        else:
            env, hook = HookEnvironment(runner), self._initialize_environment
            returned = await call_hook("_initialize_environment", hook, env, runner.task.index)
        with reading("_initialize_environment"):
            first, info = returned
            text = ObservationText.of(first) if isinstance(first, Observation) else first
            return text, {**info}

    def _has(self, hook: str) -> bool:
        """Return True if a subclass or this instance overrides the attribute `hook`."""
        return getattr_static(self, hook) is not vars(TrainableAgentMixin)[hook]

    def _template(self, template: ChatTemplate, policy: CallPolicy) -> ChatTemplate | None:
        """Return `template` with a rewritten start of prompts (system text and tools). Return None
        if it is used unchanged.

        If `_reformulate_tool_call` is overridden, the override rewrites the start, and the template
        belongs to this agent. Otherwise, if the policy does not execute all calls of a turn,
        `one_call_a_turn` rewrites the start, and all agents share the template.
        """
        if not self._has("_reformulate_tool_call"):
            if policy.parallel_calls in (None, "all"):
                return None
            return template.reformulated(one_call_a_turn)
        if self._own_template is None or self._own_template[0] is not template:
            self._own_template = template, template.variant(head_hook=self._head)
        return self._own_template[1]

    def _direct_template(self, tokenizer: Any) -> ChatTemplate:
        """Return the model's template, or the template of `tokenizer` if no model is named."""
        if self._has_model() or tokenizer is None:
            return self._open(self.rollout_args).template
        if self._bare_template is None or self._bare_template.tokenizer is not tokenizer:
            self._bare_template = ChatTemplate(tokenizer)
        return self._bare_template

    def _head(self, text: str) -> str:
        head = hook_value("_reformulate_tool_call", self._reformulate_tool_call(text))
        if not isinstance(head, str):
            raise EnvironmentFailure(
                f"_reformulate_tool_call returned {type(head).__name__}: return the text"
            )
        return head

    def _finish(self, played: Played[Conversation]) -> InteractionResult:
        result = build_result(played, self.tools_info)
        if not self._has("_build_final_result"):
            return result
        try:
            with guarded():
                return finish_with(self._build_final_result, result)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - a failed episode is data (I7)
            played.reason, played.reward = played.tracker.fail(error), None
            played.turn_rewards = ()
            return build_result(played, self.tools_info)

    # --- the hooks --------------------------------------------------------------------------------

    def _reformulate_tool_call(self, text: str) -> str:
        """Rewrite the start of the prompt (system text and tools) for one call per turn.

        Rewriting the text a second time changes nothing.
        """
        return one_call_a_turn(text)

    async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Post `payload` to `url`, and return the engine's JSON.

        `payload` has `input_ids`, `sampling_params` and `return_logprob`. An override may be plain
        (it then runs in a thread) or `async`. What it returns is checked like a response of the
        engine. The requests of an override have no routing key and are not retried.
        """
        if self._has_model():
            return await self._open(self.rollout_args).post(url, payload)
        async with Engine(EngineConfig(engine=read_args(self.rollout_args).engine)) as engine:
            return await engine.post(url, payload)

    def _parse_tool(self, response: str) -> dict[str, Any]:
        """Parse the text of a reply into `{openai_message, parsed_result, success, error}`, with
        `openai_adapter`.
        """
        parsed: dict[str, Any] = self.openai_adapter.parse_response_to_openai_format(response)
        return parsed

    def _execute_tool(self, env: Any, action: Any) -> Any:
        """Execute `action` in the environment. The result, with or without `await`, has
        `observation`, `reward`, `done` and `info`, which may be changed.

        An override may be plain or `async`. It may return `env.step(action)` with or without
        `await`, or an object with these four attributes. `action` also has tau-bench's `name` and
        `kwargs`.
        """
        return step_hook(env, action)

    def _initialize_environment(self, env: Any, task_index: int | None) -> Any:
        """Reset the environment. The result, with or without `await`, is its first observation (the
        text of the user's first message), and the info for the episode's result.

        An override may be plain or `async`. It may call tau-bench's `env.reset(task_index=...)`
        without `await`, and return its `(observation, info)`.
        """
        return reset_hook(env, task_index)

    def _build_initial_messages(self, obs: str) -> list[Message]:
        """Return the first messages of the conversation.

        `obs` is the text of the user's first message. If it comes from the environment,
        `obs.observation` is the whole observation, and its messages are returned. If an override of
        `_initialize_environment` returned its own text, return `wiki` as the system message and
        `obs` as the user message.
        """
        if isinstance(obs, ObservationText):
            return [dict(message) for message in obs.observation.messages]
        return [{"role": "system", "content": self.wiki}, {"role": "user", "content": obs}]

    def _prepare_prompt_tokens(
        self, state: Any, messages: Sequence[Message]
    ) -> tuple[str, list[int]]:
        """Return the text and the ids of the first prompt. During an episode, these ids are sent
        to the engine unless an override returns different ones. `state` has the
        attributes `tokenizer` and `args` (the rollout arguments of the episode).
        """
        direct = self._direct_template(getattr(state, "tokenizer", None))
        template = self._template(direct, self.policy) or direct
        proposed = proposed_ids()
        ids = template.prompt(messages, self.tools_info) if proposed is None else proposed
        return template.encoder.decode(ids), ids

    def _get_token_delta(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        *,
        include_generation_prompt: bool = True,
    ) -> tuple[list[int], list[int]]:
        """Return the ids and the loss mask that the last message adds to a recorded conversation.
        To find them, the conversation is rendered with and without the message.

        Assistant messages have mask 1. All other messages, and the generation prompt before an
        assistant message, have mask 0. `include_generation_prompt=False` leaves out the generation
        prompt, for an assistant message that follows the first prompt. This is for transcripts: a
        rollout never encodes what the model sampled. If an override calls this method during an
        episode, the method returns the ids that will be sent to the engine for the new messages,
        with mask 0.
        """
        proposed = proposed_ids()
        if proposed is not None:
            return proposed, [0] * len(proposed)
        template = self._direct_template(tokenizer)
        ids, mask = last_message_delta(template, messages, self.tools_info)
        start = 0 if include_generation_prompt or 1 not in mask else mask.index(1)
        return ids[start:], mask[start:]

    def _build_final_result(
        self,
        res: InteractionResult,
        total_reward: float | None,
        info: dict[str, Any],
        messages: list[Message],
        loss_masks: list[int],
        prompt_token_ids: list[int],
        response_token_ids: list[int],
    ) -> InteractionResult:
        """Set the fields of the result that slime's example sets.

        The messages' content is always text.
        """
        res.reward = total_reward
        res.info = info
        res.messages = messages
        res.loss_mask = loss_masks
        res.tokens = [*prompt_token_ids, *response_token_ids]
        res.response = response_text(messages)
        res.response_length = len(response_token_ids)
        return res
