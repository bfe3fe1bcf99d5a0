r"""Real tokenizers and chat templates for tests, out of two pinned wheels and without a model hub.

The BPE is Qwen's (`qwen.tiktoken` in dashscope 2.0.2: that of Qwen2, Qwen2.5 and Qwen3), the
special tokens are Qwen3's, and the chat templates are those that trl 1.16.0 ships. `tokenizer_for`
takes the first 4,096 of the 151,643 ranks unless it is asked for all of them. These are a complete
BPE, with Qwen's own merges across the edges of message bodies (`}\n`, `\n\n`), and a tokenizer is
made of them in milliseconds, not in a second.

Invariants: neither wheel is imported (they are read as data), nor anything of toolroll; each text
that a template's model reads as one control token is one added token of the tokenizer made for it.
"""

import base64
import importlib.metadata
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from support.cache import cached_folder
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

N_RANKS = 151_643
FEW_RANKS = 4_096
# Qwen3's added tokens in the order of their ids, which begin at N_RANKS; True: skipped by
# skip_special_tokens.
_SKIPPED = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> "
    "<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> "
    "<|image_pad|> <|video_pad|>"
)
_SHOWN = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> "
    "<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>"
)
QWEN3_ADDED: tuple[tuple[str, bool], ...] = (
    *((text, True) for text in _SKIPPED.split()),
    *((text, False) for text in _SHOWN.split()),
)
_QWEN3_TEXTS = frozenset(text for text, _ in QWEN3_ADDED)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Control tokens with bars: <|x|>, DeepSeek's full-width ones, and Gemma's pairs <|x> and <x|>;
# MiniMax's, Seed's, Nemotron's.
_BARRED = re.compile(
    r"<\|[^|<>'\"\s{}]+\|>|<\|\"\|>|<｜[^｜\s]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\]~!?b\[|\]~b\]|\[e~\["
    r"|</?seed:[a-z_]+>|<SPECIAL_\d+>|<(?:beginning|end)_of_sentence>|<sep>"
)
# Control tokens in other shapes. Tags that are not here (<tools>, <function=, <parameter>,
# <IMPORTANT>) are ordinary text.
_OTHER_SHAPES = (
    # Qwen, GLM, Nemotron
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[gMASK]", "<sop>",  # GLM
    "<start_of_turn>", "<end_of_turn>", "<start_of_image>",  # Gemma 3
    "<minimax:tool_call>", "</minimax:tool_call>",  # MiniMax
    "<end_of_utterance>", "<image>",  # Idefics, SmolVLM, LFM2-VL
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    # Mistral
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]", "</s>",
)  # fmt: skip
# A marker that only this family has -> its model's end of turn and beginning of text. The first
# that fits decides.
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
    ("<|end_of_text|>", "<|end_of_text|>", None),  # Granite
    ("<SPECIAL_12>", "<SPECIAL_12>", None),  # Nemotron
    ("<end_of_sentence>", "<end_of_sentence>", None),
    ("<seed:eos>", "<seed:eos>", "<seed:bos>"),  # Seed
)


# --- where the data lie ---------------------------------------------------------------------------


def wheel_folder(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        needed = "pip install --no-deps -r tests/requirements-data.txt"
        raise RuntimeError(f"the wheel {name} is not installed: {needed}")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def trl_templates() -> dict[str, str]:
    """Name -> source of each chat template in the trl wheel, with the `*_training` ones."""
    paths = sorted((wheel_folder("trl") / "chat_templates").glob("*.jinja"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def trl_template(name: str) -> str:
    found = trl_templates()
    if name not in found:
        version = importlib.metadata.version("trl")
        raise KeyError(f"trl {version} has no template {name!r}; it has {', '.join(found)}")
    return found[name]


def extra_templates(variable: str = "TOOLROLL_TEST_DATA", sub: str = "templates") -> dict[str, str]:
    """Name -> source of the chat templates in the folder that `variable` names, if any."""
    folder = os.environ.get(variable)
    paths = sorted((Path(folder) / sub).glob("*.jinja")) if folder else []
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


@cache
def all_templates() -> dict[str, str]:
    """trl's templates, and those of `TOOLROLL_TEST_DATA` and `TOOLROLL_EXTRA_TEMPLATES` whose text
    is another one, as `data/NAME` and `extra/NAME`."""
    found = dict(trl_templates())
    extra = extra_templates("TOOLROLL_EXTRA_TEMPLATES", "")
    for prefix, more in (("data", extra_templates()), ("extra", extra)):
        known = set(found.values())
        new = {name: source for name, source in more.items() if source not in known}
        found |= {f"{prefix}/{name}": source for name, source in new.items()}
    return found


def tool_templates() -> dict[str, str]:
    return {name: source for name, source in all_templates().items() if "tool" in source}


# --- tokenizers -----------------------------------------------------------------------------------


@cache
def qwen3_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Qwen3's real tokenizer with a chat template (default: trl's `qwen3`); do not change it."""
    return tokenizer_for(trl_template("qwen3") if template is None else template, ranks=N_RANKS)


def markers(source: str) -> list[str]:
    """The control tokens that stand in a chat template's source, sorted."""
    return sorted({*_BARRED.findall(source), *(text for text in _OTHER_SHAPES if text in source)})


def tokenizer_for(
    source: str, extra: Sequence[str] = (), *, ranks: int = FEW_RANKS
) -> PreTrainedTokenizerFast:
    """A new tokenizer: Qwen's BPE of so many ranks with the control tokens of the template `source`
    (and `extra`) added, and `source` as its chat template.

    Qwen3's own added tokens for a template that has no others (with all ranks, these have their own
    ids); else the template's and its family's.
    """
    found = markers(source)
    end, begin = next(
        ((end, begin) for mark, end, begin in _FAMILIES if mark in found), ("<|endoftext|>", None)
    )
    if set(found) <= _QWEN3_TEXTS and "bos_token" not in source and not extra:
        end, begin, added = "<|im_end|>", None, QWEN3_ADDED
    else:
        if "<|im_start|>" in found and "bos_token" not in source:
            begin = None
        texts = [*found, end, "<|endoftext|>", *([begin] if begin else []), *extra]
        added = tuple((text, True) for text in dict.fromkeys(texts))
    backend = Tokenizer.from_str(_in_json(ranks))
    for text, special in added:  # in the order of their ids
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(text, special=special, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        bos_token=begin,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=131_072,
    )
    tokenizer.chat_template = source
    return tokenizer


def save_qwen3(folder: Path, template: str) -> None:
    """Write Qwen3's tokenizer so that `AutoTokenizer` and SGLang read it from `folder`."""
    qwen3_tokenizer(template).save_pretrained(folder)


@cache
def _in_json(ranks: int) -> str:
    data = (wheel_folder("dashscope") / "resources" / "qwen.tiktoken").read_bytes()
    if ranks < N_RANKS:
        return _built(data, ranks).to_str()
    key = (data, Path(__file__).read_bytes(), importlib.metadata.version("tokenizers"))
    folder = cached_folder(
        "qwen", key, lambda folder: _built(data, ranks).save(str(folder / "bare.json"))
    )
    return (folder / "bare.json").read_text(encoding="utf-8")


def _built(data: bytes, count: int) -> Tokenizer:
    lines = [line.split() for line in data.splitlines()[:count]]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    if sorted(ranks.values()) != list(range(count)):
        raise RuntimeError(
            f"qwen.tiktoken does not hold the ranks 0 to {count - 1}: is this dashscope 2.0.2?"
        )
    backend = Tokenizer(_bpe(ranks))
    backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), byte_level]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _bpe(ranks: dict[bytes, int]) -> models.BPE:
    """The BPE with these ranks: each token is the merge of two tokens of lower ranks."""
    letters = bytes_to_unicode()
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
