"""Tokenizers that are not plain: some add a BOS, have named templates, or render in Python. Text
that is encoded by pre-tokens has the ids of its tokenizer."""

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.oracle_scenarios import ASK, BASE, CALL, RESULT, TOOLS, said, user
from support.qwen import tokenizer_for, trl_template
from support.work import CountedEncoder
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.evaluation.certify import certify
from toolroll.parsers.infer import infer_parser
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import ChatTemplate, pretokens
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.testing import load_embedded_tokenizer

pytestmark = pytest.mark.tokens

BOS = "<|begin_of_text|>"
TALK: Any = [*BASE, CALL, RESULT]


@pytest.mark.parametrize(("name", "written"), [("llama3_1", 1), ("qwen2_5", 0)])
def test_the_template_alone_says_whether_there_is_a_bos(name: str, written: int) -> None:
    """The template writes it, or nobody does: never twice, and never in a delta."""
    tokenizer: Any = tokenizer_for(trl_template(name), extra=[BOS])
    mark = tokenizer.convert_tokens_to_ids(BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # as Llama's
        single=f"{BOS} $A", special_tokens=[(BOS, mark)]
    )
    assert tokenizer.encode("x")[0] == mark
    template = ChatTemplate(tokenizer)
    prompt = template.prompt(BASE)
    shown = tokenizer.apply_chat_template(BASE, tokenize=False, add_generation_prompt=True)
    assert prompt == tokenizer.encode(shown, add_special_tokens=False)
    assert prompt.count(mark) == written
    sampled = template.encoder.encode("1" + template.stop_texts[0])
    talk = [*BASE, said("1")]
    delta = template.delta(talk, [ASK], sampled_ids=sampled)
    assert mark not in delta
    assert [*prompt, *sampled, *delta] == template.prompt([*talk, ASK])


_TURN = (
    "<|{{ m.role }}|>{{ m.content }}CLOSE{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}"
)
DEFAULT = "{% for m in messages %}" + _TURN.replace("CLOSE", "<|eot|>")
TOOL_USE = "{% for m in messages %}[{{ loop.index }}]" + _TURN.replace("CLOSE", "<|eom|>")
TOOL_USE = TOOL_USE.replace("{% if add", "[{{ messages | length + 1 }}]{% if add")


def test_each_conversation_has_its_own_template() -> None:
    """The one for tools is used with tools, and the stop tokens of both end a turn."""
    tokenizer: Any = tokenizer_for(DEFAULT + TOOL_USE + "<|user|><|assistant|>")
    tokenizer.chat_template = {"default": DEFAULT, "tool_use": TOOL_USE}
    subject = ChatTemplate(tokenizer)
    assert {"<|eot|>", "<|eom|>"} <= set(subject.stop_texts)
    for tools, close in ((None, "<|eot|>"), ([TOOLS[0]], "<|eom|>")):
        render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
        messages = [user("a")]
        for _ in range(12):
            sampled = subject.encoder.encode("b" + close, previous=0)
            after = [*messages, said("b"), user("a")]
            delta = subject.delta(after[:-1], after[-1:], tools=tools, sampled_ids=sampled)
            prompt = render(messages, add_generation_prompt=True)
            whole = render(after, add_generation_prompt=True)
            assert prompt + "b" + close + subject.encoder.decode(delta) == whole
            messages = after


def test_a_method_of_its_own_cannot_change_the_tools_of_others() -> None:
    mine = load_embedded_tokenizer()
    theirs = mine.apply_chat_template

    def changing(messages: Any, tools: Any, **kwargs: Any) -> Any:
        messages[0]["content"] = "changed"
        tools[0]["function"].setdefault("strict", False)
        return theirs(messages, tools=tools, **kwargs)

    mine.apply_chat_template = changing
    cursor = ChatTemplate(mine).start(TALK, TOOLS)
    assert '"strict"' in cursor.text and "changed" in cursor.text
    other = ChatTemplate(load_embedded_tokenizer()).start(TALK, TOOLS)
    assert '"strict"' not in other.text and "changed" not in other.text
    assert '"strict"' not in str(cursor._head.tools) and "changed" not in str(cursor._messages)


def code(messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> str:
    """Renders as the embedded template does, changes its arguments, and refuses an empty list."""
    assert messages, "no messages"
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "tokenize": False}
    text = load_embedded_tokenizer().apply_chat_template(messages, **options)
    messages.clear()
    return str(text)


@pytest.mark.parametrize("returned", [None, [1, 2], b"text", "\ud800"])
def test_code_must_return_text(returned: Any) -> None:
    template = ChatTemplate(load_embedded_tokenizer(), chat_template=lambda *_, **__: returned)
    with pytest.raises(TemplateError, match=r"TypeError: it must return the text|surrogates"):
        template.prompt(TALK[:1])


@pytest.mark.parametrize("way", ["function", "method"])
def test_code_renders_without_a_template(way: str) -> None:
    """Models such as Kimi-K3 have no Jinja template."""
    tokenizer, given = load_embedded_tokenizer(), code if way == "function" else None
    own = {"apply_chat_template": lambda _, talk, tokenize, **options: code(talk, **options)}
    tokenizer.chat_template, expected = None, ChatTemplate(load_embedded_tokenizer())
    with pytest.raises(
        TemplateError, match=r"Python function.*\(FILE.py:NAME\).*trust_remote_code"
    ):
        ChatTemplate(tokenizer)
    if way == "method":
        tokenizer.__class__ = type("Own", (type(tokenizer),), own)
    tokenizer.add_tokens([AddedToken("customer_id")])
    subject = ChatTemplate(tokenizer, chat_template=given)
    assert subject.prompt(TALK, TOOLS) == expected.prompt(TALK, TOOLS)
    assert infer_parser(tokenizer, subject.renderer.template) == "hermes"
    assert certify(subject).exact and certify(subject).probes == certify(expected).probes
    assert "customer_id" in subject.encoder.control
    assert "customer_id" in subject.verifier._control.values()
    assert "tokenize" not in TemplateCache(subject).variables or way == "method"
    with pytest.raises(TemplateError, match="no messages"):
        subject.prompt([])
    first = [user("a customer_id <|end|>")]
    prompt = subject.prompt(first)
    ids = np.array([*prompt, *subject.encoder.encode("So.<|end|>", previous=prompt[-1])], np.int32)
    turns = (TurnSpan(len(prompt), len(ids), 1),)
    served = ServedSequence(ids, turns, [*first, said("So.")], ())
    assert subject.verifier.check(served) is None
    ids[1] += 1
    assert subject.verifier.check(served) == "prompt"


# --- text encoded by pre-tokens, and offsets of ids -----------------------------------------------

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# The expressions of the models' own tokenizer.json.
SPLITS = {
    "qwen3": [rf"{CONTRACTIONS}|{WORD}\p{{L}}+|\p{{N}}{REST}"],
    "qwen3.5": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "llama3, glm4": [rf"{CONTRACTIONS}|{WORD}\p{{L}}+|\p{{N}}{{1,3}}{REST}"],
    "gpt-oss": [
        rf"{WORD}[{UPPER}]*[{LOWER}]+{CONTRACTIONS}?|{WORD}[{UPPER}]+[{LOWER}]*{CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
ALPHABET = "aZLsétſK中🙂ね'’9٣ \u00a0\u2003\n\r\t\v\x00\x1c\x85/_.,-{}[]()\":;<|>\\`~$"
TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from(ALPHABET))


def bytes_after(*steps: Any) -> Any:
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])


def split(*patterns: str) -> Any:
    return bytes_after(*(pre_tokenizers.Split(Regex(text), "isolated") for text in patterns))


def tokenizer_with(pre_tokenizer: Any) -> Any:
    """Qwen's vocabulary with another split. A model's merges say nothing about the split."""
    tokenizer = tokenizer_for(trl_template("qwen3"))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


PIPELINES = {name: split(*patterns) for name, patterns in SPLITS.items()}
PIPELINES["gpt2"] = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.fixture(scope="module", params=PIPELINES)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer_with(PIPELINES[request.param])


@given(text=TEXTS)
def test_a_text_has_the_tokenizers_ids(tokenizer: Any, text: str) -> None:
    encoder = Encoder(tokenizer)
    assert encoder.method == "pre-tokens"
    plain = tokenizer.encode(text, add_special_tokens=False)
    stop = encoder.control["<|im_end|>"]
    for previous in (None, stop):
        assert encoder.encode(text, previous=previous) == plain
    ascii_text = text.encode("ascii", "ignore").decode()
    assert encoder.encode(ascii_text) == tokenizer.encode(ascii_text, add_special_tokens=False)


def test_every_sequence_of_five_kinds_is_split_alike(tokenizer: Any) -> None:
    original = tokenizer.backend_tokenizer.pre_tokenizer
    chosen: Any = pretokens.ascii_split(b"{}", original.__getstate__())
    kinds = "aZs9 \n'./"
    texts = list(map("".join, product(kinds, repeat=5)))
    for start in range(0, len(texts), 1000):
        text = "".join(texts[start : start + 1000])
        spans = [span for _, span in original.pre_tokenize_str(text)]
        assert list(filter(None, chosen(text))) == [text[begin:end] for begin, end in spans]


SPACES = Regex(r"\s+")
OTHER = {
    "it removes white space": bytes_after(pre_tokenizers.Split(SPACES, "removed")),
    "it keeps what does not match": bytes_after(
        pre_tokenizers.Split(SPACES, "isolated", invert=True)
    ),
    "a text, not an expression": bytes_after(pre_tokenizers.Split("a.", "isolated")),
    "a space before each text": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "digits": bytes_after(pre_tokenizers.Digits()),
    "no bytes": pre_tokenizers.Split(SPACES, "isolated"),
    "a repeated count": split(r"\d|\p{N}{1,3}+"),
    "intersected classes": split(r"[\p{L}&&[^\p{Han}]]+|\s"),
    "the start of a line": split(r"^a+|\s"),
    "a group": split(r"(a)+|\s"),
    "hexadecimal digits": split(r"\h+|\s"),
    "a class in a class": split(r"then[a[b]]|[\s\S]"),
    "a text that looks like a count": split(r"thee{,}|[\s\S]"),
    "not greedy": split(r"x(?:the)??|[\s\S]"),
    "a repeated group": split(r"(?:the)+|[\s\S]"),
    "an empty match": split(r"(?:the)?"),
    "any lookahead": split(r"[a-z](?![a-z]*!)|!"),
    "a class without regard to case": split(r"then(?i:\p{Lu})|[\s\S]"),
    "a long s without regard to case": split("(?i:the\u017f)|[\\s\\S]"),
}


@pytest.mark.parametrize("name", OTHER)
def test_any_other_split_is_left_to_the_tokenizer(name: str) -> None:
    assert pretokens.ascii_split(b"{}", OTHER[name].__getstate__()) is None


def test_a_pre_token_is_not_split_again() -> None:
    tokenizer = tokenizer_with(split("[a-z]+[0-9]|[a-z]", "[0-9]"))
    encoder = Encoder(tokenizer)
    assert encoder.method == "pre-tokens"
    for text in ("the1", "the", "1 the2 the"):
        assert encoder.encode(text) == tokenizer.encode(text)


def test_a_normalizer_that_changes_text_is_left_to_the_tokenizer() -> None:
    state = PIPELINES["qwen3"].__getstate__()
    assert pretokens.ascii_split(normalizers.NFC().__getstate__(), state) is not None
    for other in (normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("x", "y")):
        assert pretokens.ascii_split(other.__getstate__(), state) is None


def test_text_with_added_words_has_the_tokenizers_ids() -> None:
    tokenizer = tokenizer_with(PIPELINES["qwen3"])
    tokenizer.add_tokens([AddedToken("customer_id"), AddedToken("zip", lstrip=True)])
    encoder: Any = Encoder(tokenizer, words=["customer_id", "zip"])
    for text in ("the customer_id is 1", "customer_i", "a  zip", "acustomer_idb", "none of them"):
        assert encoder.encode(text) == tokenizer.encode(text)
    assert " them" in encoder.pre_tokens._ids and " is" not in encoder.pre_tokens._ids


def test_a_word_normalized_to_ascii_has_the_tokenizers_ids() -> None:
    tokenizer = tokenizer_with(PIPELINES["qwen3"])
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("\u212aelvin_degrees")])  # it begins with the Kelvin sign
    encoder = Encoder(tokenizer, words=["\u212aelvin_degrees"])
    assert encoder.method == "pre-tokens"
    for text in ("a Kelvin_degrees", "\u212aelvin_degrees", "kelvin_degrees"):
        assert encoder.encode(text) == tokenizer.encode(text)


def test_random_merges_are_left_to_the_tokenizer() -> None:
    tokenizer = tokenizer_with(PIPELINES["qwen3"])
    tokenizer.backend_tokenizer.model.dropout = 0.1
    assert Encoder(tokenizer).method == "tokenizers"


@pytest.mark.parametrize("wrong", [("{1,3}", "{1,2}"), (r"\s+(?!\S)|", ""), ("'s|", "")])
def test_one_other_split_is_enough(wrong: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    state = PIPELINES["llama3, glm4"].__getstate__()
    translate = pretokens._for_re
    pretokens.ascii_split.cache_clear()
    assert pretokens.ascii_split(b"{}", state) is not None
    monkeypatch.setattr(pretokens, "_for_re", lambda source: translate(source).replace(*wrong))
    pretokens.ascii_split.cache_clear()
    assert pretokens.ascii_split(b"{}", state) is None
    pretokens.ascii_split.cache_clear()


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretokens, "_CACHED", 10)
    encoder: Any = Encoder(tokenizer_with(PIPELINES["qwen3"]))
    text = " ".join(f"w{number}" for number in range(100)) + "x" * 1000
    assert encoder.encode(text) == encoder.tokenizer.encode(text)
    assert 0 < len(encoder.pre_tokens._ids) <= 10
    assert max(map(len, encoder.pre_tokens._ids)) <= 64


def test_offsets_cost_little_although_characters_are_cut() -> None:
    counts = []
    for length in (1000, 4000):
        encoder = CountedEncoder(load_embedded_tokenizer())
        ids = (encoder.encode("One two 🙂 three. ") * length)[:length]
        text = encoder.decode(ids)
        encoder.decoded = 0
        offsets = encoder.offsets(ids, text)
        assert len(offsets) == length and offsets[-1][1] == len(text.rstrip("\ufffd"))
        counts.append(encoder.decoded)
    assert counts[1] < 5 * counts[0]
