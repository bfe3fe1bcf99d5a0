"""Play whole dialogues through `Conversation` and the embedded engine, and judge the served tokens.

The engine's request log has what was served and sampled, the judge decides what is correct, and the
session's trajectories show what would be trained.
"""

import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from support.adversarial.dialogues import TOOLS, Message, Messages, Step, Tool
from support.adversarial.dialogues import Conversation as Script
from support.adversarial.templates import Template
from support.adversarial.texts import Inapplicable, Refused, Unclear
from support.adversarial.token_judge import Judge, Said, Truth
from support.episodes import serving
from support.oracle import History
from tokenizers import AddedToken

from toolroll.parsers.types import ParsedReply, ToolCall
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.model.conversation import Conversation
from toolroll.testing import EmbeddedEngine, PolicyRequest, Reply, load_embedded_tokenizer

_FAREWELL = Step({"role": "assistant", "content": "That is all."}, ())
PARAMS = {"max_new_tokens": 2048, "temperature": 1.0}
WRONG = ("wrong", "injected", "raises", "fork-wrong", "prompt-wrong")
"""What never may be. `raises`: appended although the template refuses the conversation."""


@dataclass(frozen=True)
class Row:
    """The verdict on one delta, fork or prompt."""

    dialogue: str
    turn: int
    verdict: str
    detail: str = ""


@dataclass
class Outcome:
    """One episode. `wrong`: the first prompt that is not right. `trained_wrong`: turns that are
    trained although they were sampled after a wrong prompt; `left_out`: turns of a right episode
    that are not."""

    name: str
    rows: list[Row] = field(default_factory=list)
    wrong: str = ""
    trained: int = 0
    trained_wrong: int = 0
    left_out: int = 0
    ended: str = ""
    prompts: list[tuple[str, str]] = field(default_factory=list)
    counted: int = 0


@lru_cache(maxsize=4)
def tokenizer_with(control: tuple[str, ...], eos: str) -> Any:
    """The embedded tokenizer with further control tokens, and with `eos` to end turns."""
    tokenizer = load_embedded_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.eos_token = eos
    return tokenizer


def tokenizer_of(template: Template) -> Any:
    """The tokenizer that a template is judged with."""
    tokenizer = tokenizer_with(template.control, template.stops[0])
    tokenizer.chat_template = template.source
    return tokenizer


def control_words(judge: Judge) -> dict[str, str]:
    """The control-token texts that bodies are spoiled with."""
    known = [text for text in judge.control if text != "<|pad|>"]
    named = {"end": judge.template.stops[0], "turn": next(iter(judge.template.control), "<|turn|>")}
    for key, text in (("think", "<think>"), ("unthink", "</think>"), ("call", "<tool_call>")):
        named[key] = text if text in known else known[0]
    return {**named, "uncall": "</tool_call>" if "</tool_call>" in known else known[0]}


class Voice:
    """Says the turns of scripts in the Hermes format, with sampled control tokens."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.added = judge, judge.tokenizer.get_added_vocab()
        self.lines: dict[str, list[Reply]] = {}

    def __call__(self, request: PolicyRequest) -> Reply:
        return self.lines[request.routing_key][request.call]

    def line(self, step: Step) -> Reply:
        turn, plain, control = step.turn, self.judge.plain, self.added
        ids: list[int] = []
        if turn.get("reasoning_content") and "<think>" in control:
            thought = plain(f"\n{turn['reasoning_content']}\n")
            ids += [control["<think>"], *thought, control["</think>"], *plain("\n\n")]
        ids += plain(turn["content"]) if turn["content"] else []
        for call in turn.get("tool_calls", ()):
            text = json.dumps(call["function"], ensure_ascii=False)
            ids += [control["<tool_call>"], *plain(text), control["</tool_call>"]]
        if step.sampling == "cut":
            return Reply(output_ids=ids[: max(1, len(ids) - 2)], stop=False)
        stops = self.judge.template.stops
        return Reply(output_ids=[*ids, control[stops[-1] if turn.get("tool_calls") else stops[0]]])


class Scripted:
    """Says each turn as the template renders it, and reads what was said as the script's own
    message: a template's own format of calls is played, and no parser is asked."""

    def __init__(self, voice: Voice, tools: Sequence[Tool]) -> None:
        self.voice = voice
        self.tools = tools
        self.planned: Message = {}

    def plan(self, dialogue: Conversation, step: Step) -> None:
        """Make the line for the next turn of `dialogue`."""
        calls = step.turn.get("tool_calls", [])
        one_call = {**step.turn, "tool_calls": calls[:1]} if calls else step.turn
        followed = replace(step, sampling="alone")  # by what ends the turn, if it has no end
        plain = replace(followed, new=())
        for planned in (replace(step, new=()), plain, followed, replace(plain, turn=one_call)):
            self.planned = planned.turn | {"content": planned.turn["content"] or None}
            planned = replace(planned, turn=self.planned)
            try:
                said = self.voice.judge.say(
                    dialogue.messages, planned, self.tools, random.Random(0)
                )
                break
            except Inapplicable as error:
                failure = error
        else:
            raise failure
        reply = Reply(output_ids=said.ids, stop=bool(said.stop))
        self.voice.lines[dialogue.session.session_id].append(reply)

    def parse(self, said: str, *_: object) -> ParsedReply:
        """The planned message, whatever `said` is."""
        turn = self.planned
        calls = tuple(
            ToolCall(call["function"]["name"], call["function"]["arguments"], said, id=call["id"])
            for call in turn.get("tool_calls", ())
        )
        return ParsedReply(turn["content"] or "", turn.get("reasoning_content"), calls)


async def play_episodes(
    template: Template,
    scripts: Sequence[Script],
    *,
    tokenizer: Any = None,
    scripted: bool = False,
    history: History = "fork",
    keep: Callable[[Conversation], None] = lambda dialogue: None,
    **settings: Any,
) -> list[Outcome]:
    """Play `scripts` with one served model; `settings` are `Conversation`'s (none: its defaults).
    `scripted`: turns are said in the template's own format, else in that of Hermes. `keep` is
    called with each dialogue at its end."""
    if tokenizer is None:
        tokenizer = tokenizer_of(template)
    judge = Judge(tokenizer, template)
    voice = Voice(judge)
    stops = [judge.control[text] for text in template.stops]
    found = []
    async with serving(tokenizer, voice, stop_token_ids=stops, history=history) as (engine, served):
        for script in scripts:
            steps = [*script.steps, _FAREWELL]
            tools = script.tools or () if scripted else TOOLS
            prompter = Scripted(voice, tools) if scripted else None
            voice.lines[script.name] = [] if prompter else [voice.line(step) for step in steps]
            more: dict[str, Any] = {"parse": prompter.parse} if prompter else {}
            dialogue = Conversation(
                served, script.first, tools, session_id=script.name, **more, **settings
            )
            ended = await _play(dialogue, steps, prompter)
            await dialogue.settle()
            keep(dialogue)
            found.append(_judged(judge, dialogue, engine, ended, tools, history))
    return found


async def _play(dialogue: Conversation, steps: Sequence[Step], prompter: Scripted | None) -> str:
    """Play to the end, or to a turn that cannot be said; return the template's refusal."""
    try:
        for step in steps:
            if prompter is not None:
                prompter.plan(dialogue, step)
            reply = await dialogue.reply(PARAMS)
            dialogue.extend(_with_ids(step.new, reply.message))
    except Inapplicable:
        return ""
    except TemplateError as error:
        return str(error)
    return ""


def _with_ids(new: Sequence[Message], turn: Message) -> list[Message]:
    """The script's messages with the ids of the calls as they were parsed."""
    ids = iter([call["id"] for call in turn.get("tool_calls", ())])
    return [
        {**message, "tool_call_id": next(ids, message["tool_call_id"])}
        if message["role"] == "tool"
        else message
        for message in new
    ]


def _judged(
    judge: Judge,
    dialogue: Conversation,
    engine: EmbeddedEngine,
    ended: str,
    tools: Sequence[Tool],
    history: History,
) -> Outcome:
    name = dialogue.session.session_id
    outcome = Outcome(name, ended=ended, counted=dialogue.mismatches.total())
    log = [entry for entry in engine.log if entry.routing_key == name]
    at = [n for n, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    at.append(len(dialogue.messages))
    stream: list[int] = []
    wrong: list[int] = []
    for turn, entry in enumerate(log):
        prompt = entry.input_ids.tolist()
        before = dialogue.messages[: at[turn]]
        with suppress(Refused):
            rendered = judge.text(before, tools, generate=True)
            outcome.prompts.append((judge.decode(prompt), rendered))
        last = dialogue.messages[: at[turn - 1]] if turn else []
        verdict, detail = _verdict(
            judge, prompt, stream, before, last, log[turn - 1] if turn else None, tools, history
        )
        outcome.rows.append(Row(name, turn, verdict, detail))
        if verdict in WRONG and not wrong:
            wrong, outcome.wrong = prompt, f"turn {turn}: {verdict} {detail}"
        stream = [*prompt, *entry.output_ids]
    if ended:
        with suppress(Refused, Unclear):  # it refuses, or its control tokens cannot be told
            judge.render(dialogue.messages, tools, generate=True)
            outcome.rows.append(Row(name, len(log), "refused-unneeded", ended))
    _count_trained(outcome, dialogue, wrong)
    return outcome


def _verdict(
    judge: Judge,
    prompt: list[int],
    stream: list[int],
    before: Messages,
    last: Messages,
    entry: Any,
    tools: Sequence[Tool],
    history: History,
) -> tuple[str, str]:
    """The verdict on one prompt, served after `stream`, which ends in the answer of `entry`."""
    try:
        if entry is None:
            return ("exact", "") if prompt == judge.prompt(before, tools) else ("prompt-wrong", "")
    except (Refused, Unclear) as reason:
        return "unclear", str(reason)
    text = judge.decode(entry.output_ids)
    stop = judge.decode(entry.output_ids[-1:])
    said = Said(
        entry.output_ids, text, stop if stop in judge.template.stops else "", before[len(last)]
    )
    truth = judge.truth(last, said, before[len(last) + 1 :], tools)
    if prompt[: len(stream)] == stream:
        delta = prompt[len(stream) :]
        verdict = verdict_on(truth, delta, history)
        wanted = truth.input_ids and judge.decode(truth.input_ids)
        detail = f"expected {wanted!r:.300} got {judge.decode(delta)!r:.300}"
        return verdict, "" if verdict == "exact" else f"{truth.kind} {truth.why} {detail}"
    try:
        right = judge.fork_is_right(prompt, stream, before, tools)
    except Refused as reason:
        return "raises", str(reason)
    if right is False:
        return "fork-wrong", f"{judge.decode(prompt)[-300:]!r}"
    return verdict_on(truth, None, history), ""


def _count_trained(outcome: Outcome, dialogue: Conversation, wrong: list[int]) -> None:
    for trajectory in dialogue.session.trajectories():
        for turn in trajectory.turns:
            spoiled = bool(wrong) and trajectory.input_ids[: len(wrong)].tolist() == wrong
            spoiled = spoiled and turn.start >= len(wrong)
            trained = bool(np.any(trajectory.loss_mask[turn.start : turn.stop]))
            outcome.trained += trained
            outcome.trained_wrong += trained and spoiled
            outcome.left_out += turn.excluded not in (None, "context") and not wrong


def verdict_on(truth: Truth, appended: Sequence[int] | None, history: History) -> str:
    """The verdict on the ids that were appended, or on a fork (None)."""
    kept = truth.kind in ("append", "drift") or (
        truth.kind == "rewrite" and history == "preserve" and truth.input_ids is not None
    )
    if appended is None:
        return "fork-unneeded" if kept else "fork-right"
    if truth.kind in ("raises", "unclear"):
        return truth.kind
    if kept and appended == truth.input_ids:
        return "preserved" if truth.kind == "rewrite" else "exact"
    if truth.kind == "rewrite" and history == "preserve" and truth.input_ids is None:
        return "preserved-unclear"
    return "injected" if appended == truth.careless_ids != truth.input_ids else "wrong"
