"""Random trees of requests in all dialects against a model of what must be trained.

A program is a list of batches; the requests of a batch run at the same time. There are branches,
edited histories, and clients that hang up and ask again. The model knows from which replies the
conversation of each delivered reply continued. Each delivered reply is trained once, with the
tokens and logprobs that the engine sampled, after exactly the prompt that it sampled them from.
Nothing else is trained. The trajectories are the longest paths of the model.
"""

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from support.dialect_bodies import DIALECTS, PATHS, Dialect, body_of, items_of, reply_of
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.patience import PATIENCE
from support.tiers import costly

from toolroll.testing import PolicyRequest, Reply

pytestmark = pytest.mark.tokens

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""A reply: the ids that it was sampled from, and its own."""
Echo = Literal["same", "thoughts dropped", "ids regenerated", "keys reordered", "by its id"]
"""How the client sends a reply back."""
Fate = Literal["answered", "twice", "hangs up", "hangs up and retries", "hangs up and asks again"]
QUOTED = call(at="\u201cx\u201d <|end|>")


@dataclass(frozen=True)
class Step:
    """One request: what it continues, its dialect, and what happens to its connection. `n` and
    `cut`, a small limit of tokens, are for chat without `stream` only.
    """

    dialect: Dialect = "chat"
    kind: Literal["root", "extend", "edit", "rewind"] = "root"
    pick: int = 0
    turn: int = 0
    n: int = 1
    echo: Echo = "same"
    cut: bool = False
    stream: bool = False
    fate: Fate = "answered"


@dataclass
class Talk:
    """A conversation as its client has it. `path`: the replies in it that are as sampled, with
    their places in `history`. `cut`: whether the last of them was cut. `response`: the id of the
    last reply if it is a response.
    """

    history: list[dict[str, Any]]
    path: list[tuple[Key, int]] = field(default_factory=list)
    cut: bool = False
    response: str | None = None


@st.composite
def steps(draw: st.DrawFn) -> Step:
    dialect, stream = draw(st.sampled_from(DIALECTS)), draw(st.booleans())
    plain = dialect == "chat" and not stream
    return Step(
        dialect,
        draw(st.sampled_from(["root", "extend", "extend", "extend", "edit", "rewind"])),
        draw(st.integers(0, 99)),
        draw(st.integers(0, 99)),
        draw(st.sampled_from([1, 1, 1, 2, 3])) if plain else 1,
        draw(st.sampled_from(get_args(Echo))),
        plain and draw(st.sampled_from([False, False, False, True])),
        stream,
        draw(st.sampled_from(["answered", "answered", *get_args(Fate)])),
    )


class Player:
    """Plays a program against `bench`, and keeps the model."""

    def __init__(self, grace: float = 20.0) -> None:
        self.grace = grace
        self.bench: Bench
        self.talks: list[Talk] = []
        self.delivered: list[tuple[Key, tuple[Key, ...]]] = []
        self.holds: dict[str, tuple[asyncio.Event, int]] = {}
        self.begun: Counter[str] = Counter()

    # --- the engine's side ------------------------------------------------------------------------

    def policy(self, request: PolicyRequest) -> Reply:
        name = re.findall(r"name-\d+-", request.text)[-1]
        self.begun[name] += 1
        mark = f"#{request.index}#"
        texts = [
            f"{mark} is a reply.",
            f"I look. {call(at=mark, b=[1, 2.0])}",
            f"<think>\nHm {mark}?\n</think>\n\nWell.",
            f"<think>\nHm?\n</think>\n\nThen {call(at=mark)}{QUOTED}",
            call(at=mark) + call(at="y"),
        ]
        event, count = self.holds[name]
        hold = event if self.begun[name] <= count else None
        return Reply(texts[request.index % len(texts)], hold=hold, hold_after=8)

    # --- the client's side ------------------------------------------------------------------------

    async def play(self, batch: list[Step]) -> None:
        talks = list(self.talks)
        for new in await asyncio.gather(*(self._ask(step, talks) for step in batch)):
            self.talks += new

    def _prepared(self, step: Step, talks: list[Talk], name: str) -> Talk:
        """The conversation to send. `name` is last in it."""
        user = {"role": "user", "content": f"Go on, {name} <|end|>"}
        if step.kind == "root" or not talks:
            return Talk([{"role": "system", "content": f"You are {name}"}, user])
        talk = talks[step.pick % len(talks)]
        last = len(talk.path) - 1
        turn = step.turn % len(talk.path) if step.kind in ("edit", "rewind") else last
        place = talk.path[turn][1]
        if step.kind == "edit" and not (turn == last and talk.cut):
            edited = {"role": "assistant", "content": f"Edited {name}"}
            return Talk([*talk.history[:place], edited, user], talk.path[:turn])
        results = [
            {"role": "tool", "tool_call_id": made["id"], "content": f"seen {name}"}
            for made in talk.history[place].get("tool_calls") or ()
        ]
        history = [*talk.history[: place + 1], *(results or [user])]
        response = talk.response if turn == last else None
        return Talk(history, talk.path[: turn + 1], response=response)

    async def _ask(self, step: Step, talks: list[Talk]) -> list[Talk]:
        name, hold = f"name-{len(self.holds)}-", asyncio.Event()
        self.holds[name] = hold, step.n
        talk = self._prepared(step, talks, name)
        body = body_of(step.dialect, talk.history, stream=step.stream)
        if step.dialect == "responses" and step.echo == "by its id" and talk.response:
            new = talk.history[talk.path[-1][1] + 1 :]
            body |= {"previous_response_id": talk.response, "input": items_of(new)}
        body |= {"n": step.n} if step.n > 1 else {}
        body |= {"max_tokens": 3} if step.cut else {}
        if not step.fate.startswith("hangs up"):
            hold.set()
            raw = await self._post(step, body)
            # without a grace time no answer is kept for a retry
            if step.fate == "twice" and self.grace and not step.stream:
                assert await self._post(step, body, retry=True) == raw
            return self._kept(step, talk, name, raw)
        await self._hang_up(step, body, name)
        if step.fate == "hangs up":
            return []
        retry = step.fate == "hangs up and retries"
        if retry and step.pick % 2:  # some retries come after the release
            hold.set()
        again = asyncio.create_task(self._post(step, body, retry=retry))
        if retry:
            pending = self.bench.endpoint.sessions.find("s").pending
            while self.begun[name] <= step.n and not again.done():
                if any(request.joined for request in pending.all()):
                    break
                await asyncio.sleep(0)
            hold.set()
        return self._kept(step, talk, name, await again)

    async def _hang_up(self, step: Step, body: dict[str, Any], name: str) -> None:
        """Send `body`, and close the connection while the reply is sampled."""
        if step.stream:
            url = f"{self.bench.url}/sessions/s{PATHS[step.dialect]}"
            async with self.bench.http.post(url, json=body) as response:
                assert response.status == 200
                await response.content.readany()
                response.close()
            return
        asking = asyncio.create_task(self._post(step, body))
        while self.begun[name] < step.n:
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

    def _kept(self, step: Step, talk: Talk, name: str, raw: str) -> list[Talk]:
        if step.dialect == "chat" and not step.stream:
            answer = json.loads(raw)
            prompt = tuple(answer["prompt_token_ids"])
            replies: list[tuple[Any, dict[str, Any], str | None]] = [
                ((prompt, tuple(choice["token_ids"])), dict(choice["message"]), None)
                for choice in answer["choices"]
            ]
        else:
            message, answer_id = reply_of(step.dialect, raw, stream=step.stream)
            [mark] = re.findall(r"#(\d+)#", json.dumps(message))
            entry = self.bench.engine.log[int(mark)]
            key = (tuple(entry.input_ids.tolist()), tuple(entry.output_ids))
            named = step.dialect == "responses" and step.echo == "by its id"
            replies = [(key, message, answer_id if named else None)]
        before = tuple(key for key, _ in talk.path)
        talks = []
        for key, message, response in replies:
            self.delivered.append((key, before))
            history = [*talk.history, echoed(message, step.echo, name)]
            path = [*talk.path, (key, len(talk.history))]
            talks.append(Talk(history, path, step.cut, response))
        return talks

    # --- the end ----------------------------------------------------------------------------------

    async def compare(self) -> None:
        if not self.delivered:
            return
        sampled = {
            (tuple(entry.input_ids.tolist()), tuple(entry.output_ids)): entry.logprobs
            for entry in self.bench.engine.log
            if entry.status == 200
        }
        trained: Counter[Key] = Counter()
        paths: list[tuple[Key, ...]] = []
        for trajectory in (await self.bench.get("/sessions/s/trajectories"))["trajectories"]:
            ids = trajectory["input_ids"]
            mask = [0] * len(ids)
            path: list[Key] = []
            for turn in trajectory["turns"]:
                start, stop = turn["start"], turn["stop"]
                key = (tuple(ids[:start]), tuple(ids[start:stop]))
                logprobs = np.array(sampled[key], np.float32).tolist()
                assert trajectory["logprobs"][start:stop] == logprobs
                path.append(key)
                assert turn["excluded"] in (None, "context")
                if turn["excluded"] is None:
                    trained[key] += 1
                    mask[start:stop] = [1] * (stop - start)
            assert trajectory["loss_mask"] == mask
            paths.append(tuple(path))
        assert trained == Counter(key for key, _ in self.delivered)
        assume(max(trained.values()) == 1)  # the model cannot tell two equal cut replies apart
        every = {(*before, key) for key, before in self.delivered}
        inner = {path[:length] for path in every for length in range(1, len(path))}
        assert sorted(paths) == sorted(every - inner)
        assert self.bench.engine.killed == 0


def echoed(message: dict[str, Any], echo: Echo, name: str) -> dict[str, Any]:
    """The message as a client's library sends it back."""
    calls = [{**it, "function": dict(it["function"])} for it in message.get("tool_calls") or ()]
    if echo == "thoughts dropped":
        message.pop("reasoning_content", None)
    for number, made in enumerate(calls):
        if echo == "ids regenerated":
            made["id"] = f"{name}{number}"
        if echo == "keys reordered":
            made["function"]["arguments"] = reordered(made["function"]["arguments"])
    return {**message, "tool_calls": calls} if calls else message


def reordered(arguments: str) -> str:
    """The same arguments with other white space and another order of keys. Those of a call that
    was cut are not JSON, and stay as they are.
    """
    try:
        return json.dumps(dict(reversed(json.loads(arguments).items())), indent=1)
    except json.JSONDecodeError:
        return arguments


async def run(tokenizer: Any, program: list[list[Step]], grace: float, split: Any) -> None:
    player = Player(grace)
    async with endpoint(tokenizer, player.policy, settings={"grace": grace}, split=split) as bench:
        player.bench = bench
        for batch in program:
            await player.play(batch)
        await player.compare()


WHOLE = (Phase.explicit, Phase.reuse, Phase.generate)
"""A program that fails is shown as it is: to make it smaller takes minutes."""


@settings(costly(3), phases=WHOLE)
@given(
    program=st.lists(st.lists(steps(), min_size=1, max_size=4), min_size=2, max_size=8),
    grace=st.sampled_from([0.0, 20.0]),
    split=st.sampled_from(["canonical", "random"]),
)
def test_what_is_delivered_in_any_dialect_is_trained_once(
    tokenizer: Any, program: list[list[Step]], grace: float, split: Any
) -> None:
    asyncio.run(asyncio.wait_for(run(tokenizer, program, grace, split), PATIENCE))
