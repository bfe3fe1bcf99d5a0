"""Map the sampling parameters of a request from OpenAI's names to SGLang's, or refuse them.

Invariants: a parameter that the request does not set has the session's default, or else the
endpoint's. Requests share no objects. A turn whose sampling was constrained by a grammar is marked,
because its logprobs are from the constrained distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError

from toolroll.endpoint.endpoint_settings import EndpointSettings, SameNames, sampling_defaults
from toolroll.endpoint.errors import api_error, invalid, refusal_of, refused
from toolroll.endpoint.requests.request_bodies import (
    ChatRequest,
    NamedChoice,
    Sampling,
)
from toolroll.endpoint.requests.tool_choice import call_closer, call_grammar, strict_tag
from toolroll.endpoint.requests.tool_list import ToolList
from toolroll.rollout.engine import ModelInfo
from toolroll.rollout.engine.sampling_params import dropped_names
from toolroll.rollout.errors import UsageError

NO_LIMIT = 1 << 30
"""The token limit of a request that sets none. It is reduced to the room that is left in the
context.
"""

_UNKNOWN_CONTEXT_LIMIT = 8192


def sampling_params(
    request: Sampling,
    settings: EndpointSettings,
    info: ModelInfo,
    session_params: Mapping[str, Any],
    *,
    dropped: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Return SGLang's sampling parameters for `request`. `dropped`: those that a router in front of
    the engine drops. Raises `ApiError` if a parameter cannot be honored.
    """
    params = {**settings.sampling_params, **session_params}
    for name in SameNames.model_fields:
        value = getattr(request, name)
        if value is not None:
            params[name] = value
    if request.stop_strings:
        params["stop"] = request.stop_strings
    if request.min_tokens:
        params["min_new_tokens"] = request.min_tokens
    if request.logit_bias is not None:
        params["logit_bias"] = {str(index): bias for index, bias in request.logit_bias.items()}
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    limit = request.token_limit
    if limit is None:
        limit = default_limit(settings, session_params)
    if limit is None:
        limit = NO_LIMIT if info.context_length else _UNKNOWN_CONTEXT_LIMIT
    params["max_new_tokens"] = limit
    _check(request, settings, info, params)
    for name in dropped_names(params, dropped):
        raise refused(name, f"the router silently drops {name!r}: leave it out")
    return params


def default_limit(settings: EndpointSettings, session_params: Mapping[str, Any]) -> int | None:
    """Return the default token limit, for requests without a limit of their own, or None.

    The session's `max_new_tokens` takes precedence over the endpoint's.
    """
    limit: int | None = {**settings.sampling_params, **session_params}.get("max_new_tokens")
    return limit


def stop_strings(params: Mapping[str, Any]) -> list[str]:
    """Return the stop strings in `params`, SGLang's sampling parameters."""
    stop = params.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


def _check(
    request: Sampling,
    settings: EndpointSettings,
    info: ModelInfo,
    params: Mapping[str, Any],
) -> None:
    if request.n > settings.max_choices:
        problem = f"n is {request.n}; this endpoint gives at most {settings.max_choices}"
        raise invalid("n", problem)
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    top_k = params.get("top_k")
    if top_k is not None and top_k < 1 and top_k != -1:
        raise invalid("top_k", f"top_k is {top_k}; it must be -1 or at least 1")
    vocab = info.vocab_size
    for name in ("stop_token_ids", "logit_bias"):
        ids = map(int, params.get(name) or ())
        if vocab is not None and not all(0 <= index < vocab for index in ids):
            raise invalid(name, f"{name} has an id outside the vocabulary of {vocab} tokens")


def session_defaults(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated default sampling parameters of a session. Raise `ApiError` if a name is
    misspelled, or if a value is not valid.
    """
    try:
        if "n" in params:
            raise UsageError("'n' is set by each request")
        return sampling_defaults(params)
    except UsageError as error:
        raise refused(f"sampling_params.{api_error(error).param}", str(error)) from error
    except ValidationError as error:
        raise refusal_of(error, "sampling_params") from error


# --- constraints ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and their constraints.

    Attributes:
        tools: The tools in the prompt.
        offered: True if replies are parsed for calls.
        constrained: What caused the grammar constraint, if there is one: "tool_choice", "strict"
            or "response_format".
        forced: Names of tools. If there are any, the reply must call one of them.
        strict: Names of tools whose arguments must follow their schema.
    """

    tools: ToolList
    offered: bool
    constrained: str | None = None
    forced: tuple[str, ...] = ()
    strict: tuple[str, ...] = ()


def apply_tool_choice(
    request: ChatRequest,
    tools: ToolList,
    parser: str,
    params: dict[str, Any],
    *,
    dropped: frozenset[str],
) -> ToolUse:
    """Write `tool_choice`, `parallel_tool_calls`, `response_format` and the tools' `strict` into
    `params`, and return the tools and constraints of the request. `parser` is the name of the
    format of tool calls. `dropped`: the sampling parameters that a router drops.

    Raise `ApiError` if one of these fields cannot be honored, or if two tools have the same name.
    """
    choice = request.tool_choice
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    forced = choice == "required" or named is not None
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        [(twice, _)] = Counter(names).most_common(1)
        problem = f"two tools are named {twice!r}, so a call of that name would be ambiguous"
        raise invalid("tools", problem)
    if forced and not names:
        raise invalid("tool_choice", "tool_choice requires a call, but the request has no tools")
    constrained = _response_format(request, params)
    if not names or choice == "none":
        return ToolUse(ToolList.of([]), False, constrained)
    if named is not None and named not in names:
        problem = f"tool_choice names {named!r}; the tools are {', '.join(names)}"
        raise invalid("tool_choice", problem)
    if forced and constrained:
        problem = "response_format cannot be combined with a forced tool call"
        raise invalid("response_format", problem)
    only_one = request.parallel_tool_calls is False or named is not None
    callable_names = names if named is None else [named]
    callable_tools = [tool for tool in tools if tool["function"]["name"] in callable_names]
    strict = tuple(
        tool["function"]["name"] for tool in callable_tools if tool["function"].get("strict")
    )
    if strict:
        place = f"tools[{names.index(strict[0])}].function.strict"
        if constrained:
            raise invalid(place, f"{place} cannot be combined with response_format")
        if "structural_tag" in dropped:
            raise refused(
                place,
                f"the router drops the grammar that {place} needs: leave it out or set it to false",
            )
        params["structural_tag"] = strict_tag(
            parser, callable_tools, place, forced=forced, several=not only_one
        )
        constrained = "strict"
    elif forced:
        params["ebnf"] = call_grammar(parser, callable_names, several=not only_one)
        constrained = "tool_choice"
    elif only_one:
        params["stop"] = [*stop_strings(params), call_closer(parser)]
        params["no_stop_trim"] = True
    return ToolUse(tools, True, constrained, tuple(callable_names) if forced else (), strict)


def _response_format(request: ChatRequest, params: dict[str, Any]) -> str | None:
    chosen = request.response_format
    if chosen is None or chosen.type == "text":
        return None
    schema: dict[str, Any] | None = {"type": "object"}
    if chosen.type == "json_schema":
        schema = chosen.json_schema.schema_ if chosen.json_schema is not None else None
        if schema is None:
            raise invalid("response_format", "response_format.json_schema.schema is missing")
    params["json_schema"] = orjson.dumps(schema).decode()
    return "response_format"
