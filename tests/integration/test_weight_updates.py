"""Weight updates in the middle of turns, and routed experts, on the real SGLang with a tiny mixture
of experts.

Two checkpoints take turns. Each token is computed again with transformers, by the checkpoint whose
version it has. TOOLROLL_WEIGHT_UPDATES is the number of updates of each mode (default: 4).
"""

import asyncio
import base64
import os
import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from support.client import Watched
from support.processes import Server
from support.servers import Router, router
from support.tiny_model import EXPERTS, tiny_moe
from support.wire import Wire, until

from toolroll.rollout.engine import Engine, EngineConfig, generate_resumed
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.types import Completion, GenerateRequest, Trajectory

UPDATES = int(os.environ.get("TOOLROLL_WEIGHT_UPDATES", "4"))
ROUTED_UPDATES = 2
EPISODES, TURNS, TOKENS = 2, 2, 160
LATEST = 100
"""An update begins before a turn has more tokens than this, so that it comes in the turn."""
LAYERS, TOP_K = EXPERTS
CHECKPOINTS = 2
Played = tuple[Trajectory, list[int]]
"""A trajectory, and the version of the weights when each of its turns was requested."""


async def update(wire: Wire, version: int, mode: str) -> None:
    """Load the checkpoint of `version`. Only `in_place` keeps the keys and values."""
    assert (await wire.post("/pause_generation", {"mode": mode})).status == 200
    body = {
        "model_path": str(tiny_moe(version % CHECKPOINTS)),
        "weight_version": str(version),
        "flush_cache": mode != "in_place",
    }
    answer = await wire.post("/update_weights_from_disk", body)
    assert answer.body["success"], answer.body
    assert (await wire.post("/continue_generation", {})).status == 200


def turn_of(path: SessionPath, tokens: int) -> GenerateRequest:
    """The request of the next turn of `path`, which has `tokens` tokens."""
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    start = path.experts_end
    return GenerateRequest(path.input_ids, params, "s", routed_experts_start=start)


async def play(
    wire: Wire, url: str, mode: str, *, count: int, experts: bool
) -> tuple[list[Played], list[Completion]]:
    """Episodes of several turns until `count` updates are done, and the parts of their turns. They
    are sampled at `url`, which is the address of `wire` or of a router."""
    chance, middle, done = random.Random(17), asyncio.Event(), asyncio.Event()
    version, left, played = 0, 5, list[Played]()

    def sampled(ids: Sequence[int]) -> None:
        nonlocal left
        left -= 1
        if left <= 0 and len(ids) <= LATEST:
            middle.set()

    async def updates() -> None:
        nonlocal version, left
        while version < count:
            middle.clear()
            left = chance.randrange(1, 20)
            await middle.wait()
            await update(wire, version + 1, mode)
            version += 1
        done.set()

    async def episodes(number: int) -> None:
        while not done.is_set():
            path, requested = SessionPath(Session(f"s{number}")), []
            path.observe([chance.randrange(1000, 100_000) for _ in range(20)])
            for _ in range(TURNS):
                request = turn_of(path, TOKENS)
                requested.append(version)
                path.sample(
                    await generate_resumed(engine, request, max_resumes=1000, progress=sampled), {}
                )
                path.observe([5, 6, 7])
            [trajectory] = path.session.trajectories()
            played.append((trajectory, requested))

    engine = Watched(EngineConfig(engine=url, return_routed_experts=experts))
    async with engine:
        await update(wire, 0, "abort")
        async with asyncio.TaskGroup() as group:
            group.create_task(updates())
            for number in range(EPISODES):
                group.create_task(episodes(number))
    return played, engine.parts


def versions_of(trajectory: Trajectory, mode: str) -> list[int]:
    """The version of the weights that sampled each token, or, if it was not sampled, the next one
    that was.

    After an update `in_place`, SGLang 0.5.23 gives the new version to one token too many: to the
    one that the overlapped scheduler was sampling.
    """
    versions = [-1] * len(trajectory)
    for turn in trajectory.turns:
        before = None
        for span in turn.weight_versions:
            versions[span.start : span.stop] = [int(span.version)] * (span.stop - span.start)
            if mode == "in_place" and before is not None:
                versions[span.start] = before
            before = int(span.version)
    return filled(versions)


def versions_of_experts(trajectory: Trajectory, mode: str) -> list[int]:
    """The version of the weights whose experts each token but the last has: those that processed it
    to sample the next token. `retract` computes the whole turn again, and SGLang returns that."""
    if mode != "retract":
        return versions_of(trajectory, mode)[1:]
    versions = [-1] * len(trajectory)
    for turn in trajectory.turns:
        versions[turn.start : turn.stop] = [int(turn.weight_versions[-1].version)] * turn.length
    return filled(versions)[1:]


def filled(versions: list[int]) -> list[int]:
    """Replace -1 with the next version."""
    for position in reversed(range(len(versions) - 1)):
        if versions[position] < 0:
            versions[position] = versions[position + 1]
    return versions


def checkable(trajectory: Trajectory, requested: list[int], mode: str) -> int:
    """The number of tokens that can be computed again. If an update `in_place` met the prefill of a
    turn, it is not known which weights sampled the turn's first token."""
    for turn, version in zip(trajectory.turns, requested, strict=True):
        if mode == "in_place" and int(turn.weight_versions[0].version) != version:
            return turn.start
    return len(trajectory)


def computed(
    models: list[Any], ids: npt.NDArray[np.int32], versions: list[int], *, mixed: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.integer[Any]]]:
    """The logprobs of `ids[1:]` and the experts of `ids[:-1]`. Each comes from the checkpoint that
    `versions` names, with the keys and values of the same checkpoint for all tokens before it, or,
    if `mixed`, of the one that processed each of them."""
    import torch
    from transformers import DynamicCache

    def run(model: Any, start: int, stop: int, cache: Any = None) -> tuple[Any, Any]:
        tokens = torch.tensor(ids[start : stop + 1].tolist())
        output = model(
            tokens[None, :-1], past_key_values=cache, use_cache=True, output_router_logits=True
        )
        logprobs = torch.log_softmax(output.logits[0], dim=-1).gather(1, tokens[1:, None])[:, 0]
        chosen = [scores.topk(TOP_K).indices.sort().values for scores in output.router_logits]
        return logprobs.numpy(), torch.cat(chosen, dim=1).numpy()

    checkpoints = [version % CHECKPOINTS for version in versions]
    with torch.inference_mode():
        if mixed:
            cache, parts, start = DynamicCache(), [], 0
            for checkpoint, group in groupby(checkpoints):
                stop = start + len(list(group))
                parts.append(run(models[checkpoint], start, stop, cache))
                start = stop
            logprobs, experts = (np.concatenate(part) for part in zip(*parts, strict=True))
            return logprobs, experts
        whole = [run(model, 0, len(versions)) for model in models]
    logprobs, experts = (np.stack(part) for part in zip(*whole, strict=True))
    places = np.array(checkpoints), np.arange(len(versions))
    return logprobs[places], experts[places]


@pytest.fixture
def front(request: pytest.FixtureRequest, sglang_moe: Server, log_folder: Path) -> Iterator[str]:
    """The address of a router of the kind `request.param`, or of the server itself."""
    if request.param == "none":
        yield sglang_moe.url
        return
    kind, name = request.param, f"{request.param}-moe"
    with router([sglang_moe.url], log_folder, kind=kind, name=name) as server:
        yield server.url


@pytest.mark.parametrize(
    ("front", "mode"),
    [("none", "retract"), ("none", "in_place")]
    + [(kind, "abort") for kind in ("none", *get_args(Router))],
    indirect=["front"],
)
async def test_no_token_is_lost_and_each_has_its_weights_version(
    sglang_moe: Server, http: Any, front: str, mode: str, request: pytest.FixtureRequest
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    count = UPDATES if front == sglang_moe.url else ROUTED_UPDATES
    experts_come = "sglang-router" not in request.node.name  # it drops the fields
    wire = Wire(http, sglang_moe.url)
    played, parts = await play(wire, front, mode, count=count, experts=experts_come)
    turns = [turn for trajectory, _ in played for turn in trajectory.turns]
    assert {span.version for turn in turns for span in turn.weight_versions[1:]} == {
        str(version) for version in range(1, count + 1)
    }, "each update comes in the middle of a turn"
    assert {turn.length for turn in turns} == {TOKENS}
    assert sum(len(part.output_ids) for part in parts) == TOKENS * len(turns)
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(tiny_moe(seed), dtype=torch.float32)
        for seed in range(CHECKPOINTS)
    ]
    checked = 0
    for trajectory, requested in played:
        end = checkable(trajectory, requested, mode)
        ids, mixed = trajectory.input_ids[:end], mode == "in_place"
        versions = versions_of(trajectory, mode)[1:end]
        logprobs, experts = computed(models, ids, versions, mixed=mixed)
        sampled = trajectory.loss_mask[1:end] == 1
        if not sampled.any():  # an update met the prefill of the first turn
            continue
        errors = np.abs(logprobs - trajectory.logprobs[1:end])[sampled]
        assert errors.max() < 1e-3
        others, _ = computed(models, ids, [version + 1 for version in versions], mixed=mixed)
        assert np.median(np.abs(others - trajectory.logprobs[1:end])[sampled]) > 0.1
        checked += int(sampled.sum())
        if not experts_come:
            continue
        of_experts = versions_of_experts(trajectory, mode)[: end - 1]
        if of_experts != versions:
            _, experts = computed(models, ids, of_experts, mixed=mixed)
        assert trajectory.routed_experts is not None
        rows = trajectory.routed_experts.reshape(-1, LAYERS, TOP_K)[: end - 1]
        same = np.sort(rows, axis=-1) == experts.reshape(rows.shape)
        assert same.mean() > 0.999  # two experts may be nearly equal
    assert checked > TOKENS * len(turns) / 2


# --- routed experts -------------------------------------------------------------------------------


def begun_path() -> SessionPath:
    path = SessionPath(Session("s"))
    path.observe(list(range(1000, 1020)))
    return path


async def check_experts(wire: Wire, trajectory: Trajectory) -> None:
    """Compare each row with what SGLang computes in one request with all tokens. In float32 the
    second pass over a token has the same experts, unless two are nearly equal; rows at the wrong
    tokens would agree in about one number of eight."""
    ids, fields = trajectory.input_ids.tolist(), {"return_routed_experts": True}
    answer = await wire.generate(ids, fields=fields, max_new_tokens=1, ignore_eos=True)
    encoded = answer.meta["routed_experts"]
    rows = np.frombuffer(base64.b64decode(encoded), dtype=np.int32).reshape(-1, LAYERS * TOP_K)
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts.shape == (len(trajectory) - 1, LAYERS * TOP_K)
    assert (trajectory.routed_experts == rows[: len(trajectory) - 1]).mean() > 0.98


async def test_rows_of_turns_add_up_to_those_of_the_sequence(sglang_moe: Server, http: Any) -> None:
    """Three turns and a fork, with the prefix cache emptied between them."""
    wire, path = Wire(http, sglang_moe.url), begun_path()
    sizes = []

    async def flushed() -> bool:
        return (await wire.post("/flush_cache", {})).status == 200

    async with Engine(EngineConfig(engine=sglang_moe.url, return_routed_experts=True)) as engine:
        for number in range(4):
            if number == 3:
                path.fork([*path.input_ids[:30].tolist(), 7, 7], "rewritten")
            completion = await engine.generate(turn_of(path, 8))
            assert completion.routed_experts is not None
            sizes.append(len(completion.routed_experts))
            assert completion.routed_experts.dtype == np.uint8
            path.sample(completion, {})
            path.observe([5, 6, 7 + number])
            await until(flushed, "the prefix cache is empty")
    assert sizes[:3] == [27, 11, 11]
    trajectories = path.session.trajectories()
    assert len(trajectories) == 2
    for trajectory in trajectories:
        await check_experts(wire, trajectory)


async def test_a_turn_that_is_aborted_and_resumed_has_all_rows(sglang_moe: Any, http: Any) -> None:
    wire, path = Wire(http, sglang_moe.url), begun_path()
    engine = Watched(EngineConfig(engine=sglang_moe.url, return_routed_experts=True))
    async with engine:
        begun = asyncio.Event()
        turn = generate_resumed(
            engine, turn_of(path, 300), max_resumes=3, progress=lambda ids: begun.set()
        )
        task = asyncio.ensure_future(turn)
        await begun.wait()
        await engine.abort_all()
        whole = await task
    parts = engine.parts
    assert len(parts) == 2 and parts[0].finish_reason == "abort" and len(parts[0].output_ids)
    path.sample(whole, {})
    [trajectory] = path.session.trajectories()
    await check_experts(wire, trajectory)
    rows = [part.routed_experts for part in parts]
    assert sum(len(part) for part in rows if part is not None) == len(trajectory) - 1
