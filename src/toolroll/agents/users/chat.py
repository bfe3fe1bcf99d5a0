"""The HTTP side of a simulated user: one `POST {base_url}/chat/completions`, tried until it
succeeds or cannot.

Invariants: only what can succeed is tried again (no connection, a time-out, an unreadable 200, 408,
425, 429, 5xx), after a backoff and never sooner than `Retry-After` asks; at most `max_concurrency`
requests are in flight, and waiting between two attempts holds no place; the API key stands in no
error.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from toolroll.agents.users.strategies import UserStrategy
from toolroll.rollout.engine.address import split_credentials
from toolroll.rollout.engine.errors import reason
from toolroll.rollout.engine.health import check_endpoint
from toolroll.rollout.engine.outage import MAX_OUTAGES, Outage
from toolroll.rollout.errors import UsageError, UserSimulatorError
from toolroll.rollout.types import Message, Tool

SYSTEM_PROMPT = """Play the part of a person who writes to a service desk. You are never the desk, and never an assistant.

Who you are and what you want:
{instruction}

How you write:
- One short message at a time, in plain words, without quoting the lines above.
- Begin with your main request. Give a detail when you are asked for it, not before.
- Where you are asked for something that the lines above do not say, answer that you do not know.
- Stay with what you want; do not agree to something else unless the lines above allow it.
- As soon as everything is settled, or it is clear that it cannot be, or you are handed to another person, answer with
  ###STOP### and nothing else.
"""  # noqa: E501

_RETRYABLE = frozenset({408, 425, 429, *range(500, 600)}) - {501, 505}
_EXCERPT = 500


class UserConfig(BaseModel):
    """Where the model that plays the user is, and how it samples. Times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    """With the version: http://127.0.0.1:30000/v1."""
    model: str
    api_key: SecretStr | None = None
    api_key_env: str | None = None
    """The environment variable that holds the key; read when the client is made."""
    system_prompt: str = SYSTEM_PROMPT
    """`{instruction}` stands for the task's instruction."""
    strategy: UserStrategy = "llm"
    """How the model plays: see `toolroll.agents.users.strategies`."""
    revisions: int = Field(default=2, ge=0)
    """How often a line may be refused by the supervisor of `verify` and `reflection`; the last
    one is said in any case.
    """
    first_agent_line: str = "Hi! How can I help you today?"
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    seed: int | None = None
    timeout: float = Field(default=60.0, gt=0)
    """Of one attempt."""
    retries: int = Field(default=4, ge=0)
    backoff: float = Field(default=0.5, ge=0)
    """The first pause; it doubles up to `max_backoff`."""
    max_backoff: float = Field(default=30.0, ge=0)
    """Also the longest `Retry-After` that is waited for; a longer one is a failure at once."""
    engine_timeout: float = Field(default=0.0, ge=0)
    """How long to wait for a server that does not answer at all, before
    `EngineUnreachableError`; 0: it is a failure like others.
    """
    max_concurrency: int = Field(default=64, gt=0)
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, such as {"chat_template_kwargs": {"enable_thinking":
    false}}.
    """

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://, as in http://127.0.0.1:30000/v1")
        return value.rstrip("/")

    @field_validator("system_prompt")
    @classmethod
    def _check_prompt(cls, value: str) -> str:
        if "{instruction}" not in value:
            raise ValueError("must contain {instruction}, the place of the task's instruction")
        return value

    @field_validator("extra_body")
    @classmethod
    def _check_extra(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted({"messages", "model", "stream", "n", "tools"} & set(value))
        if taken:
            raise ValueError(f"must not set {', '.join(taken)}")
        return value

    @model_validator(mode="after")
    def _check_key(self) -> UserConfig:
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("give api_key or api_key_env, not both")
        return self

    def key(self) -> str | None:
        """The API key. `UsageError` where `api_key_env` names a variable that is not set."""
        if self.api_key_env is None:
            return self.api_key.get_secret_value() if self.api_key else None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UsageError(
                f"the user simulator's api_key_env names {self.api_key_env}, which is not set"
            )
        return key


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: its raw content, what it cost in tokens (0 where the server does not say),
    and its tool calls as they came.
    """

    content: str
    prompt_tokens: int
    completion_tokens: int
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class _Failure:
    what: str
    status: int | None = None
    body: str = ""
    retryable: bool = True
    retry_after: float = 0.0
    lost: bool = False
    """There was no connection, or it broke; perhaps the server is down."""


class ChatClient:
    """A session, its limit, and the retries. `sleep`, `clock` and `jitter` are for tests;
    `jitter` gives [0, 1).
    """

    def __init__(
        self,
        config: UserConfig,
        *,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        base_url, authorization = split_credentials(config.base_url)
        self.url = f"{base_url}/chat/completions"
        self.clock = clock
        self._config = config
        self._key = config.key()
        self._authorization = authorization if self._key is None else f"Bearer {self._key}"
        self._outage = Outage(
            f"the user simulator's server {base_url}",
            partial(check_endpoint, base_url, self._authorization),
            timeout=config.engine_timeout,
            sleep=sleep,
        )
        self._sleep = sleep
        self._jitter = jitter
        self._limit = asyncio.Semaphore(config.max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        seed: int | None,
        on_retry: Callable[[], None],
        tools: Sequence[Tool] = (),
    ) -> Answer:
        """Return the answer to `messages`.

        Raise `UserSimulatorError` with url, status, excerpt of the body, and attempts, or
        `EngineUnreachableError` if nobody answered for `engine_timeout` seconds.
        """
        body = orjson.dumps(
            self.request(messages, seed) | ({"tools": list(tools)} if tools else {})
        )
        attempt = deaths = 0
        while True:
            ended = self._outage.ended
            outcome = await self._attempt(body)
            if isinstance(outcome, Answer):
                self._outage.answered()
                return outcome
            if outcome.lost and await self._outage.over(ended, outcome.what):
                deaths += 1
                if deaths < MAX_OUTAGES:
                    continue
            if (
                not outcome.retryable
                or attempt == self._config.retries
                or outcome.retry_after > self._config.max_backoff
            ):
                raise self._error(outcome, attempt + 1)
            on_retry()
            pause = min(self._config.backoff * 2**attempt, self._config.max_backoff) * (
                0.5 + self._jitter() / 2
            )
            await self._sleep(max(pause, outcome.retry_after))
            attempt += 1

    def request(self, messages: Sequence[Message], seed: int | None) -> dict[str, Any]:
        """The request's body."""
        config = self._config
        optional = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_tokens": config.max_tokens,
            "seed": seed,
        }
        given = {key: value for key, value in optional.items() if value is not None}
        return {"model": config.model, "messages": list(messages), **given, **config.extra_body}

    async def close(self) -> None:
        """Close the session; a later request opens a new one."""
        await self._outage.aclose()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _attempt(self, body: bytes) -> Answer | _Failure:
        headers = {"Content-Type": "application/json"}
        if self._authorization is not None:
            headers["Authorization"] = self._authorization
        async with self._limit:
            if self._session is None or self._session.closed:
                self._session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=self._config.timeout),
                )
            try:
                # A redirect would turn the POST into a GET, and carry the key elsewhere.
                async with self._session.post(
                    self.url, data=body, headers=headers, allow_redirects=False
                ) as response:
                    text = (await response.read()).decode("utf-8", errors="replace")
                    status, retry_after = (
                        response.status,
                        _retry_after(response.headers.get("Retry-After")),
                    )
            except TimeoutError:
                return _Failure(f"no answer within {self._config.timeout} s")
            except aiohttp.InvalidURL as error:
                return _Failure(f"not a URL: {error}", retryable=False)
            except aiohttp.ClientError as error:
                return _Failure(f"{type(error).__name__}: {reason(error)}", lost=True)
        if status != 200:
            return _Failure(f"HTTP {status}", status, text, status in _RETRYABLE, retry_after)
        return _read_answer(text)

    def _error(self, failure: _Failure, attempts: int) -> UserSimulatorError:
        excerpt = failure.body
        if self._key:
            excerpt = excerpt.replace(self._key, "***")
        excerpt = excerpt[:_EXCERPT]
        tail = f"; it said: {excerpt}" if excerpt else ""
        if failure.retry_after > self._config.max_backoff:
            tail += (
                f" (Retry-After {failure.retry_after:g} s is beyond max_backoff "
                f"{self._config.max_backoff:g} s)"
            )
        times = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        return UserSimulatorError(
            f"the user simulator at {self.url} failed after {times}: {failure.what}{tail}"
        )


def _read_answer(text: str) -> Answer | _Failure:
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return _Failure(f"the answer is not JSON ({error})", 200, text)
    try:
        message = data["choices"][0]["message"]
        content = message.get("content")
        calls = tuple(dict(call) for call in message.get("tool_calls") or ())
        usage = data.get("usage") or {}
        tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return _Failure(
            f"the answer is not a chat completion ({type(error).__name__}: {error})", 200, text
        )
    if content is not None and not isinstance(content, str):
        return _Failure(f"the answer's content is {type(content).__name__}, not text", 200, text)
    return Answer(content or "", *tokens, calls)


def _retry_after(header: str | None) -> float:
    """Seconds to wait, from either form of the header (RFC 9110 10.2.3); 0 where it is absent or
    unreadable.
    """
    if header is None:
        return 0.0
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
