"""Wrap overridden hooks of `TrainableAgentMixin`, so that a `Conversation` can call them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from operator import index
from typing import Any

from toolroll.agents.loop.hook_value import hook_value, reading, run_hook
from toolroll.agents.loop.validation import checked_reward
from toolroll.parsers.openai import from_openai
from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
from toolroll.rollout.engine import parse_completion
from toolroll.rollout.errors import EnvironmentFailure
from toolroll.rollout.model.model import Model
from toolroll.rollout.types import (
    Completion,
    GenerateRequest,
    IdArray,
    InteractionResult,
    Message,
)

_PROPOSED: ContextVar[list[int] | None] = ContextVar("toolroll_proposed_ids", default=None)

CallHook = Callable[[str, dict[str, Any]], Any]


def wrap_call_llm(
    served: Model, call_llm: CallHook
) -> Callable[[GenerateRequest], Awaitable[Completion]]:
    """Return a function that samples by calling `call_llm`, an overridden `_call_llm`. The response
    is checked like a response of the engine.
    """

    async def generate(request: GenerateRequest) -> Completion:
        payload = {
            "input_ids": [int(index) for index in request.input_ids],
            "sampling_params": dict(request.sampling_params),
            "return_logprob": request.return_logprob,
        }
        body: Any = await run_hook(call_llm, f"{served.url}/generate", payload)
        if inspect.isawaitable(body) and not inspect.iscoroutinefunction(call_llm):
            body = await body
        body = hook_value("_call_llm", body)
        info = await served.engine.model_info()
        return parse_completion(body, request, vocab_size=info.sampled_limit)

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
            given = hook_value(name, hook(messages), depth=1)
        finally:
            _PROPOSED.reset(token)
        with reading(name):
            return [index(one) for one in given[position]]  # a float is refused, not rounded

    return hooked


def proposed_ids() -> list[int] | None:
    """Return the ids that will be sent to the engine unless the running token hook returns
    different ones. Return None if no token hook is running.
    """
    return _PROPOSED.get()


def wrap_parse_tool(parse_tool: Callable[[str], Mapping[str, Any]]) -> Callable[[str], ParsedReply]:
    """Return a parser that calls an overridden `_parse_tool`, which returns `{parsed_result:
    {normal_text, calls}, success, error}`.
    """

    def parse(text: str) -> ParsedReply:
        found = hook_value("_parse_tool", parse_tool(text), depth=2)
        with reading("_parse_tool"):
            if not found.get("success", True):
                call = ToolCall(
                    "",
                    None,
                    text,
                    CallStatus.INVALID_JSON,
                    str(found.get("error") or "the reply could not be parsed"),
                )
                return ParsedReply(content="", tool_calls=(call,))
            result = found["parsed_result"]
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
    found = hook(
        result,
        result.reward,
        result.info,
        [{**message, "content": message.get("content") or ""} for message in result.messages],
        result.loss_mask,
        ids[:cut],
        ids[cut:],
    )
    made = hook_value("_build_final_result", found)
    if not isinstance(made, InteractionResult):
        raise EnvironmentFailure(
            f"_build_final_result returned {type(made).__name__}: return the argument `res`"
        )
    made.reward = checked_reward("_build_final_result", made.reward)
    return made


def _function(entry: Mapping[str, Any]) -> dict[str, str]:
    parameters = entry.get("parameters")
    arguments = parameters if isinstance(parameters, str) else json.dumps(parameters)
    return {"name": str(entry.get("name") or ""), "arguments": arguments}
