"""The server processes that tests start (`support.processes`), and the proxy that counts their
requests, without a server of SGLang's.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.cache import cached_folder
from support.patience import PATIENCE
from support.processes import ServerFailed, get_json, members, serving
from support.proxy import CountingProxy, counting_proxy

ANSWER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"pid": %d}' % child.pid)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


# --- processes ------------------------------------------------------------------------------------


def test_a_server_is_killed_with_its_children(tmp_path: Path) -> None:
    command = lambda port: [sys.executable, "-c", ANSWER, str(port)]
    with serving(command, ready="/", environment={}, log=tmp_path / "log", name="it") as server:
        status, body = get_json(server.url + "/")
        assert status == 200
        assert body["pid"] in members(server.process.pid)
    assert members(server.process.pid) == []


def test_a_server_that_dies_says_why(tmp_path: Path) -> None:
    command = lambda port: [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(ServerFailed, match=r"(?s)it exited with 1 .*no such model"),
        serving(command, ready="/", environment={}, log=tmp_path / "log", name="it"),
    ):
        pass


def test_a_taken_port_is_tried_anew(tmp_path: Path) -> None:
    ports: list[int] = []

    def command(port: int) -> list[str]:
        ports.append(port)
        failing = "raise SystemExit('[Errno 98] Address already in use')"
        return [sys.executable, "-c", failing if len(ports) == 1 else ANSWER, str(port)]

    with serving(command, ready="/", environment={}, log=tmp_path / "log", name="it") as server:
        assert server.port == ports[1]
    assert len(ports) == 2


# --- the cache ------------------------------------------------------------------------------------


def test_a_folder_is_built_once_and_only_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "file").write_text("x")
        if len(built) == 1:
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        cached_folder("kind", ("key",), build)
    place = cached_folder("kind", ("key",), build)
    assert cached_folder("kind", ("key",), build) == place
    assert len(built) == 2
    assert cached_folder("kind", ("ke", "y"), build) != place
    assert not [path for path in place.parent.iterdir() if path.name.startswith(".")]


def test_threads_that_build_at_once_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    barrier = threading.Barrier(4)
    places: list[Path] = []

    def build(folder: Path) -> None:
        barrier.wait()  # all of them build
        (folder / "file").write_text("x")

    threads = [
        threading.Thread(target=lambda: places.append(cached_folder("kind", ("key",), build)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 4
    assert len(set(places)) == 1


# --- the proxy ------------------------------------------------------------------------------------


class Worker:
    """Answers with what it got; `/slow` never answers, and says when it was hung up on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.hung_up = asyncio.Event()

    async def echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        return web.Response(
            status=418,
            body=body + request.query_string.encode(),
            headers={"X-Seen": request.headers["X-Smg"]},
        )

    async def slow(self, request: web.Request) -> web.Response:
        self.reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.hung_up.set()
        raise AssertionError


@pytest.fixture
async def worker() -> AsyncIterator[tuple[Worker, str]]:
    found = Worker()
    app = web.Application()
    app.router.add_post("/generate", found.echo)
    app.router.add_post("/slow", found.slow)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    yield found, f"http://127.0.0.1:{server.port}"
    await server.close()


@pytest.fixture
def proxy(worker: tuple[Worker, str]) -> Iterator[CountingProxy]:
    with counting_proxy(worker[1]) as found:
        yield found


async def test_the_proxy_passes_bytes_on_and_writes_them_down(proxy: CountingProxy) -> None:
    url = proxy.url + "/generate?a=%20b"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, data=b'{"x":1}', headers={"X-Smg": "k"}) as response,
    ):
        assert (response.status, await response.read()) == (418, b'{"x":1}a= b')
        assert response.headers["X-Seen"] == "k"
    (seen,) = proxy.generations()
    assert (seen.method, seen.path, seen.status, seen.hung_up) == ("POST", "/generate", 418, False)
    assert seen.headers["x-smg"] == "k"
    assert seen.json() == {"x": 1}


async def test_the_proxy_hangs_up_when_its_client_does(
    worker: tuple[Worker, str], proxy: CountingProxy
) -> None:
    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(http.post(proxy.url + "/slow"))
        await asyncio.wait_for(worker[0].reached.wait(), PATIENCE)
        task.cancel()
        await asyncio.wait_for(worker[0].hung_up.wait(), PATIENCE)
    [seen] = proxy.requests
    async with asyncio.timeout(PATIENCE):
        while not seen.hung_up:  # the proxy has a thread of its own
            await asyncio.sleep(0.001)


async def test_a_worker_that_is_gone_is_a_502() -> None:
    with counting_proxy("http://127.0.0.1:1") as proxy:
        async with aiohttp.ClientSession() as http, http.get(proxy.url + "/health") as response:
            assert response.status == 502
