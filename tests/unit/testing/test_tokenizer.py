"""The embedded tokenizer and its chat template: ours, small, and made again byte for byte."""

from __future__ import annotations

from typing import Any

from make_tokenizer import CONTROL_TOKENS, VOCABULARY, build, corpus
from transformers import AutoTokenizer

from toolroll.testing import embedded_tokenizer_path

CALL = {"function": {"name": "find", "arguments": {"at": "here"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "nowhere"},
    {"role": "tool", "content": "elsewhere"},
]


def test_the_tokenizer_is_made_again_byte_for_byte() -> None:
    made = build().to_str(pretty=False) + "\n"
    assert made == (embedded_tokenizer_path() / "tokenizer.json").read_text(encoding="utf-8")


def test_its_corpus_depends_on_the_seed_alone() -> None:
    assert list(corpus(lines=50)) == list(corpus(lines=50)) != list(corpus(seed=8, lines=50))


def test_a_folder_of_it_is_what_transformers_takes(tokenizer: Any) -> None:
    loaded = AutoTokenizer.from_pretrained(embedded_tokenizer_path())
    text = "<|turn|>user\nWhere is it? 漢 <tool_call><|end|>"
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.encode(text) == tokenizer.encode(text)
    assert (loaded.eos_token, loaded.pad_token, len(loaded)) == ("<|end|>", "<|pad|>", VOCABULARY)
    assert loaded.chat_template == tokenizer.chat_template


def test_control_tokens_are_one_token_and_only_three_are_hidden(tokenizer: Any) -> None:
    ids = [tokenizer.encode(token) for token in CONTROL_TOKENS]
    assert [len(each) for each in ids] == [1] * len(CONTROL_TOKENS)
    shown = [tokenizer.decode(each, skip_special_tokens=True) for each in ids]
    assert shown == ["", "", "", *CONTROL_TOKENS[3:]]


def test_the_template_is_chatml_like_and_only_ever_appends(tokenizer: Any) -> None:
    parts = [
        "<|turn|>system\nBe kind.<|end|>\n",
        "<|turn|>user\nWhere is it?<|end|>\n",
        '<|turn|>assistant\n<tool_call>{"name": "find", "arguments": {"at": '
        '"here"}}</tool_call><|end|>\n',
        "<|turn|>tool\n<tool_response>nowhere</tool_response>"
        "<tool_response>elsewhere</tool_response><|end|>\n",
    ]
    for count, messages in ((2, 2), (3, 3), (4, 5)):
        for prompt in ("", "<|turn|>assistant\n"):
            options = {"add_generation_prompt": bool(prompt), "tokenize": False}
            text = tokenizer.apply_chat_template(MESSAGES[:messages], **options)
            assert text == "".join(parts[:count]) + prompt
