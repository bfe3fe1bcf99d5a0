"""Agreement of our deltas with `renderers` 0.1.12 (`bridge_to_next_turn`) on the families that it
codes by hand.

Where an append exists and the two disagree, ours must be the oracle's, and the disagreement must be
of a kind in `EXPLAINED`. Skipped where the package is not installed.
"""

from typing import Any

import pytest
from support.oracle import Inapplicable, Oracle
from support.oracle_scenarios import scenarios
from support.qwen import tokenizer_for, tool_templates

from toolroll.rollout.template import ChatTemplate

pytestmark = pytest.mark.tokens

pytest.importorskip("renderers", reason="the peer `renderers` is not installed")

EXTRA = ("<think>", "</think>", "<|end_of_text|>", "<|eom_id|>", "<eos>", "<|endoftext|>")
FAMILIES = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_8": "qwen3.8",
    "glm4moe": "glm-4.5",
    "deepseekv3": "deepseek-v3",
    "llama3_2": "llama-3",
    "nemotron_3_nano": "nemotron-3",
    "qwen3_vl": "qwen3-vl",
    "data/kimi_k2_5": "kimi-k2.5",
    "data/minimax_m2_5": "minimax-m2",
}
TEMPLATES = tool_templates()
EDGES = "tool_blank tool_edged parts_tool user_edged user_empty inject_ tool_newline_end tool_empty"
# Kind of disagreement -> the scenarios it may occur in (a prefix of their names):
# - none: by default, `renderers` renders again when a user message follows
# - control: it encodes messages with control tokens enabled
# - edges: it encodes a message separately from the template's text next to it
# - parts: it joins the text parts of a tool result
# - system: the template drops a later system message
# - thought: it closes truncated reasoning in another form than the template
# - generation prompt: it leaves out the `<think>` that the template opens
EXPLAINED = {
    "none": ("",),
    "control": ("inject_",),
    "edges": tuple(EDGES.split()),
    "parts": ("parts_",),
    "system": ("system_",),
    "thought": ("cut_thought",),
    "generation prompt": ("user_after_cycle", "think_user_after_cycle", "cut_text_after_cycle"),
}


def kind_of(
    peer: list[int] | None, ours: list[int], careless: list[int], decode: Any, scenario: str
) -> str | None:
    """The kind of a disagreement; None where the two agree."""
    if peer is None:
        return "none"
    if peer == ours:
        return None
    if peer == careless:
        return "control"
    mine, theirs = decode(ours), decode(peer)
    if scenario.startswith(EXPLAINED["thought"]) and theirs.startswith("</think>"):
        return "thought"
    if mine == theirs + "<think>\n":
        return "generation prompt"
    marks = mine.count("<response>"), theirs.count("<response>")
    if scenario == "parts_tool" and marks == (2, 1):
        return "parts"
    if scenario.startswith("system_") and "Be brief" in theirs and "Be brief" not in mine:
        return "system"
    return "edges" if "".join(mine.split()) == "".join(theirs.split()) else "unexplained"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in TEMPLATES])
def test_disagreements_are_explained(name: str) -> None:
    configs = pytest.importorskip("renderers.configs")
    base = pytest.importorskip("renderers.base")
    known = {
        config.model_fields["name"].default: config  # type: ignore[attr-defined]
        for config in dict[str, Any](vars(configs)).values()
        if isinstance(config, type)
        and issubclass(config, configs.BaseRendererConfig)
        and "name" in config.model_fields  # type: ignore[attr-defined]
    }
    oracle = Oracle(tokenizer_for(TEMPLATES[name], EXTRA))
    renderer = base.create_renderer(oracle.tokenizer, known[FAMILIES[name]]())
    template = ChatTemplate(oracle.tokenizer, history="fork")
    agreed, unexplained = 0, []
    for scenario in scenarios(sorted(oracle.control)):
        try:
            case, truth = oracle.judge(scenario)
        except Inapplicable:
            continue
        if truth.kind not in ("append", "drift"):
            continue
        if truth.input_ids is None or truth.careless_ids is None:
            continue
        ours = template.delta(
            case.messages,
            case.new,
            tools=case.tools,
            sampled_ids=case.sampled_ids,
            stop_token_ids=case.stop_token_ids,
            finish_reason=case.finish_reason,
        )
        bridged = renderer.bridge_to_next_turn(
            case.prompt_ids, case.sampled_ids, case.new, tools=case.tools
        )
        stream = len(case.prompt_ids) + len(case.sampled_ids)
        peer = None if bridged is None else [int(index) for index in bridged.token_ids][stream:]
        kind = kind_of(
            peer, truth.input_ids, truth.careless_ids, oracle.tokenizer.decode, scenario.name
        )
        agreed += kind is None and ours == truth.input_ids
        explained = kind is None or scenario.name.startswith(EXPLAINED.get(kind, ("-",)))
        if ours != truth.input_ids or not explained:
            texts = (oracle.tokenizer.decode(ours), peer and oracle.tokenizer.decode(peer))
            unexplained.append((scenario.name, kind, *texts))
    assert not unexplained
    assert agreed > 0
