"""Real servers: each is started by the first test that needs it, for the whole run."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import aiohttp
import pytest
from support.processes import START_DEADLINE, Server
from support.proxy import CountingProxy, counting_proxy
from support.servers import Router, router, sglang_server
from support.session_load import POOL
from support.tiny_model import lora_adapter, tiny_moe
from support.wire import Wire

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class RoutedSglang:
    """A router (`url`) over two float32 workers with the same weights, each behind a proxy that
    writes down what it gets.

    The router knows the workers by their proxies' addresses: `worker_urls` are those.
    """

    router: Server
    workers: tuple[Server, ...]
    proxies: tuple[CountingProxy, ...]

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def worker_urls(self) -> tuple[str, ...]:
        return tuple(proxy.url for proxy in self.proxies)

    def clear(self) -> None:
        """Forget the requests so far."""
        for proxy in self.proxies:
            proxy.clear()

    async def running(self, http: aiohttp.ClientSession) -> bool:
        """Whether a worker runs a request."""
        return any([await Wire(http, worker.url).running() for worker in self.workers])

    async def idle(self, http: aiohttp.ClientSession) -> bool:
        return not await self.running(http)

    def sessions(self, names: Iterable[str]) -> list[set[str]]:
        """The sessions of each worker, among `names`. Each of these stays at one worker."""
        keys = [{seen.routing_key for seen in proxy.generations()} for proxy in self.proxies]
        first, second = ({name for name in names if name in each} for each in keys)
        assert first.isdisjoint(second)
        assert first | second == set(names)
        return [first, second]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("timeout") is None:
                # the first test of a fixture waits for its servers
                item.add_marker(pytest.mark.timeout(3 * START_DEADLINE))


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers write their logs, and where their LoRA adapters are."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def sglang_float32(log_folder: Path) -> Iterator[Server]:
    """SGLang with the tiny model in float32."""
    with sglang_server(log_folder, name="sglang-float32") as server:
        yield server


@pytest.fixture(scope="session")
def sglang_moe(log_folder: Path) -> Iterator[Server]:
    """SGLang with the tiny mixture of experts. Tests may load other weights."""
    flags = ["--enable-return-routed-experts"]
    with sglang_server(log_folder, model=tiny_moe(), flags=flags, name="sglang-moe") as server:
        yield server


@pytest.fixture(scope="session")
def sglang_small(log_folder: Path) -> Iterator[Server]:
    """SGLang with the tiny model in bfloat16, a small cache that can keep sessions, and streams
    whose events have only the new ids. No test looks at more than one of these."""
    flags = ["--max-total-tokens", str(POOL), "--chunked-prefill-size", "1024"]
    flags += ["--enable-session-radix-cache", "--incremental-streaming-output"]
    with sglang_server(log_folder, dtype="bfloat16", flags=flags, name="sglang-small") as server:
        yield server


@pytest.fixture(scope="session")
def adapters(log_folder: Path) -> dict[str | None, Path | None]:
    """The folder of each LoRA adapter of `second_float32`, by name. The key None has no adapter."""
    names = ("one", "two")
    return {None: None} | {
        name: lora_adapter(log_folder / name, seed) for seed, name in enumerate(names)
    }


@pytest.fixture(scope="session")
def second_float32(log_folder: Path, adapters: dict[str | None, Path | None]) -> Iterator[Server]:
    """A second server with the weights of `sglang_float32`, which also has LoRA adapters."""
    paths = [f"{name}={folder}" for name, folder in adapters.items() if name]
    flags = ["--enable-lora", "--lora-backend", "torch_native", "--lora-paths", *paths]
    with sglang_server(log_folder, flags=flags, name="sglang-float32-second") as server:
        yield server


@pytest.fixture(scope="session", params=get_args(Router))
def routed_sglang(
    request: pytest.FixtureRequest, sglang_float32: Server, second_float32: Server, log_folder: Path
) -> Iterator[RoutedSglang]:
    """Each router over `sglang_float32` and `second_float32`, which has the same weights."""
    with ExitStack() as stack:
        workers = (sglang_float32, second_float32)
        proxies = tuple(stack.enter_context(counting_proxy(worker.url)) for worker in workers)
        urls, kind = [proxy.url for proxy in proxies], request.param
        front = stack.enter_context(router(urls, log_folder, kind=kind, name=kind))
        yield RoutedSglang(front, workers, proxies)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without limits, for plain requests."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        yield session


@pytest.fixture
def float32(http: aiohttp.ClientSession, sglang_float32: Server) -> Wire:
    return Wire(http, sglang_float32.url)


@pytest.fixture(params=[("sglang_float32", 1e-4), ("sglang_small", 0.05)], ids=["float32", "bf16"])
def precise(request: pytest.FixtureRequest, http: aiohttp.ClientSession) -> tuple[Wire, float]:
    """Each server, and how far its logprobs may be from those that it computes again."""
    name, close = request.param
    return Wire(http, request.getfixturevalue(name).url), close
