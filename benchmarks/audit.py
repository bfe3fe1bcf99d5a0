"""`toolroll audit`: rows of 2,000 tokens in a file, with the engine's log and with the template."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.conversations import as_sampled, renumbered, tokenizer, workload
from benchmarks.deltas import Toolroll
from benchmarks.endpoint import resident
from benchmarks.tables import Required, Table, number
from toolroll.evaluation.audit import TemplateCheck, audit
from toolroll.evaluation.audit.formats import read_rows
from toolroll.evaluation.audit.request_log import read_record

TOKENS, ROWS_A_MINUTE = 2_000, 10_000


def run(*, quick: bool) -> Table:
    """Measure each check alone, and both."""
    head = ["checked with", "rows a minute of CPU", "us of CPU per row", "resident MiB at the end"]
    tok, table = tokenizer(), Table("Audit of training rows", head)
    with TemporaryDirectory() as folder:
        samples, log = Path(folder, "samples.jsonl"), Path(folder, "requests.log")
        count, tokens = write(samples, log, tok, rows=500 if quick else 10_000)
        for name in ("--requests", "--model", "both"):
            start = time.process_time()
            record = None if name == "--model" else read_record(log)
            check = None if name == "--requests" else TemplateCheck(tok)
            report = audit(read_rows(samples), record=record, template=check)
            taken = time.process_time() - start
            if report.rows != count or report.kinds:
                raise RuntimeError(f"audit, {name}: {report.to_json()}")
            rate = 60 * count / taken * tokens / count / TOKENS
            mib = resident() / 2**20
            table.rows.append([name, number(rate), number(taken / count * 1e6), number(mib)])
            table.required.append(
                Required(f"rows of 2,000 tokens a minute, audit, {name}", rate, ROWS_A_MINUTE, True)
            )
            table.figures[f"audit.{name.strip('-')}"] = rate
    table.notes.append(
        f"{count:,} rows of {number(tokens / count)} tokens on average, in a JSONL file. Rows a "
        "minute: of 2,000 tokens, in one process, with the time to read the rows and the log."
    )
    return table


def write(samples: Path, log: Path, tok: Any, *, rows: int) -> tuple[int, int]:
    """Write rows, and the log of their engine. Return the numbers of rows and tokens."""
    tokens = 0
    with samples.open("w") as row_lines, log.open("w") as log_lines:
        for row, answers in played(tok, rows):
            tokens += len(row["input_ids"])
            row_lines.write(json.dumps(row) + "\n")
            for prompt, ids in answers:
                meta = {
                    "prompt_tokens": len(prompt), "completion_tokens": len(ids),
                    "output_token_logprobs": [[-0.5, index, None] for index in ids],
                }  # fmt: skip
                line = {"event": "request.finished", "rid": "x", "obj": {"input_ids": prompt}}
                out = {"output_ids": ids, "meta_info": meta}
                log_lines.write(json.dumps(line | {"out": out}) + "\n")
    return rows, tokens


def played(tok: Any, rows: int) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield training rows with their answers, from conversations without system messages."""
    way, load = Toolroll(tok), workload()
    for seed in range(rows):
        talk = renumbered(load.conversations[seed % len(load.conversations)], seed)
        messages = [message for message in talk.first if message["role"] != "system"]
        ids = list(map(int, way.begin(messages, [])))
        mask, answers = [0] * len(ids), []
        for turn in talk.turns:
            sampled = tok.encode(as_sampled(turn.assistant) + "<|im_end|>")
            answers.append((ids, sampled))
            mask += [1] * len(sampled)
            messages = [*messages, turn.assistant]
            if len(ids) + len(sampled) > TOKENS:
                ids = [*ids, *sampled]
                break
            ids = list(map(int, way.turn(turn.assistant, sampled, turn.new)))
            mask += [0] * (len(ids) - len(mask))
            messages = [*messages, *turn.new]
        logprobs = [-0.5 if bit else None for bit in mask]
        yield (
            {"input_ids": ids, "loss_mask": mask, "logprobs": logprobs, "messages": messages},
            answers,
        )
