"""Use SGLang's HTTP API directly, for tests of the engine itself and not of our client."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from support.patience import PATIENCE


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of `/generate`: the status and the body (as text if it is not JSON)."""

    status: int
    body: Any

    @property
    def output_ids(self) -> list[int]:
        return list(self.body["output_ids"])

    @property
    def meta(self) -> dict[str, Any]:
        return dict(self.body["meta_info"])

    @property
    def logprobs(self) -> list[float]:
        return [item[0] for item in self.meta["output_token_logprobs"]]

    @property
    def reason(self) -> str:
        return str(self.meta["finish_reason"]["type"])

    @property
    def message(self) -> str:
        """An error's words, in whichever shape they came."""
        inner = self.body.get("error", self.body) if isinstance(self.body, dict) else self.body
        return str(inner.get("message") if isinstance(inner, dict) else inner)


@dataclass(frozen=True, slots=True)
class Wire:
    http: aiohttp.ClientSession
    url: str

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, Any] | None = None,
        **sampling_params: Any,
    ) -> Answer:
        """Post `/generate`, with logprobs; `fields` stand beside `input_ids` in the body."""
        body = {
            "input_ids": list(input_ids),
            "return_logprob": True,
            "sampling_params": sampling_params,
            **(fields or {}),
        }
        return await self.post("/generate", body, headers=headers)

    async def post(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        async with self.http.post(f"{self.url}{path}", json=body, headers=headers) as response:
            return _answer(response.status, await response.text())

    async def get(self, path: str) -> Answer:
        async with self.http.get(f"{self.url}{path}") as response:
            return _answer(response.status, await response.text())

    async def running(self) -> int:
        """The number of requests that the engine is working on, waiting ones included."""
        loads = (await self.get("/v1/loads")).body["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def idle(self) -> bool:
        return await self.running() == 0

    async def rescore(self, ids: Sequence[int]) -> list[float]:
        """The logprob of each token of `ids` but the first, from one prefill."""
        answer = await self.generate(
            ids, fields={"logprob_start_len": 0}, max_new_tokens=1, temperature=1.0
        )
        items = answer.meta["input_token_logprobs"]
        assert [item[1] for item in items] == list(ids)
        return [item[0] for item in items[1:]]


_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


def sglang_names(params: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's sampling parameters with the engine's names."""
    return {_NAMES.get(name, name): value for name, value in params.items()}


async def generate(
    url: str, input_ids: Sequence[int], params: Mapping[str, Any], session: str = "", **fields: Any
) -> Answer:
    """Sample one turn of a trainer's stand-in. `fields` are more of the request."""
    headers = {"X-SMG-Routing-Key": session} if session else None
    async with aiohttp.ClientSession() as http:
        wire = Wire(http, url)
        answer = await wire.generate(input_ids, headers=headers, fields=fields, **params)
    assert answer.status == 200, answer
    return answer


async def until(condition: Callable[[], Awaitable[bool] | bool], what: str) -> None:
    """Ask `condition` until it holds; fails with `what` after a time limit."""
    deadline = time.monotonic() + PATIENCE
    while not (await met if isinstance(met := condition(), Awaitable) else met):
        assert time.monotonic() < deadline, f"not in {PATIENCE:.0f} s: {what}"
        await asyncio.sleep(0.05)


def _answer(status: int, text: str) -> Answer:
    try:
        return Answer(status, json.loads(text))
    except json.JSONDecodeError:
        return Answer(status, text)
