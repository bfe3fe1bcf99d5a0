"""Requests to SGLang's `/generate`: parses a body, and refuses invalid bodies with SGLang's
messages.

Bodies and limits are the same as in SGLang 0.5.23. They were observed on the wire, except the
scheduler's two length limits, which are from its source.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from aiohttp import web
from tokenizers import Tokenizer

from toolroll.rollout.runtime.sglang_names import SGLANG_NAMES

_DEFAULT_MAX_NEW_TOKENS = 128
_UNBOUNDED = 1 << 30
_INPUT_RESERVE = 5  # tokens that the scheduler reserves after the longest prompt


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (
        lambda value: 0 <= value < float("inf"),
        "must be a non-negative finite number",
    ),
    "top_p": (lambda value: 0 < value <= 1, "must be in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "must be in [0, 1]"),
    "top_k": (lambda value: value == -1 or value >= 1, "must be -1 (disable) or at least 1"),
    "max_new_tokens": (lambda value: value >= 0, "must be at least 0"),
    "n": (lambda value: value >= 1, "must be at least 1"),
}
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (_is_integer, "an integer"),
    "sampling_seed": (_is_integer, "an integer"),
    "stream_interval": (_is_integer, "an integer"),
    "stop": (
        lambda value: isinstance(value, str) or _is_list(value, str),
        "a string or a list of strings",
    ),
    "stop_token_ids": (lambda value: _is_list(value, int), "a list of integers"),
}


class RefusedError(Exception):
    """An HTTP error with its body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(str(body))
        self.status = status
        self.body = body

    def response(self) -> web.Response:
        """Return the HTTP response."""
        return json_response(self.body, status=self.status)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to answer. `unchecked`: the ids as int64, for the vocabulary check. `input_ids`:
    the same ids as int32.
    """

    rid: str
    unchecked: npt.NDArray[np.int64]
    params: Mapping[str, Any]
    routing_key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    session_id: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    lora_path: str | None = None

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """The ids of the prompt."""
        return self.unchecked.astype(np.int32)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits in tokens. `context_length`: the limit of the prompt and the answer together."""

    context_length: int

    @property
    def request(self) -> int:
        """The scheduler's maximum length of a request."""
        return self.context_length - 1

    @property
    def prompt(self) -> int:
        """`max_req_input_len`: the smallest prompt length that the scheduler refuses."""
        return self.request - _INPUT_RESERVE

    def check(self, prompt: int, params: Mapping[str, Any]) -> None:
        """Raise `RefusedError` if the request does not fit."""
        limit, output = self.context_length, params.get("max_new_tokens")
        if prompt >= limit:
            raise refused(
                f"The input ({prompt} tokens) is longer than the model's context length ({limit} "
                f"tokens)."
            )
        if output is not None and prompt + output > limit:
            raise refused(
                f"Requested token count exceeds the model's maximum context length of {limit} "
                f"tokens. You requested a total of "
                f"{prompt + output} tokens: {prompt} tokens from the input messages and {output} "
                f"tokens for the completion. Please "
                "reduce the number of tokens in the input messages or the completion to fit within "
                "the limit."
            )
        if prompt >= self.prompt:
            raise refused(
                f"Input length ({prompt} tokens) exceeds the maximum allowed length ({self.prompt} "
                f"tokens). Use a shorter input or "
                "enable --allow-auto-truncate."
            )

    def max_new_tokens(self, prompt: int, params: Mapping[str, Any]) -> int:
        """Return the maximum length of an answer: the requested length, but at most the room that
        the scheduler has.
        """
        limit = params.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS)
        return max(0, min(_UNBOUNDED if limit is None else int(limit), self.request - prompt - 1))


def refused(message: str) -> RefusedError:
    """Return a 400 whose body has the form of most SGLang errors."""
    return RefusedError(400, {"error": {"message": message}})


def invalid(message: str) -> RefusedError:
    """Return a 400 whose body has the form of SGLang's validation errors."""
    return _error(400, "Bad Request", f"1 validation error: {message}")


def queue_full() -> RefusedError:
    """Return the 503 that --max-queued-requests causes."""
    return _error(503, "503", "The request queue is full.")


def _error(status: int, kind: str, message: str) -> RefusedError:
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return RefusedError(status, body)


async def read_json(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in the body. Raise `RefusedError` if the body is not a JSON object, or
    if its content type is not JSON.
    """
    body = await request.read()
    if body and request.content_type != "application/json":
        raise invalid(
            f"Unsupported Media Type: Only 'application/json' is allowed, not "
            f"{request.content_type!r}"
        )
    try:
        data = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise invalid(f"body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise invalid("body must be an object")
    return data


@dataclass(frozen=True, slots=True)
class EngineRequests:
    """The requests in one body. `single`: True if the answer is one object, not a list."""

    requests: tuple[EngineRequest, ...]
    single: bool
    stream: bool


def read_generate(
    body: Mapping[str, Any], headers: Mapping[str, str], tokenizer: Tokenizer
) -> EngineRequests:
    """Return the requests in a body. `tokenizer` encodes a text, with its special tokens. Raise
    `RefusedError` if the body is not valid.
    """
    params = read_params(body.get("sampling_params"))
    prompts, batch = _read_prompts(body, tokenizer)
    n = params.get("n") or 1
    rids = _read_rids(body.get("rid"), len(prompts), fresh=n > 1)
    lower = {name.lower(): value for name, value in headers.items()}
    base = EngineRequest(
        rid="",
        unchecked=np.zeros(0, dtype=np.int64),
        params=params,
        routing_key=lower.get("x-smg-routing-key", ""),
        headers=lower,
        session_id=body.get("session_id"),
        return_logprob=bool(body.get("return_logprob")),
        logprob_start_len=_read_integer(body, "logprob_start_len", -1),
        top_logprobs_num=_read_integer(body, "top_logprobs_num", 0),
        return_routed_experts=bool(body.get("return_routed_experts")),
        routed_experts_start_len=_read_integer(body, "routed_experts_start_len", 0),
        lora_path=body.get("lora_path"),
    )
    requests = tuple(
        replace(base, rid=rids[number] if n == 1 else uuid.uuid4().hex, unchecked=prompt)
        for number, prompt in enumerate(prompts)
        for _ in range(n)
    )
    single = not batch and n == 1
    stream = bool(body.get("stream"))
    if stream and not single:
        raise refused("the embedded engine streams single answers only: no batch and no n > 1")
    return EngineRequests(requests, single, stream)


def _read_integer(body: Mapping[str, Any], name: str, lowest: int) -> int:
    """Return the field `name`, or `lowest` if it is missing. Raise `RefusedError` if it is not an
    integer, or less than `lowest`.
    """
    value = body.get(name)
    if value is None:
        return lowest
    if not _is_integer(value) or value < lowest:
        raise invalid(f"{name} must be an integer, and at least {lowest}, not {value!r}")
    return int(value)


def read_params(value: Any) -> dict[str, Any]:
    """Return the `sampling_params` of a request. Raise `RefusedError` if a name is unknown, or if a
    value has the wrong type or is out of range.
    """
    if value is not None and not isinstance(value, dict):
        raise invalid("sampling_params must be an object")
    params = dict(value or {})
    for name, param in params.items():
        if name not in SGLANG_NAMES:
            names = ", ".join(f"`{param_name}`" for param_name in SGLANG_NAMES)
            raise RefusedError(400, {"error": f"unknown field `{name}`, expected one of {names}"})
        if name in _TYPES and param is not None and not _TYPES[name][0](param):
            raise invalid(f"sampling_params.{name} must be {_TYPES[name][1]}")
        if name in _RANGES and param is not None:
            fits, requirement = _RANGES[name]
            if isinstance(param, bool) or not isinstance(param, int | float):
                raise invalid(f"sampling_params.{name} must be a number")
            if not fits(param):
                raise refused(f"{name} {requirement}, got {param}.")
    return params


def _read_prompts(
    body: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[list[npt.NDArray[np.int64]], bool]:
    ids = body.get("input_ids")
    if ids is None:
        text = body.get("text")
        prompt_texts = text if isinstance(text, list) else [text]
        texts = [item for item in prompt_texts if isinstance(item, str)]
        if not texts or len(texts) != len(prompt_texts):
            raise invalid("input_ids must be given, or text as a string or a list of strings")
        encoded = [np.array(tokenizer.encode(item).ids, dtype=np.int64) for item in texts]
        if not all(map(len, encoded)):
            raise invalid("text must have at least one token")
        return encoded, isinstance(text, list)
    batch = isinstance(ids, list) and ids != [] and isinstance(ids[0], list)
    prompts = []
    for prompt in ids if batch else [ids]:
        if not isinstance(prompt, list) or not prompt:
            raise invalid("input_ids must be a list of ids, or a list of such lists, and not empty")
        prompts.append(_read_ids(prompt))
    return prompts, batch


def _read_ids(prompt: list[Any]) -> npt.NDArray[np.int64]:
    try:
        ids = np.array(prompt)
    except ValueError as error:
        raise invalid(f"input_ids must hold integers only: {error}") from error
    if ids.dtype.kind != "i" or ids.ndim != 1:
        raise invalid(
            f"input_ids must hold integers only, not {ids.dtype} in {ids.ndim} dimensions"
        )
    return ids.astype(np.int64)


def _read_rids(rid: Any, count: int, *, fresh: bool) -> list[str]:
    if rid is None or fresh:
        return [uuid.uuid4().hex for _ in range(count)]
    rids = (
        rid
        if isinstance(rid, list)
        else [rid]
        if count == 1
        else [f"{rid}_{number}" for number in range(count)]
    )
    if len(rids) != count or not all(isinstance(item, str) for item in rids):
        raise invalid("rid must be a string, or a list of as many strings as prompts")
    return rids


def json_response(data: Any, *, status: int = 200) -> web.Response:
    """Return `data` as a JSON response."""
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")
