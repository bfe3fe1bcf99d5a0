"""Check how a chat template renders tool-calling conversations. `certify` returns a
`TemplateReport`.

Each probe is a small conversation. Its assistant turn is treated as sampled, with exactly the text
that the template renders for it. The delta is the ids that the new messages append. The render of
the whole conversation must be the text of prompt + sampled + delta, and must end with exactly the
delta's ids. Any other outcome is reported: the template rewrites history (the session then forks,
or preserves history on request), or it refuses the conversation. One more conversation has twelve
calls in a row. `Verifier` checks it like an episode. Another one is replayed with each `history`
setting, to count its sequences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import orjson

from toolroll.parsers.reasoning import ANY_TAGS
from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.runtime.jsonable import common_prefix
from toolroll.rollout.template.chat_template import ChatTemplate, HistoryPolicy
from toolroll.rollout.template.delta import SampledText
from toolroll.rollout.template.encode import as_ids
from toolroll.rollout.template.probes import (
    AFTER_A_CALL,
    BASE,
    BODIES,
    HALF,
    OTHER,
    TOOLS,
    USER,
    Probe,
    calls_in_a_row,
    episode,
    probes,
    with_control,
)
from toolroll.rollout.template.render import Renderer
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.template.stop_tokens import missing_tokens
from toolroll.rollout.types import Message, Tool

Outcome = Literal["append", "fork", "refuse", "wrong"]

CORE = ("tool", "cycles", "tool_control_text", "twelve_calls")
"""The probes whose outcome must be `append` for tool calling to be exact in one sequence."""


_THEN: Mapping[Outcome, str] = {
    "append": "exact",
    "fork": "a second training sequence begins there, unless history='preserve'",
    "refuse": "such an episode ends with stop_reason template_error",
    "wrong": "such samples are excluded from training: please report this template",
}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of one probe.

    - `append`: prompt + sampled + delta is the whole render, and the delta's ids are exact.
    - `fork`: the template rewrites the prompt or the sampled turn.
    - `refuse`: the template raises an error.
    - `wrong`: prompt + sampled + delta differs from the whole render. Please report this as a bug.

    `what` describes the probe. `detail` gives the reason for any outcome except `append`.
    `preserved` is set for a fork: True if history="preserve" can continue the sequence instead.
    """

    name: str
    what: str
    outcome: Outcome
    detail: str = ""
    preserved: bool | None = None


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
    """

    fingerprint: str
    stop_tokens: Mapping[str, int]
    generation_prompt: str
    opens_reasoning: Mapping[str, bool]
    arguments: str
    dated: bool
    tools_change: str
    probes: tuple[ProbeResult, ...]
    tokenizer: str = ""
    """How the tokenizer's encoding differs from this library's. It is empty if they do not
    differ.
    """
    missing_tokens: tuple[str, ...] = ()
    """The control tokens that the template writes but the tokenizer does not have, if the template
    and the tokenizer do not belong together.
    """
    reasons: bool = False
    """True if the turns of the replayed episode have reasoning."""
    sequences: Mapping[HistoryPolicy, Sequence[int]] = field(default_factory=dict)
    """The replayed tool episode: for each `history` setting, the number of sampled tokens in each
    of its sequences. It is empty if the template refuses the episode.
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
        """True if the outcome of every probe in `CORE` is `append`, and the tokenizer's encoding
        does not differ. Tool results are then exact after any number of calls.
        """
        return self.exact_with("fork")

    def exact_with(self, history: HistoryPolicy) -> bool:
        """Return `exact`, or with history="scaffold" also True if it prevents the forks."""
        no_fork = history == "scaffold" and len(self.sequences.get(history, ())) == 1
        outcomes = ("append", "fork") if no_fork else ("append",)
        return not (self.tokenizer or self.missing_tokens) and all(
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
        lines = [
            f"{'; '.join(what)}: {detail} ({_THEN[outcome]})"
            for (outcome, detail), what in reasons.items()
        ]
        return [f"the tokenizer: {self.tokenizer}", *lines] if self.tokenizer else lines

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data, for `toolroll check-template --json`."""
        data = asdict(self)
        probes = list(data.pop("probes"))
        return {"exact": self.exact, **data, "probes": probes}


def certify(template: ChatTemplate) -> TemplateReport:
    """Return the report on `template`. This takes about a second. Each pair of template and
    tokenizer is probed once per process.
    """
    return _certified(_Subject(fingerprint(template), template))


def fingerprint(template: ChatTemplate) -> str:
    """Return a hash of the template's text, its switches and the tokenizer."""
    tokenizer, renderer = template.tokenizer, template.renderer
    sample = "Zürich 東京 3.14\n\n\tx = {'a': 1}"
    seen = [
        renderer.source,
        {str(key): repr(value) for key, value in renderer.kwargs.items()},
        type(tokenizer).__name__,
        len(tokenizer),
        sorted(tokenizer.get_added_vocab().items()),
        tokenizer.encode(sample),
        sorted(template.stop_token_ids),
        renderer.head_hook is not None and renderer.head_hook("head"),
    ]
    return hashlib.sha256(orjson.dumps(seen)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Subject:
    fingerprint: str
    template: ChatTemplate = field(compare=False)


@lru_cache(maxsize=16)
def _certified(subject: _Subject) -> TemplateReport:
    template = subject.template.variant(history="fork")  # so that forks are reported as forks
    opens = _opens_reasoning(template)
    thinks = opens["user message"]
    tried = (
        *(_tried(template, probe) for probe in probes(opens_reasoning=thinks)),
        _tried_loop(template, thinks=thinks),
    )
    shows = any(probe.name == "thought_tool" and probe.outcome == "append" for probe in tried)
    reasons = thinks or (shows and not template.parts.deltas.scaffold)
    return TemplateReport(
        fingerprint=subject.fingerprint,
        stop_tokens=dict(zip(template.stop_texts, template.stop_token_ids, strict=True)),
        generation_prompt=_generation_prompt(template),
        opens_reasoning=opens,
        arguments=template.renderer.argument_form or "not shown",
        dated=_dated(template),
        tools_change=_tools_change(template),
        probes=tried,
        tokenizer=_tokenizer(template),
        missing_tokens=missing_tokens(template.renderer, template.encoder),
        reasons=reasons,
        sequences=_replayed(template, episode(4, thinks=reasons)),
    )


# --- one probe ------------------------------------------------------------------------------------


def _tried(template: ChatTemplate, probe: Probe) -> ProbeResult:
    result = partial(ProbeResult, probe.name, probe.what)
    probe = replace(probe, new=with_control(probe.new, _mark(template)))
    try:
        stream = template.prompt(probe.messages[:-1], probe.tools)
        whole = template.prompt([*probe.messages, *probe.new], probe.tools)
        sampled, delta, _ = _continued(template, probe, stream)
    except HistoryRewrittenError as error:
        return result("fork", error.reason, preserved=_preserved(template, probe))
    except TemplateError as error:
        return result("refuse", str(error.__cause__ or error))
    # The start of the turn may be split into tokens differently in the whole render, because the
    # prompt ended there. So only the text is compared up to the delta. From there on, the ids are
    # compared.
    decode = template.encoder.decode
    if whole[-len(delta) :] != delta or decode([*stream, *sampled]) != decode(whole[: -len(delta)]):
        return result(
            "wrong", "prompt + sampled + delta are not the render of the whole conversation"
        )
    return result("append")


def _tried_loop(template: ChatTemplate, *, thinks: bool) -> ProbeResult:
    """Build a sequence of twelve calls in a row, with different names, arguments, ids and results.
    Check the sequence with `Verifier`.
    """
    messages: list[Message] = list(BASE)
    stream = template.prompt(messages, TOOLS)
    spans: list[TurnSpan] = []
    result = partial(
        ProbeResult,
        "twelve_calls",
        "twelve calls in a row, with different names, arguments, ids and results",
    )
    probe = Probe("", "", tuple(messages), ())
    try:
        for turn, answer in calls_in_a_row(12, thinks=thinks):
            [answer] = with_control((answer,), _mark(template))
            probe = Probe("", "", (*messages, turn), (answer,))
            sampled, delta, finish_reason = _continued(template, probe, stream)
            begin, stop = len(stream), len(stream) + len(sampled)
            spans.append(TurnSpan(begin, stop, len(messages), finish_reason == "stop"))
            stream = [*stream, *sampled, *delta]
            messages += [turn, answer]
    except HistoryRewrittenError as error:
        detail = f"{error.reason} (call {len(spans) + 1})"
        return result("fork", detail, preserved=_preserved(template, probe))
    except TemplateError as error:
        return result("refuse", str(error.__cause__ or error))
    mismatch = template.verifier.check(
        ServedSequence(as_ids(stream), tuple(spans), messages, TOOLS)
    )
    return (
        result("append")
        if mismatch is None
        else result("wrong", f"the finished sequence is not the render: {mismatch}")
    )


def _replayed(
    template: ChatTemplate, messages: Sequence[Message]
) -> dict[HistoryPolicy, Sequence[int]]:
    policies: tuple[HistoryPolicy, ...] = get_args(HistoryPolicy)
    try:
        return {each: replay(template.variant(history=each), messages, TOOLS) for each in policies}
    except TemplateError:
        return {}


def replay(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None = None
) -> list[int]:
    """Replay a conversation as if a model sampled its assistant turns. Return the number of sampled
    tokens in each sequence: several numbers if the conversation forks.

    Raise `TemplateError` if the template refuses the conversation.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    cursor = template.start(messages[: turns[0]], tools)
    counts = [0]
    for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        probe = Probe("", "", (*messages[: turn + 1],), (*messages[turn + 1 : following],), tools)
        try:
            text, finish_reason = _sampled_text(template, probe)
        except HistoryRewrittenError:
            alone = template.renderer.render(probe.messages, tools, generate=False)
            text, finish_reason = alone[common_prefix(alone, cursor.text) :], "length"
        encoder = template.encoder
        ids = encoder.encode(text, previous=encoder.ending_id(cursor.text))
        counts[-1] += len(ids)
        sampled = template.sampled(ids, finish_reason=finish_reason)
        if following == len(messages):
            break
        try:
            _, cursor = cursor.after(sampled, messages[turn:following])
        except HistoryRewrittenError:
            cursor = template.start(messages[:following], tools)
            counts.append(0)
    return counts


def _mark(template: ChatTemplate) -> str:
    """Return the text of the template's longest control token."""
    return max(template.encoder.control, key=len, default="<|x|>")


def _continued(
    template: ChatTemplate, probe: Probe, stream: Sequence[int]
) -> tuple[list[int], list[int], str]:
    """Return the ids of the turn that is sampled after the ids `stream`, the delta after the turn,
    and the turn's finish reason.
    """
    text, finish_reason = _sampled_text(template, probe)
    sampled = template.encoder.encode(text, previous=stream[-1])
    delta = template.delta(
        probe.messages,
        probe.new,
        tools=probe.tools,
        sampled_ids=sampled,
        finish_reason=finish_reason,
    )
    return sampled, delta, finish_reason


def _tokenizer(template: ChatTemplate) -> str:
    """Compare how the tokenizer and `Encoder` encode a text with control tokens. Return the
    difference, or an empty text if there is none.
    """
    marks = template.stop_texts or [""]
    text = "".join(body + marks[pos % len(marks)] for pos, body in enumerate(BODIES))
    encoder, tokenizer = template.encoder, template.tokenizer
    theirs = tokenizer(text, add_special_tokens=False)["input_ids"]
    return (
        ""
        if encoder.encode(text) == list(theirs)
        else "for a text with control tokens, its ids differ from the ids of the text's pieces"
    )


def _preserved(template: ChatTemplate, probe: Probe) -> bool:
    """Return True if history="preserve" can continue the sequence: for at least one stop token, the
    text to append does not depend on the turn's text.
    """
    for stop in (None,) if probe.cut else template.stop_texts:
        try:
            cursor = template.start(probe.messages[:-1], probe.tools)
            sampled = SampledText(HALF + (stop or ""), stop)
            cursor.derive(sampled, [*probe.messages[-1:], *probe.new])
        except HistoryRewrittenError:
            continue
        return True
    return False


def _sampled_text(template: ChatTemplate, probe: Probe) -> tuple[str, str]:
    """Return the text of the sampled turn, including its stop token, and its finish reason.

    For a turn with reasoning, this is its render at the end of a conversation. If the template does
    not show the reasoning or the text there, they are added before it. The same render is used for
    a turn that renders alike with and without later messages, apart from the token that closes it.
    For any other turn, this is its render with later messages.
    """
    render = template.renderer.render
    prompt = render(probe.messages[:-1], probe.tools, generate=True)
    alone = render(probe.messages, probe.tools, generate=False)
    whole = render([*probe.messages, *probe.new], probe.tools, generate=True)
    if probe.cut:
        rendered = whole[len(prompt) :] if whole.startswith(prompt) else ""
        return rendered[: rendered.find(HALF) + len(HALF)] if HALF in rendered else HALF, "length"
    stop = next((stop for stop in template.stop_texts if alone.rstrip("\n").endswith(stop)), "")
    body = alone.rstrip("\n").removesuffix(stop)
    thought = probe.messages[-1].get("reasoning_content")
    rendered = (
        alone
        if alone.startswith(prompt)
        and (thought or template.parts.deltas.scaffold or (stop and whole.startswith(body)))
        else whole
    )
    if not rendered.startswith(prompt):
        raise HistoryRewrittenError("the prompt that was served is no longer rendered as it was")
    rendered = rendered[len(prompt) :]
    parts = (thought or "", probe.messages[-1].get("content") or "")
    lead = "".join(f"{part}\n" for part in parts if part.strip() not in rendered)
    ends = [rendered.find(stop) + len(stop) for stop in template.stop_texts if stop in rendered]
    if ends:
        return lead + rendered[: min(ends)], "stop"
    # GLM: the stop token is the next role's marker, which is not part of the turn's own render.
    marker = next(
        (stop for stop in template.stop_texts if whole.startswith(prompt + rendered + stop)), ""
    )
    return lead + rendered + marker, "stop" if marker else "length"


# --- further facts --------------------------------------------------------------------------------


def _generation_prompt(template: ChatTemplate) -> str:
    render = template.renderer.render
    try:
        alone, prompted = render(USER, None, generate=False), render(USER, None, generate=True)
    except TemplateError:
        return ""
    return prompted[len(alone) :] if prompted.startswith(alone) else prompted


def _opens_reasoning(template: ChatTemplate) -> dict[str, bool]:
    opens = {}
    for last, messages in (("user message", USER), ("tool result", AFTER_A_CALL)):
        try:
            opens[last] = template.start(messages, TOOLS).opens_reasoning(ANY_TAGS)
        except TemplateError:
            opens[last] = False
    return opens


def _dated(template: ChatTemplate) -> bool:
    """Return True if the prompt depends on the date. (A session reads the clock only once.)"""
    renderer = template.renderer
    today, later = (
        Renderer(
            renderer.tokenizer,
            chat_template=renderer.chat_template,
            kwargs=renderer.kwargs,
            now=renderer.now + timedelta(days=days),
        )
        for days in (0, 400)
    )
    try:
        return later.render(USER, TOOLS, generate=True) != today.render(USER, TOOLS, generate=True)
    except TemplateError:
        return False


def _tools_change(template: ChatTemplate) -> str:
    """Return what happens if the tool list changes during a conversation."""
    render = template.renderer.render
    try:
        same = render(USER, TOOLS, generate=True) == render(USER, [*TOOLS, OTHER], generate=True)
    except TemplateError as error:
        return f"refuse: {error}"
    return (
        "append: the prompt does not show the tools"
        if same
        else "fork: the tools are part of the prompt that was served"
    )
