"""Wrap overridden hooks of `TrainableAgentMixin`, so that a `Conversation` can call them, and an
overridden `asolve`.

While a wrapped function runs, a context variable holds what the base class's method would use
without the override. So an override with the published signature can call `super()`.
"""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from operator import index
from typing import Any

from toolroll.agents.loop.environment_results import checked_reward
from toolroll.agents.loop.environment_runner import chosen_task
from toolroll.agents.loop.hook_value import hook_value, reading, run_hook
from toolroll.parsers.openai import (
    OpenAICompatibleToolCallAdapter,
    from_openai,
    openai_result,
)
from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
from toolroll.rollout.engine import cut_placeholder, parse_completion, request_fields
from toolroll.rollout.environment import Task
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.errors import EnvironmentFailure, UsageError
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import Completion, GenerateRequest, IdArray, Message, Tool

_PROPOSED: ContextVar[list[int] | None] = ContextVar("toolroll_proposed_ids", default=None)
_READ: ContextVar[tuple[str, ParsedReply, Sequence[Tool]] | None] = ContextVar(
    "toolroll_read_reply", default=None
)
_ASKED: ContextVar[tuple[Any, dict[str, Any]]] = ContextVar("toolroll_asked", default=(None, {}))

CallHook = Callable[[str, dict[str, Any]], Any]


def with_episode_arguments(asolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return the overridden `asolve`, which then also takes the arguments `task`, `seed` and
    `session_id`. The published signature lacks them, so the base class's `asolve` gets them from
    `episode_arguments`.
    """
    parameters = inspect.signature(asolve).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return asolve
    missing = {"task", "seed", "session_id"} - parameters.keys()
    if not missing:
        return asolve

    @wraps(asolve)
    async def played(agent: Any, *args: Any, **kwargs: Any) -> Any:
        passed = {name: kwargs.pop(name) for name in missing & kwargs.keys()}
        if "session_id" in passed:  # a list that all calls of `super()` share: the first takes it
            passed["session_id"] = [passed["session_id"]]
        token = _ASKED.set((agent, {**_asked_of(agent), **passed}))
        try:
            return await asolve(agent, *args, **kwargs)
        finally:
            _ASKED.reset(token)

    return played


def episode_arguments(
    agent: Any, task_index: int | None, task: Task | None, seed: int | None, session_id: str | None
) -> tuple[Task, int, str]:
    """Return the task, the seed and the session id of an episode of `agent`, for the arguments of
    `asolve`. Arguments that an override of `asolve` does not pass on are those of its own call. If
    it plays several episodes, only the first has the session id of the call.
    """
    passed = _asked_of(agent)
    if not isinstance(task, Task | None):
        raise UsageError(f"task={task!r:.100} is no Task: a number is the argument task_index")
    if task is None:
        task = passed.get("task")
        if task is None or task_index not in (None, task.index):  # the override changed the index
            task = chosen_task(task_index)
    if not session_id and passed.get("session_id"):
        session_id = passed["session_id"].pop()
    seed = passed.get("seed") if seed is None else seed
    return task, seed or 0, session_id or uuid.uuid4().hex


def _asked_of(agent: Any) -> dict[str, Any]:
    """Return the arguments that the running override of `asolve` did not take. They are those of
    `agent` only: the override may play another agent.
    """
    asked_agent, passed = _ASKED.get()
    return passed if asked_agent is agent else {}


def wrap_call_llm(
    model: Model, call_llm: CallHook
) -> Callable[[GenerateRequest], Awaitable[Completion]]:
    """Return a function that samples by calling `call_llm`, an overridden `_call_llm`. The response
    is checked like a response of the engine.
    """

    async def generate(request: GenerateRequest) -> Completion:
        payload = {
            "input_ids": [int(index) for index in request.input_ids],
            **request_fields(request.sampling_params),
            "return_logprob": request.return_logprob,
        }
        body: Any = await run_hook(call_llm, f"{model.url}/generate", payload)
        if inspect.isawaitable(body) and not inspect.iscoroutinefunction(call_llm):
            body = await body
        body = hook_value("_call_llm", body)
        info = await model.engine.model_info()
        turn = parse_completion(body, request, vocab_size=info.sampled_limit)
        return cut_placeholder(turn, model.placeholders)

    return generate


def proposing(
    name: str, hook: Callable[[Sequence[Message]], tuple[Any, ...]], *, position: int
) -> Callable[[Sequence[Message], IdArray], Sequence[int]]:
    """Return a function that calls `hook`, an overridden token hook, and that can be passed to a
    `Conversation`.

    The hook returns a tuple whose item at `position` is the list of ids. `name` is the hook's name
    in error messages. While the hook runs, `proposed_ids` returns the ids that would be sent to the
    engine without the hook. So an override can get these ids from `super()` and change them.
    """

    def hooked(messages: Sequence[Message], ids: IdArray) -> Sequence[int]:
        token = _PROPOSED.set(ids.tolist())
        try:
            returned = hook_value(name, hook(messages), depth=1)
        finally:
            _PROPOSED.reset(token)
        with reading(name):
            return list(map(index, returned[position]))  # a float is refused, not rounded

    return hooked


def proposed_ids() -> list[int] | None:
    """Return the ids that will be sent to the engine unless the running token hook returns
    different ones. Return None if no token hook is running.
    """
    return _PROPOSED.get()


class ModelAdapter(OpenAICompatibleToolCallAdapter):
    """Parses replies with the parser of `model`. While an overridden `_parse_tool` runs, it returns
    what this parser read in the turn, and parses any other text for the episode's tools.
    """

    def __init__(self, tools_info: Sequence[Tool], model: Model) -> None:
        read = _READ.get()
        super().__init__(tools_info if read is None else read[2], model.parser)

    def parse_response_to_openai_format(self, response: str) -> dict[str, Any]:
        read = _READ.get()
        if read is not None and read[0] == response:
            return openai_result(read[1])
        return super().parse_response_to_openai_format(response)


def wrap_parse_tool(
    parse_tool: Callable[[str], Mapping[str, Any]],
) -> Callable[..., ParsedReply]:
    """Return a function that calls an overridden `_parse_tool`, which returns `{parsed_result:
    {normal_text, calls}, success, error}`, and that can be passed to a `Conversation`.

    `reply` is what the model's parser read. If the override returns the same, `reply` is the
    result. So its reasoning, all its calls, and its `lookalikes` are kept. Any other result has no
    reasoning and no lookalikes.
    """

    def parse(
        text: str, reply: ParsedReply | None = None, tools: Sequence[Tool] = ()
    ) -> ParsedReply:
        token = _READ.set(None if reply is None else (text, reply, tools))
        try:
            returned = hook_value("_parse_tool", parse_tool(text), depth=2)
        finally:
            _READ.reset(token)
        with reading("_parse_tool"):
            if reply is not None and returned == openai_result(reply):
                return reply
            if not returned.get("success", True):
                call = ToolCall(
                    "",
                    None,
                    text,
                    CallStatus.INVALID_JSON,
                    str(returned.get("error") or "the reply could not be parsed"),
                )
                return ParsedReply(content="", tool_calls=(call,))
            result = returned["parsed_result"]
            calls = [{"function": _function(entry)} for entry in result.get("calls") or ()]
            return from_openai({"content": result.get("normal_text"), "tool_calls": calls})

    return parse


def finish_with(hook: Callable[..., Any], result: InteractionResult) -> InteractionResult:
    """Call an overridden `_build_final_result`, and return its result.

    The hook of slime's example joins the contents of the messages, so an override gets messages
    with "" in place of a content of None. Raise `EnvironmentFailure` if the hook returns anything
    but an `InteractionResult` with a valid reward.
    """
    ids = result.tokens
    cut = len(ids) - result.response_length
    returned = hook(
        result,
        result.reward,
        result.info,
        [{**message, "content": message.get("content") or ""} for message in result.messages],
        result.loss_mask,
        ids[:cut],
        ids[cut:],
    )
    final = hook_value("_build_final_result", returned)
    if not isinstance(final, InteractionResult):
        raise EnvironmentFailure(
            f"_build_final_result returned {type(final).__name__}: return the argument `res`"
        )
    final.reward = checked_reward("_build_final_result", final.reward)
    return final


def _function(entry: Mapping[str, Any]) -> dict[str, str]:
    parameters = entry.get("parameters")
    arguments = parameters if isinstance(parameters, str) else json.dumps(parameters)
    return {"name": str(entry.get("name") or ""), "arguments": arguments}
