"""The correct result for one template and one scenario, found by plain renders, without toolroll.

A truth is one of:

- `append`: the whole render starts with prompt and sampled text. The rest of it, encoded, is the
  only correct answer.
- `drift`: the same, except for white space in the sampled text.
- `rewrite`: no append exists, and a fork is correct. Keeping the sequence is correct only with
  exactly the text after the turn's close, if that is defined.
- `raises`: the template refuses the conversation.

An implementation's refusal is correct only if no append exists (or, with `history="preserve"`, if
no tail is defined), so it cannot pass by refusing. Every exception that is neither a fork nor a
refusal is a crash.

Control tokens are the special tokens and the template's own markers; the same characters in a body
of a system message, a user message, a tool result or a tool description are text (I6). Any other
added token is one token everywhere. Texts are compared up to NFC, which
the vocabulary's normalizer applies.
"""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

from support.adversarial.texts import CLOSES, ControlTokens, Render, common, with_arguments
from support.adversarial.texts import Inapplicable as Inapplicable
from support.adversarial.texts import Refused as Refused
from support.adversarial.token_judge import Kind
from support.adversarial.token_judge import Truth as Truth
from support.oracle_scenarios import (
    ASK,
    MARK,
    Message,
    Messages,
    Scenario,
    Tool,
    Tools,
    call,
    calls,
    scenarios,
)


@dataclass(frozen=True)
class Case:
    """What an implementation is given."""

    messages: list[Message]
    new: list[Message]
    tools: list[Tool] | None
    prompt_ids: list[int]
    sampled_ids: list[int]
    stop_token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Ending:
    """How the turn ends in renders: its last text, what follows, and the stop token."""

    mark: str
    rest: str
    stop: str


class Oracle(ControlTokens):
    """Judges one tokenizer with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, str(tokenizer.chat_template))
        self._texts: dict[str, str] = {}

    # --- renders and ids --------------------------------------------------------------------------

    def text(self, messages: Messages, tools: Tools, *, generate: bool) -> str:
        """The template's text, remembered. Arguments are given as dicts, or as JSON text if it
        takes no dicts. A thought is also given as `thinking` if the template reads only this field,
        or an empty one if it refuses that (transformers 5.24 adds the field).
        """
        key = repr((messages, tools, generate))
        if key not in self._texts:
            self._texts[key] = self._shown(messages, tools, generate=generate)
        return self._texts[key]

    def _shown(self, messages: Messages, tools: Tools, *, generate: bool) -> str:
        failure: Exception | None = None
        field, other = "message.thinking", "reasoning_content"
        reads_thinking = field in self.source and other not in self.source
        for as_text, joins, thinks in itertools.product(
            (False, True), (False, True), ("all", None, "") if reads_thinking else (None,)
        ):
            prepared = [
                self._prepared(_joined(m) if joins else m, as_text=as_text, thinks=thinks)
                for m in messages
            ]
            try:
                text = self.applied(prepared, tools, generate=generate)
            except Exception as error:
                failure = failure or error
                continue
            if _shows_parts(prepared, text):
                return text
        raise Refused(str(failure)) from failure

    def _prepared(self, message: Message, *, as_text: bool, thinks: str | None) -> Message:
        message = with_arguments(message, as_text=as_text)
        if message.get("tool_calls") and message.get("content") is None and not self._takes_null:
            message = {**message, "content": ""}
        if thinks is not None and message.get("reasoning_content"):
            message = {**message, "thinking": thinks and message["reasoning_content"]}
        return message

    @cached_property
    def _takes_null(self) -> bool:
        """Whether a call beside null is neither refused nor rendered with the word for null."""
        for arguments in ({"x": "x"}, '{"x":"x"}'):
            texts = []
            for content in ("", None):
                try:
                    texts.append(self.applied([ASK, calls(call(1, arguments), content=content)]))
                except Exception:
                    texts.append("")
            empty, null = texts
            if empty:
                words = ("None", "null")
                return bool(null) and all(null.count(word) == empty.count(word) for word in words)
        return True

    def _own(self, messages: Messages, tools: Tools) -> Render:
        """The prompt with the places of its control tokens. Those of assistant turns are tokens."""
        said = [message for message in messages if message["role"] == "assistant"]
        return self.marked(messages, tools, generate=True, as_they_are=said)

    def prompt(self, messages: Messages, tools: Tools) -> list[int]:
        """The ids of a first prompt. Raises `Refused` as the template does."""
        return self.ids(self._own(messages, tools).pieces())

    # --- the truth --------------------------------------------------------------------------------

    def judge(self, scenario: Scenario) -> tuple[Case, Truth]:
        """The case that an implementation is given, and what is right. Raises `Inapplicable`."""
        scenario, prompt, sampled, ending = self._sample(scenario)
        messages = [*scenario.history, scenario.turn]
        stopped = scenario.sampled not in ("cut", "call_cut", "stop_trimmed")
        stops = [self.control[ending.stop]]
        case = Case(
            messages,
            list(scenario.new),
            list(scenario.tools) if scenario.tools else None,
            self.prompt(scenario.history, scenario.tools),
            self._split(sampled) if scenario.odd_split else self.careless(sampled),
            stops,
            "length" if scenario.sampled in ("cut", "call_cut") else "stop",
        )
        try:
            full = self._followed(scenario)
        except Refused:
            return case, Truth("raises")
        kind, length = self._compare(
            full, prompt, sampled, ending if stopped else replace(ending, stop=""), scenario
        )
        if length is None:
            return case, Truth(kind)
        own = self._own([*messages, *scenario.new], scenario.tools)
        careful = self.ids(own.pieces(len(full) - length))
        return case, Truth(kind, careful, self.careless(full[len(full) - length :]))

    def _compare(
        self, full: str, prompt: str, sampled: str, ending: Ending, scenario: Scenario
    ) -> tuple[Kind, int | None]:
        """The kind of truth and the length of the text to append."""
        if full.startswith(prompt + sampled):
            return "append", len(full) - len(prompt + sampled)
        at = full.rfind(ending.mark + ending.rest)
        if at < 0:
            return "rewrite", None if ending.stop else self._close_only(full, scenario)
        tail = at + len(ending.mark)
        if ending.stop:
            found = self.pattern.match(full, tail + len(ending.rest))
            if not found:
                return "rewrite", None
            tail = found.end()
        content = scenario.turn.get("content") or ""
        if scenario.turn.get("tool_calls") and content.strip() and content.strip() in full[tail:]:
            return "rewrite", None  # the turn's text is moved after the result
        region = full[len(prompt) : tail]
        if full.startswith(prompt) and _squash(region) == _squash(sampled):
            return "drift", len(full) - tail
        return "rewrite", len(full) - tail

    def _close_only(self, full: str, scenario: Scenario) -> int | None:
        """The length from the close on, if history does not show a cut turn: a plain turn's."""
        messages = [*scenario.history, {"role": "assistant", "content": MARK}, *scenario.new]
        text = self.text(messages, scenario.tools, generate=True)
        tail = text[text.rfind(MARK) + len(MARK) :]
        return len(tail) if MARK in text and full.endswith(tail) else None

    # --- what the model sampled -------------------------------------------------------------------

    def _sample(self, scenario: Scenario) -> tuple[Scenario, str, str, Ending]:
        """The scenario as parsed, the texts of the prompt and the turn, and its ending."""
        try:
            prompt = self.text(scenario.history, scenario.tools, generate=True)
            alone = self.text([*scenario.history, scenario.turn], scenario.tools, generate=False)
        except Refused as error:
            raise Inapplicable(
                f"the template refuses the conversation before the new messages: {error}"
            ) from error
        opens = prompt.rstrip().endswith("<think>") and not alone.startswith(prompt)
        thought = scenario.turn.get("reasoning_content")
        if opens and not thought and scenario.sampled != "raw_thought":
            # the model must end the reasoning that the prompt opens
            turn = {**scenario.turn, "reasoning_content": "I think."}
            return self._sample(replace(scenario, turn=turn))
        if thought and prompt.rstrip().endswith("</think>"):
            raise Inapplicable("the prompt closes the thought: the model does not think")
        at = alone.rfind(scenario.mark)
        if at < len(prompt) - 40:
            raise Inapplicable("the template does not render this turn")
        ending = self._ending(scenario, alone[at + len(scenario.mark) :])
        said = alone[_turn_start(prompt, alone) : at + len(scenario.mark)]
        if scenario.sampled not in ("alone", "raw_thought") and not thought:
            said = self._in_history(scenario, prompt, ending) or said
        if opens and "</think>" not in said:
            said = f"I think.\n</think>\n\n{said}"
        if scenario.sampled == "raw_thought" and "</think>" not in said:
            raise Inapplicable("the template does not render the thought in the content")
        if scenario.sampled == "call_cut":
            cut = said[: said.rfind("Paris") + 2]
            scenario = replace(scenario, turn={"role": "assistant", "content": cut})
            return scenario, prompt, cut, replace(ending, mark=cut[-12:], rest="")
        if scenario.sampled in ("cut", "stop_trimmed"):
            said += "\nObservation:" if scenario.sampled == "stop_trimmed" else ""
            return scenario, prompt, said, replace(ending, rest="")
        said += ending.rest
        if scenario.sampled == "compact":
            said = said.replace('": ', '":').replace(", ", ",")
        if scenario.sampled == "spaced":
            said += "\n"
        return scenario, prompt, said + ending.stop, ending

    def _followed(self, scenario: Scenario) -> str:
        """The whole render, with the messages that follow the turn."""
        messages = [*scenario.history, scenario.turn, *scenario.new]
        return self.text(messages, scenario.tools, generate=True)

    def _in_history(self, scenario: Scenario, prompt: str, ending: Ending) -> str | None:
        """The turn as history shows it (Qwen3 writes an empty thought only at the end)."""
        try:
            full = self._followed(scenario)
        except Refused:
            return None
        at = full.rfind(ending.mark + ending.rest)
        shows = full.startswith(prompt) and at >= len(prompt)
        return full[len(prompt) : at + len(ending.mark)] if shows else None

    def _ending(self, scenario: Scenario, rest: str) -> Ending:
        """Where the model stopped: at the template's close, or at the next role marker (GLM)."""
        mark, closes = scenario.mark, {*CLOSES, "<sep>"}
        ends = (match for match in self.pattern.finditer(rest) if match.group() in closes)
        found = next(ends, None)
        if found is None and not scenario.turn.get("tool_calls"):
            found = self.pattern.search(rest.replace("</think>", "        "))
        if found is not None:
            return Ending(mark, rest[: found.start()], found.group())
        try:
            full = self._followed(scenario)
        except Refused as error:
            raise Inapplicable(
                "no close in the render, and the template refuses what follows"
            ) from error
        at = full.rfind(mark)
        if mark != MARK:
            asked = full.find(scenario.history[-1]["content"])
            at = full.find(mark + rest.rstrip("\n"), asked)
        behind = full[at + len(mark) :]
        own = rest if behind.startswith(rest) else rest.rstrip("\n")
        marker = self.pattern.match(behind, len(own)) if behind.startswith(own) else None
        last = [match for match in self.pattern.finditer(own) if match.end() == len(own)]
        # Gemma 4 stops at the start of the result, and shows it at the end
        if marker is None and last and behind.startswith(own):
            return Ending(mark, own[: last[0].start()], last[0].group())
        if marker is None:
            raise Inapplicable("no token ends the turn in the render")
        return Ending(mark, own, marker.group())

    def _split(self, text: str) -> list[int]:
        """Ids of the same text, cut at every third character between control tokens."""
        ids: list[int] = []
        for piece in re.split(f"({self.pattern.pattern})", text):
            if piece in self.control:
                ids.append(self.control[piece])
                continue
            for start in range(0, len(piece), 3):
                ids += self.plain(piece[start : start + 3])
        return ids


def _turn_start(prompt: str, alone: str) -> int:
    """Where the turn begins in `alone`, its own render: after the prompt, or where they differ."""
    if alone.startswith(prompt):
        return len(prompt)
    at = common(prompt, alone)
    if len(prompt) - at > 60:
        raise Inapplicable("the template rewrites the prompt when the turn itself is rendered")
    return at


def _squash(text: str) -> str:
    return re.sub(r"\s+", "", unicodedata.normalize("NFC", text))


def _shows_parts(messages: Messages, text: str) -> bool:
    """Whether the template shows the text of each part, not the list of parts in Python's form."""
    contents = [
        message["content"] for message in messages if isinstance(message.get("content"), list)
    ]
    return not contents or (
        "'type': 'text'" not in text
        and all(part["text"].strip() in text for content in contents for part in content)
    )


def _joined(message: Message) -> Message:
    """The message, with its text parts as one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


# --- the verdict on an implementation -------------------------------------------------------------

History = Literal["fork", "preserve"]
Outcome = tuple[Literal["append", "fork", "refuse", "crash"], Any]
BAD = frozenset(("refused-unneeded", "wrong", "injected", "crashed"))


class Implementation(Protocol):
    """What is judged: one tokenizer with its template."""

    def prompt(self, messages: list[Message], tools: list[Tool] | None) -> Outcome: ...

    def delta(self, case: Case) -> Outcome: ...


@dataclass(frozen=True)
class Row:
    """One cell of the table."""

    scenario: str
    truth: str
    verdict: str
    detail: str = ""


def verdict(truth: Truth, outcome: Outcome, history: History) -> str:
    what, value = outcome
    if what == "crash":
        return "crashed"
    if what in ("fork", "refuse"):
        kept = truth.kind == "rewrite" and history == "preserve" and truth.input_ids is not None
        return "refused-unneeded" if kept or truth.kind in ("append", "drift") else "fork-right"
    if truth.input_ids is not None and value == truth.input_ids:
        return "preserve-ok" if truth.kind == "rewrite" else "exact"
    return "injected" if truth.careless_ids is not None and value == truth.careless_ids else "wrong"


def judge_deltas(
    oracle: Oracle, implementations: Mapping[History, Implementation]
) -> dict[History, list[Row]]:
    """By policy, a row for each scenario; `inapplicable` if it says nothing of the template."""
    rows: dict[History, list[Row]] = {history: [] for history in implementations}
    for scenario in scenarios(sorted(oracle.control)):
        try:
            case, truth = oracle.judge(scenario)
        except (Inapplicable, Refused) as reason:
            for judged in rows.values():
                judged.append(Row(scenario.name, "inapplicable", "inapplicable", str(reason)))
            continue
        for history, implementation in implementations.items():
            rows[history].append(_row(oracle, scenario, truth, implementation.delta(case), history))
    return rows


def judge_prompts(
    oracle: Oracle, implementations: Mapping[History, Implementation]
) -> dict[History, list[Row]]:
    """By policy, which is not asked, a row for each different first prompt."""
    rows: dict[History, list[Row]] = {history: [] for history in implementations}
    for scenario in _prompts(scenarios(sorted(oracle.control))):
        try:
            truth = Truth("append", oracle.prompt(scenario.history, scenario.tools))
        except Refused:
            truth = Truth("raises")
        except Inapplicable as reason:
            for judged in rows.values():
                judged.append(Row(scenario.name, "inapplicable", "inapplicable", str(reason)))
            continue
        for history, implementation in implementations.items():
            outcome = implementation.prompt(
                list(scenario.history), list(scenario.tools) if scenario.tools else None
            )
            rows[history].append(_row(oracle, scenario, truth, outcome, "fork"))
    return rows


def _row(
    oracle: Oracle, scenario: Scenario, truth: Truth, outcome: Outcome, history: History
) -> Row:
    word = verdict(truth, outcome, history)
    return Row(
        scenario.name, truth.kind, word, _detail(oracle, truth, outcome) if word in BAD else ""
    )


def _prompts(all_scenarios: Iterable[Scenario]) -> list[Scenario]:
    seen: dict[str, Scenario] = {}
    for scenario in all_scenarios:
        seen.setdefault(repr((scenario.history, scenario.tools)), scenario)
    return list(seen.values())


def outcome_of(
    make: Callable[[], list[int]], fork: type[Exception], refuse: type[Exception]
) -> Outcome:
    """What a call came to: `fork` and `refuse` are the implementation's own errors."""
    try:
        return "append", [int(index) for index in make()]
    except fork as error:
        return "fork", error
    except refuse as error:
        return "refuse", error
    except Exception as error:
        return "crash", error


def _detail(oracle: Oracle, truth: Truth, outcome: Outcome) -> str:
    what, value = outcome
    expected = None if truth.input_ids is None else oracle.tokenizer.decode(truth.input_ids)
    got = oracle.tokenizer.decode(value) if what == "append" else f"{type(value).__name__}: {value}"
    same = " (the same text in other tokens)" if got == expected else ""
    return f"{truth.kind}: expected {expected!r:.400}, got {what} {got!r:.400}{same}"
