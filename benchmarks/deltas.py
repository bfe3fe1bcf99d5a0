"""Prompt building: CPU per turn, from a sampled turn and new messages to the next request's ids, without a network.

Goals: a learned frame costs at most 1.3x a raw encode of the new bodies, an unknown template at most 1.8x, turn 30 at most 1.1x
turn 5, a known head at most 0.056 of a whole first prompt.

The first round, which is not timed, plays the same conversations: frames, heads and words are known then, as in a process that has
played a batch. What words cost that are met for the first time is said below the table.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from benchmarks.clock import Laps, mean
from benchmarks.conversations import QWEN, Conversation, Workload, as_sampled, tokenizer, workload
from benchmarks.peers import FullRender, PublishedLoop, Renderers, Strands, Verl, Way, missing, readable
from benchmarks.tables import Table, number, verdict
from toolroll.rollout.session import Session
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.features import History
from toolroll.rollout.template.word_split import read_split
from toolroll.rollout.types import Completion, Message, Tool

TURNS = (1, 5, 10, 20, 30)
FLOOR = "floor: raw encode of the new bodies"
OURS = "toolroll"
OURS_CHECKED = 'toolroll, verify="sample"'
OURS_UNKNOWN = "toolroll, nothing learned"


class Toolroll:
    """Our own: delta, session and history; the ids of the next request as JSON."""

    def __init__(self, template: ChatTemplate, *, name: str = OURS, checked: bool = False) -> None:
        self.name = name
        self.framed = self.turns = 0
        self._template = template
        self._checked = checked
        self._session = Session("s")
        self._messages: list[Message] = []
        self._rendered: str | None = None

    def begin(self, messages: list[Message], tools: list[Tool]) -> Sequence[int]:
        self._session = Session("s")
        self._messages = list(messages)
        self._tools, self._tools_key = tools, orjson.dumps(tools)
        self._history = History(self._template.features)
        self._history.extend(messages)
        self._rendered = None
        self._session.observe(self._template.first_prompt(messages, tools, tools_key=self._tools_key)[1].input_ids)
        return self._session.input_ids

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        self._messages.append(assistant)
        self._history.add(assistant)
        ids = self._ids
        delta = self._template.delta_after(
            self._history.key,
            self._messages,
            new,
            tools=self._tools,
            sampled=self._sampled,
            sampled_ids=ids,
            tools_key=self._tools_key,
            rendered=self._rendered,
        )
        self._rendered = delta.rendered
        self._session.observe(delta.input_ids)
        self._history.extend(new)
        self.turns += 1
        self.framed += delta.framed
        if self._checked and delta.check_due:
            assert self._template.check(self._messages, new, self._tools, self._sampled, delta.input_ids) is None
        self._messages += new
        return self._session.input_ids, self._session.input_ids_json  # type: ignore[return-value]

    def sampled(self, ids: list[int]) -> None:
        """What the engine's answer brings: appended before the next prompt is built, and decoded for the parser anyway."""
        array = np.array(ids, dtype=np.int32)
        self._session.sample(Completion(array, np.zeros(len(ids), dtype=np.float32), "stop"), {})
        self._sampled, self._ids = self._template.sampled(ids), array

    @property
    def prompt(self) -> list[int]:
        """The next request's ids."""
        return [int(index) for index in self._session.input_ids]


def swapped(given: Conversation) -> Conversation:
    """The same conversation with its turns 1 to 25 behind its turns 26 to 50: what was said in turn 30 is said in turn 5."""
    return Conversation(given.first, given.turns[25:50] + given.turns[:25])


@dataclass
class Measured:
    """Microseconds: `first[way]` of the first prompt, `turns[way, turn]` the mean over conversations."""

    first: dict[str, float]
    turns: dict[tuple[str, int], float]
    prompts: dict[int, float]
    equal: dict[str, tuple[int, int]]
    skipped: list[str]


def ways(tok: Any) -> tuple[list[Way], list[str]]:
    """Our ways and the peers that are installed; and why the others are skipped."""
    found: list[Way] = [
        FullRender(tok),
        PublishedLoop(tok),
        Toolroll(ChatTemplate(tok)),
        Toolroll(ChatTemplate(tok), name=OURS_CHECKED, checked=True),
        Toolroll(unreadable(tok), name=OURS_UNKNOWN),
    ]
    peers: list[tuple[str, str, Callable[[], Way]]] = [
        ("renderers 0.1.12", "renderers", lambda: Renderers(tok)),
        ("strands-sglang 0.4.3", "strands_sglang", lambda: Strands(tok)),
        ("verl 0.9.1", "verl", lambda: Verl(tok, with_tools=True)),
        ("verl 0.9.1", "verl", lambda: Verl(tok, with_tools=False)),
    ]
    skipped = []
    for package, module, make in peers:
        why = missing(package, module)
        if why is None:
            found.append(make())
        elif why not in skipped:
            skipped.append(why)
    return found, skipped


def unreadable(tok: Any) -> ChatTemplate:
    """A template of which nothing may be learned, as one whose source cannot be read: each delta is derived by renders."""
    template = ChatTemplate(tok)
    template.features.readable = False
    return template


def measure(load: Workload, *, conversations: int = 12, rounds: int = 3, template: str = QWEN) -> Measured:
    """Play every conversation in every way, the ways interleaved, after one round that is not timed."""
    tok = tokenizer(template)
    candidates, skipped = ways(tok)
    chosen = [turned for given in load.conversations[: conversations // 2] for turned in (given, swapped(given))]
    laps, prompts = Laps(), Laps()
    equal: dict[str, list[bool]] = {}
    for number_of_round in range(rounds + 1):
        timed = number_of_round > 0
        gc.collect()
        for at, conversation in enumerate(chosen):
            order = candidates[at % len(candidates) :] + candidates[: at % len(candidates)]
            for way in order:
                ids = play(way, tok, conversation, load.tools, at, laps if timed else Laps(), prompts)
                equal.setdefault(way.name, []).extend(ids if timed and number_of_round == 1 else [])
            floor(tok, conversation, at, laps if timed else Laps())
    names = [FLOOR, *(way.name for way in candidates)]
    return Measured(
        first={name: laps.median((name, "first")) for name in names if name != FLOOR},
        turns={
            (name, turn): mean(laps.median((name, at, turn)) for at in range(len(chosen))) for name in names for turn in range(1, 31)
        },
        prompts={turn: mean(prompts.times[turn]) for turn in TURNS},
        equal={name: (sum(values), len(values)) for name, values in equal.items()},
        skipped=skipped,
    )


def play(way: Way, tok: Any, conversation: Conversation, tools: list[Tool], at: int, laps: Laps, prompts: Laps) -> list[bool]:
    """One conversation in one way; whether the text of each prompt equals the full render."""
    end = tok.convert_tokens_to_ids("<|im_end|>")
    history = list(conversation.first)
    with laps.lap((way.name, "first")):
        way.begin(list(conversation.first), tools)
    equal = []
    for number_of_turn, turn in enumerate(conversation.turns[:30], 1):
        ids = [*tok.encode(as_sampled(turn.assistant), add_special_tokens=False), end]
        assistant = readable(turn.assistant)
        if isinstance(way, Toolroll):
            way.sampled(ids)
        began = time.thread_time_ns()
        prompt = way.turn(assistant, ids, turn.new)
        laps.add((way.name, at, number_of_turn), (time.thread_time_ns() - began) / 1000)
        history += [assistant, *turn.new]
        if number_of_turn in TURNS and not isinstance(way, PublishedLoop):
            built = way.prompt if isinstance(way, Toolroll) else list(prompt)
            text = tok.apply_chat_template(history, tools=tools, tokenize=False, add_generation_prompt=True)
            equal.append(tok.decode(built) == text)
            if isinstance(way, FullRender):
                prompts.add(number_of_turn, float(len(built)))
    return equal


def floor(tok: Any, conversation: Conversation, at: int, laps: Laps) -> None:
    """The least that any way must do: encode the new bodies with the bare tokenizer."""
    encode = tok.backend_tokenizer.encode
    for number_of_turn, turn in enumerate(conversation.turns[:30], 1):
        bodies = [message["content"] for message in turn.new]
        began = time.thread_time_ns()
        for body in bodies:
            _ = encode(body, add_special_tokens=False).ids
        laps.add((FLOOR, at, number_of_turn), (time.thread_time_ns() - began) / 1000)


def unseen(load: Workload) -> str:
    """What bodies cost by words whose words were learned from other conversations, in words of its own."""
    encoder, split = Encoder(tokenizer()), read_split(tokenizer().backend_tokenizer)
    assert split is not None

    def bodies(conversations: Sequence[Conversation]) -> list[str]:
        return [message["content"] for given in conversations for turn in given.turns for message in turn.new]

    def cpu(encode: Callable[[str], object], texts: list[str]) -> float:
        began = time.thread_time_ns()
        for text in texts:
            encode(text)
        return (time.thread_time_ns() - began) / 1000

    before, asked = bodies(load.recorded[::2]), bodies(load.recorded[1::2])
    cpu(encoder.encode_known, before)
    known = {word for body in before for word in split.words(body) or ()}
    cut = [split.words(body) for body in asked]
    new = sum(len(word) for words in cut for word in words or () if word not in known) / sum(map(len, asked))
    raw = cpu(tokenizer().backend_tokenizer.encode, asked)
    first, again = cpu(encoder.encode_known, asked) / raw, cpu(encoder.encode_known, asked) / raw
    return (
        f"Bodies alone, of every second conversation when the others have been played: {first:.2f} of the raw encode the first time "
        f"({new:.1%} of their characters stand in words that were not met before, {sum(words is None for words in cut)} of "
        f"{len(cut)} bodies cannot be cut), {again:.2f} from then on."
    )


def over(found: Measured, name: str) -> float:
    """CPU of all 30 turns, over the floor's."""
    return mean(found.turns[name, turn] for turn in range(1, 31)) / mean(found.turns[FLOOR, turn] for turn in range(1, 31))


def growth(found: Measured, name: str) -> float:
    """What turns 28 to 30 cost over what turns 3 to 5 do. The bodies are the same: each conversation is played `swapped` too."""
    return mean(found.turns[name, turn] for turn in (28, 29, 30)) / mean(found.turns[name, turn] for turn in (3, 4, 5))


def table(found: Measured, load: Workload) -> Table:
    """The figures as a table."""
    head = ["way", "first prompt", *(f"turn {turn}" for turn in TURNS), "30 turns / floor", "turn 30 / turn 5", "prompts as rendered"]
    made = Table("Prompt building, microseconds of CPU per turn", head)
    for name in [FLOOR, *found.first]:
        cells = [number(found.turns[name, turn]) for turn in TURNS]
        equal = "" if name == FLOOR else "{}/{}".format(*found.equal[name]) if found.equal[name][1] else "text"
        first = "" if name == FLOOR else number(found.first[name])
        made.rows.append([name, first, *cells, f"{over(found, name):.2f}", f"{growth(found, name):.2f}", equal])
    tokens = ", ".join(f"{found.prompts[turn]:,.0f}" for turn in TURNS)
    made.notes += [f"Conversations: {load.source}; Qwen's BPE and template {QWEN}; prompt tokens at these turns: {tokens}."]
    made.notes += [
        "turn 30 / turn 5: turns 28 to 30 over turns 3 to 5, with the same bodies: each conversation is played a second time"
    ]
    made.notes[-1] += " with its first 25 turns behind the next 25."
    made.notes += [unseen(load)]
    goals = [
        ("a learned frame over the floor", over(found, OURS), 1.3),
        ('with verify="sample"', over(found, OURS_CHECKED), 1.5),
        ("an unknown template over the floor", over(found, OURS_UNKNOWN), 1.8),
        ("turn 30 / turn 5", growth(found, OURS), 1.1),
        ("a known head over a whole first prompt (0.2 ms where that is 3.6)", found.first[OURS] / found.first[FullRender.name], 0.056),
    ]
    made.notes += [f"Goal: {name} at most {most}: {value:.3g}, {verdict(held=value <= most)}." for name, value, most in goals]
    made.notes += [f"Skipped: {why}." for why in found.skipped]
    return made


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    load = workload(50)
    return table(measure(load, conversations=4 if quick else 8, rounds=3), load)
