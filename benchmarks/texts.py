"""Kinds of new text: CPU per kilobyte of a tool result that was not seen before."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable

from benchmarks.clock import Laps
from benchmarks.conversations import QWEN, made_up_tools, tokenizer
from benchmarks.deltas import Toolroll
from benchmarks.peers import FullRender
from benchmarks.tables import Table, number

SIZE = 8_000
"""Approximate size of each tool result in bytes of UTF-8."""
TURNS = 10
_WORDS = (
    "flight reservation cancel insurance passenger economy total payment gift certificate bag "
    "refund"
).split()


def _english(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) + str(rng.randrange(99)) for _ in range(SIZE // 10))


def _json(rng: random.Random) -> str:
    rows = [
        {"id": f"R{rng.randrange(10**6)}", "seat": rng.choice(_WORDS), "price": rng.random()}
        for _ in range(SIZE // 58)
    ]
    return json.dumps(rows)


def _letters(first: int, last: int, width: int) -> Callable[[random.Random], str]:
    def made(rng: random.Random) -> str:
        words = (
            "".join(chr(rng.randint(first, last)) for _ in range(6))
            for _ in range(SIZE // (6 * width + 1))
        )
        return " ".join(words)

    return made


KINDS: dict[str, Callable[[random.Random], str]] = {
    "English": _english,
    "JSON": _json,
    "Chinese": _letters(0x4E00, 0x9FA5, 3),
    "Arabic": _letters(0x621, 0x64A, 2),
    "Cyrillic": _letters(0x410, 0x44F, 2),
    "base64": lambda rng: base64.b64encode(rng.randbytes(SIZE * 3 // 4)).decode(),
}


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    tok, rng = tokenizer(QWEN), random.Random(0)
    end = tok.convert_tokens_to_ids("<|im_end|>")
    tools = made_up_tools()
    made = Table(
        "Kinds of text: microseconds of CPU per kB of a new tool result",
        [
            "text",
            "tokens per kB",
            "floor: raw encode",
            "toolroll, whole turn",
            "full render + full tokenise",
        ],
    )
    for kind, make in KINDS.items():
        laps, size, tokens = Laps(), 0, 0
        ways: tuple[Toolroll | FullRender, ...] = ()
        for _ in range(1 if quick else 3):
            ways = (Toolroll(tok), FullRender(tok))
            for way in ways:
                way.begin(
                    [
                        {"role": "system", "content": "Be helpful."},
                        {"role": "user", "content": "Go."},
                    ],
                    tools,
                )
            for turn in range(TURNS):
                body = make(rng)
                size += len(body.encode())
                call = {
                    "id": f"c{turn}",
                    "type": "function",
                    "function": {"name": "do_thing_1", "arguments": "{}"},
                }
                said = {"role": "assistant", "content": "", "tool_calls": [call]}
                new = [
                    {
                        "role": "tool",
                        "tool_call_id": f"c{turn}",
                        "name": "do_thing_1",
                        "content": body,
                    }
                ]
                text = '<tool_call>\n{"name": "do_thing_1", "arguments": {}}\n</tool_call>'
                ids = [*tok.encode(text, add_special_tokens=False), end]
                with laps.lap("floor"):
                    tokens += len(tok.backend_tokenizer.encode(body, add_special_tokens=False).ids)
                for way in ways:
                    with laps.lap(way.name):
                        if isinstance(way, Toolroll):
                            way.sampled(ids)
                        way.turn(said, ids, new)
        cost = {name: sum(times) / size * 1000 for name, times in laps.times.items()}
        cells = [number(cost[name]) for name in ("floor", *(way.name for way in ways))]
        made.rows.append([kind, number(tokens / size * 1000), *cells])
    made.notes.append(
        f"{TURNS} turns, each with a tool result of {SIZE:,} bytes of random text of this kind; "
        f"template {QWEN}."
    )
    return made
