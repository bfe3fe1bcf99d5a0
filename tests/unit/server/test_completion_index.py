"""`CompletionIndex`: which sampled texts a prompt goes on from, and what finding them costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toolroll.endpoint.conversation.completions import CompletionIndex
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Completion


class CountingEncoder(Encoder):
    """Keeps how many ids it decoded."""

    decoded = 0

    def decode(self, ids: Iterable[int]) -> str:
        given = list(ids)
        self.decoded += len(given)
        return super().decode(given)


def ends(encoder: Encoder, texts: list[tuple[str, str]]) -> tuple[CompletionIndex, list[Node]]:
    """Texts of a prompt and what was sampled behind it."""
    session = Session("s")
    found, nodes = CompletionIndex(session), []
    for prompt, said in texts:
        ids = np.array(encoder.encode(said), dtype=np.int32)
        node = session.sample(
            Completion(ids, None, "stop"),
            {},
            after=session.observe(encoder.encode(prompt), after=None),
        )
        found.append(node)
        nodes.append(node)
    return found, nodes


PIECES = st.text("ab é🙂", max_size=3)


@given(
    texts=st.lists(st.tuples(PIECES, st.text("ab é🙂", min_size=1, max_size=3)), max_size=6),
    prompt=st.text("ab é🙂\ud800", max_size=8),
)
def test_a_prompt_is_found_as_if_all_texts_were_compared(
    tokenizer: Any, texts: list[tuple[str, str]], prompt: str
) -> None:
    encoder = Encoder(tokenizer)
    found, nodes = ends(encoder, texts)
    whole = [(node, before + said) for node, (before, said) in zip(nodes, texts, strict=True)]
    fitting = [(node, len(text)) for node, text in whole if prompt.startswith(text)]
    got = found.before_text(prompt, encoder)
    assert {id(node): length for node, length in got} == {
        id(node): length for node, length in fitting
    }
    assert [node.stop for node, _ in got] == sorted(
        (node.stop for node, _ in fitting), reverse=True
    )
    for node in nodes:
        path = found.session.path_ids(node)
        longest = found.before_ids(path)
        assert longest is not None and np.array_equal(found.session.path_ids(longest), path)
        shorter = found.before_ids(path[:-1])
        assert shorter is None or shorter.stop < len(path)


def test_a_text_is_decoded_once(tokenizer: Any) -> None:
    encoder = CountingEncoder(tokenizer)
    found, nodes = ends(encoder, [(f"{at} hello world", " and more") for at in range(50)])
    for at in range(3):
        [(node, length)] = found.before_text(f"{at} hello world and more, and on", encoder)
        assert node is nodes[at] and length == len(f"{at} hello world and more")
    assert encoder.decoded == sum(node.stop for node in nodes)
