"""The correct result for one template and one scenario, found by plain renders, without toolroll.

A truth is one of:

- `append`: the whole render starts with prompt and sampled text. The rest of it, encoded, is the
  only correct answer.
- `drift`: the same, except for white space in the sampled text.
- `rewrite`: no append exists, and a fork is correct. Keeping the sequence is correct only with
  exactly the text after the turn's close, if that is defined.
- `raises`: the template refuses the conversation.

Control tokens are the special tokens and the template's own markers; the same characters in a body
of a system message, a user message, a tool result or a tool description are text (I6). Any other
added token is one token everywhere. Texts are compared up to NFC, which
the vocabulary's normalizer applies.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from support.adversarial.texts import CLOSES, ControlTokens, common, with_arguments
from support.adversarial.token_judge import Inapplicable as Inapplicable
from support.adversarial.token_judge import Kind
from support.adversarial.token_judge import Refused as Refused
from support.adversarial.token_judge import Truth as Truth
from support.oracle_scenarios import MARK, Message, Messages, Scenario, Tool, Tools


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
        self._renders: dict[str, str] = {}

    # --- renders and ids --------------------------------------------------------------------------

    def render(self, messages: Messages, tools: Tools, *, generate: bool) -> str:
        """The template's text, remembered. Arguments are given as dicts, or as JSON text if it
        takes no dicts. A thought is also given as `thinking` if the template reads only this field,
        or an empty one if it refuses that (transformers 5.24 adds the field).
        """
        key = repr((messages, tools, generate))
        if key not in self._renders:
            self._renders[key] = self._rendered(messages, tools, generate=generate)
        return self._renders[key]

    def _rendered(self, messages: Messages, tools: Tools, *, generate: bool) -> str:
        failure: Exception | None = None
        source = str(self.tokenizer.chat_template)
        reads_thinking = "message.thinking" in source and "reasoning_content" not in source
        for as_text, joins, thinks in itertools.product(
            (False, True), (False, True), ("all", None, "") if reads_thinking else (None,)
        ):
            prepared = [
                with_arguments(_joined(m) if joins else m, as_text=as_text) for m in messages
            ]
            if not self._takes_null:
                prepared = [
                    {**m, "content": ""} if m.get("tool_calls") and m.get("content") is None else m
                    for m in prepared
                ]
            if thinks is not None:
                prepared = [
                    {**m, "thinking": thinks and m["reasoning_content"]}
                    if m.get("reasoning_content")
                    else m
                    for m in prepared
                ]
            try:
                text = self.tokenizer.apply_chat_template(
                    prepared,
                    tools=list(tools) if tools else None,
                    add_generation_prompt=generate,
                    tokenize=False,
                )
            except Exception as error:
                failure = failure or error
                continue
            if _shows_parts(prepared, str(text)):
                return str(text)
        raise Refused(str(failure)) from failure

    @cached_property
    def _takes_null(self) -> bool:
        """Whether a call beside null is neither refused nor rendered with the word for null."""
        user: Message = {"role": "user", "content": "x"}
        for arguments in ({"x": "x"}, '{"x":"x"}'):
            function = {"name": "x", "arguments": arguments}
            calls = [{"id": "callid000", "type": "function", "function": function}]
            texts = []
            for content in ("", None):
                turn = {"role": "assistant", "content": content, "tool_calls": calls}
                try:
                    texts.append(
                        str(self.tokenizer.apply_chat_template([user, turn], tokenize=False))
                    )
                except Exception:
                    texts.append("")
            empty, null = texts
            if empty:
                words = ("None", "null")
                return bool(null) and all(null.count(word) == empty.count(word) for word in words)
        return True

    def careful(self, masked: str, restore: Callable[[str], str]) -> list[int]:
        """Ids of a render with masked bodies: its control tokens are the template's."""
        ids: list[int] = []
        at = 0
        for found in [*self.pattern.finditer(masked), None]:
            piece = restore(masked[at : found.start() if found else len(masked)])
            ids += self.plain(piece)
            if found:
                ids.append(self.control[found.group()])
                at = found.end()
        return ids

    def mask(self, value: Any) -> Any:
        """Messages or tools with control text in bodies (not assistant turns) replaced."""
        if isinstance(value, str):
            return self.pattern.sub(
                lambda found: f"\ue000{self.control[found.group()]}\ue001", value
            )
        if isinstance(value, dict):
            if value.get("role") == "assistant":
                return value
            return {
                key: value[key] if key in ("role", "tool_call_id") else self.mask(value[key])
                for key in value
            }
        return [self.mask(item) for item in value] if isinstance(value, list | tuple) else value

    def restore(self, text: str) -> str:
        """The text that `mask` replaced, put back."""
        texts = {index: text for text, index in self.control.items()}
        return re.sub("\ue000([0-9]+)\ue001", lambda found: texts[int(found.group(1))], text)

    # --- prompts ----------------------------------------------------------------------------------

    def prompt(self, messages: Messages, tools: Tools) -> list[int]:
        """The ids of a first prompt. Raises `Refused` as the template does."""
        text = self.render(messages, tools, generate=True)
        return self._ids(text, len(text), messages, tools)

    def _ids(self, text: str, length: int, messages: Messages, tools: Tools) -> list[int]:
        """The ids of the last `length` characters of `text`, the prompt of `messages`."""
        masked = self.render(
            self.mask(list(messages)), self.mask(list(tools)) if tools else None, generate=True
        )
        if self.restore(masked) != text:
            raise Inapplicable(
                "the template tests for control text in a body: the body cannot be masked"
            )
        return self.careful(
            masked[_masked_index(masked, len(text) - length, self.restore) :], self.restore
        )

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
            full = self.render([*messages, *scenario.new], scenario.tools, generate=True)
        except Refused:
            return case, Truth("raises")
        kind, length = self._compare(
            full, prompt, sampled, ending if stopped else replace(ending, stop=""), scenario
        )
        if length is None:
            return case, Truth(kind)
        careful = self._ids(full, length, [*messages, *scenario.new], scenario.tools)
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
        turn_end = at + len(ending.mark)
        tail = turn_end
        if ending.stop:
            found = self.pattern.match(full, turn_end + len(ending.rest))
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
        text = self.render(messages, scenario.tools, generate=True)
        tail = text[text.rfind(MARK) + len(MARK) :]
        return len(tail) if MARK in text and full.endswith(tail) else None

    # --- what the model sampled -------------------------------------------------------------------

    def _sample(self, scenario: Scenario) -> tuple[Scenario, str, str, Ending]:
        """The scenario as parsed, the texts of the prompt and the turn, and its ending."""
        try:
            prompt = self.render(scenario.history, scenario.tools, generate=True)
            alone = self.render([*scenario.history, scenario.turn], scenario.tools, generate=False)
        except Refused as error:
            raise Inapplicable(
                f"the template refuses the conversation before the new messages: {error}"
            ) from error
        thinks = (
            prompt.rstrip().endswith("<think>")
            and not alone.startswith(prompt)
            and scenario.sampled != "raw_thought"
        )
        # the model must end the reasoning that the prompt opens
        if thinks and not scenario.turn.get("reasoning_content"):
            return self._sample(
                replace(scenario, turn={**scenario.turn, "reasoning_content": "I think."})
            )
        if scenario.turn.get("reasoning_content") and prompt.rstrip().endswith("</think>"):
            raise Inapplicable("the prompt closes the thought: the model does not think")
        at = alone.rfind(scenario.mark)
        if at < len(prompt) - 40:
            raise Inapplicable("the template does not render this turn")
        ending = self._ending(scenario, alone[at + len(scenario.mark) :])
        said = alone[_turn_start(prompt, alone) : at + len(scenario.mark)]
        if scenario.sampled not in ("alone", "raw_thought") and not scenario.turn.get(
            "reasoning_content"
        ):
            said = self._in_history(scenario, prompt, ending) or said
        opened = prompt.rstrip().endswith("<think>")
        if opened and not alone.startswith(prompt) and "</think>" not in said:
            said = f"I think.\n</think>\n\n{said}"
        if scenario.sampled == "raw_thought" and "</think>" not in said:
            raise Inapplicable("the template does not render the thought in the content")
        if scenario.sampled == "call_cut":
            cut = said[: said.rfind("Paris") + 2]
            scenario = replace(scenario, turn={"role": "assistant", "content": cut})
            return scenario, prompt, cut, replace(ending, mark=cut[-12:], rest="")
        if scenario.sampled == "cut":
            return scenario, prompt, said, replace(ending, rest="")
        if scenario.sampled == "stop_trimmed":
            return scenario, prompt, said + "\nObservation:", replace(ending, rest="")
        if scenario.sampled == "compact":
            compact = (said + ending.rest).replace('": ', '":').replace(", ", ",")
            return scenario, prompt, compact + ending.stop, ending
        return (
            scenario,
            prompt,
            said + ending.rest + ("\n" if scenario.sampled == "spaced" else "") + ending.stop,
            ending,
        )

    def _in_history(self, scenario: Scenario, prompt: str, ending: Ending) -> str | None:
        """The turn as history shows it (Qwen3 writes an empty thought only at the end)."""
        try:
            full = self.render(
                [*scenario.history, scenario.turn, *scenario.new], scenario.tools, generate=True
            )
        except Refused:
            return None
        at = full.rfind(ending.mark + ending.rest)
        return (
            full[len(prompt) : at + len(ending.mark)]
            if full.startswith(prompt) and at >= len(prompt)
            else None
        )

    def _ending(self, scenario: Scenario, rest: str) -> Ending:
        """Where the model stopped: at the template's close, or at the next role marker (GLM)."""
        closes = self.control.keys() & {*CLOSES, "<sep>"}
        found = next(
            (match for match in self.pattern.finditer(rest) if match.group() in closes), None
        )
        if found is None and not scenario.turn.get("tool_calls"):
            found = self.pattern.search(rest.replace("</think>", "        "))
        if found is not None:
            return Ending(scenario.mark, rest[: found.start()], found.group())
        try:
            full = self.render(
                [*scenario.history, scenario.turn, *scenario.new], scenario.tools, generate=True
            )
        except Refused as error:
            raise Inapplicable(
                "no close in the render, and the template refuses what follows"
            ) from error
        behind = (
            full[full.rfind(scenario.mark) + len(scenario.mark) :]
            if scenario.mark == MARK
            else full
        )
        if scenario.mark != MARK:
            at = full.find(
                scenario.mark + rest.rstrip("\n"), full.find(scenario.history[-1]["content"])
            )
            behind = full[at + len(scenario.mark) :]
        own = rest if behind.startswith(rest) else rest.rstrip("\n")
        marker = self.pattern.match(behind, len(own)) if behind.startswith(own) else None
        last = [match for match in self.pattern.finditer(own) if match.end() == len(own)]
        # Gemma 4 stops at the start of the result, and shows it at the end
        if marker is None and last and behind.startswith(own):
            return Ending(scenario.mark, own[: last[0].start()], last[0].group())
        if marker is None:
            raise Inapplicable("no token ends the turn in the render")
        return Ending(scenario.mark, own, marker.group())

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


def _masked_index(masked: str, place: int, restore: Callable[[str], str]) -> int:
    """Where in the masked text the character stands that is at `place` in the restored one."""
    at = done = 0
    for found in re.finditer("\ue000[0-9]+\ue001", masked):
        if place <= done + found.start() - at:
            break
        done += found.start() - at + len(restore(found.group()))
        at = found.end()
    if place < done:
        raise Inapplicable("the text to append begins inside of a body")
    return at + place - done


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
