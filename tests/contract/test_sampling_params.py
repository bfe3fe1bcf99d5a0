"""The library's list of sampling parameters against the installed SGLang's own class."""

from __future__ import annotations

import ast

from support.trainer_source import definition

from toolroll.rollout.runtime.sglang_names import SGLANG_NAMES

INTERNAL = set(
    "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized "
    "ebnf_full_assistant".split()
)
"""The fields that SGLang fills itself."""
OF_THE_FRONT_END = {"choice"}  # the server's, in Rust: `test_sglang_facts` compares its whole list


def test_the_list_is_that_of_sglang_s_class() -> None:
    node = definition("sglang/srt/sampling/sampling_params.py", "SamplingParams")
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert fields - INTERNAL == set(SGLANG_NAMES) - OF_THE_FRONT_END
