"""What each router does with each call and field: the table of docs/sglang.md. And failing requests
and a killed worker behind each router.

The workers are embedded engines. In the first part, a proxy before the worker records what arrives.
"""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import aiohttp
import numpy as np
import pytest
from support.episodes import agent, judge_tokens, opened_model
from support.proxy import CountingProxy, counting_proxy
from support.servers import Router, router
from support.toy_environment import PondFactory, look
from support.wire import Wire

from toolroll.rollout.engine import Engine, EngineConfig
from toolroll.rollout.engine.sampling_params import DROPPED_BY_ROUTER, DROPPED_BY_SMG
from toolroll.rollout.episode import Episode
from toolroll.rollout.errors import UsageError
from toolroll.rollout.runs.runner import Runner
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import GenerateRequest, Status
from toolroll.testing import EmbeddedEngine, Fault, serve_in_thread

ROUTERS: tuple[Router, ...] = get_args(Router)
DROPPED = {"none": frozenset(), "smg": DROPPED_BY_SMG, "sglang-router": DROPPED_BY_ROUTER}
PAGE = Path(__file__).parents[2] / "docs" / "sglang.md"


@dataclass(frozen=True, slots=True)
class Routed:
    """A router of a kind (or none) over one worker. `proxy` records what the worker gets."""

    kind: str
    url: str
    proxy: CountingProxy


@pytest.fixture(scope="module", params=["none", *ROUTERS])
def routed(request: pytest.FixtureRequest, tokenizer: Any, log_folder: Path) -> Iterator[Routed]:
    with ExitStack() as stack:
        engine = stack.enter_context(serve_in_thread(EmbeddedEngine(tokenizer, session_cache=True)))
        proxy = stack.enter_context(counting_proxy(engine.url))
        url, kind = proxy.url, request.param
        if kind != "none":
            name = f"{kind}-table"
            url = stack.enter_context(router([url], log_folder, kind=kind, name=name)).url
        yield Routed(kind, url, proxy)


def rows() -> dict[str, list[str]]:
    """The table: by call or field, the words for no router, sglang-router and smg."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines()]
    return {
        name: cells
        for names, *cells in lines
        if len(cells) == 1 + len(ROUTERS) and cells[0] == "forwarded"
        for name in re.findall(r"`([^`]+)`", names)
    }


TABLE = rows()
CALLS = [name for name in TABLE if name.startswith("/")]
GETS = ("/get_model_info", "/model_info", "/server_info", "/v1/loads")
SAMPLING = [name.removeprefix("sampling_params.") for name in TABLE if name.startswith("sampling")]
FIELDS = [name for name in TABLE if name not in CALLS and not name.startswith("sampling")]
"""The rows. A test sends each of them."""


def word(routed: Routed, name: str) -> str:
    return TABLE[name][["none", *ROUTERS].index(routed.kind)]


@pytest.mark.parametrize("call", CALLS)
async def test_calls(http: aiohttp.ClientSession, routed: Routed, call: str) -> None:
    routed.proxy.clear()
    if call in GETS:
        status = (await Wire(http, routed.url).get(call)).status
    else:
        status = (await Wire(http, routed.url).post(call, {})).status
    arrived = any(seen.path == call for seen in routed.proxy.requests)
    expected = word(routed, call)
    assert arrived == (expected == "forwarded")
    if expected == "404":
        assert status == 404


VALUES: dict[str, Any] = {
    "rid": "a" * 32, "session_id": "s", "return_logprob": True, "logprob_start_len": 2,
    "top_logprobs_num": 1, "return_routed_experts": True, "routed_experts_start_len": 3,
    "return_prompt_token_ids": True,
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
async def test_fields(http: aiohttp.ClientSession, routed: Routed, field: str) -> None:
    sent = {field: VALUES[field]}
    assert (await arrived(http, routed, sent)).get(field) == (
        VALUES[field] if word(routed, field) == "forwarded" else None
    )


PARAMS: dict[str, Any] = {
    "max_new_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "stop": ["z"],
    "stop_token_ids": [1], "stop_regex": "z", "frequency_penalty": 0.1, "presence_penalty": 0.1,
    "repetition_penalty": 1.1, "min_new_tokens": 1, "n": 1, "json_schema": "{}", "regex": "a",
    "ebnf": "root ::= 'a'", "structural_tag": "{}", "ignore_eos": True,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True,
    "stream_interval": 2, "logit_bias": {"5": 1.0}, "sampling_seed": 7, "custom_params": {"a": 1},
    "beam_width": 2, "watermark": True, "choice": ["a"],
}  # fmt: skip


@pytest.mark.parametrize("param", PARAMS)
async def test_sampling_parameters(http: aiohttp.ClientSession, routed: Routed, param: str) -> None:
    """And one that nobody knows, which each router drops."""
    sent = {param: PARAMS[param], "bogus": 1}
    got = await arrived(http, routed, {"sampling_params": sent})
    assert ("bogus" in got["sampling_params"]) == (routed.kind == "none")
    dropped = DROPPED[routed.kind]
    assert (param not in got["sampling_params"]) == (param in dropped)
    assert (param in SAMPLING) == (param in DROPPED_BY_ROUTER)
    if param in SAMPLING:
        words = word(routed, f"sampling_params.{param}")
        assert words == ("dropped" if param in dropped else "forwarded")


async def arrived(http: Any, routed: Routed, fields: dict[str, Any]) -> dict[str, Any]:
    """The body that the worker got."""
    routed.proxy.clear()
    await Wire(http, routed.url).post("/generate", {"input_ids": [5, 6, 7], **fields})
    [seen] = routed.proxy.generations()
    return dict(seen.json())


async def test_the_client_knows_what_the_router_drops_and_refuses_it(routed: Routed) -> None:
    """In a turn, and in the body that an overridden `_call_llm` posts."""
    params, prompt = {"logit_bias": {"5": 1.0}}, np.array([5, 6], dtype=np.int32)
    url = routed.proxy.target if routed.kind == "none" else routed.url
    async with Engine(EngineConfig(engine=url)) as engine:
        assert await engine.dropped_params() == DROPPED[routed.kind]
        assert (await engine.model_info()).session_cache == (routed.kind != "sglang-router")
        if routed.kind == "none":
            return
        routed.proxy.clear()
        refused = "silently drops the sampling parameter 'logit_bias'"
        with pytest.raises(UsageError, match=refused):
            await engine.generate(GenerateRequest(prompt, params, "s"))
        with pytest.raises(UsageError, match=refused):
            await engine.post(f"{routed.url}/generate", {"sampling_params": params})
    assert routed.proxy.generations() == []


# --- faults ---------------------------------------------------------------------------------------

EPISODES = 24
FAULTS = {
    3: Fault(status=503, body=b"busy"),
    5: Fault(status=500, body=b"boom"),
    8: Fault(drop=True),
    11: Fault(status=429, body=b"full"),
}
"""By the number of the request at its worker."""
KILLED_AT = 14


@pytest.mark.parametrize("kind", ROUTERS)
async def test_failing_requests_and_a_killed_worker_cost_no_episode(
    tokenizer: Any, kind: Router, log_folder: Path
) -> None:
    episodes: list[Episode] = []
    killing: list[asyncio.Task[None]] = []
    one_kill = threading.Lock()

    def fault_or_kill(worker: int, request: Any) -> Fault | None:
        # The router chooses which worker comes first to this request. It is killed in its thread.
        if request.index == KILLED_AT and one_kill.acquire(blocking=False):
            killing.append(asyncio.get_running_loop().create_task(workers[worker].kill()))
        return FAULTS.get(request.index)

    workers = [
        EmbeddedEngine(tokenizer, look, latency=0.05, faults=partial(fault_or_kill, worker))
        for worker in range(2)
    ]
    with ExitStack() as stack:
        urls = [stack.enter_context(serve_in_thread(worker)).url for worker in workers]
        # the defaults of sglang-router keep a dead worker for three minutes
        flags = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        front = router(urls, log_folder, kind=kind, flags=flags, name=f"{kind}-faults")
        url, factory = stack.enter_context(front).url, PondFactory(EPISODES)
        params = {"temperature": 1.0, "max_new_tokens": 256}
        settings = RunSettings(sampling_params=params, concurrency=8)
        async with opened_model(url, tokenizer, config={"backoff": 0.01}) as model:
            runner = Runner(factory, lambda: agent(model, verify="off"), settings)
            await runner.run(factory.tasks("test"), episodes.append)
    assert len({episode.task_id for episode in episodes}) == EPISODES == len(episodes)
    log: Any = SimpleNamespace(log=[entry for worker in workers for entry in worker.log], killed=0)
    for episode in episodes:
        assert episode.result.status is Status.COMPLETED, episode.result.info
        name = f"pond/{episode.task_id}#0"
        answered = [entry for entry in log.log if entry.routing_key == name and entry.output_ids]
        trained = sum(len(path.turns) for path in episode.result.trajectories)
        # each token was sampled once for it
        judge_tokens(episode.result.trajectories, log, name, refused=len(answered) - trained)
    assert killing
    assert [sum(entry.faulted for entry in worker.log) for worker in workers] == [len(FAULTS)] * 2
