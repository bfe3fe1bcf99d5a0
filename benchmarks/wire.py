"""Requests and replies: CPU of encoding a request body and of parsing a reply, without a network.

Goals, as ratios within the run: encoding a request at 12k ids costs at most 0.23 of encoding the whole list (10 us where that is
44), and reading a reply of 500 tokens with logprobs at most 1.74 of decoding its JSON (0.15 us a token where that is 0.086).
"""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import numpy as np
import orjson

from benchmarks.clock import cpu_in_turns, cpu_of
from benchmarks.tables import Table, number, verdict
from toolroll.rollout.engine import Engine, parse_completion
from toolroll.rollout.session import Session
from toolroll.rollout.types import Completion, GenerateRequest

LENGTHS = (1_000, 4_000, 12_000, 32_000)
REPLIES = (50, 500, 4_000)
_PARAMS = {"temperature": 1.0, "max_new_tokens": 512, "stop_token_ids": [151645]}


def reply(tokens: int, prompt: int = 100, seed: int = 0) -> bytes:
    """An answer of SGLang's with `tokens` sampled ids."""
    rng = random.Random(seed)
    ids = [rng.randrange(150_000) for _ in range(tokens)]
    logprobs = [[-rng.random() * 5, index, None] for index in ids]
    meta: dict[str, Any] = {
        "id": "0" * 32,
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "cached_tokens": 90,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
        "output_token_logprobs": logprobs,
        "input_token_logprobs": [],
    }
    return orjson.dumps({"text": "word " * tokens, "output_ids": ids, "meta_info": meta})


def session(length: int, seed: int = 0) -> Session:
    """One of that many tokens."""
    rng = random.Random(seed)
    made = Session("s")
    made.observe([rng.randrange(150_000) for _ in range(length)])
    return made


def _parse(text: bytes, asked: GenerateRequest) -> Completion:
    return parse_completion(orjson.loads(text), asked)


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    rounds = 3 if quick else 9
    engine = Engine("http://127.0.0.1:1")
    made = Table("Requests and replies, microseconds of CPU", ["", "toolroll", "orjson, whole list", "json, whole list"])
    new = np.arange(150_000, 150_300, dtype=np.int32)
    costs, whole, read, decoded = {}, {}, {}, {}
    for length in LENGTHS:
        held = session(length)
        ids = held.input_ids.tolist()

        def request(held: Session = held) -> bytes:
            asked = GenerateRequest(held.input_ids, _PARAMS, "s", input_ids_json=held.input_ids_json)
            return engine._body(asked, "0" * 32, stream=False)

        body = {"input_ids": ids, "sampling_params": _PARAMS, "return_logprob": True, "stream": False, "rid": "0" * 32}
        costs[length], whole[length] = cpu_in_turns(request, partial(orjson.dumps, body), rounds=rounds)
        cells = [costs[length], whole[length], cpu_of(partial(json.dumps, body), rounds=3)]
        made.rows.append([f"request, {length:,} ids", *map(number, cells)])
    growing = session(12_000)
    made.rows.append(["300 new ids taken in", number(cpu_of(lambda: growing.observe(new), rounds=rounds)), "", ""])
    for tokens in REPLIES:
        text = reply(tokens)
        asked = GenerateRequest(np.zeros(100, dtype=np.int32), _PARAMS, "s")
        read[tokens], decoded[tokens] = cpu_in_turns(partial(_parse, text, asked), partial(orjson.loads, text), rounds=rounds)
        cells = [read[tokens], decoded[tokens], cpu_of(partial(json.loads, text), rounds=3)]
        made.rows.append([f"reply, {tokens:,} tokens with logprobs (others: only decoded)", *map(number, cells)])
    goals = [
        ("a request of 12,000 ids over encoding the whole list", costs[12_000] / whole[12_000], 0.23),
        ("a reply of 500 tokens over decoding its JSON", read[500] / decoded[500], 1.74),
    ]
    made.notes += [f"Goal: {name} at most {most:g}: {value:.3g}, {verdict(held=value <= most)}." for name, value, most in goals]
    return made
