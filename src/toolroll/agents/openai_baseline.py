"""`BaselineAgent`: a model behind any OpenAI-compatible endpoint, played and scored like the model
that is trained.

Invariants: what such an endpoint gives is text, so its episodes are marked not trainable and hold
no tokens; a call that cannot be executed is answered in words, as everywhere; only what can succeed
is tried again; the API key stands in no error.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import aiohttp
import orjson

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.loop.validation import MOST_BYTES
from toolroll.agents.text_agent import DEFAULT_POLICY, TextAgent
from toolroll.parsers.formats.plain import PlainParser
from toolroll.parsers.openai import to_openai
from toolroll.parsers.reading.schema import Offered, ToolSchemas
from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
from toolroll.rollout.engine.address import split_credentials
from toolroll.rollout.engine.errors import Failure, from_exception, from_response
from toolroll.rollout.engine.health import check_endpoint
from toolroll.rollout.engine.outage import MAX_OUTAGES, Outage
from toolroll.rollout.errors import CompletionError, ContextOverflowError, EngineError, UsageError
from toolroll.rollout.model.call_ids import with_call_ids
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runtime.threads import BlockingRunner
from toolroll.rollout.types import Message, Tool

_NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
"""Our names of sampling parameters where OpenAI's are others."""
_PASSED = frozenset(
    {"temperature", "top_p", "frequency_penalty", "presence_penalty", "stop", "max_tokens", "seed"}
)
"""What OpenAI's API knows; the rest goes too where `extra_params` allows it (SGLang and vLLM
know top_k and min_p).
"""


class ChatEndpoint:
    """`POST {base_url}/chat/completions`, tried until it succeeds or cannot.

    `timeout`: seconds for one attempt. `engine_timeout`: seconds to wait for a server that does not
    answer at all.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        attempts: int = 5,
        backoff: float = 0.5,
        engine_timeout: float = 0.0,
    ) -> None:
        base_url, authorization = split_credentials(base_url.rstrip("/"))
        if not base_url.startswith(("http://", "https://")):
            raise UsageError(
                f"--endpoint {base_url!r} must begin with http:// or https://, as in "
                f"http://127.0.0.1:30000/v1"
            )
        self.url = f"{base_url}/chat/completions"
        self.model = model
        authorization = f"Bearer {api_key}" if api_key else authorization
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": authorization} if authorization else {}
        )
        self._outage = Outage(
            f"the endpoint {base_url}",
            partial(check_endpoint, base_url, authorization),
            timeout=engine_timeout,
        )
        self._key = api_key
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._attempts = attempts
        self._backoff = backoff
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """The answer's JSON, and how many attempts it took. Raises `EngineError`,
        `ContextOverflowError`, `EngineUnreachableError`.
        """
        data = orjson.dumps({"model": self.model, **body})
        attempt, deaths = 1, 0
        while True:
            ended = self._outage.ended
            outcome = await self._attempt(data)
            if not isinstance(outcome, Failure):
                self._outage.answered()
                return outcome, attempt
            gone = outcome.lost or outcome.down
            if gone and await self._outage.over(ended, outcome.message, down=outcome.down):
                deaths += 1
                if deaths < MAX_OUTAGES:
                    continue
            if attempt == self._attempts or not (outcome.retry or outcome.server_fault):
                raise self._error(outcome, attempt)
            pause = self._backoff * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.5)
            await asyncio.sleep(max(pause, min(outcome.retry_after or 0.0, 60.0)))
            attempt += 1

    async def aclose(self) -> None:
        """Close the connections."""
        await self._outage.aclose()
        if self._session is not None:
            await self._session.close()

    async def _attempt(self, data: bytes) -> dict[str, Any] | Failure:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout
            )
        try:
            # A redirect would turn the POST into a GET, and carry the key elsewhere.
            async with self._session.post(
                self.url, data=data, headers=self._headers, allow_redirects=False
            ) as response:
                body = await response.read()
                if response.status != 200:
                    return from_response(
                        response.status, body, retry_after=response.headers.get("Retry-After")
                    )
        except (TimeoutError, aiohttp.ClientError) as error:
            return from_exception(error)
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            return Failure(
                f"the answer is no JSON: {error}",
                200,
                body[:500].decode("utf-8", "replace"),
                retry=True,
            )
        return (
            answer
            if isinstance(answer, dict)
            else Failure("the answer is no JSON object", 200, retry=True)
        )

    def _error(self, failure: Failure, attempts: int) -> EngineError:
        words, body = failure.message, failure.body
        if self._key:
            words, body = words.replace(self._key, "***"), body.replace(self._key, "***")
        overflow = failure.overflow or "context_length_exceeded" in body
        kind = ContextOverflowError if overflow else EngineError
        return kind(f"{self.url}: {words}", status=failure.status, body=body, attempts=attempts)


class BaselineAgent(TextAgent):
    """Plays the model at `endpoint`. `extra_params`: send sampling parameters that OpenAI does
    not know (top_k, min_p ...).
    """

    def __init__(
        self,
        threads: BlockingRunner,
        endpoint: ChatEndpoint,
        *,
        policy: CallPolicy = DEFAULT_POLICY,
        step_timeout: float | None = None,
        max_observation_bytes: int = MOST_BYTES,
        extra_params: bool = True,
    ) -> None:
        super().__init__(
            threads,
            policy=policy,
            step_timeout=step_timeout,
            max_observation_bytes=max_observation_bytes,
        )
        self._endpoint = endpoint
        self._schemas = ToolSchemas()
        self._parser = PlainParser()
        self._extra_params = extra_params

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling_params: Mapping[str, Any],
        session_id: str,
    ) -> AssistantTurn:
        """One completion. Raises `EngineError`, `CompletionError`."""
        params = {
            _NAMES.get(name, name): value
            for name, value in sampling_params.items()
            if value is not None
        }
        if not self._extra_params:
            params = {name: value for name, value in params.items() if name in _PASSED}
        began = perf_counter()
        body = {"messages": [_sent(message) for message in messages], **params} | (
            {"tools": list(tools)} if tools else {}
        )
        answer, attempts = await self._endpoint.complete(body)
        seconds = perf_counter() - began
        try:
            choice = answer["choices"][0]
            parsed = self._parsed(choice["message"], tools)
            usage = answer.get("usage") or {}
            counts = {
                name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")
            }
            counts["cached_tokens"] = int(
                (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise CompletionError(
                f"{self._endpoint.url}: the answer is no chat completion ({error!r})", status=200
            ) from error
        parsed = with_call_ids(parsed, f"{session_id}/{len(messages)}")
        counts["engine_retries"] = attempts - 1
        return AssistantTurn(
            parsed, _message(parsed), str(choice.get("finish_reason") or "stop"), counts, seconds
        )

    def _parsed(self, message: Mapping[str, Any], tools: Sequence[Tool]) -> ParsedReply:
        # A server without a reasoning parser leaves the thoughts in the text; nobody but the model
        # may see them.
        read = self._parser.parse(message.get("content") or "")
        offered = Offered(tools)
        calls = tuple(self._call(call, offered) for call in message.get("tool_calls") or ())
        told = message.get("reasoning_content") or message.get("reasoning") or read.reasoning
        return replace(read, reasoning=told, tool_calls=calls)

    def _call(self, call: Mapping[str, Any], offered: Offered) -> ToolCall:
        function = call["function"]
        name, raw = str(function.get("name") or ""), function.get("arguments") or "{}"
        found = ToolCall(name, None, str(raw), id=str(call.get("id") or ""))
        try:
            arguments = orjson.loads(raw) if isinstance(raw, str) else raw
        except orjson.JSONDecodeError as error:
            return replace(
                found, status=CallStatus.INVALID_JSON, error=f"the arguments are not JSON: {error}"
            )
        if not isinstance(arguments, dict):
            return replace(
                found, status=CallStatus.BAD_ARGUMENTS, error="the arguments are no JSON object"
            )
        return self._schemas.check(replace(found, arguments=arguments), offered)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._endpoint.aclose()


def _message(parsed: ParsedReply) -> Message:
    """What the conversation keeps. Arguments that are no JSON are wrapped: servers refuse a
    history that holds them.
    """
    message = to_openai(parsed)
    for call, sent in zip(parsed.tool_calls, message.get("tool_calls", ()), strict=True):
        if call.arguments is None:
            sent["function"]["arguments"] = orjson.dumps({"unreadable": call.raw}).decode()
    return message


def _sent(message: Message) -> Message:
    """A message as endpoints take it: reasoning stays here."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def make_baseline(threads: BlockingRunner, settings: Mapping[str, Any]) -> BaselineAgent:
    """Make the agent `baseline` of the group `toolroll.agents`.

    `settings`: endpoint, model, api_key_env, engine_timeout, step_timeout, max_observation_bytes,
    and `CallPolicy`'s fields.
    """
    own = dict(settings)
    key_name = own.pop("api_key_env", None)
    key = os.environ.get(key_name) if key_name else None
    if key_name and not key:
        raise UsageError(f"--api-key-env names {key_name}, which is not set")
    url, model = own.pop("endpoint"), own.pop("model")
    endpoint = ChatEndpoint(url, model, api_key=key, engine_timeout=own.pop("engine_timeout", 0.0))
    names = ("step_timeout", "max_observation_bytes", "extra_params")
    given = {name: own.pop(name) for name in names if name in own}
    return BaselineAgent(threads, endpoint, policy=CallPolicy(**own), **given)
