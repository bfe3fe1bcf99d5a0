"""`toolroll audit`, as the command line runs it."""

import asyncio
import html
import inspect
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from examples.audit_slime import main
from support.audited import Played, play
from support.commands import toolroll
from support.exports import varied, write_run
from support.planted import PLANTED, plant
from support.published_example import example_folder
from support.qwen import tokenizer_for, trl_template
from support.results import episode, trajectory
from support.source import ROOT

from toolroll import UsageError
from toolroll.rollout.model.tokenizers import embedded_tokenizer_path
from toolroll.rollout.types import Message

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
    """The page has the same lines, and the fault is marked in it."""
    command = ("audit", folder / "rows.jsonl", "--requests", folder / "log")
    model, page = ("--model", folder / "model"), folder / "audit.html"
    done = toolroll(*command, *model)
    assert done.exit_code == 1
    text = done.stdout
    assert text.startswith("1 of 2 rows have a fault\n")
    assert "trained, but not sampled: 1 row (50.0%), 3 places\n" in text
    assert f"{folder / 'rows.jsonl'}, row 1, tokens " in text
    drawn = re.search(r"^  before: (.*)\n   fault: (.*)\n   after: (.*)\n", text, re.MULTILINE)
    assert drawn is not None
    assert drawn[1].endswith("<|im_end|>") and drawn[2] == "\\n"  # the newline is the fault
    assert drawn[3].startswith("<|im_start|>user")
    without = toolroll(*command).stdout
    assert "<|im_end|>" not in without and "shown; --model decodes the ids)" in without
    done = toolroll(*command, *model, "--html", page, "--json")
    assert done.exit_code == 1 and "audit.html: 0.0 MB; open it in a browser" in done.stderr
    shown = page.read_text(encoding="utf-8").partition("<main>")[2]
    tokens = re.findall(r'<div class="tokens">(.*)</div>', shown)[0]
    assert html.unescape(re.sub(r"<[^>]*>", "", tokens)) == drawn[1] + drawn[2] + drawn[3]
    assert re.findall(r'<span class="trained fault">([^<]*)</span>', tokens) == ["\\n"]
    assert "<h2>trained, but not sampled</h2>\n<p>1 row (50.0%), 3 places</p>" in shown
    assert f"<p>{html.escape(text.splitlines()[1])}</p>" in shown


def test_another_tokenizer_is_an_error(played: Played, folder: Path) -> None:
    """But not if the engine's record decides, a row has no turn to match, or a row has a fault."""
    rows, other = folder / "clean.jsonl", ("--model", "embedded")
    with pytest.raises(UsageError, match="--model embedded: the turns and messages of no row"):
        toolroll("audit", rows, *other)
    done = toolroll("audit", rows, *other, "--requests", folder / "log", "--json")
    assert (done.exit_code, json.loads(done.stdout)["unmatched_rows"]) == (0, 2)
    first, second = played.rows
    for row in ({**second, "messages": second["messages"][:1]}, {**second, "messages": []}):
        write(rows, [first, row])
        assert toolroll("audit", rows, *other).exit_code == 0
    write(rows, [first, {**second, "logprobs": [9.0] * len(second["input_ids"])}])
    assert toolroll("audit", rows, *other).exit_code == 1


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
    assert "1 row without a trained token\n" in text
    assert "the row has no `tools`: " in text
    assert "in rows.jsonl, row 1; rows.jsonl, row 2\n" in text


def test_a_runs_folder_and_its_own_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", varied())
    done = toolroll("audit", run, "--requests", run)
    assert done.exit_code == 0


def test_a_runs_own_tokenizer_decodes_if_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `run.json` that cannot be read does not hide that of the other folder."""
    part = trajectory()
    part = replace(part, input_ids=part.input_ids - 60)
    run = write_run(tmp_path / "run", [episode(trajectories=[part])])
    log = write_run(tmp_path / "log", [episode(trajectories=[trajectory()])])
    (log / "run.json").write_text("{")
    cache = tmp_path / "models--pond--tiny"
    shutil.copytree(embedded_tokenizer_path(), cache / "snapshots" / "1")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    file = run / "run.json"
    settings = file.read_text()
    for model in ("embedded", "pond/tiny"):
        file.write_text(settings.replace('"tiny"', f'"{model}"'))
        text = toolroll("audit", run, "--requests", log).stdout
        assert "  before: IJKL\n   fault: MNO\n   after: PQRST\n" in text
        assert "--model" not in text
    monkeypatch.setattr("transformers.AutoTokenizer", None)
    assert toolroll("audit", run, "--requests", log, "--json").exit_code == 1  # it loads none
    file.write_text(settings)  # `tiny` is not on this machine, and no hub is asked
    text = toolroll("audit", run, "--requests", log).stdout
    assert "   fault: 44 45 46 \n" in text and "shown; --model decodes the ids)" in text


# --- a loop that makes its tokens as slime's tau-bench example does -------------------------------


def delta(tokenizer: Any, messages: Sequence[Message], **options: bool) -> tuple[list[int], Any]:
    """The ids and the mask of the last message: what it adds to the render.

    `include_generation_prompt`: the ids begin with the generation prompt.
    """
    whole, before, prompt = (
        tokenizer.apply_chat_template(list(part), tokenize=False, add_generation_prompt=generate)
        for part, generate in ((messages, False), (messages[:-1], False), (messages[:-1], True))
    )
    if messages[-1]["role"] != "assistant":
        text = whole[len(before) :] if whole.startswith(before) else ""
        text = text or tokenizer.apply_chat_template([messages[-1]], tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ids, [0] * len(ids)
    said = tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
    if not options.get("include_generation_prompt"):
        return said, [1] * len(said)
    opening = tokenizer.encode(prompt[len(before) :], add_special_tokens=False)
    return opening + said, [0] * len(opening) + [1] * len(said)


@pytest.mark.parametrize(
    ("kind", "template", "after_others"),
    [
        ("function", "qwen3", 78),
        ("function", "qwen2_5", 0),
        ("method", "qwen2_5", 156),
        pytest.param("slime", "qwen3", 78, marks=pytest.mark.peers),
    ],
)
def test_the_pages_commands(kind: str, template: str, after_others: int, tmp_path: Path) -> None:
    model, slime, out = (str(tmp_path / name) for name in ("model", "slime", "out"))
    tokenizer_for(trl_template(template)).save_pretrained(model)
    if kind == "slime":
        folder = example_folder()
        if folder is None:
            pytest.skip("slime's checkout is on GitHub only: make test-peers")
        slime = str(folder.parents[1])
    else:
        file = Path(slime, "examples", "tau-bench", "example.py")
        file.parent.mkdir(parents=True)
        text = inspect.getsource(delta)
        if kind == "method":
            text = "class Agent:\n" + indent(text.replace("def delta(", "def delta(self, "), "    ")
        file.write_text(text.replace("def delta", "def _get_token_delta"), encoding="utf-8")
    main(slime, model, out)
    files = f"{out}/samples.jsonl", "--requests", f"{out}/requests.log", "--model", model
    done = toolroll("audit", *files)
    assert done.exit_code == 1
    assert done.stdout.startswith("40 of 40 rows have a fault\n0.0% of the ")
    assert "trained, but not sampled: 40 rows (100.0%), 196 places\n" in done.stdout
    assert ("sampled after other tokens: " in done.stdout) == bool(after_others)
    if after_others:
        assert f", {after_others} places\n" in done.stdout
        assert f"{after_others} of 196" in (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
