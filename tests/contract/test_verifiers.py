"""verifiers' own client class, dialect, trace and server, with `toolroll serve` behind them; and
our environments as verifiers loads and plays them, with its own rollouts and its own client.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from support.bare import run_apart
from support.endpoints import endpoint, streamed
from support.experts import first_experts
from support.verifiers_parts import need_verifiers, verifiers_parts

import toolroll.trainers.verifiers.client
from toolroll.rollout.errors import UsageError
from toolroll.testing import Fault, load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}
LINES = ["I look.", "Found it.", "Bye."]
CHAT = SimpleNamespace(upstream_path="/chat/completions")


@pytest.fixture(scope="module")
def vf() -> Iterator[Any]:
    with verifiers_parts() as parts:
        yield parts


async def test_an_agent_plays_through_verifiers_server(vf: Any) -> None:
    """An OpenAI-SDK agent, whose second turn is streamed. The trace has what was sampled."""
    async with (
        endpoint(
            load_embedded_tokenizer(), lambda request: LINES[request.index],
            faults=lambda _: Fault(evict=True), config={"return_routed_experts": True},
        ) as bench,
        vf.InterceptionServer() as server,
    ):  # fmt: skip
        config = vf.TrainClientConfig(base_url=bench.url + "/v1")
        registered = vf.register(server, config, expert_layers=2)
        trace = vf.new_trace("trace")
        session = vf.RolloutSession(vf.ModelContext("default", config), trace)
        secret, _ = server.register(session)
        assert session.client is registered and isinstance(registered, vf.Client)
        url = f"http://127.0.0.1:{server.port}/v1"
        messages = [USER]
        async with AsyncOpenAI(base_url=url, api_key=secret, max_retries=0) as agent:
            for turn, line in enumerate(LINES):
                create: Any = agent.chat.completions.create
                if turn == 1:
                    create = partial(streamed, agent)
                reply = await create(model="m", messages=messages)
                assert reply.choices[0].message.content == line
                messages += [{"role": "assistant", "content": line}, USER]
        (branch,) = trace.branches
        (ours,) = bench.endpoint.sessions.get("trace").session.trajectories()  # type: ignore[union-attr]
    assert branch.token_ids == ours.input_ids.tolist()
    assert branch.sampled_mask == ours.loss_mask.astype(bool).tolist()
    assert list(branch.logprobs) == np.nan_to_num(ours.logprobs).tolist()
    experts = branch.routed_experts  # with a placeholder for the last token
    assert experts.shape == (len(ours), 2, 2) and experts.dtype == np.uint8
    expected = first_experts(bench.engine.log, ours.input_ids)
    assert np.array_equal(experts[:-1].reshape(-1, 4), expected)
    assert np.array_equal(ours.routed_experts, expected)  # type: ignore[arg-type]


# --- answers that the test makes ------------------------------------------------------------------

CHOICE: dict[str, Any] = {
    "token_ids": [3],
    "logprobs": {"content": [{"token_id": 3, "logprob": -0.5}]},
    "finish_reason": "stop",
}
NO_LOGPROB = {"content": [{"token_id": 3, "logprob": None}]}


class Answers:
    """Verifiers' inner client, whose answer has `choice`. `requests`: what it was asked."""

    def __init__(self, **choice: Any) -> None:
        self.prompt: Any = choice.pop("prompt", [1, 2])
        self.choice = {**CHOICE, **choice}
        self.requests: list[Any] = []
        self.closed = False

    async def get_response(
        self, dialect: Any, body: Any, sampling: Any, session_id: Any, turn: Any, headers: Any
    ) -> Any:
        self.requests.append((body, session_id))
        raw = {"prompt_token_ids": self.prompt, "choices": [self.choice]}
        return SimpleNamespace(raw=raw, tokens=None)

    async def close(self) -> None:
        self.closed = True


def client_of(vf: Any, **choice: Any) -> Any:
    client = vf.EndpointClient(vf.TrainClientConfig(base_url="http://e/v1"))
    client._inner = Answers(**choice)
    return client


async def test_the_tokens_of_a_turn_are_filled(vf: Any) -> None:
    client = client_of(vf)
    body = {"messages": [], "stream": True, "stream_options": {}, "n": 1}
    response = await client.get_response(CHAT, body, SimpleNamespace(n=None), "session")
    assert body["stream"], "the given body was changed"
    tokens = response.tokens.model_dump(exclude_unset=True)
    assert tokens == {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]}
    [request] = client._inner.requests
    assert request == ({"messages": [], "logprobs": True, "n": 1}, "session")


@pytest.mark.parametrize(("choice", "words"), [
    ({"prompt": None}, "the answer has no token ids"),
    ({"token_ids": [4]}, "the answer has no token ids"),
    ({"logprobs": None}, "the answer has no token ids"),
    ({"logprobs": NO_LOGPROB}, "a sampled token of the answer has no logprob"),
    ({"finish_reason": "abort"}, "ended the turn with 'abort'"),
])  # fmt: skip
async def test_untrainable_answers_are_errors(vf: Any, choice: dict[str, Any], words: str) -> None:
    with pytest.raises(vf.ProviderError, match=words) as caught:
        await client_of(vf, **choice).get_response(CHAT, {}, None)
    assert caught.value.status_code == (503 if "finish_reason" in choice else 422)


async def test_what_has_no_token_ids_is_refused(vf: Any) -> None:
    client = client_of(vf)
    with pytest.raises(vf.ProviderError, match="only chat completions"):
        await client.get_response(vf.AnthropicDialect(), {}, None)
    for body, sampling in (({"n": 2}, None), ({}, SimpleNamespace(n=0))):
        with pytest.raises(vf.ProviderError, match=r"n=\d is not supported") as caught:
            await client.get_response(CHAT, body, sampling)
        assert caught.value.status_code == 400
    assert client._inner.requests == []
    with pytest.raises(NotImplementedError, match="TrainClientConfig"):
        await client.relay(CHAT, {})


async def test_a_server_uses_and_closes_the_client(vf: Any) -> None:
    config = vf.TrainClientConfig(base_url="http://e/v1")
    async with AsyncExitStack() as stack:
        server = SimpleNamespace(clients={}, stack=stack)
        registered = vf.register(server, config)
        assert server.clients == {config.model_dump_json(): registered}
        registered._inner = Answers()
    assert registered._inner.closed


def test_without_verifiers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.clients", "verifiers.v1.clients.eval"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"pip install verifiers==0\.4\.0"):
        toolroll.trainers.verifiers.client.EndpointClient(None)


# --- our environments, as verifiers loads and plays them ------------------------------------------

_PROGRAM = """
import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

absent("prime_sandboxes math_verify")  # a client of a paid service; for tasks of mathematics

import verifiers.v1 as vf
from support.desk_episodes import ByTask, known_tasks
from support.endpoints import endpoint
from toolroll import load_environment
from toolroll.rollout.episode import InteractionResult
from toolroll.rollout.types import StopReason
from toolroll.testing import load_embedded_tokenizer
from toolroll.trainers.verifiers import register
from toolroll_verifiers import ToolrollHarness


def loaded(env, env_args=None, **given):
    taskset = {"id": "toolroll-verifiers", "env": env, "env_args": env_args or {}}
    return vf.load_environment(vf.resolve_env_config({"taskset": taskset, **given}))


async def play(env, task, bench):
    client = vf.EvalClientConfig(base_url=bench.url + "/v1")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="default", client=client))
    (trace,) = episode.traces
    return trace


async def references_earn_one():
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


async def tokens_are_the_endpoints():
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


async def limits_failures_and_files():
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sums.py"
        path.write_text(FILE)
        env = lambda **agent: loaded(f"{path}:make", {"answer": 5}, agent=agent)
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


async def aborted_episodes_are_errors():
    async def play(*_):
        return InteractionResult.of(
            (), messages=[], stop_reason=StopReason.ENGINE_ABORT, prompt="", reward=None, info={}
        )

    harness = ToolrollHarness.__new__(ToolrollHarness)
    harness._play = play
    for client, words in (
        (None, "the episode was aborted: engine_abort"),  # it has no error
        (vf.TrainClientConfig(base_url="http://other/v1"), "its tokens are not exact"),
    ):
        context = SimpleNamespace(model="m", client=client)
        trace, data = SimpleNamespace(id="t", info={}), SimpleNamespace(name="n", index=0, seed=0)
        try:
            await harness.launch(context, trace, None, "", "", {}, data)
        except vf.HarnessError as error:
            assert words in str(error), error
        else:
            raise AssertionError("not refused")


async def the_pages_example_runs():
    async with endpoint(load_embedded_tokenizer(), lambda request: "Goodbye.") as bench:
        found = await rewards(bench.url + "/v1", 2)
    assert len(found) == 2 and set(found) <= {0.0, 1.0}, found


for check in (
    references_earn_one, tokens_are_the_endpoints, limits_failures_and_files,
    the_pages_example_runs, aborted_episodes_are_errors,
):
    asyncio.run(check())
"""


def test_verifiers_plays_our_environments() -> None:
    """References earn 1.0; the tokens are the endpoint's; limits, failures and files."""
    need_verifiers()
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    (example,) = [block for block in blocks if "toolroll-verifiers" in block]
    run_apart(example + _PROGRAM)
