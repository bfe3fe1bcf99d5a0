"""Learned frames against what they stand for: whatever a body's white space, whatever a template does to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.qwen import tokenizer_for

from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Message

TEMPLATE = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ {body} }}}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
BODIES = {
    "as it is": "m.content",
    "strip": "m.content | trim",
    "newlines off": "m.content.strip('\\n')",
    "newlines off the end": "m.content.rstrip('\\n')",
    "spaces off": "m.content.strip(' ')",
    "cut": "m.content[:100]",
    "one word": "'' if m.content == 'stop' else m.content",
    "long": "m.content if m.content | length < 50 else 'long'",
    "json": "m.content | tojson",
}
ASKED: list[Message] = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]
TEXT = st.one_of(
    st.sampled_from([" ", "\n", "\n\n\n", "", "stop", "\nstop", " a ", "\na\n", "a" * 60, "b " * 80]), st.text(" \nab", max_size=8)
)
TOKENIZER = tokenizer_for(TEMPLATE.format(body="m.content"))


@pytest.mark.parametrize("body", BODIES)
@given(texts=st.lists(TEXT, min_size=2, max_size=12))
def test_each_delta_and_prompt_is_the_renders(body: str, texts: list[str]) -> None:
    """Nothing is checked on the way, and one template sees all the texts: each frame is used as it was learned."""
    source = TEMPLATE.format(body=BODIES[body])
    shared = ChatTemplate(TOKENIZER, chat_template=source)
    sampled = shared.encoder.encode("1<|im_end|>")
    for text in texts:
        new: list[Message] = [{"role": "user", "content": text}]
        fresh: Any = ChatTemplate(TOKENIZER, chat_template=source, encoder=shared.encoder)
        assert shared.delta(ASKED, new, sampled_ids=sampled) == fresh.delta(ASKED, new, sampled_ids=sampled)
        assert shared.first_prompt(new, None)[1].input_ids.tolist() == fresh.prompt(new)


def test_frames_are_learned_at_all() -> None:
    shared = ChatTemplate(TOKENIZER, chat_template=TEMPLATE.format(body="m.content | trim"))
    first, second = (shared.first_prompt([{"role": "user", "content": text}], None)[1] for text in ("a", " b "))
    assert (first.framed, second.framed, second.check_due) == (False, True, True)
