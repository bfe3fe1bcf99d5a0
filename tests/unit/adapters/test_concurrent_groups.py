"""Eight groups of four samples at once through each adapter that plays several episodes at once.

The oracle is the engine's log alone: each session's requests give one sample, and no other.
"""

import asyncio
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support import slime_mirror
from support.slime_trainer import reference_line
from unit.adapters import test_same_episodes as same

from toolroll.testing import EmbeddedEngine, Fault, PolicyRequest, load_embedded_tokenizer
from toolroll.trainers import slime

pytestmark = pytest.mark.slow

GROUPS = same.EPISODES[:8]
SAMPLES = 4
INDICES = [index for index in GROUPS for _ in range(SAMPLES)]


class Busy(same.World):
    """The references again, but each session says something of its own, and some give up early."""

    def reply(self, request: PolicyRequest) -> str:
        chance = random.Random(f"{zlib.crc32(request.routing_key.encode())}/{request.call}")
        line = reference_line(self.task_of(request.text), request.call)
        if chance.random() < 0.15:
            return f"I give up {chance.random()}. Goodbye."
        return f"Word {chance.random()}. {line}"


def faults(request: PolicyRequest) -> Fault | None:
    """A server that is busy now and then, and changes its weights within some turns."""
    chance = random.Random(f"fault/{request.index}")
    if chance.random() < 0.1:
        return Fault(status=503)
    if chance.random() < 0.1:
        return Fault(weight_version="2", switch_after=2)
    return None


def counted(played: Iterable[same.Tokens]) -> Counter[Any]:
    return Counter((tuple(t.ids), tuple(t.mask), tuple(t.logprobs)) for t in played)


def oracle(world: same.World) -> dict[int, list[same.Tokens]]:
    """The sequences by task, from the engine's log."""
    sessions: dict[str, list[Any]] = defaultdict(list)
    for entry in sorted(world.engine.log, key=lambda entry: entry.arrival):
        if entry.status == 200:
            sessions[entry.routing_key].append(entry)
    by_task: dict[int, list[same.Tokens]] = defaultdict(list)
    for requests in sessions.values():
        [tokens] = same.sequences(requests)  # each prompt is what was served before, and more
        by_task[world.task_of(world.tokenizer.decode(requests[0].input_ids))].append(tokens)
    return by_task


async def with_slime_rollout(world: same.World) -> list[same.Played]:
    args = same.trainer_args(world)
    args.rollout_batch_size = args.over_sampling_batch_size = len(GROUPS)
    rows = [{"prompt": index} for index in GROUPS]
    source = slime_mirror.DataSource(slime_mirror.Sample, rows, n=SAMPLES)
    output = await asyncio.to_thread(slime.generate_rollout, args, 0, source)
    await asyncio.to_thread(slime.close_rollout)
    assert [len(group) for group in output.samples] == [SAMPLES] * len(GROUPS)
    return [same.of_samples(sample) for group in output.samples for sample in group]


PLAYS: dict[str, Callable[[same.World], Awaitable[list[same.Played]]]] = {
    name: same.ADAPTERS[name] for name in ("slime", "miles", "trl", "atropos", "skyrl", "verl")
} | {"slime rollout": with_slime_rollout}
OWN_HTTP = {"skyrl", "verl"}
"""Their mirrors post to the engine themselves, without retries."""


@pytest.mark.parametrize("name", PLAYS)
async def test_each_sample_is_one_session(
    name: str, tmp_path: Path, mirrors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slime_mirror.install(monkeypatch)
    tokenizer = load_embedded_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    world = Busy(tokenizer, tmp_path, indices=INDICES)
    async with EmbeddedEngine(
        tokenizer, world.reply, faults=None if name in OWN_HTTP else faults, split="random"
    ) as world.engine:
        played = await PLAYS[name](world)
        known = oracle(world)
        refused = [entry for entry in world.engine.log if entry.status == 503]
    assert bool(refused) == (name not in OWN_HTTP) and len(played) == len(INDICES)
    for index in GROUPS:
        episodes = [each for each, task in zip(played, INDICES, strict=True) if task == index]
        assert len(episodes) == SAMPLES == len(known[index])
        tokens = [tokens for episode in episodes for tokens in episode.sequences]
        assert counted(tokens) == counted(known[index])
