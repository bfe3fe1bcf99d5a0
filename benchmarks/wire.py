"""Requests and replies: CPU for encoding a request body and for parsing a reply."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import numpy as np
import orjson

from benchmarks.clock import cpu_in_turns, cpu_of
from benchmarks.tables import Table, number
from toolroll.rollout.engine import EncodedRequest, Engine, parse_completion
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session
from toolroll.rollout.types import Completion, GenerateRequest

LENGTHS = (1_000, 4_000, 12_000, 32_000)
REPLIES = (50, 500, 4_000)
_PARAMS = {"temperature": 1.0, "max_new_tokens": 512, "stop_token_ids": [151645]}


def reply(tokens: int, prompt: int = 100, seed: int = 0) -> bytes:
    """Return an answer of SGLang with `tokens` sampled ids."""
    rng = random.Random(seed)
    ids = [*(rng.randrange(150_000) for _ in range(tokens - 1)), 151645]
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


def session(length: int, seed: int = 0) -> SessionPath:
    """Return a session with `length` tokens."""
    rng = random.Random(seed)
    made = SessionPath(Session("s"))
    made.observe([rng.randrange(150_000) for _ in range(length)])
    return made


def _parse(text: bytes, asked: GenerateRequest) -> Completion:
    return parse_completion(orjson.loads(text), asked)


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    rounds = 3 if quick else 9
    engine = Engine("http://127.0.0.1:1")
    made = Table(
        "Requests and replies, microseconds of CPU",
        ["", "toolroll", "orjson, whole list", "json, whole list"],
    )
    new = np.arange(150_000, 150_300, dtype=np.int32)
    for length in LENGTHS:
        held = session(length)
        ids = held.input_ids.tolist()

        def request(held: SessionPath = held) -> bytes:
            asked = EncodedRequest(held.input_ids, _PARAMS, "s", input_ids_json=held.input_ids_json)
            return engine._body(asked, "0" * 32, stream=False)

        body = {
            "input_ids": ids,
            "sampling_params": _PARAMS,
            "return_logprob": True,
            "stream": False,
            "rid": "0" * 32,
        }
        costs = cpu_in_turns(request, partial(orjson.dumps, body), rounds=rounds)
        cells = [*costs, cpu_of(partial(json.dumps, body), rounds=3)]
        made.rows.append([f"request, {length:,} ids", *map(number, cells)])
    growing = session(12_000)
    made.rows.append(
        [
            "300 new ids appended",
            number(cpu_of(lambda: growing.observe(new), rounds=rounds)),
            "",
            "",
        ]
    )
    for tokens in REPLIES:
        text = reply(tokens)
        asked = GenerateRequest(
            np.zeros(100, dtype=np.int32), {**_PARAMS, "max_new_tokens": tokens}, "s"
        )
        read = partial(_parse, text, asked)
        costs = cpu_in_turns(read, partial(orjson.loads, text), rounds=rounds)
        cells = [*costs, cpu_of(partial(json.loads, text), rounds=3)]
        made.rows.append(
            [f"reply, {tokens:,} tokens with logprobs (others: only decoded)", *map(number, cells)]
        )
    return made
