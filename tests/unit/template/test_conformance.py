"""The conformance of `ChatTemplate`: every template of the pinned wheel (and of the folders in
`TOOLROLL_TEST_DATA` and `TOOLROLL_EXTRA_TEMPLATES`) with every scenario, against an oracle that
knows nothing of toolroll.

A cell fails if the ids are wrong, if control text in a body became a control token, if the
implementation crashed, or if it refused where an append exists. The counts by template are printed
at the end of the run.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.oracle import (
    BAD,
    Case,
    History,
    Oracle,
    Outcome,
    Truth,
    judge_deltas,
    judge_prompts,
    outcome_of,
    verdict,
)
from support.oracle_scenarios import Message, Tool, scenarios
from support.qwen import FEW_RANKS, N_RANKS, tokenizer_for, tool_templates
from support.tiers import by_tier

from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.template import ChatTemplate, Cursor
from toolroll.rollout.template.bodies import Spelled
from toolroll.rollout.template.delta import DeltaRenderer

pytestmark = pytest.mark.tokens

TEMPLATES = tool_templates()
POLICIES: tuple[History, ...] = ("fork", "preserve")
NOT_PRESERVED = ("refused-unneeded", "glm4moe_training", "system_midway")
"""The model ended its turn with `<|user|>`, and history shows `<|system|>` there: a fork, also
with history="preserve"."""


class UnderTest:
    """`ChatTemplate` in the form that the oracle judges: the only place that knows its
    signature."""

    def __init__(self, tokenizer: Any, history: History) -> None:
        self.template = ChatTemplate(tokenizer, history=history)

    def prompt(self, messages: list[Message], tools: list[Tool] | None) -> Outcome:
        return outcome_of(
            lambda: self.template.prompt(messages, tools), HistoryRewrittenError, TemplateError
        )

    def delta(self, case: Case) -> Outcome:
        if self.template.history == "fork":  # what is derived does not depend on the policy
            self._both_ways(case)
        make = lambda: self.template.delta(
            case.messages,
            case.new,
            tools=case.tools,
            sampled_ids=case.sampled_ids,
            stop_token_ids=case.stop_token_ids,
            finish_reason=case.finish_reason,
        )
        return outcome_of(make, HistoryRewrittenError, TemplateError)

    def _both_ways(self, case: Case) -> None:
        """Where the delta is the rest of the render after the sampled turn, comparing renders
        finds the same."""
        template = self.template
        sampled = template.sampled(
            case.sampled_ids, finish_reason=case.finish_reason, stop_token_ids=case.stop_token_ids
        )
        parts, said = template.parts, [*case.messages[-1:], *case.new]
        by_sentinel = BySentinel(parts.renderer, parts.encoder, parts.deltas.stops)
        cursor = template.start(case.messages[:-1], case.tools)
        try:
            found = cursor.derive(sampled, said)
        except (HistoryRewrittenError, TemplateError):
            return
        prepared = parts.renderer.prepare(case.messages[:-1])
        head = parts.renderer.head(prepared, case.tools)
        other = Cursor(replace(parts, deltas=by_sentinel), prepared, head, Spelled(frozenset()))
        assert found == other.derive(sampled, said), case


class BySentinel(DeltaRenderer):
    """Finds every delta by comparing renders with the sentinel in them."""

    def _end_of_turn(self, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


def judge(name: str, ranks: int) -> str:
    """Judge both policies with one template and Qwen's BPE of `ranks` ranks. Return how often
    each verdict was given."""
    oracle = Oracle(tokenizer_for(TEMPLATES[name], ranks=ranks))
    implementations: dict[History, UnderTest] = {
        history: UnderTest(oracle.tokenizer, history) for history in POLICIES
    }
    deltas = judge_deltas(oracle, implementations)
    prompts = judge_prompts(oracle, implementations)
    failures, counts = [], []
    for history, rows in deltas.items():
        verdicts = Counter(row.verdict for row in rows)
        counts.append(
            f"{history}: {', '.join(f'{key} {n}' for key, n in sorted(verdicts.items()))}"
        )
        failures += [
            f"{row.verdict:16} {row.scenario}: {row.detail}"
            for row in (*rows, *prompts[history])
            if row.verdict in BAD and (row.verdict, name, row.scenario) != NOT_PRESERVED
        ]
        left_out = [row for row in rows if row.verdict == "inapplicable"]
        assert len(rows) >= 40
        # A template that shows no tool calls (an early LFM2, a distilled R1) has fewer cases; every
        # other one has its forty.
        shows_calls = "tool" in {row.scenario for row in rows} - {row.scenario for row in left_out}
        assert len(rows) - len(left_out) >= (40 if shows_calls else 12), left_out
        assert any(row.verdict == "exact" for row in prompts[history])
    assert not failures, "\n".join(failures)
    return "; ".join(counts)


@pytest.mark.parametrize("name", by_tier(TEMPLATES))
def test_no_silent_mismatch_and_no_unneeded_refusal(name: str, record_property: Any) -> None:
    record_property("figure", judge(name, FEW_RANKS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_instruct_2507", "glm4moe", "gptoss"])
def test_the_same_with_the_whole_vocabulary(name: str) -> None:
    judge(name, N_RANKS)


@pytest.mark.parametrize(
    ("truth", "outcome", "history", "expected"),
    [
        (Truth("append", [1, 2]), ("append", [1, 3]), "fork", "wrong"),
        (Truth("append", [1, 2], [1, 9]), ("append", [1, 9]), "fork", "injected"),
        (Truth("append", [1, 2]), ("fork", "why"), "fork", "refused-unneeded"),
        (Truth("drift", [1, 2]), ("refuse", "why"), "preserve", "refused-unneeded"),
        (Truth("rewrite", [1, 2]), ("fork", "why"), "preserve", "refused-unneeded"),
        (Truth("rewrite", None), ("fork", "why"), "preserve", "fork-right"),
        (Truth("raises"), ("append", []), "fork", "wrong"),
        (Truth("append", []), ("crash", ValueError()), "fork", "crashed"),
    ],
)
def test_the_judge(truth: Truth, outcome: Outcome, history: History, expected: str) -> None:
    assert verdict(truth, outcome, history) == expected


def test_the_oracle_on_a_template_read_by_eye() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    oracle = Oracle(tokenizer_for(source))
    decode, end = oracle.tokenizer.decode, oracle.control["<|im_end|>"]
    by_name = {scenario.name: scenario for scenario in scenarios(sorted(oracle.control))}
    case, truth = oracle.judge(by_name["user"])
    assert truth.kind == "append"
    assert decode(case.sampled_ids) == f"{case.messages[-1]['content']}<|im_end|>"
    assert truth.input_ids is not None
    text = "\n<|im_start|>user\nAnd tomorrow?<|im_end|>\n<|im_start|>assistant\n"
    assert decode(truth.input_ids) == text
    _, cut = oracle.judge(by_name["cut_text_user"])
    assert cut.input_ids == [end, *truth.input_ids]
    _, injected = oracle.judge(by_name["inject_user"])
    assert injected.input_ids is not None and injected.careless_ids is not None
    assert injected.input_ids.count(end) == 1 < injected.careless_ids.count(end)
    assert decode(injected.input_ids) == decode(injected.careless_ids)
