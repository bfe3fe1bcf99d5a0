"""Tokenizers that put a BOS before what they encode: the template writes it, or nobody does;
never twice, and never in a delta.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.qwen import tokenizer_for, trl_template
from tokenizers.processors import TemplateProcessing

from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Message

pytestmark = pytest.mark.tokens

ASK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
]
SAID: Message = {"role": "assistant", "content": "1"}
MORE: list[Message] = [{"role": "user", "content": "Two?"}]


def adding_bos(name: str, bos: str) -> Any:
    """The template's tokenizer, made to add `bos` to every text as Llama's does."""
    tokenizer = tokenizer_for(trl_template(name), extra=[bos])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))]
    )
    assert tokenizer.encode("x")[0] == tokenizer.convert_tokens_to_ids(bos)
    return tokenizer


@pytest.mark.parametrize(("name", "written"), [("llama3_1", 1), ("qwen2_5", 0)])
def test_the_template_alone_says_whether_there_is_a_bos(name: str, written: int) -> None:
    bos = "<|begin_of_text|>"
    tokenizer = adding_bos(name, bos)
    template = ChatTemplate(tokenizer)
    mark = tokenizer.convert_tokens_to_ids(bos)
    prompt = template.prompt(ASK)
    shown = tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    assert prompt == tokenizer.encode(shown, add_special_tokens=False)
    assert prompt.count(mark) == written
    said = template.encoder.encode("1" + template.stop_texts[0])
    delta = template.delta([*ASK, SAID], MORE, sampled_ids=said)
    assert mark not in delta
    whole = template.prompt([*ASK, SAID, *MORE])
    assert [*prompt, *said, *delta] == whole
