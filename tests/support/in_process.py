"""An endpoint's clients in the same process, and what they say of the sampled tokens."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.served import ServedBench, serve

from toolroll.endpoint.in_process import ManagedSession, SequenceNode, ToolrollClient


@asynccontextmanager
async def in_process(
    replies: Any = "Hello.", **options: Any
) -> AsyncIterator[tuple[ServedBench, ToolrollClient]]:
    """A client for the session "s", and the bench that judges it."""
    async with (
        serve(replies, **options) as bench,
        ToolrollClient(bench.endpoint, session="s") as client,
    ):
        yield bench, client


@asynccontextmanager
async def managed(
    replies: Any = "Hello.", *, tree: bool = False, **options: Any
) -> AsyncIterator[tuple[ServedBench, ManagedSession]]:
    """A managed session "s", and the bench that judges it."""
    async with serve(replies, **options) as bench:
        yield bench, ManagedSession(bench.endpoint, session="s", track_tree=tree)


def nodes_of(state: Mapping[str, Any]) -> list[SequenceNode]:
    """The sequences of a managed state, whether it is a tree or not."""
    return list(state["sequences"].values()) if "sequences" in state else state["nodes"]


def unmasked(node: SequenceNode) -> list[int]:
    """The tokens with loss; every list as long as the others, and logprobs where they belong."""
    for token, masked, logprob in zip(node.tokens, node.masked_tokens, node.logprobs, strict=True):
        assert (masked, logprob) == (-100, 1.0) or (masked == token and logprob <= 0.0)
    return [token for token in node.masked_tokens if token != -100]


def sampled(bench: ServedBench) -> list[list[int]]:
    return [entry.output_ids for entry in bench.engine.log]


def check_tokens(entry: Any, prompt: Sequence[int], ids: Any, logprobs: Any) -> None:
    """Compare what a reply says with what the engine sampled."""
    assert (prompt, ids) == (entry.input_ids.tolist(), entry.output_ids)
    assert list(logprobs) == pytest.approx(entry.logprobs)
