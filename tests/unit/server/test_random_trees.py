"""Random trees of requests against a model of what must be trained.

A program is a list of batches; the requests of a batch run at the same time. The model knows of
every reply that a client got from which replies its conversation went on. It says: each reply that
was handed out is trained once, with the tokens and logprobs that the engine sampled, behind exactly
the prompt that it sampled them from; nothing else is trained; the trajectories are the model's
longest paths.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.patience import PATIENCE
from support.tiers import costly
from support.worlds import TOOL

from toolroll.rollout.testing import PolicyRequest, Reply

pytestmark = pytest.mark.tokens

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""A reply: the ids that it was sampled from, and its own."""
Echo = Literal["as it is", "thoughts dropped", "ids regenerated", "keys reordered"]


@dataclass(frozen=True)
class Step:
    """One request: what it goes on from, how often it is answered, and what happens to its
    connection.
    """

    kind: Literal["root", "extend", "edit", "rewind"]
    pick: int
    at: int
    n: int
    echo: Echo
    cut: bool
    fate: Literal["answered", "answered twice", "hangs up and retries", "hangs up"]


@dataclass
class Talk:
    """A conversation as its client has it. `path`: the replies that it holds as they were served,
    with their places in `messages`; `cut`: whether the last of them was cut."""

    messages: list[dict[str, Any]]
    path: list[tuple[Key, int]] = field(default_factory=list)
    cut: bool = False


STEPS = st.builds(
    Step,
    kind=st.sampled_from(["root", "extend", "extend", "extend", "edit", "rewind"]),
    pick=st.integers(0, 99),
    at=st.integers(0, 99),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    echo=st.sampled_from(["as it is", "thoughts dropped", "ids regenerated", "keys reordered"]),
    cut=st.sampled_from([False, False, False, True]),
    fate=st.sampled_from(
        ["answered", "answered", "answered", "answered twice", "hangs up and retries", "hangs up"]
    ),
)


class Player:
    """Plays a program against `bench`, and keeps the model."""

    def __init__(self, grace: float = 20.0) -> None:
        self.grace = grace
        self.bench: Bench
        self.talks: list[Talk] = []
        self.delivered: list[tuple[Key, tuple[Key, ...]]] = []
        self.holds: dict[str, asyncio.Event] = {}
        self.begun: Counter[str] = Counter()
        self._names = 0

    # --- the engine's side ------------------------------------------------------------------------

    def policy(self, request: PolicyRequest) -> Reply:
        name = re.findall(r"name-\d+-", request.text)[-1]
        self.begun[name] += 1
        at = request.index
        said = [
            f"Reply {at}.",
            f"I look. {call(at=f'x{at}', b=[1])}",
            f"<think>\nHm {at}?\n</think>\n\nReply {at}.",
            call(at=str(at)) * 2,
        ]
        return Reply(said[at % len(said)], hold=self.holds.get(name), hold_after=1)

    # --- the client's side ------------------------------------------------------------------------

    async def play(self, batch: list[Step]) -> None:
        talks = list(self.talks)
        for made in await asyncio.gather(
            *(self._ask(step, *self._prepared(step, talks)) for step in batch)
        ):
            self.talks += made

    def _name(self) -> str:
        self._names += 1
        return f"name-{self._names}-"

    def _prepared(self, step: Step, talks: list[Talk]) -> tuple[Talk, str]:
        """The conversation to send, and the name that stands last in it."""
        name = self._name()
        user = {"role": "user", "content": f"Go on, {name} <|end|>"}
        if step.kind == "root" or not talks:
            return Talk([{"role": "system", "content": f"You are {name}"}, user]), name
        talk = talks[step.pick % len(talks)]
        keep = step.at % len(talk.path) if step.kind in ("edit", "rewind") else len(talk.path) - 1
        place = talk.path[keep][1]
        if step.kind == "edit" and not (keep == len(talk.path) - 1 and talk.cut):
            edited = {"role": "assistant", "content": f"Edited {name}"}
            return Talk([*talk.messages[:place], edited, user], talk.path[:keep]), name
        reply = talk.messages[place]
        results = [
            {"role": "tool", "tool_call_id": it["id"], "content": f"seen {name}"}
            for it in reply.get("tool_calls") or ()
        ]
        return Talk(
            [*talk.messages[: place + 1], *(results or [user])], talk.path[: keep + 1]
        ), name

    async def _ask(self, step: Step, talk: Talk, name: str) -> list[Talk]:
        body = {
            "messages": talk.messages,
            "tools": [TOOL],
            "n": step.n,
            **({"max_tokens": 3} if step.cut else {}),
        }
        if step.fate.startswith("hangs up"):
            self.holds[name] = asyncio.Event()
            first = asyncio.create_task(self._post(body, 0))
            while self.begun[name] < step.n:
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            if step.fate == "hangs up":
                return []
            again = asyncio.create_task(self._post(body, 1))
            if step.pick % 2:  # some retries come before the release, the others after it
                works = self.bench.endpoint.sessions.find("s").pending
                while self.begun[name] <= step.n and not any(work.joined for work in works.all()):
                    await asyncio.sleep(0)
            self.holds[name].set()
            answer = await again
        else:
            answer = await self._post(body, 0)
        # without a grace time no answer is kept for a retry
        if step.fate == "answered twice" and self.grace:
            assert await self._post(body, 1) == answer
        return [self._kept(step, talk, answer, choice) for choice in answer["choices"]]

    async def _post(self, body: dict[str, Any], retry: int) -> dict[str, Any]:
        headers = {"x-stainless-retry-count": str(retry)} if retry else {}
        status, answer = await self.bench.post("/sessions/s/v1/chat/completions", body, **headers)
        assert status == 200, answer
        return answer

    def _kept(self, step: Step, talk: Talk, answer: dict[str, Any], choice: dict[str, Any]) -> Talk:
        key = (tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"]))
        before = tuple(one for one, _ in talk.path)
        self.delivered.append((key, before))
        if before:
            served = [*before[-1][0], *before[-1][1]]
            assert list(key[0][: len(served)]) == served  # I1, whatever was edited behind it
        message = echoed(dict(choice["message"]), step.echo, self._name())
        return Talk([*talk.messages, message], [*talk.path, (key, len(talk.messages))], step.cut)

    # --- the end ----------------------------------------------------------------------------------

    async def compare(self) -> None:
        found = (
            (await self.bench.get("/sessions/s/trajectories"))["trajectories"]
            if self.delivered
            else []
        )
        sampled = {
            (tuple(it.input_ids.tolist()), tuple(it.output_ids)): it.logprobs
            for it in self.bench.engine.log
            if it.status == 200
        }
        trained: Counter[Key] = Counter()
        paths: list[tuple[Key, ...]] = []
        for trajectory in found:
            ids = trajectory["input_ids"]
            mask = [0] * len(ids)
            path: list[Key] = []
            for turn in trajectory["turns"]:
                key = (tuple(ids[: turn["start"]]), tuple(ids[turn["start"] : turn["stop"]]))
                assert trajectory["logprobs"][turn["start"] : turn["stop"]] == [
                    as_float32(value) for value in sampled[key]
                ]
                path.append(key)
                assert turn["excluded"] in (None, "context")
                if turn["excluded"] is None:
                    trained[key] += 1
                    mask[turn["start"] : turn["stop"]] = [1] * (turn["stop"] - turn["start"])
            assert trajectory["loss_mask"] == mask
            paths.append(tuple(path))
        assert trained == Counter(key for key, _ in self.delivered)
        assert max(trained.values(), default=1) == 1
        every = {(*before, key) for key, before in self.delivered}
        inner = {path[:at] for path in every for at in range(1, len(path))}
        assert sorted(paths) == sorted(every - inner)
        assert self.bench.engine.killed == 0


def as_float32(value: float) -> float:
    return float(np.float32(value))


def echoed(message: dict[str, Any], echo: Echo, name: str) -> dict[str, Any]:
    """The message as a client's library gives it back."""
    calls = [{**it, "function": dict(it["function"])} for it in message.get("tool_calls") or ()]
    if echo == "thoughts dropped":
        message.pop("reasoning_content", None)
    for at, it in enumerate(calls):
        if echo == "ids regenerated":
            it["id"] = f"{name}{at}"
        if echo == "keys reordered":
            it["function"]["arguments"] = reordered(it["function"]["arguments"])
    return {**message, "tool_calls": calls} if calls else message


def reordered(arguments: str) -> str:
    """The same arguments, written otherwise; those of a call that was cut are no JSON, and stay
    as they are.
    """
    try:
        return json.dumps(dict(reversed(json.loads(arguments).items())), indent=1)
    except json.JSONDecodeError:
        return arguments


async def run(
    tokenizer: Any, program: list[list[Step]], grace: float, split: Literal["canonical", "random"]
) -> None:
    player = Player(grace)
    async with endpoint(tokenizer, player.policy, settings={"grace": grace}, split=split) as bench:
        player.bench = bench
        for batch in program:
            await player.play(batch)
        await player.compare()


WHOLE = (Phase.explicit, Phase.reuse, Phase.generate)
"""A program that fails is shown as it is: to make it smaller takes minutes."""


@settings(costly(2), phases=WHOLE)
@given(
    program=st.lists(st.lists(STEPS, min_size=1, max_size=4), min_size=1, max_size=7),
    grace=st.sampled_from([0.0, 20.0]),
    split=st.sampled_from(["canonical", "random"]),
)
def test_what_is_handed_out_is_trained_once(
    tokenizer: Any, program: list[list[Step]], grace: float, split: Any
) -> None:
    asyncio.run(asyncio.wait_for(run(tokenizer, program, grace, split), PATIENCE))


def test_the_model_sees_what_is_wrong(tokenizer: Any) -> None:
    """A reply that was trained nowhere, and one that was trained though nobody got it, are
    found.
    """
    steps = [[Step("root", 0, 0, 1, "as it is", False, "answered")]]

    async def wrong(change: Any) -> None:
        player = Player()
        async with endpoint(tokenizer, player.policy) as bench:
            player.bench = bench
            await player.play(steps[0])
            change(player)
            await player.compare()

    with pytest.raises(AssertionError):
        asyncio.run(
            wrong(
                lambda player: (
                    player.delivered.clear() or player.delivered.append((((1,), (2,)), ()))
                )
            )
        )
    with pytest.raises(AssertionError):
        asyncio.run(wrong(lambda player: player.delivered.append(player.delivered[0])))
