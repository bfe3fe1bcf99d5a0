"""`toolroll audit`: CPU time per row and peak memory, in a new process each. A row has about 2,000
tokens; SGLang's log has a line for each turn, with its whole prompt.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.audited import request_line

from benchmarks.clock import cpu, in_new_process
from benchmarks.conversations import Conversation, as_sampled, renumbered, tokenizer, workload
from benchmarks.deltas import Toolroll
from benchmarks.peers import readable
from benchmarks.tables import Table, number
from toolroll.evaluation.audit import TemplateCheck, audit
from toolroll.evaluation.audit.formats import read_rows
from toolroll.evaluation.audit.request_log import read_record
from toolroll.rollout.types import Tool

TOKENS, TOOLS, WORDS = 2000, 3, 150
"""The tokens of a row, its tools, and the words of its system message."""
ROWS, LOG = "rows.jsonl", "requests.log"


@dataclass(frozen=True)
class Cost:
    """CPU seconds of reading the log and of the whole audit, and the process's peak in bytes."""

    log: float
    total: float
    peak: int


def write(folder: Path, rows: int) -> tuple[float, float]:
    """Write rows and the log of their turns. Return the mean numbers of tokens and of turns."""
    load, tok = workload(), tokenizer()
    way, end, tools = Toolroll(tok), tok.convert_tokens_to_ids("<|im_end|>"), load.tools[:TOOLS]
    tokens = turns = 0
    with (folder / ROWS).open("w") as samples, (folder / LOG).open("w") as log:
        for seed in range(rows):
            talk = renumbered(load.conversations[seed % len(load.conversations)], seed)
            row, lines = played(way, talk, tools, [end], random.Random(seed))
            samples.write(json.dumps(row) + "\n")
            log.writelines(lines)
            tokens, turns = tokens + len(row["input_ids"]), turns + len(lines)
    return tokens / rows, turns / rows


def played(
    way: Toolroll, talk: Conversation, tools: list[Tool], end: list[int], rng: random.Random
) -> tuple[dict[str, Any], list[str]]:
    """Return a row of turns up to `TOKENS`, and their lines of the log."""
    system, *messages = talk.first
    words = system["content"].split(" ")[:WORDS]
    messages, lines = [{**system, "content": " ".join(words)}, *messages], list[str]()
    ids = [int(index) for index in way.begin(messages, tools)]
    mask, logprobs = [0] * len(ids), list[float | None]([None] * len(ids))
    for turn in talk.turns:
        sampled = way.template.tokenizer.encode(as_sampled(turn.assistant)) + end
        values = [-rng.expovariate(3) for _ in sampled]
        lines.append(request_line(ids, sampled, values))
        assistant = readable(turn.assistant)
        following = [int(index) for index in way.turn(assistant, sampled, turn.new)]
        messages.append(assistant)
        ids += sampled
        mask += [1] * len(sampled)
        logprobs += values
        if len(following) > TOKENS:
            break
        messages += turn.new
        new = len(following) - len(ids)
        mask += [0] * new
        logprobs += [None] * new
        ids = following
    row = {"input_ids": ids, "loss_mask": mask, "logprobs": logprobs}
    return {**row, "messages": messages, "tools": tools}, lines


def measure(folder: str, *, log: bool, model: bool) -> Cost:
    """Audit the rows in this process."""
    check = TemplateCheck(tokenizer()) if model else None
    began = cpu()
    record = read_record(Path(folder, LOG)) if log else None
    read = cpu()
    report = audit(read_rows(Path(folder, ROWS)), record=record, template=check)
    ended = cpu()
    if report.kinds:
        raise RuntimeError(f"clean rows have faults: {report.to_json()['kinds']}")
    [peak] = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return Cost(read - began, ended - began, int(peak) * 1024)


def run(*, quick: bool = False) -> Table:
    """Measure and tabulate."""
    rows = 200 if quick else 2000
    head = "options,ms of CPU per row,of this the log,rows a minute on one core,peak in MB"
    made = Table("`toolroll audit`", head.split(","))
    with TemporaryDirectory() as folder:
        tokens, turns = in_new_process("benchmarks.audit", "write", Path(folder), rows)
        size = Path(folder, LOG).stat().st_size / rows
        for log, model in ((False, False), (True, False), (False, True), (True, True)):
            cost = in_new_process("benchmarks.audit", "measure", folder, log=log, model=model)
            options = ["--requests"] * log + ["--model"] * model
            rate, peak = 60 * rows / cost.total, cost.peak / 1e6
            cells = 1000 * cost.total / rows, 1000 * cost.log / rows, rate, peak
            made.rows.append([" ".join(options) or "none", *map(number, cells)])
            key = ".".join(["audit", *(option[2:] for option in options)])
            made.figures |= {f"{key}_rate": rate, f"{key}_peak": peak}
    made.notes.append(
        f"{rows:,} rows, with means of {tokens:,.0f} tokens, {turns:.1f} turns, and {size:,.0f} "
        "bytes of SGLang's log."
    )
    return made
