"""Atropos' own managed server and node type, beside ours."""

import inspect
from typing import Any

import pytest
from support.endpoints import endpoint

from toolroll.endpoint import in_process
from toolroll.testing import embedded_tokenizer_path, load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}
NOTHING: Any = None


@pytest.mark.parametrize("tree", [False, True])
async def test_the_state_is_what_atropos_reads(tree: bool) -> None:
    """The way of an Atropos environment's `collect_trajectories`, with this session in its
    place, and its own node type.
    """
    from atroposlib.envs.server_handling import managed_server as theirs

    policy = lambda request: f"Answer {request.index}."
    async with endpoint(load_embedded_tokenizer(), policy) as bench:
        async with in_process.managed_session(
            bench.engine.url, load_embedded_tokenizer(), track_tree=tree, tool_parser="hermes"
        ) as m:
            reply = await m.chat_completion(
                messages=[USER], n=4, max_tokens=64, temperature=1.0, top_p=0.9
            )
            state = m.get_state()
        own = theirs.ManagedServer(NOTHING, tokenizer=object(), track_tree=tree).get_state()
        assert set(state) == set(own)
        nodes = [
            theirs.SequenceNode.model_validate(it.model_dump())
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

    for name in ("ManagedServer", "DummyManagedServer"):
        published = list(inspect.signature(getattr(theirs, name)).parameters)
        ours = list(inspect.signature(getattr(in_process, name)).parameters)
        assert ours[: len(published)] == published
    published = list(inspect.signature(theirs.ManagedServer).parameters)
    names = {"tokenizer", "track_tree", "tool_parser"}
    assert names <= set(published) & set(inspect.signature(in_process.managed_session).parameters)


async def test_an_environment_runs_a_group_with_one_import_changed() -> None:
    """An environment of the shape of Atropos' regex_env.py (commit 296a0bc): one import names this
    package, and the rest is as its authors write it.
    """
    pytest.importorskip("atroposlib.envs.base", reason="needs atroposlib's own requirements")
    from support.atropos_env import CountingEnv

    from toolroll.trainers.atropos import APIServerConfig

    policy = lambda request: f"<answer>{'o' * (request.index % 2 + 1)}</answer>"
    path = str(embedded_tokenizer_path())
    async with endpoint(load_embedded_tokenizer(), policy, split="random") as bench:
        config = APIServerConfig(
            model_name=path, base_url=f"{bench.engine.url}/v1", api_key="x", server_type="sglang",
            num_max_requests_at_once=4,
        )  # fmt: skip
        env = CountingEnv(CountingEnv.config_init()[0], [config], slurm=False)
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
