"""Concurrent calls with several answers in one managed session, judged by the engine's log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from toolroll.endpoint.in_process import ManagedServer, SequenceNode
from toolroll.testing import EmbeddedEngine, PolicyRequest, load_embedded_tokenizer

Answer = tuple[tuple[int, ...], tuple[int, ...], tuple[np.float32, ...]]
"""The ids of the prompt, the sampled ids, and their logprobs."""


def answer(prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]) -> Answer:
    return tuple(map(int, prompt)), tuple(ids), tuple(map(np.float32, logprobs))


def policy(request: PolicyRequest) -> str:
    """Three replies only: equal answers to one prompt are different samples."""
    return ("Yes.", "No.", "Maybe so.")[request.index % 3]


def last_turn(node: SequenceNode) -> Answer:
    start = next(at for at, token in enumerate(node.masked_tokens) if token != -100)
    assert node.masked_tokens[start:] == node.tokens[start:]
    return answer(node.tokens[:start], node.tokens[start:], node.logprobs[start:])


def unmasked(nodes: Sequence[SequenceNode]) -> list[tuple[int, int, np.float32]]:
    """Position, id and logprob of each token with loss."""
    return [
        (at, token, np.float32(logprob))
        for node in nodes
        for at, (token, logprob) in enumerate(zip(node.masked_tokens, node.logprobs, strict=True))
        if token != -100
    ]


@pytest.mark.parametrize("tree", [False, True])
async def test_each_answer_is_in_the_state_once(tree: bool) -> None:
    returned: list[Answer] = []
    async with EmbeddedEngine(load_embedded_tokenizer(), policy, split="random") as engine:
        managed = ManagedServer(engine.url, load_embedded_tokenizer(), track_tree=tree)

        async def ask(messages: list[Any], n: int) -> list[list[Any]]:
            made: Any = await managed.chat_completion(messages=messages, n=n, max_tokens=32)
            prompt = made.prompt_token_ids
            for choice in made.choices:
                logprobs = [place.logprob for place in choice.logprobs.content]
                returned.append(answer(prompt, choice.token_ids, logprobs))
            more = {"role": "user", "content": "Why?"}
            return [
                [*messages, {"role": "assistant", "content": choice.message.content}, more]
                for choice in made.choices
            ]

        async with managed:
            talks: list[list[Any]] = [[{"role": "user", "content": "Hi."}]]
            for calls, n in ((8, 4), (24, 2), (24, 1)):
                asked = [ask(talks[at % len(talks)], n) for at in range(calls)]
                talks = [talk for found in await asyncio.gather(*asked) for talk in found]
            state = managed.get_state()
    log = [answer(one.input_ids.tolist(), one.output_ids, one.logprobs) for one in engine.log]
    assert len(log) == 8 * 4 + 24 * 2 + 24
    assert Counter(returned) == Counter(log)
    if tree:
        assert Counter(map(last_turn, state["sequences"].values())) == Counter(log)
        return
    tokens = [
        (len(prompt) + at, *one)
        for prompt, ids, logprobs in log
        for at, one in enumerate(zip(ids, logprobs, strict=True))
    ]
    assert Counter(unmasked(state["nodes"])) == Counter(tokens)
