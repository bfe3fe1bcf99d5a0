"""Small tokenizers of all kinds, trained at run time, with the correct results for each.

Imports nothing of toolroll. The truth is the tokenizer's own encoding of the whole render: the ids
of a delta are its last ones, after the end of the sampled turn.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

from support.adversarial import dialogues
from support.adversarial.dialogues import Messages, Tools
from support.adversarial.texts import Inapplicable
from support.adversarial.token_judge import Judge, Said
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
)
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = [
    *dialogues.RESULTS, *dialogues.USERS, *dialogues.SAID, *dialogues.THOUGHTS,
    *dialogues.CITIES, *dialogues.NAMES,
    "user\n", "assistant\n", "tool\n", "system\n", "<tool_response>", '{"name": "',
    '", "arguments": {"city": ',
    "[INST] ", " [/INST]", "<<SYS>>\n", "Plan my trip to Paris.", str(dialogues.TOOLS[0]),
]  # fmt: skip
_TRIPLES = zip(_WORDS, _WORDS[1:], _WORDS[2:], strict=False)
_TEXTS = [*_WORDS, *(f"{a}\n{b} {c}" for a, b, c in _TRIPLES)]


# --- kinds ---------------------------------------------------------------------------------------


def _trained_on_texts(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    made = Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.train_from_iterator(_TEXTS, trainer)
    return made


def _byte_level(split: Any = None, **parts: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    parts["pre_tokenizer"] = split or pre.ByteLevel(add_prefix_space=False)
    return _trained_on_texts(models.BPE(), trainer, decoder=decoders.ByteLevel(), **parts)


def _byte_fallback(**parts: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", *_BYTES], show_progress=False, max_token_length=12
    )
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return _trained_on_texts(model, trainer, **parts)


def _metaspace(scheme: Any) -> Tokenizer:
    pieces = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    split = pre.Metaspace(prepend_scheme=scheme)
    return _byte_fallback(pre_tokenizer=split, decoder=decoders.Sequence(pieces))


def _unigram(scheme: Any, **parts: Any) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=500, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    parts["pre_tokenizer"] = pre.Metaspace(prepend_scheme=scheme)
    parts["decoder"] = decoders.Metaspace(prepend_scheme=scheme)
    return _trained_on_texts(models.Unigram(), trainer, **parts)


def _legacy() -> Tokenizer:
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    back = [*_BACK, decoders.Strip(" ", 1, 0)]
    return _byte_fallback(normalizer=normalizers.Sequence(steps), decoder=decoders.Sequence(back))


def _replaced() -> Tokenizer:
    normalizer = normalizers.Replace(" ", "▁")
    return _byte_fallback(normalizer=normalizer, decoder=decoders.Sequence(_BACK))


def _word_piece(*, lowercase: bool) -> Tokenizer:
    trainer = trainers.WordPieceTrainer(
        vocab_size=700, special_tokens=["[UNK]"], show_progress=False
    )
    return _trained_on_texts(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(lowercase=lowercase),
        pre_tokenizer=pre.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )


_BACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_NO_REGEX = pre.ByteLevel(add_prefix_space=False, use_regex=False)
_SPLITTING = pre.Sequence([pre.Split(Regex(_SPLIT), "isolated"), _NO_REGEX])
_MAKERS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "byte_level_prefix_space": partial(_byte_level, pre.ByteLevel(add_prefix_space=True)),
    "byte_level_no_regex": partial(_byte_level, _NO_REGEX),
    "byte_level_split": partial(_byte_level, _SPLITTING),
    "byte_level_nfc": partial(_byte_level, normalizer=normalizers.NFC()),
    "byte_level_nfkc": partial(_byte_level, normalizer=normalizers.NFKC()),
    "byte_level_lowercase": partial(_byte_level, normalizer=normalizers.Lowercase()),
    "metaspace_first": partial(_metaspace, "first"),
    "metaspace_always": partial(_metaspace, "always"),
    "metaspace_never": partial(_metaspace, "never"),
    "unigram_first": partial(_unigram, "first"),
    "unigram_always": partial(_unigram, "always"),
    "unigram_nfkc": partial(_unigram, "first", normalizer=normalizers.NFKC()),
    "legacy_prepend": _legacy,
    "replace_only": _replaced,
    "word_piece": partial(_word_piece, lowercase=False),
    "word_piece_lowercase": partial(_word_piece, lowercase=True),
}
KINDS: Mapping[str, tuple[Callable[[], Tokenizer], dict[str, bool]]] = {
    **{name: (make, {}) for name, make in _MAKERS.items()},
    "special_lstrip": (_byte_level, {"lstrip": True}),
    "special_rstrip": (_byte_level, {"rstrip": True}),
    "special_both_strip": (_byte_level, {"lstrip": True, "rstrip": True}),
    "special_single_word": (_byte_level, {"single_word": True}),
    "special_normalized": (_MAKERS["byte_level_lowercase"], {"normalized": True}),
    "metaspace_first_rstrip": (_MAKERS["metaspace_first"], {"rstrip": True}),
}
"""Name: what makes the tokenizer, and the flags of its control tokens."""

EXACT = ("byte_level", "byte_level_no_regex", "byte_level_split", "byte_level_nfc", "replace_only")
"""Kinds of published models that must not be refused."""


@cache
def _trained(kind: str) -> str:
    return str(KINDS[kind][0]().to_str())


def tokenizer_of_kind(kind: str, control: Iterable[str], eos: str) -> Any:
    """A tokenizer of `kind` with `control` tokens, in the form that models have it."""
    backend = Tokenizer.from_str(_trained(kind))
    flags = {"normalized": False, **KINDS[kind][1]}
    backend.add_special_tokens([AddedToken(text, special=True, **flags) for text in control])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=None)


# --- truth ---------------------------------------------------------------------------------------


class Canon:
    """The tokenizer's own encodings of whole texts."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.backend: Tokenizer = judge.tokenizer.backend_tokenizer
        self.marks = set(judge.control.values())

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def behind(self, text: str, at: int, *, cut: bool) -> list[int]:
        """The last ids of `text`, from the character `at` on. Raises `Inapplicable` if a token of
        text lies across it. A control token across it has swallowed white space: it belongs to the
        turn that it ends, or to the delta if the turn was `cut`."""
        made = self.backend.encode(text, add_special_tokens=False)
        if cut and self.judge.pattern.match(text, at) and not self._marked(made, at):
            raise Inapplicable("the tokenizer takes no marker for a token beside a word")
        first = next((n for n, (a, _) in enumerate(made.offsets) if a >= at), len(made.ids))
        if first and made.offsets[first - 1][1] > at:
            if made.ids[first - 1] not in self.marks:
                raise Inapplicable("a token of text lies across the end of the turn")
            first -= cut
        return list(made.ids[first:])

    def _marked(self, made: Any, at: int) -> bool:
        pairs = zip(made.ids, made.offsets, strict=True)
        return any(index in self.marks and a <= at < b for index, (a, b) in pairs)

    def sampled(self, prompt: str, said: Said) -> list[int]:
        """The ids of a turn as its model would choose them behind the prompt."""
        if not said.stop:
            return self._sampled(prompt, said.text)
        stop = self.judge.control[said.stop]
        return [*self._sampled(prompt, said.text.removesuffix(said.stop)), stop]

    def _sampled(self, prompt: str, text: str) -> list[int]:
        try:
            return self.behind(prompt + text, len(prompt), cut=False)
        except Inapplicable:
            anchor = next(iter(self.judge.control))
            return self.encode(anchor + text)[1:]

    def delta(self, before: Messages, said: Said, new: Messages, tools: Tools) -> list[int]:
        """The ids to append. Raises `Inapplicable` if the turn reads otherwise now."""
        served = self.judge.text(before, tools, generate=True)
        full = self.judge.text([*before, said.turn, *new], tools, generate=True)
        if not full.startswith(served + said.text):
            raise Inapplicable("the turn reads otherwise in history")
        at = len(served) + len(said.text)
        return self.behind(full, at, cut=not said.stop)
