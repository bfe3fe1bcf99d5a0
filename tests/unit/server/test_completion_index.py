"""`CompletionIndex`: which sampled texts a prompt goes on from, and what finding them costs."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.counted import CountedEncoder

from toolroll.endpoint.conversation.completions import CompletionIndex
from toolroll.rollout.session.session import Session
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import Completion


def index_of(encoder: Encoder, texts: list[tuple[str, str]]) -> tuple[CompletionIndex, list[Node]]:
    """Texts of a prompt and what was sampled behind it."""
    session = Session("s")
    index, nodes = CompletionIndex(session), []
    for prompt, sampled in texts:
        completion = Completion(np.array(encoder.encode(sampled), dtype=np.int32), None, "stop")
        after = session.observe(encoder.encode(prompt), after=None)
        nodes.append(session.sample(completion, {}, after=after))
        index.append(nodes[-1])
    return index, nodes


PIECES = st.text("ab é🙂", max_size=3)


@given(
    texts=st.lists(st.tuples(PIECES, st.text("ab é🙂", min_size=1, max_size=3)), max_size=6),
    prompt=st.text("ab é🙂\ud800", max_size=8),
)
def test_a_prompt_is_found_as_if_all_texts_were_compared(
    tokenizer: Any, texts: list[tuple[str, str]], prompt: str
) -> None:
    encoder = Encoder(tokenizer)
    index, nodes = index_of(encoder, texts)
    whole = [before + sampled for before, sampled in texts]
    fitting = {id(n): len(t) for n, t in zip(nodes, whole, strict=True) if prompt.startswith(t)}
    matches = index.before_text(prompt, encoder)
    assert {id(node): length for node, length in matches} == fitting
    stops = [node.stop for node in nodes if id(node) in fitting]
    assert [node.stop for node, _ in matches] == sorted(stops, reverse=True)
    for node in nodes:
        path = index.session.path_ids(node)
        longest = index.before_ids(path)
        assert longest is not None and np.array_equal(index.session.path_ids(longest), path)
        shorter = index.before_ids(path[:-1])
        assert shorter is None or shorter.stop < len(path)


def test_a_text_is_decoded_once(tokenizer: Any) -> None:
    encoder = CountedEncoder(tokenizer)
    texts = [(f"{number} hello world", " and more") for number in range(50)]
    index, nodes = index_of(encoder, texts)
    for number in range(3):
        text = f"{number} hello world and more"
        [(node, length)] = index.before_text(f"{text}, and on", encoder)
        assert node is nodes[number] and length == len(text)
    assert encoder.decoded == sum(node.stop for node in nodes)
