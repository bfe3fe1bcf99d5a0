"""Our environments as verifiers loads and plays them, with its own rollouts and its own client."""

from __future__ import annotations

import re
from pathlib import Path

from support.bare import run_apart
from support.verifiers_parts import need_verifiers

_BEGIN = """
import asyncio

absent("prime_sandboxes math_verify")  # a client of a paid service; for tasks of mathematics

import verifiers.v1 as vf
from support.desk_episodes import ByTask, known_tasks
from support.endpoints import endpoint
from toolroll.testing import load_embedded_tokenizer


def loaded(env, **given):
    taskset = {"id": "toolroll-verifiers", "env": env}
    return vf.load_environment(vf.resolve_env_config({"taskset": taskset, **given}))


async def play(env, task, bench):
    client = vf.EvalClientConfig(base_url=bench.url + "/v1")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="default", client=client))
    (trace,) = episode.traces
    return trace
"""

_REFERENCES = """
from toolroll import load_environment


async def main():
    env = loaded("desk")
    tasks, desk = list(env.taskset), load_environment("desk").tasks("test")
    assert [(task.data.idx, task.data.name) for task in tasks] == [
        (task.index, task.id) for task in desk
    ]
    async with endpoint(load_embedded_tokenizer(), ByTask(mistakes=0)) as bench:
        for index in known_tasks():
            trace = await play(env, tasks[index], bench)
            assert trace.ok and trace.reward == 1.0 and not trace.is_truncated, trace.errors
            assert trace.num_turns == trace.metrics["turns"] and trace.tool_messages


asyncio.run(main())
"""

_TOKENS = """
from toolroll.trainers.verifiers import register


async def main():
    env = loaded("desk", interception={"type": "server"})
    task = list(env.taskset)[known_tasks()[0]]
    async with endpoint(load_embedded_tokenizer(), ByTask(mistakes=0)) as bench, env.serving():
        client = vf.TrainClientConfig(base_url=bench.url + "/v1")
        context = vf.ModelContext(model="default", client=client)
        (trace,) = (await env.run_episode(task, context)).traces
        assert not trace.ok and "its tokens are not exact" in trace.last_error.message
        env._interception.clients.clear()  # verifiers' own client, which it has made for the config
        register(env._interception, client)
        episode = await env.run_episode(task, vf.ModelContext(model="default", client=client))
        (trace,) = episode.traces
        (branch,) = trace.branches
        (ours,) = bench.endpoint.sessions.get(trace.id).session.trajectories()
        assert trace.reward == 1.0 and branch.token_ids == ours.input_ids.tolist()
        assert branch.sampled_mask == ours.loss_mask.astype(bool).tolist()


asyncio.run(main())
"""

_ENDINGS = """
from pathlib import Path
from tempfile import TemporaryDirectory

FILE = '''
from toolroll import tool_environment

def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

def fail(a: int) -> int:
    "Fail."
    raise RuntimeError("the database is gone")

def make(answer: int = 4):
    return tool_environment(
        tools=[add, fail],
        tasks=[{"prompt": "What is 2 + 3?"}],
        reward=lambda task, final: float(str(answer) in final),
    )
'''
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
ADD, FAIL = CALL % ("add", '{"a": 2, "b": 3}'), CALL % ("fail", '{"a": 2}')


async def ended(env, *replies):
    task = list(env.taskset)[0]
    assert task.data.prompt == "What is 2 + 3?" and task.data.env_args == {"answer": 5}
    text = lambda request: replies[min(request.index, len(replies) - 1)]
    async with endpoint(load_embedded_tokenizer(), text) as bench:
        return await play(env, task, bench)


async def main():
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sums.py"
        path.write_text(FILE)

        def env(**agent):
            settings = {"env": f"{path}:make", "env_args": {"answer": 5}}
            given = {"taskset": {"id": "toolroll-verifiers", **settings}, "agent": agent}
            return vf.load_environment(vf.resolve_env_config(given))

        trace = await ended(env(), ADD, "It is 5.")
        assert trace.ok and trace.reward == 1.0 and trace.num_turns == 2
        assert trace.tool_messages[0].content == "5"
        assert trace.info["toolroll"]["stop_reason"] == "done"

        for limits in ({"max_turns": 3}, {"harness": {"id": "toolroll-verifiers", "max_turns": 3}}):
            trace = await ended(env(**limits), ADD)
            assert trace.ok and trace.is_truncated and trace.stop_condition == "max_turns"
            assert trace.reward == 0.0 and trace.num_turns == 3

        trace = await ended(env(), FAIL)
        assert not trace.ok and trace.rewards == {} and trace.last_error.type == "HarnessError"
        assert "the database is gone" in trace.last_error.message, trace.last_error


asyncio.run(main())
"""

_ABORTED = """
from types import SimpleNamespace
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.types import StopReason
from toolroll_verifiers import ToolrollHarness


async def refused(client, words):
    try:
        context = SimpleNamespace(model="m", client=client)
        trace, data = SimpleNamespace(id="t", info={}), SimpleNamespace(name="n", index=0, seed=0)
        await harness.launch(context, trace, None, "", "", {}, data)
    except vf.HarnessError as error:
        assert words in str(error), error
    else:
        raise AssertionError("not refused")


async def main():
    await refused(None, "the episode was aborted: engine_abort")  # it has no error
    await refused(vf.TrainClientConfig(base_url="http://other/v1"), "its tokens are not exact")


async def play(*_):
    return InteractionResult.of(
        (), messages=[], stop_reason=StopReason.ENGINE_ABORT, prompt="", reward=None, info={}
    )


harness = ToolrollHarness.__new__(ToolrollHarness)
harness._play = play
asyncio.run(main())
"""

_PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def page() -> str:
    """The page's example, called."""
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.S)
    (example,) = [block for block in blocks if "toolroll-verifiers" in block]
    return (
        example
        + """

async def main():
    async with endpoint(load_embedded_tokenizer(), lambda request: "Goodbye.") as bench:
        found = await rewards(bench.url + "/v1", 2)
    assert len(found) == 2 and set(found) <= {0.0, 1.0}, found


asyncio.run(main())
"""
    )


def test_verifiers_plays_our_environments() -> None:
    """References earn 1.0; the tokens are the endpoint's; limits, failures and files."""
    need_verifiers()
    run_apart(_BEGIN + _REFERENCES + _TOKENS + _ENDINGS + page() + _ABORTED)
