"""Ids from words: whatever is not the tokenizer's own, number for number, is not given."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.qwen import all_templates, qwen3_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from toolroll.rollout.template import ChatTemplate, words
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.word_split import ALPHABET, WordSplit, in_python, read_split
from toolroll.rollout.template.words import Words, find_words

# Llama 3, GLM-4, Phi-4
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # gpt-oss; Mistral's tekken without the contractions
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert=invert)


def bytes_only() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def in_turn(*steps: Any) -> Any:
    return pre_tokenizers.Sequence(list(steps))


WAYS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "cl100k": in_turn(split(CL100K), bytes_only()),
    "o200k": in_turn(split(O200K), bytes_only()),
    "o200k, inverted": in_turn(split(O200K, "removed", invert=True), bytes_only()),
    "deepseek": in_turn(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), bytes_only()),
    "starcoder": in_turn(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
}


@cache
def base() -> Tokenizer:
    found = Tokenizer.from_str(qwen3_tokenizer(all_templates()["qwen3_instruct_2507"]).backend_tokenizer.to_str())
    assert isinstance(found, Tokenizer)
    return found


def cut_by(way: str) -> Tokenizer:
    """The Qwen vocabulary under another family's pre-tokenizer."""
    tokenizer = base()
    tokenizer.pre_tokenizer, tokenizer.normalizer = WAYS[way], normalizers.NFC()
    return tokenizer


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(words._FRAGMENTS),
        st.text(st.characters(max_codepoint=0x17F), max_size=6),
        st.sampled_from(["don't", "DON'T", "ſ", "İ", "“so”—", "…", "€5", "é", "e\u0301", "日本語", "\u3000", "12345", "🙂"]),
    ),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("way", WAYS)
def test_the_ids_are_the_tokenizers_own_whatever_cuts(way: str) -> None:
    tokenizer = cut_by(way)
    found, cut = find_words(tokenizer), read_split(tokenizer)
    assert found is not None
    assert cut is not None

    @given(TEXTS)
    def same(text: str) -> None:
        given_ids = found.ids(text)
        if set(text) <= set(ALPHABET):
            assert given_ids is not None
            # The vocabulary is Qwen's, whose merges hide where other families cut: so the cuts are compared too.
            assert cut.words(text) == words._pieces(tokenizer, text)
        if given_ids is not None:
            assert np.frombuffer(given_ids, dtype=np.intc).tolist() == ids(tokenizer, text)

    same()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [(r"\p{N}{1,3}", r"\p{N}"), (r"[\r\n/]*", r"[\r\n]*"), (r"\s+(?!\S)|", ""), (r"\p{Lu}", r"\p{Ll}"), ("(?i:", "(?:")],
)
def test_a_cut_that_is_read_wrongly_is_found_out(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = cut_by("o200k")
    read_wrongly = in_python(O200K.replace(right, wrong))
    assert read_wrongly is not None
    monkeypatch.setattr(words, "read_split", lambda _: WordSplit([read_wrongly]))
    assert find_words(tokenizer) is None


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"(?<=\$)\p{N}+|\p{N}{1,2}|[^\p{N}]+", "price $1234"), (r"\p{N}+(?= dollars)|\p{N}|[^\p{N}]+", "1234 dollars")],
)
def test_a_word_that_is_cut_otherwise_by_itself_is_not_kept(pattern: str, text: str) -> None:
    tokenizer = base()
    tokenizer.pre_tokenizer = in_turn(split(pattern), bytes_only())
    made = in_python(pattern)
    assert made is not None
    assert Words(WordSplit([made]), tokenizer).ids(text) is None


@pytest.mark.parametrize("change", ["prefix", "lower", "dropout", "truncation", "merged", "none", "stripped"])
def test_a_tokenizer_that_does_anything_else_is_left_alone(change: str) -> None:
    tokenizer = Tokenizer.from_str(cut_by("cl100k").to_str())
    assert read_split(tokenizer) is not None
    if change == "prefix":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "lower":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    elif change == "dropout":
        tokenizer.model.dropout = 0.1
    elif change == "truncation":
        tokenizer.enable_truncation(5)
    elif change == "merged":
        tokenizer.pre_tokenizer = in_turn(split(" ", "merged_with_previous"), bytes_only())
    elif change == "none":
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.normalizer = normalizers.Strip()
    assert read_split(tokenizer) is None


@pytest.mark.parametrize(
    "pattern", ["^a", "a$", ".", "(a)", "(?<n>a)", "[a&&b]", "[[:alpha:]]", r"\p{Greek}", "a{2}+", r"\w+", r"\bx", "[a", r"\p"]
)
def test_an_expression_that_may_mean_something_else_is_not_translated(pattern: str) -> None:
    assert in_python(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"\p{L}+", "aé1 b", ["aé", "b"]),
        (r"\P{L}+", "aé1 b", ["1 "]),
        (r"[^\p{L}\s]+", "a-1 \u00a0b", ["-1"]),
        (r"\s+", "a\x1c \u00a0\x85b", [" \u00a0\x85"]),
        (r"[\p{Han}]|x", "x", ["x"]),
        (r"[^\p{Han}]", "x", ["x"]),
        (r"\p{Lu}\p{Ll}+", "Ünder Ab", ["Ünder", "Ab"]),
        (r"[\r\n/]*/", "\n//", ["\n//"]),
        (r"[\p{Han}^a]", "^ab", ["^", "a"]),
    ],
)
def test_classes_are_written_out(pattern: str, text: str, found: list[str]) -> None:
    made = in_python(pattern)
    assert made is not None
    assert made.findall(text) == found


def test_what_no_match_covers_is_a_word_or_is_not_cut() -> None:
    assert WordSplit([re.compile("[a-z]+")]).words("ab cd") == ["ab", " ", "cd"]
    assert WordSplit([re.compile("[a-z]+")], keeps_rest=False).words("ab cd") is None
    assert WordSplit([re.compile("[0-9]"), re.compile("[a-z ]+|[0-9]")]).words("ab1 cd") == ["ab", "1", " cd"]


def test_words_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_LIMIT", 8)
    tokenizer = cut_by("cl100k")
    found = find_words(tokenizer)
    assert found is not None
    text = " ".join(f"word{chr(97 + at)}" for at in range(20)) + " " + "x" * 100
    for _ in range(3):
        assert found.ids(text) == np.array(ids(tokenizer, text), dtype=np.intc).tobytes()
        assert len(found._known) <= 8
    assert "x" * 100 not in found._known, "what is very long is not kept"


def test_whole_texts_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_TEXTS", 8000)
    tokenizer = cut_by("cl100k")
    found = find_words(tokenizer)
    assert found is not None
    cuts: list[str] = []
    split = found._split
    monkeypatch.setattr(found, "_split", SimpleNamespace(words=lambda text: (cuts.append(text), split.words(text))[1]))
    texts = [f"the result of a tool that was called {at:02} times" for at in range(60)]
    for text in [*texts, texts[-1], texts[0], texts[-1]]:
        assert found.ids(text) == np.array(ids(tokenizer, text), dtype=np.intc).tobytes()
        assert 0 < len(found._texts) < 25 and len(found._older) < 25
    assert cuts == [*texts, texts[0]], "the last one was known, the first one forgotten"
    short, long = "a short one", "very long " * 101
    for text in (short, short, long, long):
        assert found.ids(text) == np.array(ids(tokenizer, text), dtype=np.intc).tobytes()
    assert cuts[-4:] == [short, short, long, long]
    uncut = "日本語のとても長いテキストです。ここには英語がありません。それでもトークンになります。"
    assert found.ids(uncut) is found.ids(uncut) is None


def test_what_others_do_to_the_tokenizer_does_not_reach_the_words() -> None:
    tokenizer = qwen3_tokenizer(all_templates()["qwen3_instruct_2507"])
    encoder = Encoder(tokenizer)
    text = "<|im_start|>internationalization misanthropically, 1234<|im_end|>"
    expected = encoder.encode(text)
    for switched in ({"truncation": True, "max_length": 1}, {"padding": True, "pad_to_multiple_of": 8}):
        tokenizer(["something else"], **switched)
        assert encoder.encode_known(text).tolist() == expected
        assert encoder.encode(text) == expected
        tokenizer(["x"])


def test_words_are_given_up_for_good() -> None:
    tokenizer = qwen3_tokenizer(all_templates()["qwen3_instruct_2507"])
    encoder = Encoder(tokenizer)
    assert encoder.encode_known("one two").tolist() == encoder.encode("one two")
    assert encoder._text.words is not None
    encoder._text.words._known["one"] = b""
    remembered = "one two, in a text that is long enough to be remembered"
    encoder._text.words._texts[remembered] = b""
    encoder.give_up_words()
    assert encoder.encode_known(remembered).tolist() == encoder.encode(remembered)
    assert Encoder(tokenizer).encode_known("one two").tolist() == encoder.encode("one two")


def test_a_check_gives_words_up_only_where_they_were_wrong() -> None:
    asked = [{"role": "user", "content": "one two"}]
    template = ChatTemplate(qwen3_tokenizer(all_templates()["qwen3_instruct_2507"]))
    right = template.first_prompt(asked, None)[1].input_ids
    assert template.check_prompt(asked, None, right) is None
    assert template.check_prompt(asked, None, right[:-1]) == "prompt"
    held = template.encoder._text.words
    assert held is not None, "it was not the words"
    held._known[" two"] = b""
    assert template.check_prompt(asked, None, right[:-1]) == "prompt"
    assert template.encoder._text.words is None


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("[INST]", single_word=True),
        AddedToken("<tool>", normalized=True),
        AddedToken("<left>", lstrip=True, normalized=False),
        AddedToken("<right>", rstrip=True, normalized=False),
        AddedToken("    ", normalized=False),
    ],
)
def test_a_token_that_takes_more_or_less_than_its_spelling_leaves_text_to_the_tokenizer(token: AddedToken) -> None:
    tokenizer = qwen3_tokenizer(all_templates()["qwen3_instruct_2507"])
    assert Encoder(tokenizer)._text.words is not None
    tokenizer.add_tokens([token])
    encoder = Encoder(tokenizer)
    assert encoder._text.words is None
    text = f"a{token.content}b {token.content} c\u0338"
    assert encoder.encode_known(text).tolist() == encoder.encode(text)


@pytest.mark.parametrize("name", ["qwen3_instruct_2507", "qwen3_coder"])
def test_control_tokens_are_where_the_template_wrote_them(name: str) -> None:
    templates = all_templates()
    encoder = Encoder(qwen3_tokenizer(templates.get(name, templates["qwen3_instruct_2507"])))
    pieces = st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<tool_call>", "</think>", "user", "\n", "a b", "é", "日本", "<", "|im_end|>", " "]
    )

    @given(st.lists(pieces, max_size=14), st.integers(0, 60), st.integers(0, 60))
    def same(parts: list[str], one: int, other: int) -> None:
        text = "".join(parts)
        start, stop = sorted((min(one, len(text)), min(other, len(text))))
        for bodies in ([], [(start, stop)] if stop > start else []):
            assert encoder.encode_known(text, bodies).tolist() == encoder.encode(text, bodies)

    same()


def test_texts_of_ids_are_joined_only_where_that_is_decoding() -> None:
    encoder = Encoder(qwen3_tokenizer(all_templates()["qwen3_instruct_2507"]))
    fast = encoder.tokenizer.backend_tokenizer
    assert encoder._joins

    @given(st.lists(st.one_of(st.integers(0, 151_668), st.integers(151_640, 151_668), st.integers(90, 260)), max_size=12))
    def same(given_ids: list[int]) -> None:
        assert encoder.decode(given_ids) == fast.decode(given_ids, skip_special_tokens=False)

    same()
    other = qwen3_tokenizer(all_templates()["qwen3_instruct_2507"])
    other.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert not Encoder(other)._joins
