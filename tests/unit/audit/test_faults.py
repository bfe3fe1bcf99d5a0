"""What `audit` finds of each planted fault, with and without record and template, and that clean
rows of many templates have none: forked ones, and those whose history is kept.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from support.adversarial.size import FULL
from support.audited import Played, Row, play
from support.planted import PLANTED, Fault, plant
from support.source import ROOT

from toolroll.evaluation.audit import AuditReport, TemplateCheck, audit, faults, template
from toolroll.evaluation.audit.formats import read_rows
from toolroll.evaluation.audit.report import UNDECIDED

TEMPLATE = "qwen2_5"
NO_FAULT = "no fault"
EXPECTED = {
    # a row of the page's table, with its faults:
    # kinds with the rows | more with the record | more with the template | undecided
    "tokens that were not sampled are trained": {
        "the mask is shifted right":
            "NO_LOGPROB | NOT_SAMPLED NOT_WHOLE | AFTER_STOP NOT_WHOLE TURN | NOT_WHOLE",
        "the mask is shifted left": "NO_LOGPROB | NOT_SAMPLED NOT_WHOLE | PROMPT | NOT_WHOLE STOP",
        "the token after each stop token is trained": "NO_LOGPROB | NOT_SAMPLED | AFTER_STOP | -",
        "the end of each prompt is trained": "NO_LOGPROB | NOT_SAMPLED | PROMPT | -",
        "a tool result is trained": "NO_LOGPROB | NOT_SAMPLED | AFTER_STOP DELTA TURN | -",
        "the whole response is trained": "NO_LOGPROB | NOT_SAMPLED | AFTER_STOP | -",
        "everything is trained": "NO_PREFIX NO_LOGPROB | NOT_SAMPLED | AFTER_STOP | UNMATCHED",
    },
    "a logprob is missing, or above zero": {
        "the logprobs are positive": "IMPOSSIBLE | LOGPROBS | - | -",
        "a logprob is missing": "NO_LOGPROB | - | - | -",
    },
    "stop tokens are not trained": {
        "the stop tokens are not trained": "- | NOT_WHOLE | - | NOT_WHOLE STOP",
        "the last stop token is not trained": "- | NOT_WHOLE | - | NOT_WHOLE STOP",
    },
    "a token of a turn is not trained": {
        "a token of a turn is not trained": "- | NOT_WHOLE | - | NOT_WHOLE UNMATCHED",
    },
    "words at an edge of a turn are not trained": {
        "the first tokens are not trained": "- | NOT_WHOLE | NOT_WHOLE TURN | NOT_WHOLE",
        "half of a turn is not trained": "- | NOT_WHOLE | TURN | NOT_WHOLE",
    },
    "a turn has other tokens": {
        "a turn is encoded again": "- | NOT_SAMPLED OTHER_PREFIX | - | -",
        "a turn has another token": "- | NOT_SAMPLED OTHER_PREFIX | - | -",
        "a turn has a token twice": "- | NOT_SAMPLED OTHER_PREFIX | - | -",
        "a turn lacks a token": "- | NOT_SAMPLED OTHER_PREFIX | - | -",
    },
    "a turn is trained twice": {
        "a row is there twice": "- | TWICE | - | -",
        "turns are trained again in another row": "- | TWICE | - | -",
    },
    "the logprobs are not the sampled ones": {
        "the logprobs are shifted": "- | LOGPROBS | - | -",
        "the logprobs are those of another turn": "- | LOGPROBS | - | -",
        "the logprobs are those of another row": "- | LOGPROBS | - | -",
        "the logprobs are zero": "- | LOGPROBS | - | -",
        "the logprobs have another temperature": "- | LOGPROBS | - | -",
        "the logprobs were computed again": "- | LOGPROBS | - | -",
    },
    "a result has other tokens": {
        "a result has another token": "- | OTHER_PREFIX | DELTA | -",
        "a result has a token twice": "- | OTHER_PREFIX | DELTA | -",
        "a result lacks a token": "- | OTHER_PREFIX | DELTA | -",
    },
    "a turn or a result is missing, cut, repeated or misplaced": {
        "a part of an earlier turn is dropped": "- | NOT_SAMPLED OTHER_PREFIX | TURN | -",
        "a turn is there twice": "- | NOT_SAMPLED OTHER_PREFIX | AFTER_STOP | -",
        "two turns are swapped": "- | OTHER_PREFIX | TURN | -",
        "a turn is that of another row": "- | OTHER_PREFIX | TURN | -",
        "the row is truncated in a turn": "- | CUT | TURN | -",
        "a result is missing": "- | NOT_SAMPLED OTHER_PREFIX | AFTER_STOP TURN | DELTA",
        "a result is appended and trained": "- | NOT_SAMPLED | AFTER_STOP | -",
    },
    "the prompt has other tokens": {
        "the prompt has another token": "- | OTHER_PREFIX | - | PROMPT",
        "the prompt has a token twice": "- | OTHER_PREFIX | - | PROMPT",
        "the prompt lacks a token": "- | OTHER_PREFIX | - | PROMPT",
        "the first token is there twice": "- | OTHER_PREFIX | - | PROMPT",
        "the first token is missing": "- | OTHER_PREFIX | - | PROMPT",
        "padding is at the start": "- | OTHER_PREFIX | - | PROMPT",
        "the row is truncated at its start": "- | OTHER_PREFIX | - | PROMPT",
    },
    "rows are merged, or a turn is repeated with its result": {
        "a turn and its result are there twice": "- | OTHER_PREFIX | - | UNMATCHED",
        "two rows are merged": "- | OTHER_PREFIX | - | UNMATCHED",
    },
    "an untrained result is appended, or the tools are missing": {
        "a result is appended": "- | - | - | TAIL",
        "the messages lack the tools": "- | - | - | PROMPT",
    },
    "a message differs from its tokens": {
        "the message of a result is another one": "- | - | DELTA | -",
        "the message of a turn is another one": "- | - | TURN | -",
    },
    NO_FAULT: {
        "a turn is not trained": "- | - | - | -",
    },
}  # fmt: skip
FAULTS = {fault: kinds for group in EXPECTED.values() for fault, kinds in group.items()}
KINDS = {
    value: name
    for module in (faults, template)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}


@pytest.fixture(scope="module")
def played() -> Played:
    return asyncio.run(play(TEMPLATE, 2, turns=6))


@pytest.fixture(scope="module")
def check(played: Played) -> TemplateCheck:
    return TemplateCheck(played.tokenizer)


def names(kinds: Iterable[str]) -> set[str]:
    return {KINDS[kind] for kind in kinds if not kind.startswith(UNDECIDED)}


def undecided(kinds: Iterable[str]) -> set[str]:
    return {KINDS[kind.removeprefix(UNDECIDED)] for kind in kinds if kind.startswith(UNDECIDED)}


def expected(fault: str, column: int) -> set[str]:
    return set(FAULTS[fault].split(" | ")[column].split()) - {"-"}


def test_the_table_has_each_planted_fault() -> None:
    assert sorted(FAULTS) == sorted(PLANTED)


@pytest.mark.parametrize("fault", PLANTED)
def test_each_fault_is_found_as_stated(played: Played, check: TemplateCheck, fault: str) -> None:
    rows = plant(PLANTED[fault], played.rows)
    alone, record, template, perhaps = (expected(fault, column) for column in range(4))
    for report, kinds, unsure in (
        (audit(rows), alone, perhaps & {"NOT_WHOLE"}),
        (audit(rows, record=played.record()), alone | record, set()),
        (audit(rows, template=check), alone | template, perhaps),
    ):
        assert (names(report.kinds), undecided(report.kinds)) == (kinds, unsure)


def found_by(fault: str) -> tuple[str, str, str]:
    """Whether the rows show the fault, and whether the record or the template with them does."""
    alone, record, check, perhaps = (expected(fault, column) for column in range(4))
    return (
        "yes" if alone else "undecided" if "NOT_WHOLE" in perhaps else "no",
        "yes" if alone | record else "no",
        "yes" if alone | check else "undecided" if perhaps else "no",
    )


def test_the_page_has_this_table() -> None:
    lines = []
    for group, planted in EXPECTED.items():
        [cells] = set(map(found_by, planted))
        if group != NO_FAULT:
            lines.append(f"| {' | '.join([group, *cells])} |")
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    table = page.partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == lines


# --- the formats ---------------------------------------------------------------------------------


def write_lines(rows: list[Row], folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(rows: list[Row], folder: Path) -> Path:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    for row in rows:
        row |= {name: json.dumps(row[name]) for name in ("messages", "tools")}
    path = folder / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_labels(rows: list[Row], folder: Path) -> Path:
    for row in rows:
        row["labels"] = [
            index if bit else -100
            for index, bit in zip(row["input_ids"], row.pop("loss_mask"), strict=True)
        ]
        del row["logprobs"]
    return write_lines(rows, folder)


def write_pt(rows: list[Row], folder: Path) -> Path:
    """As slime and miles do."""
    torch = pytest.importorskip("torch")
    samples = []
    for row in rows:
        first = row["loss_mask"].index(1)
        logprobs = [value or 0.0 for value in row["logprobs"][first:]]
        sample = {"tokens": row["input_ids"], "response_length": len(row["input_ids"]) - first}
        sample |= {"loss_mask": row["loss_mask"][first:], "rollout_log_probs": logprobs}
        samples.append({**sample, "status": "completed", "prompt": "x"})
    path = folder / "rollout_3.pt"
    torch.save({"rollout_id": 3, "samples": samples}, path)
    return path


def write_traces(rows: list[Row], folder: Path) -> Path:
    """As verifiers does: logprobs of trained tokens only, in four decimals."""
    lines = []
    for row in rows:
        mask = [bit == 1 for bit in row["loss_mask"][1:]]
        pairs = zip(row["logprobs"][1:], mask, strict=True)
        answer, task = ({"role": role, "content": "x"} for role in ("assistant", "user"))
        node: Row = {"parent": 0, "message": answer, "sampled": True, "mask": mask}
        node["logprobs"] = [round(value, 4) for value, bit in pairs if bit]
        node["token_ids"] = row["input_ids"][1:]
        root = {"message": task, "token_ids": row["input_ids"][:1], "mask": [False]}
        lines.append({"env": {"id": "x"}, "traces": [{"nodes": [root, node]}]})
    return write_lines(lines, folder)


def no_logprobs(row: Row) -> None:
    row["logprobs"] = [None] * len(row["logprobs"])


def only_trained(row: Row) -> None:
    """Each of them has a logprob."""
    pairs = zip(row["logprobs"], row["loss_mask"], strict=True)
    row["logprobs"] = [(value or 0.0) if bit else None for value, bit in pairs]


def every_trained(row: Row) -> None:
    """After the first trained token, a logprob of zero also means that there is none."""
    first = row["loss_mask"].index(1)
    row["logprobs"] = [
        None if at < first else (value or 0.0) if bit else value
        for at, (value, bit) in enumerate(zip(row["logprobs"], row["loss_mask"], strict=True))
    ]


FORMATS: dict[str, tuple[Callable[[list[Row], Path], Path], Callable[[Row], None]]] = {
    "jsonl": (write_lines, lambda row: None),
    "parquet": (write_parquet, lambda row: None),
    "labels": (write_labels, no_logprobs),
    "pt": (write_pt, every_trained),
    "traces": (write_traces, only_trained),
}
"""How to write rows, and what the format cannot hold of a row."""


NOT_HELD = {
    "labels": {fault for fault in PLANTED if "logprob" in fault},
    "pt": {"everything is trained"},
    "traces": {"everything is trained"},
}
"""The mask of a prompt's first token has no place in the last two."""


def kinds(report: AuditReport) -> Any:
    return {name: (len(kind.rows), kind.places) for name, kind in report.kinds.items()}


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_shows_the_same_faults(played: Played, kind: str, tmp_path: Path) -> None:
    write, held = FORMATS[kind]
    faults: dict[str, Fault] = {"none": lambda rows: None, **PLANTED}
    for number, (fault, planted) in enumerate(faults.items()):
        if fault in NOT_HELD.get(kind, ()):
            continue
        rows = plant(planted, played.rows)
        for row in rows:
            held(row)
        wanted = kinds(audit(rows, record=played.record()))
        assert bool(wanted) == (fault in PLANTED and found_by(fault)[1] == "yes"), fault
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write(rows, folder)
        assert kinds(audit(read_rows(path), record=played.record())) == wanted, fault
        assert kinds(audit(read_rows(folder), record=played.record())) == wanted, fault


# --- clean rows of many templates -----------------------------------------------------------------


QUICK = ("qwen2_5", "qwen3", "llama3_1", "glm4moe", "gptoss", "gemma4")
OTHERS = """
deepseekv3 lfm2_2_5 lfm2_v2 llama3_2 mistral muse_glimmer nemotron_3_nano nemotron_3_super
qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 qwen3_instruct_2507 qwen3_vl
""".split()
HISTORIES = ("fork", "scaffold", "preserve")
ROWS, EPISODES = (10_000, 60) if FULL else (400, 8)
"""The rows of all templates, and the episodes of a batch. TOOLROLL_ADVERSARIAL=full plays the most,
for half an hour.
"""


def assert_clean(played: Played, check: TemplateCheck) -> None:
    record = played.record()
    report = audit(played.rows, record=record, template=check)
    assert report.kinds == {}
    assert report.with_messages == report.rows == len(played.rows)
    assert report.delivered_tokens == report.trained_tokens <= record.sampled_tokens


def assert_clean_in(kind: str, played: Played, folder: Path) -> None:
    """In a file of the format `kind`."""
    write, held = FORMATS[kind]
    rows = deepcopy(played.rows)
    for row in rows:
        held(row)
    report = audit(read_rows(write(rows, folder)), record=played.record())
    assert (report.kinds, report.rows) == ({}, len(played.rows))
    assert report.delivered_tokens == report.trained_tokens


@pytest.mark.parametrize("name", QUICK)
async def test_clean_rows_have_no_fault(name: str) -> None:
    played: dict[Any, Played] = {}
    for history in ("fork", "preserve"):
        played[history] = await play(name, 2, history=history)
        assert_clean(played[history], TemplateCheck(played[history].tokenizer))
    if name in ("qwen3", "glm4moe", "gptoss", "gemma4"):
        assert any(row["fork_reason"] for row in played["fork"].rows)
        assert len(played["preserve"].rows) < len(played["fork"].rows)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
async def test_many_clean_rows_have_no_fault(name: str, tmp_path: Path) -> None:
    """With forks, without, and with history that is kept. One batch of each in each format."""
    rows, check = 0, None
    for seed, history in enumerate(cycle(HISTORIES)):
        if seed >= len(HISTORIES) and rows * len([*QUICK, *OTHERS]) >= ROWS:
            break
        played = await play(name, EPISODES, history=history, seed=seed)
        check = check or TemplateCheck(played.tokenizer)
        assert_clean(played, check)
        for kind in FORMATS if seed < len(HISTORIES) else ():
            assert_clean_in(kind, played, tmp_path)
        rows += len(played.rows)
