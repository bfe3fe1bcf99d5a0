"""The tokenizers that the tests are built on: the real vocabulary, and each template's own
control tokens.
"""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.qwen import (
    FEW_RANKS,
    QWEN3_ADDED,
    extra_templates,
    markers,
    qwen3_tokenizer,
    tokenizer_for,
    trl_template,
    trl_templates,
)

pytestmark = pytest.mark.tokens

TEMPLATES = ("qwen3_5_think", "gptoss", "gemma4")
"""Qwen's own control tokens, those of another family, and markers of unlike shapes."""
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}
PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": "Zürich, 東京 – 3.14?"},
    {"role": "assistant", "content": "It is 12:30 there."},
    {"role": "user", "content": "Thanks\n\nand now?"},
]


@pytest.fixture(scope="module")
def qwen3() -> Any:
    """The real tokenizer, with all ranks."""
    return qwen3_tokenizer()


def with_tools(arguments: Any) -> list[dict[str, Any]]:
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "look_up", "arguments": arguments},
    }
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is x?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "look_up", "content": '{"x": 1}'},
    ]


def renders(tokenizer: Any) -> list[str]:
    """What the template makes of the conversations that it takes (as text, or where it wants
    that, as parts).
    """
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in PLAIN
    ]
    conversations = [
        (PLAIN, None),
        (parts, None),
        (with_tools({"key": "x"}), [TOOL]),
        (with_tools('{"key": "x"}'), [TOOL]),
    ]
    found = []
    for messages, tools in conversations:
        try:
            found.append(
                tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=True, tokenize=False
                )
            )
        except Exception:
            continue
    return found


def test_known_ids(qwen3: Any) -> None:
    """As Qwen3 publishes them; the first two were seen on the wire of a server."""
    assert qwen3.encode("Hello") == [9707]
    assert qwen3.encode("lo") == [385]
    assert qwen3.encode("<|im_start|>user\nHi<|im_end|>\n") == [
        151644,
        872,
        198,
        13048,
        151645,
        198,
    ]
    assert [qwen3.convert_tokens_to_ids(text) for text, _ in QWEN3_ADDED] == list(
        range(151643, 151669)
    )
    assert len(qwen3) == 151669
    assert (qwen3.eos_token_id, qwen3.pad_token_id) == (151645, 151643)


def test_digits_are_single_tokens_and_newlines_are_grouped(qwen3: Any) -> None:
    assert len(qwen3.encode("2026")) == 4
    assert qwen3.encode("\n\n") == [271]


@given(text=st.text())
def test_text_round_trips_up_to_nfc(qwen3: Any, text: str) -> None:
    assert qwen3.decode(qwen3.encode(text, add_special_tokens=False)) == unicodedata.normalize(
        "NFC", text
    )


@pytest.mark.parametrize("edge", ["}\n", "\n\n", ">\n", ".\n\n", '":', '",'])
def test_the_few_ranks_merge_as_all_do(qwen3: Any, edge: str) -> None:
    """What meets at the edges of bodies is one token in both."""
    few = tokenizer_for(trl_template("qwen3"))
    assert len(few) == FEW_RANKS + len(QWEN3_ADDED)
    assert few.encode(edge) == qwen3.encode(edge)
    assert len(few.encode(edge)) == 1


def test_skipped_tokens_are_those_that_qwen_skips(qwen3: Any) -> None:
    ids = qwen3.encode("<|im_start|><tool_call>a</tool_call><think><|im_end|>")
    assert qwen3.decode(ids, skip_special_tokens=True) == "<tool_call>a</tool_call><think>"


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_template_renders_and_round_trips(name: str) -> None:
    tokenizer = tokenizer_for(trl_template(name))
    texts = renders(tokenizer)
    assert texts, "the template renders none of the conversations"
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
        control = {
            tokenizer.convert_tokens_to_ids(marker)  # pyright: ignore[reportUnhashable]
            for marker in markers(tokenizer.chat_template)  # pyright: ignore[reportArgumentType]
            if marker in text
        }
        assert control <= set(ids)
        assert max(ids) < len(tokenizer)


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_marker_is_one_token_and_the_end_of_turn_is_one_of_them(name: str) -> None:
    source = trl_template(name)
    tokenizer = tokenizer_for(source)
    for marker in markers(source):
        assert tokenizer.encode(f"a{marker}b", add_special_tokens=False) == [
            64,
            tokenizer.convert_tokens_to_ids(marker),
            65,
        ]
    in_a_render = any(tokenizer.eos_token in text for text in renders(tokenizer))  # pyright: ignore[reportOperatorIssue]
    assert in_a_render or tokenizer.eos_token in source  # pyright: ignore[reportOperatorIssue]


def test_markers_are_found_and_ordinary_tags_are_not() -> None:
    found = markers(trl_template("qwen3_5_think"))
    assert {"<|im_start|>", "<|im_end|>", "<think>", "</tool_call>"} <= set(found)
    assert not {"<tools>", "</parameter>", "<IMPORTANT>"} & set(found)
    assert '<|"|>' in markers(trl_template("gemma4"))
    assert "<｜tool▁calls▁begin｜>" in markers(trl_template("deepseekv3"))


def test_qwen_templates_get_qwens_own_ids() -> None:
    assert qwen3_tokenizer(trl_template("qwen2_5")).convert_tokens_to_ids("</think>") == 151668
    assert tokenizer_for(trl_template("gptoss")).convert_tokens_to_ids("<|im_end|>") is None


def test_an_unknown_template_is_named() -> None:
    with pytest.raises(KeyError, match=r"no template 'qwen9'; it has .*qwen3"):
        trl_template("qwen9")
    assert len(trl_templates()) >= 40


def test_the_vocabulary_is_the_reference_one(qwen3: Any) -> None:
    folder = os.environ.get("TOOLROLL_TEST_DATA")
    if not folder:
        pytest.skip("TOOLROLL_TEST_DATA is not set")
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(Path(folder) / "tokenizers" / "qwen3" / "tokenizer.json"))
    for text in [
        *extra_templates().values(),
        (Path(folder) / "tau_bench" / "gpt-4o-airline-40.json").read_text()[:200_000],
    ]:
        assert qwen3.encode(text) == reference.encode(text).ids
