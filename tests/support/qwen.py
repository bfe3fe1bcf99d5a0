"""Real tokenizers for tests, out of two pinned wheels and without a model hub.

The vocabulary is Qwen's (`qwen.tiktoken` in dashscope 1.24.6: the BPE of Qwen2, Qwen2.5 and Qwen3), the special tokens are
Qwen3's, and the chat templates are those that trl 1.16.0 ships. Invariants: neither wheel is imported (they are read as data);
each text that a template's model reads as one control token is one added token of the tokenizer made for it.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from support.cache import cached_folder
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

N_RANKS = 151_643
# Qwen3's added tokens in the order of their ids, which begin at N_RANKS; True: skipped by skip_special_tokens.
QWEN3_ADDED: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True), ("<|box_start|>", True), ("<|box_end|>", True), ("<|quad_start|>", True),
    ("<|quad_end|>", True), ("<|vision_start|>", True), ("<|vision_end|>", True), ("<|vision_pad|>", True),
    ("<|image_pad|>", True), ("<|video_pad|>", True), ("<tool_call>", False), ("</tool_call>", False),
    ("<|fim_prefix|>", False), ("<|fim_middle|>", False), ("<|fim_suffix|>", False), ("<|fim_pad|>", False),
    ("<|repo_name|>", False), ("<|file_sep|>", False), ("<tool_response>", False), ("</tool_response>", False),
    ("<think>", False), ("</think>", False),
)  # fmt: skip
_QWEN3_TEXTS = frozenset(text for text, _ in QWEN3_ADDED)
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Control tokens with bars: <|x|>, DeepSeek's full-width ones, and Gemma's pairs <|x> and <x|>.
_BARRED = re.compile(r"<\|[A-Za-z0-9_\"]+\|>|<｜[^｜\s]+｜>|<\|[a-z_]+>|<[a-z_]+\|>")
# Control tokens in other shapes. Tags that are not here (<tools>, <function=, <parameter>, <IMPORTANT>) are ordinary text.
_OTHER_SHAPES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",  # Qwen, GLM, Nemotron
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[gMASK]", "<sop>",  # GLM
    "<start_of_turn>", "<end_of_turn>", "<start_of_image>",  # Gemma 3
    "]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>",  # MiniMax
    "<end_of_utterance>", "<image>",  # Idefics, SmolVLM, LFM2-VL
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]", "</s>",  # Mistral
)  # fmt: skip
# A marker that only this family has -> its model's end of turn and beginning of text. The first that fits decides.
_FAMILIES: tuple[tuple[str, str, str | None], ...] = (
    ("[gMASK]", "<|endoftext|>", None),  # GLM ends a turn with the next role marker
    ("<|return|>", "<|return|>", "<|startoftext|>"),  # gpt-oss
    ("[e~[", "[e~[", None),  # MiniMax
    ("<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),  # DeepSeek
    ("<|eot_id|>", "<|eot_id|>", "<|begin_of_text|>"),  # Llama 3
    ("<|eot|>", "<|eot|>", "<|begin_of_text|>"),  # Muse
    ("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),  # Command
    ("<turn|>", "<turn|>", "<bos>"),  # Gemma 4
    ("<end_of_turn>", "<end_of_turn>", "<bos>"),  # Gemma 3
    ("<end_of_utterance>", "<end_of_utterance>", "<|im_start|>"),  # Idefics, SmolVLM
    ("<|end|>", "<|end|>", None),  # Phi
    ("[INST]", "</s>", "<s>"),  # Mistral, Llama 2
    ("<|im_start|>", "<|im_end|>", "<|startoftext|>"),  # Qwen, LFM2, Nemotron
    ("<|im_end|>", "<|im_end|>", None),  # Kimi
)


# --- where the data lie --------------------------------------------------------------------------------------------------


def wheel_folder(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the wheel {name} is not installed: pip install --no-deps -r tests/requirements-data.txt")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def trl_templates() -> dict[str, str]:
    """Name -> source of each chat template in the trl wheel, the patched `*_training` ones included."""
    paths = sorted((wheel_folder("trl") / "chat_templates").glob("*.jinja"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def trl_template(name: str) -> str:
    """The source of one chat template of the trl wheel, `qwen3` say."""
    found = trl_templates()
    if name not in found:
        raise KeyError(f"trl {importlib.metadata.version('trl')} has no template {name!r}; it has {', '.join(found)}")
    return found[name]


def extra_templates() -> dict[str, str]:
    """Name -> source of the chat templates in `TOOLROLL_TEST_DATA/templates`; none where the variable is not set."""
    folder = os.environ.get("TOOLROLL_TEST_DATA")
    paths = sorted((Path(folder) / "templates").glob("*.jinja")) if folder else []
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def all_templates() -> dict[str, str]:
    """trl's templates and the extra ones whose text differs from all of trl's, those named `data/NAME`."""
    found = dict(trl_templates())
    known = set(found.values())
    return found | {f"data/{name}": source for name, source in extra_templates().items() if source not in known}


# --- tokenizers ----------------------------------------------------------------------------------------------------------


def qwen3_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Qwen3's tokenizer with `template` (default: trl's `qwen3`) as its chat template."""
    return _wrapped(_base(added=True), "<|im_end|>", None, trl_template("qwen3") if template is None else template)


def markers(source: str) -> list[str]:
    """The control tokens that stand in a chat template's source, sorted."""
    return sorted({*_BARRED.findall(source), *(text for text in _OTHER_SHAPES if text in source)})


def tokenizer_for(source: str) -> PreTrainedTokenizerFast:
    """Qwen's BPE with the control tokens of the template `source` added, and `source` as its chat template.

    Qwen3's own added tokens, with their own ids, for a template that has no others; else the template's and its family's.
    """
    found = markers(source)
    end, begin = next(((end, begin) for mark, end, begin in _FAMILIES if mark in found), ("<|endoftext|>", None))
    if set(found) <= _QWEN3_TEXTS and "bos_token" not in source:
        return qwen3_tokenizer(source)
    if "<|im_start|>" in found and "bos_token" not in source:
        begin = None
    backend = _base(added=False)
    texts = [*found, end, "<|endoftext|>", *([begin] if begin else [])]
    backend.add_special_tokens([_added(text, special=True) for text in dict.fromkeys(texts)])
    return _wrapped(backend, end, begin, source)


def save_qwen3(folder: Path, template: str | None = None) -> None:
    """Write Qwen3's tokenizer so that `AutoTokenizer` and SGLang read it from `folder`."""
    qwen3_tokenizer(template).save_pretrained(folder)


def _wrapped(backend: Tokenizer, end: str, begin: str | None, template: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        bos_token=begin,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=131_072,
    )
    tokenizer.chat_template = template
    return tokenizer


def _added(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False, lstrip=False, rstrip=False, single_word=False)


def _base(*, added: bool) -> Tokenizer:
    name = "qwen3.json" if added else "bare.json"
    return Tokenizer.from_file(str(_built() / name))


@cache
def _built() -> Path:
    """The folder with Qwen's BPE as `bare.json` and, with Qwen3's added tokens, as `qwen3.json`."""
    ranks = (wheel_folder("dashscope") / "resources" / "qwen.tiktoken").read_bytes()
    key = (ranks, Path(__file__).read_bytes(), importlib.metadata.version("tokenizers"))
    return cached_folder("qwen", key, lambda folder: _build(ranks, folder))


def _build(data: bytes, folder: Path) -> None:
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in data.splitlines() if line.strip())}
    if sorted(ranks.values()) != list(range(N_RANKS)):
        raise RuntimeError(f"qwen.tiktoken holds {len(ranks)} ranks, not {N_RANKS}: is this dashscope 1.24.6?")
    backend = Tokenizer(_bpe(ranks))
    backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SPLIT), "isolated"), byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "bare.json"))
    for text, special in QWEN3_ADDED:
        token = _added(text, special=special)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
    backend.save(str(folder / "qwen3.json"))


def _bpe(ranks: dict[bytes, int]) -> models.BPE:
    """The BPE with these ranks: each token of two bytes or more is the merge of two, found by merging with lower ranks only."""
    letters = _byte_letters()
    spell = lambda token: "".join(letters[byte] for byte in token)
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = _merged(ranks, token, rank)
        if len(parts) != 2:
            raise RuntimeError(f"no two tokens merge into token {rank}: the ranks are no BPE's")
        merges.append((spell(parts[0]), spell(parts[1])))
    return models.BPE(vocab={spell(token): rank for token, rank in ranks.items()}, merges=merges)


def _merged(ranks: dict[bytes, int], token: bytes, limit: int) -> list[bytes]:
    """`token` as BPE leaves it when only ranks below `limit` may merge."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        pairs = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, at = min(pairs, default=(limit, 0))
        if rank >= limit:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it is printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
