"""The language model without its engine: folders and sampling. `test_model_engine.py` tests the
forward pass, and `tests/contract/test_language_model.py` compares it with transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_llama import CONFIG, tiny_tensors, write_model

from toolroll.testing.language_model import LanguageModel, ModelFolderError
from toolroll.testing.language_model.sampling import Sampling, sample, top_logprobs

# --- folders --------------------------------------------------------------------------------------


def test_the_old_field_of_rope_and_the_stops_are_read(tmp_path: Path) -> None:
    """The stops of the generation's configuration come first."""
    folder = write_model(tmp_path, rope_theta=500.0, rope_parameters=None)
    model = LanguageModel.from_folder(folder)
    config = model.config
    assert (config.rope_theta, config.head_dim, config.eos_token_ids) == (500.0, 16, (4089,))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 4089]}')
    assert model.updated(tmp_path).config.eos_token_ids == (7, 4089)  # still the same network


REFUSED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"architectures": ["Qwen2ForCausalLM"]},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "hidden_act": {"hidden_act": "gelu"},
    "quantization_config": {"quantization_config": {"bits": 4}},
    "rope_type": {"rope_parameters": {"rope_theta": 1.0, "rope_type": "llama3"}},
    "rope_type.*linear": {"rope_scaling": {"type": "linear", "factor": 2}},
    "partial_rotary_factor": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "not a model's configuration": {"hidden_size": "wide"},
    "by zero": {"num_attention_heads": 0},
    "4 heads, 3 key heads": {"num_key_value_heads": 3},
    "head_dim 15": {"head_dim": 15},
}


@pytest.mark.parametrize(("named", "changes"), REFUSED.items(), ids=list(REFUSED))
def test_what_is_not_supported_is_refused(tmp_path: Path, named: str, changes: Any) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=named):
        LanguageModel.from_folder(tmp_path)


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    steps: list[tuple[str, bytes, str]] = [
        ("other", b"", r"config.json cannot be read"),
        ("config.json", json.dumps(CONFIG).encode(), r"there is no .*model.safetensors"),
        ("model.safetensors", b"no tensors", r"model.safetensors cannot be read"),
        ("config.json", b"{}", "LlamaForCausalLM"),
        ("config.json", b'{"model_type": "llama"}', "has no 'num_attention_heads'"),
    ]
    for name, data, words in steps:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelFolderError, match=words):
            LanguageModel.from_folder(tmp_path)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    norm, bias = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
    whole = tiny_tensors()
    without = {name: value for name, value in whole.items() if name != norm}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (without, {}, r"has no tensor model.norm.weight"),
        ({**whole, norm: whole[norm][:-1]}, {}, r"model.norm.weight has the shape \(63,\)"),
        ({**whole, bias: whole[norm]}, {}, r"not supported: .*q_proj.bias"),
        (whole, {"tie_word_embeddings": False}, r"has no tensor lm_head.weight"),
    ]
    for tensors, changes, words in cases:
        with pytest.raises(ModelFolderError, match=words):
            LanguageModel.from_folder(write_model(tmp_path, tensors=tensors, **changes))
    unused = {"lm_head.weight": whole["model.embed_tokens.weight"]}  # of a head that is tied
    LanguageModel.from_folder(write_model(tmp_path, tensors=whole | unused))


# --- sampling -------------------------------------------------------------------------------------

LOGITS = np.log(np.array([[0.02, 0.5, 0.08, 0.3, 0.1]], np.float32))


def drawn(sampling: dict[str, Any], rows: int = 400) -> list[int]:
    read = Sampling.read(sampling, "seed")
    ids, _ = sample(np.repeat(LOGITS, rows, axis=0), [read] * rows, range(rows))
    return list(ids)


@pytest.mark.parametrize(
    ("params", "inside"),
    [
        ({"top_k": 1, "temperature": 5}, {1}),
        ({"temperature": 0}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.75}, {1, 3}),
        ({"top_p": 0.85}, {1, 3, 4}),
        ({"top_p": 0.85, "top_k": 2}, {1, 3}),
        ({"top_p": 0.85, "temperature": 100}, {1, 2, 3, 4, 0}),
        ({"top_p": 1.0, "top_k": -1}, {0, 1, 2, 3, 4}),
    ],
)
def test_nothing_is_sampled_outside_top_k_and_top_p(params: Any, inside: set[int]) -> None:
    assert set(drawn(params)) == inside


def test_ids_are_sampled_as_often_as_their_probability_says() -> None:
    counts = np.bincount(drawn({}, 20_000), minlength=5) / 20_000
    np.testing.assert_allclose(counts, np.exp(LOGITS[0]), atol=0.015)
    hot = np.bincount(drawn({"temperature": 2.0}, 20_000), minlength=5) / 20_000
    flat = np.sqrt(np.exp(LOGITS[0]))
    np.testing.assert_allclose(hot, flat / flat.sum(), atol=0.015)


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        ({}, 1.0),
        ({"temperature": 0.5}, 0.5),
        ({"temperature": 2.0, "top_k": 2, "top_p": 0.5}, 2.0),
        ({"temperature": 0}, 1.0),
        ({"temperature": 1e-7}, 1.0),
        ({"temperature": 3.0, "top_k": 1}, 1.0),
    ],
)
def test_logprobs_are_those_before_filters(params: Any, temperature: float) -> None:
    """And of the temperature. As in SGLang, whose greedy sampling has those of temperature 1."""
    _, logprobs = sample(LOGITS, [Sampling.read(params, "seed")], [0])
    scaled = np.exp(LOGITS[0].astype(np.float64)) ** (1 / temperature)
    np.testing.assert_allclose(logprobs[0], np.log(scaled / scaled.sum()), atol=1e-6)


def test_seed_and_position_determine_a_sample() -> None:
    rows = np.zeros((1, 4000), np.float32)

    def one(params: dict[str, Any], position: int) -> int:
        return int(sample(rows, [Sampling.read(params, "default")], [position])[0][0])

    assert one({}, 3) == one({}, 3)
    assert one({"sampling_seed": 7}, 3) == one({"sampling_seed": 7}, 3)
    assert len({one({"sampling_seed": seed}, 3) for seed in range(9)} | {one({}, 3)}) == 10
    assert len({one({}, position) for position in range(9)}) == 9


def test_the_top_logprobs_are_sorted() -> None:
    found = top_logprobs(LOGITS[0], 3)
    assert [index for _, index in found] == [1, 3, 4]
    assert found[0][0] == pytest.approx(np.log(0.5))
    assert top_logprobs(LOGITS[0], 0) == []
    assert len(top_logprobs(LOGITS[0], 9)) == 5
