"""`ChatClient`: sends requests to an OpenAI-compatible server, with retries.

It uses aiohttp, not the `openai` SDK. If a server is down, the SDK does not wait until the server
is back (`engine_timeout`). The SDK does not retry after an unreadable response, and does not report
the number of attempts. It would also add a second HTTP stack (httpx) to a base install that needs
aiohttp in any case.

Invariants:

- Only transient failures are retried: a failed connection, a timeout, an unreadable 200, an
  unfinished answer, and the statuses 408, 425, 429 and 5xx except 501 and 505. A request is never
  retried before the time in `Retry-After`.
- An unfinished answer is never returned. Only the finish reasons in `FINISHED` end an answer.
  `length` ends it only if the caller passes `allow_length`.
- At most `max_concurrency` requests are in flight. A request that waits for its next attempt does
  not count.
- No error message contains the API key.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import aiohttp
import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from yarl import URL

from toolroll.parsers.openai import from_openai, to_openai
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.engine.errors import (
    Failure,
    from_exception,
    from_response,
    message_of,
    reason,
)
from toolroll.rollout.engine.health import check_endpoint
from toolroll.rollout.engine.outage import Outage
from toolroll.rollout.engine.retries import Backoff, Retries
from toolroll.rollout.engine.transport import NETWORK_ERRORS
from toolroll.rollout.errors import ContextOverflowError, EngineError, UsageError, capped
from toolroll.rollout.runtime.complaints import complaints
from toolroll.rollout.settings import split_credentials
from toolroll.rollout.types import Message

_NOT_RETRIED = frozenset({501, 505})
"""5xx statuses that are not retried: the server does not support the request."""
_EXCERPT = 500
_TRUNCATED = Failure(
    "the token limit truncated the answer (finish_reason 'length'): raise max_tokens, or turn the "
    "model's reasoning off",
    200,
    retry=True,
)
FINISHED = frozenset({"stop", "tool_calls"})
"""The finish reasons of whole answers. Servers also send 200 with the part of an answer that they
had when they aborted the request (SGLang: "abort"), lost the model ("error", "network_error") or
filtered its text ("content_filter"), and some send no reason (null).
"""
_LENGTH_PARAMS = ("max_tokens", "max_completion_tokens")
_OVERFLOW = re.compile(
    r"context_length_exceeded|maximum context length|maximum model length|rollout stopped: "
)
"""Matches the errors of OpenAI and vLLM for a prompt that is too long, and the error of verifiers'
interception server for a turn that exceeds one of the rollout's limits.
"""


class ChatClientConfig(BaseModel):
    """The address, time limits (in seconds) and retries of an OpenAI-compatible server."""

    # Errors must not contain a rejected value, because it may be the key, or an address with a
    # password.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    base_url: str
    """The address with the version, such as http://127.0.0.1:30000/v1."""
    model: str
    api_key: SecretStr | None = None
    api_key_env: str | None = None
    """The environment variable with the key, which is read when the client is created."""
    timeout: float = Field(default=600.0, gt=0)
    """The time limit of one attempt."""
    retries: int = Field(default=4, ge=0)
    backoff: float = Field(default=0.5, ge=0)
    """The pause before the first retry. It doubles with each retry, up to `max_backoff`."""
    max_backoff: float = Field(default=60.0, ge=0)
    """The longest pause. If the server asks for a longer pause (`Retry-After`), the request
    fails.
    """
    engine_timeout: float = Field(default=0.0, ge=0)
    """How long to wait for a server that does not answer at all. After this time,
    `EngineUnreachableError` is raised. If it is 0, the client does not wait: each missing answer
    counts as a failed attempt.
    """
    max_concurrency: int | None = Field(default=None, gt=0)
    """The maximum number of requests in flight at once, or None for no limit."""

    @classmethod
    def checked(cls, what: str, settings: Mapping[str, Any]) -> Self:
        """Return the config with `settings`. Raise `UsageError` if a setting is not valid. `what`
        is the start of the error message.
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise UsageError(f"{what}: {complaints(error)}") from error

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        try:
            complete = value.startswith(("http://", "https://")) and URL(value).host
        except ValueError:
            complete = None
        if not complete:
            raise ValueError("must begin with http:// or https://, as in http://127.0.0.1:30000/v1")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("give api_key or api_key_env, not both")
        return self

    def key(self) -> str | None:
        """Return the API key. Raise `UsageError` if the variable `api_key_env` is not set."""
        if self.api_key_env is None:
            return self.api_key.get_secret_value().strip() if self.api_key else None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise UsageError(
                f"api_key_env names the environment variable {self.api_key_env}, which is not set"
            )
        return key


class SamplingClientConfig(ChatClientConfig):
    """A server that helps to play episodes, with sampling parameters. Times are in seconds."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    seed: int | None = None
    timeout: float = Field(default=60.0, gt=0)
    """The time limit of one attempt."""
    max_backoff: float = Field(default=30.0, ge=0)
    max_concurrency: int | None = Field(default=64, gt=0)
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further request fields, such as {"chat_template_kwargs": {"enable_thinking": false}}."""

    @field_validator("extra_body")
    @classmethod
    def _check_extra(cls, value: dict[str, Any]) -> dict[str, Any]:
        reserved = sorted({"messages", "model", "stream", "n", "tools"} & set(value))
        if reserved:
            raise ValueError(f"must not set {', '.join(reserved)}")
        return value

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that are set, and the fields of `extra_body`. The config's seed
        is not included.
        """
        optional = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens")}
        params = {name: value for name, value in optional.items() if value is not None}
        return {**params, **self.extra_body}


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The first choice of a response.

    `finish_reason`: "stop", "tool_calls", or "length" if the request allows it. `usage`:
    prompt_tokens, completion_tokens and cached_tokens. They are 0 if the server does not report
    them. `attempts`: the number of times that the request was sent. Attempts that failed in an
    outage of the server (see `engine_timeout`) do not count. `refusal`: the text of a refusal,
    which OpenAI sends instead of content; "" if there is none.
    """

    reply: ParsedReply
    finish_reason: str
    usage: Mapping[str, int]
    attempts: int = 1
    refusal: str = ""


def history_message(reply: ParsedReply) -> Message:
    """Return `reply` as an assistant message for the history of the next request.

    Arguments that are not a JSON object are wrapped in one, because servers refuse such arguments
    in the history.
    """
    message = to_openai(reply)
    for call, sent in zip(reply.tool_calls, message.get("tool_calls", ()), strict=True):
        if call.arguments is None:
            sent["function"]["arguments"] = orjson.dumps({"unreadable": call.raw}).decode()
    return message


class ChatClient:
    """A client of one server, for any number of requests at once.

    `sleep` and `jitter` are for tests. `jitter` returns a number in [0, 1).

        config = ChatClientConfig(base_url="http://127.0.0.1:30000/v1", model="Qwen/Qwen3-8B")
        client = ChatClient(config)
        found = await client.complete({"messages": [{"role": "user", "content": "Hello."}]})
        print(found.reply.content, found.usage["completion_tokens"])
        await client.aclose()
    """

    def __init__(
        self,
        config: ChatClientConfig,
        *,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        base_url, authorization = split_credentials(config.base_url)
        key = config.key()
        if key is not None:
            authorization = f"Bearer {key}"
        self.url = f"{base_url}/chat/completions"
        self._config = config
        self._secret = authorization.partition(" ")[2].encode() if authorization else b""
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": authorization} if authorization else {}
        )
        outage = Outage(
            f"the endpoint {base_url}",
            partial(check_endpoint, base_url, authorization),
            timeout=config.engine_timeout,
            sleep=sleep,
        )
        backoff = Backoff(config.retries, config.backoff, config.max_backoff, jitter)
        self._retries = Retries(outage, backoff, sleep=sleep)
        self._limit = asyncio.Semaphore(config.max_concurrency or sys.maxsize)
        self._session: aiohttp.ClientSession | None = None

    async def complete(
        self, request: Mapping[str, Any], *, allow_length: bool = False
    ) -> ChatCompletion:
        """Send `request`: the messages, tools and sampling parameters. The client adds the model.

        `allow_length`: return an answer that the token limit truncated, with the finish reason
        "length". By default, the request is retried with twice the token limit. If the prompt and
        this limit do not fit into the context, the error is that of the truncated answer.

        Raises `ContextOverflowError` if the server reports that the prompt is too long,
        `EngineUnreachableError` if the server did not answer for `engine_timeout` seconds, and
        `EngineError` for any other failure that the retries did not repair.
        """
        truncated: Failure | None = None

        async def attempt(remaining: float) -> ChatCompletion | Failure:
            nonlocal request, truncated
            outcome = await self._attempt(orjson.dumps({"model": self._config.model, **request}))
            if isinstance(outcome, Failure) or outcome.finish_reason != "length" or allow_length:
                return outcome
            self._retries.outage.answered()
            request = _with_more_room(request, outcome.usage["completion_tokens"])
            truncated = _TRUNCATED
            return truncated

        outcome, attempts = await self._retries.send(attempt)
        if not isinstance(outcome, Failure):
            return replace(outcome, attempts=attempts)
        if truncated is not None and _is_overflow(outcome):
            outcome = truncated  # the prompt was not too long with the lower limit
        raise self._error(outcome, attempts)

    async def aclose(self) -> None:
        """Close the connections. A later request opens new ones."""
        await self._retries.aclose()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _attempt(self, body: bytes) -> ChatCompletion | Failure:
        async with self._limit:
            if self._session is None or self._session.closed:
                self._session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=self._config.timeout),
                )
            try:
                # A redirect would turn the POST into a GET and send the key to another server.
                async with self._session.post(
                    self.url, data=body, headers=self._headers, allow_redirects=False
                ) as response:
                    status, text = response.status, await response.read()
                    retry_after = response.headers.get("Retry-After")
            except NETWORK_ERRORS as error:
                return replace(from_exception(error), message=reason(error))
        if status == 200:
            answer = _read(text)
            if not isinstance(answer, Failure):
                return answer
            return replace(answer, body=self._redacted(text)[:_EXCERPT].decode("utf-8", "replace"))
        failure = from_response(status, self._redacted(text), retry_after=retry_after)
        wait, longest = failure.retry_after or 0.0, self._config.max_backoff
        if wait > longest:
            limit = f"Retry-After is {wait:g} s, longer than max_backoff ({longest:g} s)"
            return replace(failure, retry=False, message=f"{limit}: {failure.message}")
        retry = failure.retry or (status >= 500 and status not in _NOT_RETRIED)
        return replace(failure, retry=retry)

    def _redacted(self, text: bytes) -> bytes:
        """Return `text` without the key. Call this before truncating the text, because part of a
        key could remain otherwise.
        """
        return text.replace(self._secret, b"***") if self._secret else text

    def _error(self, failure: Failure, attempts: int) -> EngineError:
        status, text = failure.status, failure.message
        if status not in (None, 200):
            text = f"HTTP {status}: {text}".removesuffix(f": HTTP {status}")
        times = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        return (ContextOverflowError if _is_overflow(failure) else EngineError)(
            f"{self.url} failed after {times}: {text}",
            status=status,
            body=failure.body,
            attempts=attempts,
        )


def _is_overflow(failure: Failure) -> bool:
    refused = failure.status is not None and 400 <= failure.status < 500
    return bool(failure.overflow or (refused and _OVERFLOW.search(failure.body)))


def _with_more_room(request: Mapping[str, Any], sampled: int) -> dict[str, Any]:
    """Return `request` with twice the token limit. `sampled`: the number of tokens that the server
    sampled, which was its own limit if the request has none.
    """
    limits = {name: request[name] for name in _LENGTH_PARAMS if request.get(name)}
    if not limits and sampled:
        limits = {_LENGTH_PARAMS[0]: sampled}
    return {**request, **{name: 2 * limit for name, limit in limits.items()}}


def _read(body: bytes) -> ChatCompletion | Failure:
    """Return the answer in the body of a 200, or a failure if there is none or it is unfinished."""
    try:
        data = orjson.loads(body)
        if not isinstance(data, dict) or not data.get("choices"):
            error = message_of(body.decode("utf-8", "replace"))
            return Failure(
                f"the response has no choices: {capped(error, _EXCERPT)}", 200, retry=True
            )
        choice = data["choices"][0]
        finish = choice.get("finish_reason")
        if finish not in FINISHED and finish != "length":
            error = choice.get("error")
            text = f": {message_of(orjson.dumps(error).decode())}" if error else ""
            return Failure(
                f"the answer is unfinished (finish_reason {finish!r}){text}", 200, retry=True
            )
        message = dict(choice["message"])
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        reply = from_openai({**message, "reasoning_content": reasoning})
        usage = data.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        counts = {
            "prompt_tokens": int(usage.get("prompt_tokens") or 0),
            "completion_tokens": int(usage.get("completion_tokens") or 0),
            "cached_tokens": int(details.get("cached_tokens") or 0),
        }
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        text = f"the response is not a chat completion: {type(error).__name__}: {error}"
        return Failure(text, 200, retry=True)
    refusal = message.get("refusal")
    return ChatCompletion(
        reply, finish, counts, refusal=refusal if isinstance(refusal, str) else ""
    )
