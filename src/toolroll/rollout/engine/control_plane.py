"""`ControlPlane`: requests to an engine that do not sample: workers, model info, health and aborts.

Invariants:

- The workers are cached once the server has answered. A router, whose workers come and go, is asked
  again after `_ASK_AGAIN` seconds. The model info is cached once it is complete, or once the
  workers and the context length are known. Until then, each call asks again.
- `ask_model` refuses a model that is not the first one. It is called after the last turn of each
  episode, because the engine may have restarted since its first turn.
- An engine that does not report its model is not checked.
- Behind a router, only the first worker is asked for its model. A worker that lets a question time
  out is asked nothing for `_SILENT` seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import orjson
from yarl import URL

from toolroll.rollout.engine.engine_config import EngineConfig
from toolroll.rollout.engine.health import Health, check_health
from toolroll.rollout.engine.model_info import ModelInfo, read_model_info
from toolroll.rollout.engine.sampling_params import DROPPED_BY_ROUTER, DROPPED_BY_SMG
from toolroll.rollout.engine.transport import NETWORK_ERRORS, Transport
from toolroll.rollout.errors import UsageError

logger = logging.getLogger(__name__)

_MAY_PASS = (408, 425, 429)
_ASK_AGAIN = 10.0
_SILENT = 60.0
_MOST_WORKERS = 1000


class ControlPlane:
    """The engine at `config.engine`, or the router at this address and its workers.

    `model_info`: the served model's limits and version. If it is None, the engine is asked for
    them.
    """

    def __init__(
        self, config: EngineConfig, transport: Transport, *, model_info: ModelInfo | None = None
    ) -> None:
        self._config = config
        self._transport = transport
        self._workers: list[str] | None = None
        self._smg, self._asked = False, -inf
        self._silent: dict[str, float] = {}
        self._model_info = model_info
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._info_asked = 0
        self._info_so_far = ModelInfo()
        self._model = None if model_info is None else model_info.model_path
        self._tokenizer: str | None = None

    @property
    def routed(self) -> bool:
        """True if `workers` has found a router."""
        return self._workers is not None and self._workers != [self._config.engine]

    @property
    def dropped(self) -> frozenset[str]:
        """The sampling parameters that the router in front of the engine drops."""
        if not self.routed:
            return frozenset()
        return DROPPED_BY_SMG if self._smg else DROPPED_BY_ROUTER

    @property
    def session_cache(self) -> bool:
        """True if `model_info` has found that the engine's cache knows sessions."""
        return (self._model_info or self._info_so_far).session_cache is True

    async def workers(self) -> list[str]:
        """Return the workers' addresses: the engine's own, or those that a router lists and that
        are not silent.
        """
        now = asyncio.get_running_loop().time
        return [url for url in await self._listed() if now() >= self._silent.get(url, -inf)]

    async def _listed(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        if self._workers is None or (self.routed and now >= self._asked + _ASK_AGAIN):
            self._asked = now  # meanwhile other callers get the earlier answer
            url = self._config.engine
            listed, final = await self.ask(f"{url}/workers")
            entries = listed.get("workers") if isinstance(listed, dict) else listed
            workers = [
                entry
                for entry in (entries if isinstance(entries, list) else ())
                if isinstance(entry, dict) and _is_address(entry.get("url"))
            ][:_MOST_WORKERS]
            urls = [entry["url"] for entry in workers]
            if urls:
                smg = all("runtime_type" in entry for entry in workers)  # not in 0.3.2
                self._workers, self._smg = urls, smg
            elif final and listed is None and self._workers is None:
                self._workers = [url]  # not a router
        # not known if there was no answer, or if the router has no worker yet
        return self._workers or [self._config.engine]

    async def model_info(self) -> ModelInfo:
        """Return the context length, the vocabulary size and the weight version.

        Values that the configuration sets take precedence over the values that the engine reports.
        """
        if self._model_info is None:
            asked_before, loop = self._info_asked, asyncio.get_running_loop()
            if self._loop is not loop:  # a lock belongs to one loop
                self._loop, self._lock = loop, asyncio.Lock()
            async with self._lock:  # meanwhile another caller may have asked
                if self._model_info is None and self._info_asked == asked_before:
                    self._info_so_far, final = await self._ask_model_info()
                    self._info_asked += 1
                    if final:
                        self._model_info = self._info_so_far
        return self._info_so_far if self._model_info is None else self._model_info

    async def _ask_model_info(self) -> tuple[ModelInfo, bool]:
        """Return the model info, and whether it is final.

        It is not final if a later request may return values that are missing now, and the workers
        or the context length are not known yet.
        """
        worker = (await self._listed())[0]
        all_final = self._workers is not None
        info, final = await self.ask_model()
        all_final = all_final and final
        answers = [info]
        for path in ("/server_info", "/v1/models"):
            answer, final = await self.ask(f"{worker}{path}")
            answers.append(answer if isinstance(answer, dict) else {})
            all_final = all_final and final
        _check_kind(worker, answers[-1])
        reported = read_model_info(*answers)
        context_length = self._config.context_length or reported.context_length
        return replace(
            reported,
            context_length=context_length,
            vocab_size=self._config.vocab_size or reported.vocab_size,
            session_cache=self._session_cache(reported),
        ), all_final or (context_length is not None and self._workers is not None)

    def _session_cache(self, reported: ModelInfo) -> bool | None:
        if not self._config.session_cache or reported.session_cache is None:
            return None
        return reported.session_cache and (self._smg or not self.routed)  # 0.3.2 drops session ids

    async def health(self) -> Health:
        """Return whether the engine can answer, and if not, why."""
        return await check_health(self._transport, self._config.engine)

    async def probe(self) -> Health:
        """Check the health during an outage. Raise `UsageError` if the model has changed."""
        health = await self.health()
        if not health.down and self._model is not None:
            await self.ask_model()
        return health

    async def ask_model(self) -> tuple[Mapping[str, Any], bool]:
        """Return the answer to `/model_info`, and whether it is final.

        It is not final if a later request may succeed. Raise `UsageError` if the model has changed.
        """
        body, final = await self.ask(f"{(await self._listed())[0]}/model_info")
        info = body if isinstance(body, dict) else {}
        self._compare(info)
        return info, final

    def _compare(self, info: Mapping[str, Any]) -> None:
        """Raise `UsageError` if `info` describes a different model from the previous answer.

        With `allow_model_mismatch`, only log a warning. If the path differs but the tokenizer is
        the same, the weights were updated from disk. This is allowed.
        """
        path, tokenizer = read_model_info(info, {}, {}).model_path, info.get("tokenizer_path")
        if path is None:
            return
        updated = tokenizer is not None and tokenizer == self._tokenizer
        if self._model not in (None, path) and not updated:
            message = (
                f"the engine at {self._config.engine} now serves a different model: {path!r} "
                f"instead of {self._model!r}"
            )
            if not self._config.allow_model_mismatch:
                raise UsageError(message)
            logger.warning("%s", message)
        self._model, self._tokenizer = path, tokenizer

    async def abort(self, rid: str) -> None:
        """Abort one request at every worker. Log failures."""
        await self._post_to_workers("/abort_request", {"rid": rid})

    async def close_session(self, session_id: str) -> bool:
        """Close one session at every worker. Return False if a later try may succeed."""
        return await self._post_to_workers("/close_session", {"session_id": session_id})

    async def _post_to_workers(self, path: str, body: Mapping[str, Any]) -> bool:
        """Post `body` to every worker, because routers do not forward `path`. Log failures. Return
        False if a later request may succeed where this one failed.
        """
        data, all_final = orjson.dumps(body), True
        for worker in await self._listed():
            url = f"{worker}{path}"
            try:
                answer = await self._transport.ask(url, data, seconds=self._config.abort_timeout)
            except NETWORK_ERRORS as error:
                logger.info("%s %s failed: %s", url, dict(body), error)
                all_final = False
                continue
            if answer.status != 200:
                text = answer.body[:200]
                logger.warning("%s answers %d to %s: %r", url, answer.status, dict(body), text)
                all_final = all_final and _is_final(answer.status)
        return all_final

    async def ask(self, url: str) -> tuple[Any, bool]:
        """Return the JSON at `url` (None if there is none), and whether this result is final.

        It is not final if a later request may succeed.
        """
        now = asyncio.get_running_loop().time
        workers = self._workers if self._workers is not None and self.routed else ()
        worker = next((worker for worker in workers if url.startswith(f"{worker}/")), "")
        if now() < self._silent.get(worker, -inf):
            return None, False
        try:
            answer = await self._transport.ask(url, seconds=self._config.connect_timeout)
        except NETWORK_ERRORS as error:
            logger.info("the request to %s failed: %s", url, error)
            if worker and isinstance(error, TimeoutError):
                self._silent[worker] = now() + _SILENT
            return None, False
        if answer.status != 200:
            return None, _is_final(answer.status)
        try:
            return orjson.loads(answer.body), True
        except orjson.JSONDecodeError as error:
            logger.info("the answer of %s is not JSON: %s", url, error)
            return None, True


def _check_kind(url: str, models: Mapping[str, Any]) -> None:
    """Raise `UsageError` if `url` is the address of `toolroll serve`. `models`: the answer to
    `/v1/models`.
    """
    cards = models.get("data")
    if isinstance(cards, list) and any(
        isinstance(card, dict) and card.get("owned_by") == "toolroll" for card in cards
    ):
        raise UsageError(
            f"{url} is `toolroll serve`, which has no /generate: give the address of its engine, "
            "or use it as a baseline with --baseline-url and /v1 at the end of its address"
        )


def _is_address(url: Any) -> bool:
    try:
        return isinstance(url, str) and url.startswith(("http://", "https://")) and bool(URL(url))
    except ValueError:
        return False


def _is_final(status: int) -> bool:
    """Return False if a later request may be answered with another status."""
    return status < 500 and status not in _MAY_PASS
