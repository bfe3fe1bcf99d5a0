"""Complete episodes on the real SGLang behind the real router, which scores the tokens again:
of an agent, of programs in sandboxes, and audited with the log that the server writes."""

import asyncio
import itertools
import json
import uuid
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from support.adversarial.size import FULL
from support.episodes import opened_model
from support.listed_environment import ListedWorld
from support.planted import PLANTED, plant, spans
from support.processes import Server
from support.program_trials import AGENT, command_of, factory, program, refusal, write_task
from support.program_trials import play as play_trials
from support.proxy import CLOSE, counting_proxy, engine_answers, judge_answers, largest_error
from support.qwen import qwen3_tokenizer
from support.servers import Router, router, sglang_server
from support.tiny_model import tiny_model
from support.wire import Wire

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.tool_calling import TrainableToolCallingAgent
from toolroll.evaluation.audit import TemplateCheck, audit
from toolroll.evaluation.audit.report import UNDECIDED
from toolroll.evaluation.audit.request_log import FLAGS, read_record
from toolroll.rollout.engine import ROUTING_KEY, Engine, EngineConfig
from toolroll.rollout.environment import Task
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.model.model import Model
from toolroll.rollout.session.trajectory_json import to_json
from toolroll.rollout.types import GenerateRequest, Status, StopReason, Trajectory

SESSIONS = 16
SAMPLES, FIRST = 12, 300
"""The samples of a group, and the tokens of their first prompt."""
IMAGE = 151_655  # <|image_pad|> of Qwen3's tokenizer
CONTEXT = 4096  # the tiny model's; a router cannot be asked for it while it has no worker
CALL = r"<tool_call>\{\"name\": \"look\", \"arguments\": \{\"at\": \"[a-z]{3}\"\}\}</tool_call>"

# the grammar lets the model end with either; only <|im_end|> is what the template writes
NO_END_OF_TEXT = {"151643": -100.0}


def serving(url: str) -> AbstractAsyncContextManager[Model]:
    return opened_model(url, qwen3_tokenizer(), "qwen25")


async def play(
    served: Any, session: str, *, users: int = 4, steps: int = 12, world: Any = None, **params: Any
) -> InteractionResult:
    """An episode of several turns, which are cut and go on: the random model never stops."""
    player = TrainableToolCallingAgent(
        model=served, policy=CallPolicy(max_invalid_in_a_row=20), rollout_args={"verify": "always"}
    )
    player.on_length = "continue"
    texts = [f"This is line {at} of {session}, with <|im_end|> in it." for at in range(users)]
    return await player.asolve(
        world or ListedWorld(user_texts=texts, system=f"You are agent {session}."),
        None,
        {"temperature": 1.0, "max_new_tokens": 24, **params},
        task=Task(session, 0),
        session_id=session,
        max_num_steps=steps,
    )


async def difference(wire: Wire, trajectory: Trajectory, *, shift: int = 0) -> float:
    """The largest difference between the recorded logprobs and those of one prefill."""
    rescored = np.array([np.nan, *await wire.rescore(trajectory.input_ids.tolist())])
    trained = np.flatnonzero(trajectory.loss_mask)
    trained = trained[trained + shift < len(rescored)]
    assert len(trained)
    return float(np.abs(trajectory.logprobs[trained] - rescored[trained + shift]).max())


def check(result: InteractionResult, control: frozenset[int], users: int = 4) -> list[Trajectory]:
    """A random model now and then samples a control token (of 26 among 151,936 ids, in about 100):
    a tool call that is none, or another end of the turn. Then there may be more turns, or a fork;
    what holds for every token holds all the same."""
    assert (result.status, result.stop_reason) == (Status.COMPLETED, StopReason.DONE), result.info
    found = {name for name in result.metrics if name.startswith("token_mismatches")}
    assert found <= {"token_mismatches/unshown"}  # a template may normalize random text
    for trajectory in result.trajectories:
        for earlier, later in pairwise(trajectory.turns):
            assert later.prompt_tokens == later.start
            assert later.cached_tokens >= earlier.stop - 1
    sampled = [part.input_ids[part.loss_mask == 1] for part in result.trajectories]
    if not control & {*np.concatenate(sampled).tolist()}:
        assert [len(trajectory.turns) for trajectory in result.trajectories] == [users]
    return list(result.trajectories)


async def test_sglang_rescores_an_episode(precise: tuple[Wire, float]) -> None:
    wire, close = precise
    async with serving(wire.url) as served:
        trajectories = check(await play(served, "rescored"), served.template.encoder.control_ids)
    for trajectory in trajectories:
        assert await difference(wire, trajectory) <= close
        # a mask that is one token off would be seen
        assert await difference(wire, trajectory, shift=1) > 1.0


async def test_an_episode_with_tool_calls(float32: Wire) -> None:
    """The grammar makes the random model call the tool; the turn ends with the real stop token."""
    # the grammar lets the model also spell the marker out, which is no call
    users = ["Go on."] * 40
    texts = ["One </tool_response> thing.", "Another.", ""]
    world = ListedWorld(user_texts=users, tool_texts=texts, system="Look around.")
    params: dict[str, Any] = {"regex": CALL, "max_new_tokens": 64, "logit_bias": NO_END_OF_TEXT}
    async with serving(float32.url) as served:
        result = await play(served, "tools", world=world, steps=40, **params)
        stop = served.template.stop_token_ids
    assert (result.status, result.reward) == (Status.COMPLETED, 1.0), result.info
    [trajectory] = result.trajectories
    assert sum(len(action.tool_calls) for action in world.seen) == 4
    assert all(
        int(trajectory.input_ids[turn.stop - 1]) in stop and turn.finish_reason == "stop"
        for turn in trajectory.turns
    )
    assert not [name for name in result.metrics if name.startswith(("token_mismatches", "invalid"))]


async def test_sixteen_episodes_stay_at_their_workers(routed_sglang: Any, http: Any) -> None:
    routed_sglang.clear()
    names = [f"affinity-{at:02d}" for at in range(SESSIONS)]
    async with serving(routed_sglang.url) as served:
        assert sorted(await served.engine.workers()) == sorted(routed_sglang.worker_urls)
        results = await asyncio.gather(*(play(served, name) for name in names))
        trajectories = [check(result, served.template.encoder.control_ids) for result in results]
    by_worker = routed_sglang.sessions(names)
    assert min(map(len, by_worker)) >= 4, [len(found) for found in by_worker]
    wire = Wire(http, routed_sglang.workers[0].url)  # both hold the same weights
    for trajectory in itertools.chain(*trajectories[:4]):
        assert await difference(wire, trajectory) <= 1e-4


@pytest.mark.parametrize("kind", get_args(Router))
async def test_the_first_prompt_of_a_group_is_computed_by_one_worker(
    kind: Router, sglang_float32: Server, second_float32: Server, log_folder: Path
) -> None:
    """With one routing key; else by both workers. The router has no keys of other tests: it gives
    a new key to the worker that has fewer."""
    computed = []
    urls = [sglang_float32.url, second_float32.url]
    with router(urls, log_folder, kind=kind, name=f"{kind}-group") as front:
        async with Engine(EngineConfig(engine=front.url, context_length=CONTEXT)) as engine:
            for affinity in (1, SAMPLES):
                group = uuid.uuid4().hex
                prompt = np.random.default_rng(uuid.UUID(group).int).integers(1000, 100_000, FIRST)
                computed.append(0)
                for sample in range(SAMPLES):
                    session = f"{group}#{sample}"
                    ROUTING_KEY.set((session, f"{group}#{sample - sample % affinity}"))
                    request = GenerateRequest(
                        prompt.astype(np.int32), {"max_new_tokens": 1}, session
                    )
                    computed[-1] += FIRST - (await engine.generate(request)).cached_tokens
    again = SAMPLES - 1  # SGLang computes the last token of a cached prompt again
    assert computed == [2 * FIRST + again - 1, FIRST + again]


async def test_the_context_is_never_overrun(float32: Wire) -> None:
    """Most of the context is a long policy: the model need not sample all of it."""
    world = ListedWorld(user_texts=["Go on."] * 40, system="Follow the policy. " * 700)
    async with serving(float32.url) as served:
        result = await play(served, "long", world=world, steps=40, max_new_tokens=600)
    assert (result.stop_reason, result.reward) == (StopReason.CONTEXT_FULL, 0.0)
    assert result.status is Status.TRUNCATED
    ends = [turn.stop for trajectory in result.trajectories for turn in trajectory.turns]
    assert CONTEXT - 600 < max(ends) <= CONTEXT


async def test_an_episode_ends_at_a_sampled_placeholder(float32: Wire, tmp_path: Path) -> None:
    tokenizer = qwen3_tokenizer()
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": IMAGE}), encoding="utf-8")
    tokenizer.name_or_path = str(tmp_path)
    async with opened_model(float32.url, tokenizer, "qwen25") as served:
        result = await play(served, "placeholder", users=1, logit_bias={str(IMAGE): 300.0})
    assert (result.stop_reason, result.status) == (StopReason.PLACEHOLDER, Status.TRUNCATED)
    assert result.reward is not None and IMAGE not in result.tokens
    assert result.response_length == 0
    assert await float32.running() == 0


# --- programs -------------------------------------------------------------------------------------

LIMIT, USERS = 24, 2


@pytest.mark.skipif(bool(refusal()), reason=f"needs user namespaces: {refusal()}")
@pytest.mark.parametrize(
    ("file", "turns"), [(AGENT, 1 + USERS), (AGENT.with_name("claude_shape.py"), 2)]
)
async def test_each_answer_of_the_server_is_trained_once(
    file: Path, turns: int, tmp_path: Path, sglang_float32: Server
) -> None:
    """A proxy before the server says what it sampled, and transformers computes the logprobs again.
    The model is random, so no reward is earned. `python -m clients.harbor --sglang` does the same
    with published coding agents."""
    write_task(tmp_path)
    variables = {"USERS": str(USERS), "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(LIMIT)}
    params = {"temperature": 1.0, "max_new_tokens": LIMIT}
    with counting_proxy(sglang_float32.url) as proxy:
        async with opened_model(proxy.url, qwen3_tokenizer(), "qwen25") as model:
            agent = program(model, command_of(file), variables=variables, verify="always")
            episodes = await play_trials(
                factory(tmp_path), agent, samples=2, sampling_params=params
            )
        answers = engine_answers(proxy)
    for episode in episodes.values():
        result = episode.result
        own = [each for each in answers if each.session == result.info["program"]["session"]]
        assert (result.reward, len(own)) == (0.0, turns)
        judge_answers(result.trajectories, own)
        assert largest_error(tiny_model(), result.trajectories) <= CLOSE


# --- the server's log -----------------------------------------------------------------------------

EPISODES = 200 if FULL else 20
"""TOOLROLL_ADVERSARIAL=full plays more."""
NO_FAULT = {"a turn is not trained", "a result is appended"}
OF_WORDS = {"a turn is encoded again"}
"""The random model samples no words."""


@pytest.mark.timeout(3600)
async def test_episodes_are_what_the_servers_log_has(tmp_path: Path) -> None:
    log = tmp_path / "requests"
    with sglang_server(
        tmp_path, flags=FLAGS.replace("DIR", str(log)).split(), name="log"
    ) as server:
        async with serving(server.url) as served:
            names = [f"audited-{number}" for number in range(EPISODES)]
            results = await asyncio.gather(*(play(served, name) for name in names))
    rows = [
        {**to_json(part), "sequence": number, "messages": result.messages, "tools": result.tools}
        for result in results
        for number, part in enumerate(result.trajectories)
    ]
    record = read_record(log)
    report = audit(rows, record=record)
    assert report.kinds == {}
    assert len(rows) >= EPISODES
    assert report.delivered_tokens == report.trained_tokens == record.sampled_tokens
    # turns were truncated, and closed by the template: undecided without the record
    alone = audit(rows, template=TemplateCheck(qwen3_tokenizer()))
    assert [kind for kind in alone.kinds if not kind.startswith(UNDECIDED)] == []

    whole = [row for row in rows if len(spans(row)) >= 4][:2]
    assert len(whole) == 2
    for name, fault in PLANTED.items():
        if "message" in name or name in NO_FAULT | OF_WORDS:
            continue
        found = audit(plant(fault, whole), record=read_record(log)).kinds
        assert found, name
