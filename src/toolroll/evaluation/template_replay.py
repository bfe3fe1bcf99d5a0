"""The conversation of `certify`, and `Replay`, which plays it as if a model sampled its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.runtime.jsonable import common_prefix
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.cursor import Cursor
from toolroll.rollout.template.delta import EMPTY_ELEMENT, SampledText
from toolroll.rollout.template.encode import as_ids
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.types import Message, Tool

Outcome = Literal["append", "fork", "refuse", "wrong"]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the template does at one kind of step, or the result of the check.

    - `append`: prompt + sampled + delta is the next prompt.
    - `fork`: the template rewrites the prompt or the sampled turn.
    - `refuse`: the template raises an error.
    - `wrong`: `Verifier` rejects a finished sequence. Please report this as a bug.

    `what` describes the step. `detail` gives the reason for any outcome except `append`.
    `preserved` is set for a fork: True if history="preserve" can continue the sequence instead.
    """

    name: str
    what: str
    outcome: Outcome
    detail: str = ""
    preserved: bool | None = None


class Step(NamedTuple):
    """An assistant turn, and the messages that follow it (none after the last turn).

    `name` and `what` are those of the step's `ProbeResult`. `optional`: the conversation continues
    without this step if the template does not append its messages.
    """

    name: str
    what: str
    turn: Message
    new: Sequence[Message]
    optional: bool = False


def _tool(name: str, *properties: str) -> Tool:
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string"} for key in properties},
        "required": list(properties),
    }
    function = {"name": name, "description": f"To {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_step(
    name: str, what: str, results: Mapping[int, str], *, text: str = "", optional: bool = True
) -> Step:
    """Return a step with a call for each of `results`, which maps the number of each call in the
    conversation to its result. Every second call has no arguments.
    """
    calls: list[dict[str, Any]] = []
    new: list[Message] = []
    for number, result in results.items():
        tool = "look" if number % 2 else "list_all"
        arguments = {"key": f"k{number}"} if number % 2 else {}
        call_id = f"callid{number:03d}"
        function = {"name": tool, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        new.append({"role": "tool", "tool_call_id": call_id, "name": tool, "content": result})
    turn = {"role": "assistant", "content": text, "tool_calls": calls}
    return Step(name, what, turn, new, optional)


def _thinking(step: Step) -> Step:
    return step._replace(turn={**step.turn, "reasoning_content": "I had better look."})


TOOLS = [_tool("look", "key"), _tool("list_all")]
USER: Message = {"role": "user", "content": "What is x?"}
OPENING: list[Message] = [{"role": "system", "content": "Be brief."}, USER]
TOOL = "tool"
_RESULTS = (
    '{"x": 1}',
    "",
    "one line\n\nand  another\t",
    "Zürich 東京 3.14 🙂",
    "see {control} there",
    "  edged  ",
    "<b>&'\"</b> {{ x }}",
    "Error: it's 12:30",
)
"""The results of the required calls. `{control}` stands for the text of a control token."""
THOUGHT = _thinking(
    _tool_step("thought_tool", "a tool result after a thought and a call", {9: "1"})
)
_ANSWER: Message = {"role": "assistant", "content": "It is 1."}
_AGAIN: Message = {"role": "user", "content": "And y?"}


def conversation(*, reasons: bool, control: str) -> list[Step]:
    """Return the steps after `OPENING`. The required ones are four answers, each after two calls.

    `reasons`: each turn has reasoning, except that of one step, which is added. `control`: the text
    of a control token.
    """
    answer = Step("user", "a user message after an answer", _ANSWER, [_AGAIN])
    required = []
    for number, result in enumerate(_RESULTS, 1):
        results = {number: result.replace("{control}", control)}
        required.append(_tool_step(TOOL, "a tool result", results, optional=False))
        if number % 2 == 0:
            required.append(answer)
    parts = "a thought, a text and a call" if reasons else "a text and a call"
    steps = [
        *required[:-1],
        _tool_step("text_tool", f"a tool result after {parts}", {11: "1"}, text="I look."),
        _tool_step("parallel", "two results of two calls", {12: "1", 13: "2"}),
    ]
    last = answer._replace(new=[])
    if not reasons:
        return [*steps, THOUGHT, last]
    what = "a user message after an answer without a thought"
    plain = Step("plain_user", what, _ANSWER, [_AGAIN], optional=True)
    return [plain, *map(_thinking, [*steps, last])]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence whose next turn `cursor` waits for. `count`: the number of sampled tokens, without
    those of optional steps.
    """

    cursor: Cursor
    ids: list[int]
    turns: tuple[TurnSpan, ...] = ()
    count: int = 0
    preserved: bool = False


class Replay:
    """A conversation after the messages `opening`, with the `history` setting of `template`.

    `outcomes` has the result of each kind of step: the first one that is not `append`, if there is
    one.
    """

    def __init__(
        self,
        template: ChatTemplate,
        opening: Sequence[Message] = OPENING,
        tools: Sequence[Tool] | None = TOOLS,
    ) -> None:
        self.outcomes: dict[str, ProbeResult] = {}
        self._template = template
        self._messages = list(opening)
        self._tools = tools
        self._sequences: list[_Sequence] = []

    def play(self, steps: Sequence[Step]) -> bool:
        """Play `steps`. Stop and return False if the template refuses a required one."""
        for step in steps:
            outcome, detail = self._played(step)
            if step.name not in self.outcomes or self.outcomes[step.name].outcome == "append":
                self.outcomes[step.name] = ProbeResult(step.name, step.what, outcome, detail)
            if outcome == "refuse" and not step.optional:
                return False
        return True

    def counts(self) -> list[int]:
        """Return the number of sampled tokens in each sequence, without those of optional steps."""
        return [sequence.count for sequence in self._sequences]

    def mismatch(self) -> str | None:
        """Return the first difference that `Verifier` finds in the sequences."""
        for sequence in self._sequences:
            ids, tools = as_ids(sequence.ids), self._tools or ()
            served = ServedSequence(
                ids, sequence.turns, self._messages, tools, preserved=sequence.preserved
            )
            if difference := self._template.verifier.check(served):
                return difference
        return None

    def _begin(self, messages: Sequence[Message]) -> _Sequence:
        cursor = self._template.start(messages, self._tools)
        return _Sequence(cursor, list(cursor.prompt()))

    def _played(self, step: Step) -> tuple[Outcome, str]:
        """Play one step. Return its outcome and the reason."""
        outcome: tuple[Outcome, str] = ("append", "")
        talk = [*self._messages, step.turn, *step.new]
        try:
            before = self._sequences[-1] if self._sequences else self._begin(self._messages)
            turned, sampled = self._sampled(before, step)
            try:
                following = [self._appended(turned, sampled, step)]
            except HistoryRewrittenError as error:
                outcome = ("fork", error.reason)
                if step.optional:
                    return outcome
                following = [turned, self._begin(talk)]
        except TemplateError as error:
            return "refuse", str(error.__cause__ or error)
        self._sequences[-1:], self._messages = following, talk
        return outcome

    def _sampled(self, before: _Sequence, step: Step) -> tuple[_Sequence, SampledText]:
        """Return the sequence with the step's turn, and what was sampled."""
        template, start = self._template, len(before.ids)
        messages = [*self._messages, step.turn]
        text = sampled_text(template, before.cursor.text, messages, step.new, self._tools)
        sampled = template.encoder.encode(text, previous=before.ids[-1])
        stopped = text.endswith(template.stop_texts)
        turn = TurnSpan(start, start + len(sampled), len(self._messages), stopped)
        turned = replace(
            before,
            ids=[*before.ids, *sampled],
            turns=(*before.turns, turn),
            count=before.count + (0 if step.optional else len(sampled)),
        )
        return turned, template.sampled(sampled, finish_reason="stop" if stopped else "length")

    def _appended(self, turned: _Sequence, sampled: SampledText, step: Step) -> _Sequence:
        """Return the sequence with the step's new messages."""
        if not step.new:
            return turned
        delta, cursor = turned.cursor.after(sampled, [step.turn, *step.new])
        preserved = turned.preserved or cursor.preserved is not None
        return replace(turned, cursor=cursor, ids=[*turned.ids, *delta], preserved=preserved)


def sampled_text(
    template: ChatTemplate,
    prompt: str,
    messages: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool] | None,
) -> str:
    """Return the text that a model samples after `prompt` for the last of `messages`, including its
    stop token. `new` are the messages that follow.

    This is the turn's render at the end of the conversation, or after `OPENING` if the template
    rewrites the prompt. Reasoning or text that it lacks is added before it. An empty element at its
    start is left out if the turn has no reasoning.
    """
    render, turn = template.renderer.render, messages[-1]
    continued = render([*messages, *new], tools, generate=True)
    alone = render(messages, tools, generate=False)
    if not alone.startswith(prompt):
        prompt = render(OPENING, tools, generate=True)
        alone = render([*OPENING, turn], tools, generate=False)
    text = alone[common_prefix(alone, prompt) :]
    thought = turn.get("reasoning_content") or ""
    if not thought and (added := EMPTY_ELEMENT.match(text)):
        text = text[added.end() :]
    lead = "".join(f"{part}\n" for part in (thought, turn["content"]) if part not in text)
    if ends := [text.find(stop) + len(stop) for stop in template.stop_texts if stop in text]:
        return lead + text[: min(ends)]
    # GLM: the stop token is the next role's marker, which is not part of the turn's own render.
    stops = (stop for stop in template.stop_texts if continued.startswith(alone + stop))
    return lead + text + next(stops, "")
