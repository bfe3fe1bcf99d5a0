"""Check how a chat template renders tool-calling conversations. `certify` returns a
`TemplateReport`.

One conversation is replayed with each `history` setting, as if a model had sampled its turns: calls
and results, parallel calls, text, reasoning if the template shows it, answers and user messages.
After each turn, the new messages are appended to the sequence, or the template rewrites it (a
fork), or refuses the conversation. `Verifier` checks the finished sequences like an episode's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, get_args

from toolroll.evaluation.template_replay import (
    THOUGHT,
    TOOL,
    TOOLS,
    USER,
    Outcome,
    ProbeResult,
    Replay,
    conversation,
)
from toolroll.parsers.reasoning import ANY_TAGS
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template.chat_template import ChatTemplate, HistoryPolicy
from toolroll.rollout.template.stop_tokens import missing_tokens
from toolroll.rollout.types import Message, Tool

CHECK = "check"
CORE = (TOOL, CHECK)
"""The probes whose outcome must be `append` for tool calling to be exact in one sequence."""

_THEN: Mapping[Outcome, str] = {
    "append": "exact",
    "fork": "a second training sequence begins there, unless history='preserve'",
    "refuse": "such an episode ends with stop_reason template_error",
    "wrong": "such samples are excluded from training: please report this template",
}


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The findings of `certify`.

    - `fingerprint`: a hash of the template, its switches and the tokenizer.
    - `stop_tokens`: maps the text of each token that ends a turn to its id.
    - `opens_reasoning`: whether the prompt ends inside reasoning, after a "user message" and after
      a "tool result".
    - `arguments`: the form in which the template takes a call's arguments ("dict" or "text"), or
      "not shown" if it does not render them.
    - `dated`: True if the prompt depends on the date.
    - `tools_change`: what happens if the tool list changes during a conversation.
    - `encoder`: "pre-tokens" if ASCII text is encoded by pre-tokens, else "tokenizers".
    """

    fingerprint: str
    stop_tokens: Mapping[str, int]
    generation_prompt: str
    opens_reasoning: Mapping[str, bool]
    arguments: str
    dated: bool
    tools_change: str
    encoder: str
    probes: tuple[ProbeResult, ...]
    missing_tokens: tuple[str, ...] = ()
    """The control tokens that the template writes but the tokenizer does not have, if the template
    and the tokenizer do not belong together.
    """
    reasons: bool = False
    """True if the turns of the replayed conversation have reasoning."""
    sequences: Mapping[HistoryPolicy, Sequence[int]] = field(default_factory=dict)
    """The replayed conversation: for each `history` setting, the number of sampled tokens in
    each of its sequences. It is empty if the template refuses the conversation.
    """

    def forks(self, history: HistoryPolicy) -> str | None:
        """Say into how many sequences a tool episode forks, what a trainer that takes only one of
        them gets, and which setting to use. Return None if `history` gives one sequence.
        """
        counts = self.sequences.get(history, ())
        if len(counts) < 2:
            return None
        if len(self.sequences["scaffold"]) == 1:
            advice = (
                "use history=scaffold, which gives one sequence. Its prompts differ from the "
                "template's render only in the text that the generation prompt wrote before "
                "earlier turns, such as an empty reasoning block"
            )
        elif len(self.sequences["preserve"]) == 1:
            advice = (
                "keep history=fork if the trainer takes all sequences. If it takes one, use "
                "history=preserve: its prompts keep text of earlier turns that the template removes"
            )
        else:
            advice = "use a trainer that takes all sequences"
        kind = "with reasoning in each turn" if self.reasons else "without reasoning"
        return (
            f"history={history}: a tool episode (4 user messages with 2 calls each, {kind}) "
            f"becomes {len(counts)} sequences, of which the largest has "
            f"{max(counts) / sum(counts):.0%} of the sampled tokens: {advice}"
        )

    @property
    def exact(self) -> bool:
        """True if the outcome of every probe in `CORE` is `append`. Each tool result is then
        appended to the earlier tokens, exactly.
        """
        return self.exact_with("fork")

    def exact_with(self, history: HistoryPolicy) -> bool:
        """Return `exact`, or with history="scaffold" also True if it prevents the forks."""
        no_fork = history == "scaffold" and len(self.sequences.get(history, ())) == 1
        outcomes = ("append", "fork") if no_fork else ("append",)
        return not self.missing_tokens and all(
            probe.outcome in outcomes for probe in self.probes if probe.name in CORE
        )

    def remarks(self) -> list[str]:
        """Return warnings for users of this template: one line for each reason why the outcome of a
        probe is not `append`.
        """
        if self.missing_tokens:
            return [
                "the chat template and the tokenizer do not belong together: the template writes "
                f"{', '.join(self.missing_tokens)}, but the tokenizer has no such tokens. Use the "
                "tokenizer and the chat template of the same model"
            ]
        reasons: dict[tuple[Outcome, str], list[str]] = {}
        for probe in self.probes:
            if probe.outcome != "append":
                reasons.setdefault((probe.outcome, probe.detail), []).append(probe.what)
        return [
            f"{'; '.join(descriptions)}: {detail} ({_THEN[outcome]})"
            for (outcome, detail), descriptions in reasons.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data, for `toolroll check-template --json`."""
        data = asdict(self)
        probes = list(data.pop("probes"))
        return {"exact": self.exact, **data, "probes": probes}


def certify(template: ChatTemplate) -> TemplateReport:
    """Return the report on `template`. This takes about a second. Each pair of template and
    tokenizer is checked once per process.
    """
    return _certified(_Subject(template.fingerprint, template))


@dataclass(frozen=True, slots=True)
class _Subject:
    fingerprint: str
    template: ChatTemplate = field(compare=False)


@lru_cache(maxsize=16)
def _certified(subject: _Subject) -> TemplateReport:
    template = subject.template.variant(history="fork")
    opens = {
        "user message": _opens(template, [USER]),
        "tool result": _opens(template, [USER, THOUGHT.turn, *THOUGHT.new]),
    }
    trial = Replay(template)
    trial.play([THOUGHT])
    reasons = opens["user message"] or trial.outcomes[THOUGHT.name].outcome == "append"
    probes, sequences = _replayed(template, reasons=reasons)
    later = template.variant(now=template.renderer.now + timedelta(days=400))
    shows_tools = _render(template) != _render(template, TOOLS[:1])
    return TemplateReport(
        fingerprint=subject.fingerprint,
        stop_tokens=dict(zip(template.stop_texts, template.stop_token_ids, strict=True)),
        generation_prompt=_render(template).removeprefix(_render(template, generate=False)),
        opens_reasoning=opens,
        arguments=template.renderer.argument_form or "not shown",
        dated=_render(later) != _render(template),
        tools_change="fork: the tools are part of the prompt that was served"
        if shows_tools
        else "append: the prompt does not show the tools",
        encoder=template.encoder.method,
        probes=probes,
        missing_tokens=missing_tokens(template.renderer, template.encoder),
        reasons=reasons,
        sequences=sequences,
    )


def _replayed(
    template: ChatTemplate, *, reasons: bool
) -> tuple[tuple[ProbeResult, ...], dict[HistoryPolicy, list[int]]]:
    """Replay the conversation with each `history` setting. Return the results, and the number of
    sampled tokens in each sequence.
    """
    control = max(template.encoder.control, key=len, default="")
    steps = conversation(reasons=reasons, control=control)
    policies: tuple[HistoryPolicy, ...] = get_args(HistoryPolicy)
    replays = {policy: Replay(template.variant(history=policy)) for policy in policies}
    complete = [replay.play(steps) for replay in replays.values()]
    preserved = replays["preserve"].outcomes.values()
    appended = {probe.name for probe in preserved if probe.outcome == "append"}
    probes = [
        replace(probe, preserved=probe.name in appended) if probe.outcome == "fork" else probe
        for probe in replays["fork"].outcomes.values()
    ]
    wrong = [f"history={name}: {kind}" for name in policies if (kind := replays[name].mismatch())]
    outcome: Outcome = "wrong" if wrong else "append"
    checked = ProbeResult(CHECK, "each sequence, checked independently", outcome, "; ".join(wrong))
    counts: dict[HistoryPolicy, list[int]]
    counts = {policy: replays[policy].counts() for policy in policies if all(complete)}
    return (*probes, checked), counts


def _render(template: ChatTemplate, tools: Sequence[Tool] = TOOLS, *, generate: bool = True) -> str:
    """Return the render of a user message, or an empty text if the template refuses it."""
    try:
        return template.renderer.render([USER], tools, generate=generate)
    except TemplateError:
        return ""


def _opens(template: ChatTemplate, messages: Sequence[Message]) -> bool:
    """Return True if the prompt after `messages` ends inside reasoning."""
    try:
        return template.start(messages, TOOLS).opens_reasoning(ANY_TAGS)
    except TemplateError:
        return False
