"""`kill -9` of `toolroll serve --out` at any moment loses no answered turn."""

import asyncio
import json
import os
import random
import signal
from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from support.faults.size import FULL, SEED
from support.hostile import drop_logprob
from support.patience import PATIENCE
from support.processes import TOOLROLL, Server, serving

from toolroll.cli.view import view
from toolroll.evaluation.export.dataset import sample_rows
from toolroll.rollout.runs.episode_file import read_episodes
from toolroll.rollout.runs.provenance import package_version
from toolroll.testing import (
    EmbeddedEngine,
    Fault,
    PolicyRequest,
    load_embedded_tokenizer,
    serve_in_thread,
)

SESSIONS, TURNS, KILLS = (200, 10, 30) if FULL else (100, 10, 8)

Answer = tuple[list[int], list[int], list[float]]
"""The ids of the prompt, the sampled ids, and their logprobs."""

FAULTS = {
    3: Fault(drop=True),
    8: Fault(status=503, body=b"busy"),
    13: Fault(abort_after=2),
    21: Fault(status=500, body=b"no"),
    34: Fault(garble=drop_logprob),
    55: Fault(garble=lambda answer: {**answer, "meta_info": {}}),
    89: Fault(weight_version="v1", switch_after=1),
}
"""The faults of the engine, of 97 requests each."""


@dataclass
class Clients:
    """The clients. Each server is killed after as many answers as the next of `moments` says."""

    moments: list[int]
    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    """What each session answered, by the id in the answers' header."""
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The ids of the sessions that each conversation was in."""
    left: int = 0
    """How many answers this server still gives; negative if it is not killed."""
    retries: int = 0
    refused: int = 0
    in_flight: int = 0
    hit: list[int] = field(default_factory=list)
    """The requests in flight at each kill."""
    server: Server | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    down: asyncio.Event = field(default_factory=asyncio.Event)

    async def talk(self, http: aiohttp.ClientSession, number: int) -> None:
        """Hold the conversation `number`. Of three, two name no session, and say the same."""
        name, who, base = f"s{number}", f"s{number}", f"/sessions/s{number}"
        if number % 3:
            who, base = f"pair {number // 3}", ""
        messages: list[dict[str, Any]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Go on, {who}, {turn}"})
            body = {"messages": messages, "logprobs": True, "stream": number // 3 % 2 == 0}
            session, text, answer = await self._answered(http, base, body)
            messages.append({"role": "assistant", "content": text})
            self.names[name].add(session)
            self.answers[session].append(answer)
            self.left -= 1
            if self.left == 0 and self.server is not None:
                self.hit.append(self.in_flight)
                os.kill(self.server.process.pid, signal.SIGKILL)
                self.server = None
                self.up.clear()
                self.down.set()

    async def _answered(self, http: Any, base: str, body: Any) -> tuple[str, str, Answer]:
        """Send a request until it is answered, as the SDK does."""
        for retry in range(10 * KILLS):
            await self.up.wait()
            server: Any = self.server
            url = f"{server.url}{base}/v1/chat/completions"
            self.in_flight += 1
            try:
                headers = {"x-stainless-retry-count": str(retry)}
                async with http.post(url, json=body, headers=headers) as response:
                    data = await response.read()
                    if response.status == 200 and _is_whole(data, stream=body["stream"]):
                        session = response.headers["x-session-id"]
                        return session, *(_streamed(data) if body["stream"] else _whole(data))
                    assert response.status == 200 or response.headers["x-should-retry"] == "true"
                    self.refused += 1
            except aiohttp.ClientError:
                assert self.server is not server, "only a killed server breaks a connection"
                self.retries += 1
            finally:
                self.in_flight -= 1
        raise AssertionError("a request was never answered")


def _is_whole(data: bytes, *, stream: bool) -> bool:
    return not stream or (data.endswith(b"data: [DONE]\n\n") and b'"error"' not in data)


def _whole(data: bytes) -> tuple[str, Answer]:
    answer = json.loads(data)
    choice = answer["choices"][0]
    return choice["message"]["content"], _answer(answer["prompt_token_ids"], choice)


def _streamed(data: bytes) -> tuple[str, Answer]:
    lines = data.decode().split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    last = chunks[-1]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return text, _answer(last["prompt_token_ids"], last["choices"][0])


def _answer(prompt: list[int], choice: dict[str, Any]) -> Answer:
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return prompt, choice["token_ids"], logprobs


def policy(request: PolicyRequest) -> str:
    return f"Reply {request.index}."


def started(engine: str, out: Path, log: Path) -> AbstractContextManager[Server]:
    """A process of `toolroll serve --out`."""
    words = [*"serve --model embedded --parser hermes --engine".split(), engine, "--out", str(out)]
    command = lambda port: (*TOOLROLL, *words, "--port", str(port))
    return serving(command, ready="/health", environment=os.environ, log=log, name="serve")


@pytest.mark.faults
@pytest.mark.timeout((KILLS + 1) * 60)
async def test_no_answer_is_lost_by_kills_among_faults(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    out = tmp_path / "out"
    clients = Clients([rng.randint(1, 6 * SESSIONS // KILLS) for _ in range(KILLS)])
    engine = EmbeddedEngine(
        load_embedded_tokenizer(), policy, faults=lambda request: FAULTS.get(request.index % 97)
    )
    with serve_in_thread(engine) as served:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True)
        ) as http:
            talks = asyncio.gather(*(clients.talk(http, number) for number in range(SESSIONS)))
            for life in range(KILLS + 1):
                with started(served.url, out, tmp_path / f"log-{life}") as server:
                    clients.server = server
                    clients.left = clients.moments[life] if life < KILLS else -1
                    clients.down.clear()
                    clients.up.set()
                    killed = asyncio.ensure_future(clients.down.wait())
                    ends: set[asyncio.Future[Any]] = {killed, talks}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    killed.cancel()
                    if talks.done():
                        await talks
                        await _check(http, server, clients)
                        break
    assert len(clients.hit) == KILLS
    assert min(clients.hit) > 0
    assert clients.retries >= sum(clients.hit) // 2
    assert clients.refused > 0
    assert all(len(sessions) == 1 for sessions in clients.names.values())
    _check_files(out, clients)


async def _check(http: aiohttp.ClientSession, server: Server, clients: Clients) -> None:
    """Every answer is in its session, once; then all sessions are finished."""
    for name, answers in clients.answers.items():
        async with http.get(f"{server.url}/sessions/{name}/trace") as response:
            trace = (await response.json())["trace"]
        parts = ("prompt_token_ids", "completion_token_ids", "logprobs")
        found = [tuple(one[part] for part in parts) for one in trace]
        assert len({str(one) for one in found}) == len(found)
        if not name.startswith("unnamed"):
            assert found == answers
        async with http.post(f"{server.url}/sessions/{name}/reward", json={"reward": 1}) as done:
            assert done.status == 200
        async with http.post(f"{server.url}/sessions/{name}/export") as done:
            assert done.status == 200


def _check_files(out: Path, clients: Clients) -> None:
    """The files of a run can be read, and train each answer once."""
    trained: Counter[tuple[Any, ...]] = Counter()
    for row in sample_rows(read_episodes(out)):
        mask = np.flatnonzero(row["loss_mask"])
        for ids in np.split(mask, np.flatnonzero(np.diff(mask) > 1) + 1):
            begin, end = ids[0], ids[-1] + 1
            prompt, sampled = row["input_ids"][:begin], row["input_ids"][begin:end]
            trained[_key(row["task_id"], (prompt, sampled, row["logprobs"][begin:end]))] += 1
    received = {_key(name, one) for name, answers in clients.answers.items() for one in answers}
    assert not received - trained.keys(), "lost"
    assert trained.total() == len(trained), "doubled"
    assert not any("Traceback" in log.read_text() for log in out.parent.glob("log-*"))
    page, count, messages, _ = view(out, out=None, tokenizer=None, tokens=10)
    assert (page.is_file(), count) == (True, len(clients.answers))
    assert not [message for message in messages if "not a valid episode" in message], messages


def _key(session: str, answer: Answer) -> tuple[Any, ...]:
    prompt, ids, logprobs = answer
    return session, *prompt, -1, *ids, -1, *np.array(logprobs, dtype=np.float32).tolist()


LIVES = [
    # the signal, and then: how many sessions are finished, and how many the next server has
    (signal.SIGTERM, 0, 3),
    (signal.SIGKILL, 0, 4),
    (signal.SIGINT, 5, 0),
    (signal.SIGTERM, 5, 1),
]


async def test_ctrl_c_finishes_sessions_and_others_leave_them(tmp_path: Path) -> None:
    """Each server has a session of its own. Two conversations without a name go on until Ctrl-C."""
    out = tmp_path / "out"
    begin = {"role": "user", "content": "Hi"}
    talks: list[list[Any]] = [[begin], [begin]]
    names: list[set[str]] = [set(), set()]
    with serve_in_thread(EmbeddedEngine(load_embedded_tokenizer(), policy)) as served:
        for life, (number, finished, left) in enumerate(LIVES):
            own: tuple[str, list[Any], set[str]] = (f"/sessions/s{life}", [begin], set())
            unnamed = [("", talk, found) for talk, found in zip(talks, names, strict=True)]
            with started(served.url, out, tmp_path / f"log-{life}") as server:
                async with aiohttp.ClientSession() as http:
                    for base, talk, found in [own, *(unnamed if life < 3 else ())]:
                        url = f"{server.url}{base}/v1/chat/completions"
                        async with http.post(url, json={"messages": talk}) as response:
                            found.add(response.headers["x-session-id"])
                            message = (await response.json())["choices"][0]["message"]
                        talk += [message, {"role": "user", "content": f"Life {life}"}]
                server.process.send_signal(number)
                killed = number == signal.SIGKILL
                assert server.process.wait(PATIENCE) == -9 * killed, server.log_tail()
            assert len(list(read_episodes(out))) == finished
            words = f"has finished sessions: {finished}; unfinished (the next start continues them)"
            words += f": {left}"
            assert killed or words in server.log_tail()
    episodes = {one.task_id: one.result for one in read_episodes(out)}
    for talk, [name] in zip(talks, names, strict=True):
        (trajectory,) = episodes[name].trajectories
        assert len(trajectory.turns) == 3
        assert [m["content"] for m in episodes[name].messages] == [m["content"] for m in talk[:-1]]
    first, *others = json.loads((out / "run.json").read_text())["provenance"]["serve"]
    assert "serve" in first["command"]
    assert first["toolroll"] == package_version("toolroll")
    assert first["engine_model_path"] is not None
    assert len(first["tokenizer_sha256"]) == 64
    # the later servers have other ports
    assert [sorted(other) for other in others] == [["command", "date"]] * 3
