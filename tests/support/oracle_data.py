"""The templates and the vocabulary that the conformance suite judges with.

Invariants: nothing of toolroll is imported; templates come from the pinned `trl` wheel, from `TOOLROLL_TEST_DATA/templates` and
from the folder in `TOOLROLL_EXTRA_TEMPLATES` (templates nobody has tuned for); the vocabulary is the Qwen BPE of the pinned
`dashscope` wheel, with each template's own markers as added tokens.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKER = re.compile(
    r"<\|[^|<>'\"\s{}]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|<｜[^｜]+｜>|\]~!?b\[|\]~b\]|\[e~\[|\[/?INST\]"
    r"|</?seed:[a-z_]+>|<SPECIAL_\d+>|<(?:beginning|end)_of_sentence>|<sep>"
)
# Tags without bars that are tokens of the models which use them; others (<function=...>, <parameter>) are ordinary text.
_TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<start_of_turn>", "<end_of_turn>", "<end_of_utterance>", "[gMASK]", "<sop>", "</s>",
    "<minimax:tool_call>", "</minimax:tool_call>",
)  # fmt: skip
# How a turn may end, the model's eos first: which one a template uses is read off its text.
_EOS = (
    "<|im_end|>", "<|return|>", "<turn|>", "<|eot|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>", "[e~[", "<end_of_turn>",
    "<|end_of_text|>", "<|end|>", "<SPECIAL_12>", "<end_of_sentence>", "<sep>", "<seed:eos>",
)  # fmt: skip
_BOS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "<|startoftext|>")


def package_folder(name: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the test data needs the wheel {name!r}: pip install --no-deps trl==1.16.0 dashscope==1.24.6")
    return Path(next(iter(spec.submodule_search_locations)))


def template_paths() -> dict[str, Path]:
    """Name -> file of every template under test; a name in a later folder that holds another text gets the folder's prefix."""
    wheel = package_folder("trl") / "chat_templates"
    found = {path.stem: path for path in sorted(wheel.glob("*.jinja")) if "tool" in path.read_text(encoding="utf-8")}
    for variable, sub, prefix in (("TOOLROLL_TEST_DATA", "templates", "data"), ("TOOLROLL_EXTRA_TEMPLATES", "", "extra")):
        folder = os.environ.get(variable)
        if not folder:
            continue
        known = {path.read_bytes() for path in found.values()}
        for path in sorted((Path(folder) / sub).glob("*.jinja")):
            if path.read_bytes() not in known:
                found[f"{prefix}/{path.stem}"] = path
    return found


def markers(source: str) -> list[str]:
    """The control tokens of a template: what stands in its text in the shape of one."""
    tags = [tag for tag in _TAGS if tag in source]
    return sorted({*_MARKER.findall(source), *tags, "<|endoftext|>"})


def tokenizer_for(source: str, extra: Sequence[str] = ()) -> Any:
    """The Qwen BPE with the template's own markers (and `extra`) as control tokens, and the template itself."""
    backend = Tokenizer(base_model())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    control = markers(source)
    eos = next((text for text in _EOS if text in control), "<｜end▁of▁sentence｜>" if "<｜" in source else "<|im_end|>")
    if "[gMASK]" in control:  # GLM names its end of text and stops at the next role marker
        eos = "<|endoftext|>"
    bos = "<bos>" if "<turn|>" in control else "<｜begin▁of▁sentence｜>" if "<｜" in source else "<|begin_of_text|>"
    backend.add_special_tokens(sorted({*control, eos, bos, *extra}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = source
    return tokenizer


@cache
def base_model() -> BPE:
    """The BPE of Qwen out of the ranks in the dashscope wheel: byte-level vocabulary and merges."""
    ranks: dict[bytes, int] = {}
    text = (package_folder("dashscope") / "resources" / "qwen.tiktoken").read_text(encoding="ascii")
    for line in text.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    letters = _byte_letters()
    spell = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            left, right = _last_merge(ranks, token, rank)
            merges.append((spell[left], spell[right]))
    return BPE({spell[token]: rank for token, rank in ranks.items()}, merges)


def _last_merge(ranks: dict[bytes, int], token: bytes, rank: int) -> tuple[bytes, bytes]:
    """The two parts whose merge makes `token`: merge as BPE does with all ranks below its own."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, at = min((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1))
        if best >= rank:
            raise ValueError(f"the vocabulary has no merge for token {rank}")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(256 + index) for index, byte in enumerate(others)}
