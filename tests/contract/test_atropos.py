"""Atropos' own managed server and node type, beside ours."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from support.endpoints import endpoint

from toolroll.rollout.server.in_process import managed_session
from toolroll.rollout.testing import load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("tree", [False, True])
async def test_the_state_is_what_atropos_reads(tree: bool) -> None:
    """The way of an Atropos environment's `collect_trajectories`, with this session in its
    place, and its own node type.
    """
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from atroposlib.envs.server_handling.managed_server import SequenceNode as TheirNode

    async with endpoint(
        load_embedded_tokenizer(), lambda request: f"Answer {request.index}."
    ) as bench:
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
            assert set(state) == set(
                ManagedServer(None, tokenizer=object(), track_tree=tree).get_state()  # pyright: ignore[reportArgumentType]
            )
            nodes = [
                TheirNode.model_validate(it.model_dump())
                for it in (state["tree"].values() if tree else state["nodes"])
            ]
        assert [node.metadata["finish_reason"] for node in nodes] == [  # pyright: ignore[reportOptionalSubscript]
            choice.finish_reason for choice in reply.choices
        ]
        group = {"tokens": [it.tokens for it in nodes], "masks": [it.masked_tokens for it in nodes]}
        for tokens, masks, entry in zip(
            group["tokens"], group["masks"], bench.engine.log, strict=True
        ):
            assert tokens == [*entry.input_ids.tolist(), *entry.output_ids]
            assert masks == [-100] * len(entry.input_ids) + entry.output_ids
