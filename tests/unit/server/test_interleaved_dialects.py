"""One session through three dialects at the same time: branches, edited history, clients that hang
up in a stream and ask again.

A program is a list of batches; the requests of a batch run at the same time. The engine's log is
the only judge of tokens: each reply that a client got is trained once, with its logprobs, behind
exactly the prompt that it was sampled from; nothing else is trained. The trajectories are the
longest paths of replies of which the clients went on.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.patience import PATIENCE
from support.talking_dialects import DIALECTS, PATHS, Dialect, body_of, items_of, reply_of
from support.tiers import costly

from toolroll.rollout.testing import PolicyRequest, Reply

pytestmark = pytest.mark.tokens

Kind = Literal["root", "extend", "edit", "rewind"]
Fate = Literal["answered", "hangs up", "hangs up and retries", "hangs up and asks again"]
QUOTED = call(at="\u201cx\u201d <|end|>")
Path = tuple[int, ...]
"""Replies, by their numbers."""


@dataclass(frozen=True)
class Step:
    """One request: what it goes on from, its dialect, and what happens to its connection."""

    dialect: Dialect
    kind: Kind = "extend"
    pick: int = 0
    at: int = 0
    stream: bool = False
    fate: Fate = "answered"
    change: Literal["nothing", "thoughts dropped", "other ids", "by its id"] = "nothing"


STEPS = st.builds(
    Step,
    dialect=st.sampled_from(DIALECTS),
    kind=st.sampled_from(["root", "extend", "extend", "extend", "edit", "rewind"]),
    pick=st.integers(0, 99),
    at=st.integers(0, 99),
    stream=st.booleans(),
    fate=st.sampled_from(
        [
            *["answered"] * 4,
            "hangs up",
            "hangs up and retries",
            "hangs up and asks again",
        ]
    ),
    change=st.sampled_from(["nothing", "thoughts dropped", "other ids", "by its id"]),
)


@dataclass
class Talk:
    """A conversation as its client has it. `path`: the replies in it that are as served, with their
    places in `history`. `response`: the id of the last reply, if that is a response.
    """

    history: list[dict[str, Any]]
    path: list[tuple[int, int]] = field(default_factory=list)
    response: str | None = None


class Player:
    """Plays a program against `bench`, and knows what must be trained."""

    def __init__(self) -> None:
        self.bench: Bench
        self.talks: list[Talk] = []
        self.delivered: list[Path] = []
        self.holds: dict[str, asyncio.Event] = {}
        self.asked: Counter[str] = Counter()

    # --- the engine's side ------------------------------------------------------------------------

    def policy(self, request: PolicyRequest) -> Reply:
        name = re.findall(r"name-\d+-", request.text)[-1]
        self.asked[name] += 1
        mark = f"#{request.index}#"
        said = [
            f"Reply {mark}.",
            f"I look. {call(at=mark, b=[1, 2.0])}",
            f"<think>\nHm {mark}?\n</think>\n\nWell.",
            f"<think>\nHm?\n</think>\n\nThen {call(at=mark)}{QUOTED}",
        ]
        hold = self.holds.get(name) if self.asked[name] == 1 else None
        return Reply(said[request.index % len(said)], hold=hold, hold_after=8)

    # --- the client's side ------------------------------------------------------------------------

    async def play(self, batch: list[Step]) -> None:
        talks = list(self.talks)
        await asyncio.gather(*(self._ask(step, talks) for step in batch))

    def _prepared(self, step: Step, talks: list[Talk]) -> tuple[Talk, str]:
        """The conversation to send, and the name that is last in it."""
        name = f"name-{len(self.holds)}-"
        self.holds[name] = asyncio.Event()
        user = {"role": "user", "content": f"Go on, {name} <|end|>"}
        if step.kind == "root" or not talks:
            return Talk([{"role": "system", "content": f"You are {name}"}, user]), name
        talk = talks[step.pick % len(talks)]
        keep = step.at % len(talk.path) if step.kind in ("edit", "rewind") else len(talk.path) - 1
        place = talk.path[keep][1]
        if step.kind == "edit":
            edited = {"role": "assistant", "content": f"Edited {name}"}
            return Talk([*talk.history[:place], edited, user], talk.path[:keep]), name
        reply = talk.history[place]
        results = [
            {"role": "tool", "tool_call_id": it["id"], "content": f"seen {name}"}
            for it in reply.get("tool_calls") or ()
        ]
        last = keep == len(talk.path) - 1
        return Talk(
            [*talk.history[: place + 1], *(results or [user])],
            talk.path[: keep + 1],
            talk.response if last else None,
        ), name

    async def _ask(self, step: Step, talks: list[Talk]) -> None:
        talk, name = self._prepared(step, talks)
        body = body_of(step.dialect, talk.history, stream=step.stream)
        if step.dialect == "responses" and step.change == "by its id" and talk.response:
            new = talk.history[talk.path[-1][1] + 1 :]
            body |= {"previous_response_id": talk.response, "input": items_of(new)}
        if step.fate == "answered":
            self.holds[name].set()
            await self._keep(step, talk, name, await self._post(step, body))
            return
        await self._hang_up(step, body, name)
        if step.fate == "hangs up":
            return
        retry = step.fate == "hangs up and retries"
        if retry and step.pick % 2:  # some retries come after the release
            self.holds[name].set()
        again = asyncio.create_task(self._post(step, body, retry=retry))
        if retry:
            works = self.bench.endpoint.sessions.find("s").pending
            while self.asked[name] < 2 and not any(work.joined for work in works.all()):
                if again.done():
                    break
                await asyncio.sleep(0)
            self.holds[name].set()
        await self._keep(step, talk, name, await again)

    async def _hang_up(self, step: Step, body: dict[str, Any], name: str) -> None:
        """Send `body`, and close the connection while the reply is sampled."""
        url = f"{self.bench.url}/sessions/s{PATHS[step.dialect]}"
        if step.stream:
            async with self.bench.http.post(url, json=body) as response:
                assert response.status == 200
                await response.content.readany()
                response.close()
            return
        asking = asyncio.create_task(self._post(step, body))
        while not self.asked[name]:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def _post(self, step: Step, body: dict[str, Any], *, retry: bool = False) -> str:
        url = f"{self.bench.url}/sessions/s{PATHS[step.dialect]}"
        headers = {"x-stainless-retry-count": "1"} if retry else {}
        async with self.bench.http.post(url, json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
            return text

    async def _keep(self, step: Step, talk: Talk, name: str, raw: str) -> None:
        message, answer_id = reply_of(step.dialect, raw, stream=step.stream)
        mark = _mark(json.dumps(message))
        self.delivered.append((*(one for one, _ in talk.path), mark))
        if step.change == "thoughts dropped":
            message.pop("reasoning_content", None)
        if step.change == "other ids":
            for at, it in enumerate(message.get("tool_calls") or ()):
                it["id"] = f"{name}{at}"
        self.talks.append(
            Talk(
                [*talk.history, message],
                [*talk.path, (mark, len(talk.history))],
                answer_id if step.dialect == "responses" and step.change != "other ids" else None,
            )
        )

    # --- the end ----------------------------------------------------------------------------------

    async def compare(self) -> None:
        if not self.delivered:
            return
        sampled = [it for it in self.bench.engine.log if it.status == 200 and it.output_ids]
        found = await self.bench.trajectories(refused=len(sampled) - len(self.delivered))
        decode = self.bench.served.template.encoder.decode
        trained: Counter[int] = Counter()
        paths: list[Path] = []
        for trajectory in found:
            marks = [
                _mark(decode(trajectory["input_ids"][turn["start"] : turn["stop"]]))
                for turn in trajectory["turns"]
            ]
            excluded = [turn["excluded"] for turn in trajectory["turns"]]
            assert set(excluded) <= {None, "context"}
            trained.update(m for m, why in zip(marks, excluded, strict=True) if why is None)
            paths.append(tuple(marks))
        assert trained == Counter(path[-1] for path in self.delivered)
        assert set(trained.values()) == {1}
        every = set(self.delivered)
        inner = {path[:at] for path in every for at in range(1, len(path))}
        assert sorted(paths) == sorted(every - inner)


def _mark(text: str) -> int:
    """The number of the reply that `text` is of."""
    [mark] = re.findall(r"#(\d+)#", text)
    return int(mark)


async def run(
    tokenizer: Any, program: list[list[Step]], *, grace: float = 20.0, split: Any = "canonical"
) -> Player:
    player = Player()
    async with endpoint(tokenizer, player.policy, settings={"grace": grace}, split=split) as bench:
        player.bench = bench
        for batch in program:
            await player.play(batch)
        await player.compare()
    return player


WHOLE = (Phase.explicit, Phase.reuse, Phase.generate)
"""A program that fails is shown as it is: to make it smaller takes minutes."""


@settings(costly(2), phases=WHOLE)
@given(
    program=st.lists(st.lists(STEPS, min_size=1, max_size=4), min_size=2, max_size=8),
    grace=st.sampled_from([0.0, 20.0]),
    split=st.sampled_from(["canonical", "random"]),
)
def test_what_is_handed_out_in_any_dialect_is_trained_once(
    tokenizer: Any, program: list[list[Step]], grace: float, split: Any
) -> None:
    asyncio.run(asyncio.wait_for(run(tokenizer, program, grace=grace, split=split), PATIENCE))
