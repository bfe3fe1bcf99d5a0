"""Atropos' own managed server and node type, beside ours."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from support.endpoints import Bench, endpoint

from toolroll.endpoint.in_process import managed_session
from toolroll.testing import Reply, embedded_tokenizer_path, load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("tree", [False, True])
async def test_the_state_is_what_atropos_reads(tree: bool) -> None:
    """The way of an Atropos environment's `collect_trajectories`, with this session in its
    place, and its own node type.
    """
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from atroposlib.envs.server_handling.managed_server import SequenceNode as TheirNode

    policy = lambda request: f"Answer {request.index}."
    async with endpoint(load_embedded_tokenizer(), policy) as bench:
        theirs = inspect.signature(ManagedServer.__init__).parameters
        assert {"tokenizer", "track_tree", "tool_parser"} <= set(theirs) & set(
            inspect.signature(managed_session).parameters
        )
        async with managed_session(
            bench.engine.url, load_embedded_tokenizer(), track_tree=tree, tool_parser="hermes"
        ) as m:
            reply = await m.chat_completion(
                messages=[USER], n=4, max_tokens=64, temperature=1.0, top_p=0.9
            )
            state = m.get_state()
            nothing: Any = None
            assert set(state) == set(
                ManagedServer(nothing, tokenizer=object(), track_tree=tree).get_state()
            )
            nodes = [
                TheirNode.model_validate(it.model_dump())
                for it in (state["tree"].values() if tree else state["nodes"])
            ]
        assert [(node.metadata or {})["finish_reason"] for node in nodes] == [
            choice.finish_reason for choice in reply.choices
        ]
        for node, entry in zip(nodes, bench.engine.log, strict=True):
            assert node.tokens == [*entry.input_ids.tolist(), *entry.output_ids]
            assert node.masked_tokens == [-100] * len(entry.input_ids) + entry.output_ids


def test_the_constructors_take_what_atropos_classes_take() -> None:
    from atroposlib.envs.server_handling import managed_server as theirs

    from toolroll.endpoint import in_process as ours

    for name in ("ManagedServer", "DummyManagedServer"):
        published = inspect.signature(getattr(theirs, name)).parameters
        assert list(inspect.signature(getattr(ours, name)).parameters)[: len(published)] == list(
            published
        )


def server_config(bench: Bench, path: str, slots: int = 4) -> Any:
    from toolroll.trainers.atropos import APIServerConfig

    return APIServerConfig(
        model_name=path, base_url=f"{bench.engine.url}/v1", api_key="x", server_type="sglang",
        num_max_requests_at_once=slots,
    )  # fmt: skip


async def test_an_environment_runs_a_group_with_one_import_changed() -> None:
    """An environment of the shape of Atropos' regex_env.py (commit 296a0bc): one import names this
    package, and the rest is as its authors write it.
    """
    pytest.importorskip("atroposlib.envs.base", reason="needs atroposlib's own requirements")
    from support.atropos_env import CountingEnv

    policy = lambda request: f"<answer>{'o' * (request.index % 2 + 1)}</answer>"
    path = str(embedded_tokenizer_path())
    async with endpoint(load_embedded_tokenizer(), policy, split="random") as bench:
        servers = [server_config(bench, path)]
        env = CountingEnv(CountingEnv.config_init()[0], servers, slurm=False)
        env.config.tokenizer_name = path
        await env.setup()
        group, _ = await env.collect_trajectories(await env.get_next_item())
        assert group is not None
        assert sorted(group["scores"]) == [0.0, 0.0, 1.0, 1.0]
        left = list(bench.engine.log)
        rows = zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
        for tokens, masks, logprobs in rows:
            entry = next(it for it in left if [*it.input_ids.tolist(), *it.output_ids] == tokens)
            left.remove(entry)
            size = len(entry.input_ids)
            assert masks == [-100] * size + entry.output_ids
            assert logprobs[:size] == [1.0] * size
            assert logprobs[size:] == pytest.approx(entry.logprobs)
        assert left == []
        assert await env.evaluate() == 1.0


async def test_atropos_own_manager_spreads_sessions_over_servers() -> None:
    """Two engines behind atroposlib's `ServerManager`: its own semaphores count our requests."""
    pytest.importorskip("atroposlib.envs.base", reason="needs atroposlib's own requirements")
    from toolroll.trainers.atropos import ServerManager

    release = asyncio.Event()
    hold = lambda request: Reply("Hello.", hold=release, hold_after=1)
    tokenizer, path = load_embedded_tokenizer(), str(embedded_tokenizer_path())
    async with endpoint(tokenizer, hold) as one, endpoint(tokenizer, hold) as two:
        manager = ServerManager([server_config(bench, path, slots=2) for bench in (one, two)])

        async def ask() -> int:
            async with manager.managed_server() as managed:
                await managed.chat_completion(messages=[USER], split="train")
                return len(managed.get_state()["nodes"])

        asking = []
        for spread in ([1, 0], [1, 1], [2, 1], [2, 2]):
            asking.append(asyncio.ensure_future(ask()))
            while (held := [one.engine.held, two.engine.held]) and sum(held) < sum(spread):
                await asyncio.sleep(0.01)
            assert held == spread
        assert [server.sem._value for server in manager.servers] == [0, 0]
        release.set()
        assert await asyncio.gather(*asking) == [1] * 4
        assert [server.sem._value for server in manager.servers] == [2, 2]
