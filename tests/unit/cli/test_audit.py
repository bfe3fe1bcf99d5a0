"""`toolroll audit`, as the command line runs it."""

import asyncio
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.audited import Played, play, request_line
from support.commands import toolroll
from support.exports import varied, write_run
from support.planted import PLANTED, plant

TOKEN_AFTER = "the token after each stop token is trained"


@pytest.fixture(scope="module")
def played() -> Played:
    return asyncio.run(play("qwen2_5", 2, turns=4))


@pytest.fixture
def folder(played: Played, tmp_path: Path) -> Path:
    played.tokenizer.save_pretrained(tmp_path / "model")
    played.write_log(tmp_path / "log")
    write(tmp_path / "clean.jsonl", played.rows)
    write(tmp_path / "rows.jsonl", plant(PLANTED[TOKEN_AFTER], played.rows))
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_clean_rows_and_what_is_not_checked(folder: Path, played: Played) -> None:
    done = toolroll("audit", folder / "clean.jsonl", "--requests", folder / "log")
    assert done.exit_code == 0
    assert done.stdout.startswith("0 of 2 rows have a fault\n100.0% of the ")
    assert "Not checked" not in done.stdout
    assert toolroll("audit", folder / "clean.jsonl", "--model", folder / "model").exit_code == 0
    alone = toolroll("audit", folder / "clean.jsonl").stdout
    assert "Not checked without --requests: " in alone
    assert "Not checked without --model and rows with messages: " in alone
    words = "Not checked without logprobs (2 rows): whether trained tokens were sampled\n"
    write(folder / "bare.jsonl", [{**row, "logprobs": None} for row in played.rows])
    assert words in toolroll("audit", folder / "bare.jsonl").stdout
    assert "(2 rows)" not in toolroll("audit", folder / "clean.jsonl").stdout


def test_a_fault_is_drawn_and_is_the_exit_status(folder: Path) -> None:
    """The page has the same drawing, and the fault is red in it."""
    command = ("audit", folder / "rows.jsonl", "--requests", folder / "log")
    model, page = ("--model", folder / "model"), folder / "audit.html"
    done = toolroll(*command, *model)
    assert done.exit_code == 1
    text = done.stdout
    assert text.startswith("1 of 2 rows have a fault\n")
    assert "trained, but not sampled: 1 row (50.0%), 3 places\n" in text
    assert f"{folder / 'rows.jsonl'}, row 1, tokens " in text
    assert "<|im_end|>>>\\n<<<|im_start|>user" in text  # the newline is the fault
    # without a tokenizer, as ids
    assert "<|im_end|>" not in toolroll(*command).stdout
    done = toolroll(*command, *model, "--html", page, "--json")
    assert done.exit_code == 1 and "audit.html: 0.0 MB; open it in a browser" in done.stderr
    whole = page.read_text(encoding="utf-8")
    [drawing] = re.findall(r"<code[^>]*>(.*)</code>", whole, re.DOTALL)
    drawn = html.unescape(re.sub(r"<[^>]*>", "", drawing))
    assert drawn.replace("\n", "") == text.replace("\n", "")
    [red] = re.findall(r"^\.(r\d+) {[^}]*background-color: #800000", whole, re.MULTILINE)
    assert set(re.findall(rf'<span class="{red}">([^<]*)</span>', drawing)) == {"\\n"}


def test_as_json(folder: Path) -> None:
    """Without `--requests`, it is not known what was sampled."""
    rows = ("audit", folder / "rows.jsonl", "--json")
    done = toolroll(*rows, "--requests", folder / "log")
    assert done.exit_code == 1
    data, without = json.loads(done.stdout), json.loads(toolroll(*rows).stdout)
    assert (data["rows"], data["faulty_rows"], data["with_messages"]) == (2, 1, 0)
    assert 0 < data["delivered_tokens"] < data["sampled_tokens"]
    assert without["delivered_tokens"] is without["sampled_tokens"] is None
    kind = data["kinds"]["trained, but not sampled"]
    place, start, stop = kind["first"]
    assert place.endswith("rows.jsonl, row 1") and stop == start + 1
    assert (kind["rows"], kind["places"], kind["share"], kind["in"]) == (1, 3, 0.5, [place])


def test_rows_that_train_nothing_or_lack_tools_are_named(played: Played, folder: Path) -> None:
    rows = [{**row, "tools": []} for row in played.rows]
    write(folder / "rows.jsonl", [*rows, {**rows[0], "loss_mask": [0] * len(rows[0]["input_ids"])}])
    text = toolroll("audit", folder / "rows.jsonl", "--model", folder / "model").stdout
    assert "1 rows have no trained token\n" in text
    assert "the row has no `tools`: " in text
    assert "in rows.jsonl, row 1; rows.jsonl, row 2\n" in text


def test_prompts_that_were_sent_as_text_need_the_tokenizer(played: Played, folder: Path) -> None:
    text = "<|im_start|>user\nIs it late?<|im_end|>\n"
    prompt, ids = played.tokenizer.encode(text), [5, 6]
    log = folder / "texts.log"
    lines = request_line(prompt, ids, text=text), request_line([1], [2])
    log.write_text("".join(lines), encoding="utf-8")
    row = {"input_ids": prompt + ids, "loss_mask": [0] * len(prompt) + [1, 1]}
    write(folder / "rows.jsonl", [row])
    command = ("audit", folder / "rows.jsonl", "--requests", log)
    without = toolroll(*command)
    assert without.exit_code == 1
    assert "1 prompts were sent as text: give the engine's --model" in without.stdout
    done = toolroll(*command, "--model", folder / "model")
    assert done.exit_code == 0, done.stdout


def test_a_runs_folder_and_its_own_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", varied())
    done = toolroll("audit", run, "--requests", run)
    assert done.exit_code == 0
