"""The names of SGLang's sampling parameters. `tests/contract/test_standins.py` compares them
with the installed SGLang, so the embedded engine, which is a test double, may use them too.
"""

from __future__ import annotations

SGLANG_NAMES = tuple(
    (
        "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p "
        "frequency_penalty presence_penalty repetition_penalty min_new_tokens n json_schema regex "
        "ebnf structural_tag ignore_eos skip_special_tokens spaces_between_special_tokens "
        "no_stop_trim stream_interval logit_bias sampling_seed custom_params beam_width watermark "
        "choice"
    ).split()
)
"""The names that SGLang 0.5.23 lists in its error message for an unknown name, in its order."""

TEXTS = frozenset("stop stop_regex regex ebnf json_schema structural_tag lora_path".split())
"""The sampling parameters that may be text. (SGLang reads `lora_path` beside them.)"""
