"""A loop that makes its tokens as slime's tau-bench example does, audited with the engine's log."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from examples.audit_slime import CALL, ORDER, USER, Delta, main, play, token_delta
from support.commands import toolroll
from support.published_example import example_folder
from support.qwen import tokenizer_for, trl_template
from support.source import ROOT

from toolroll.evaluation.audit import AuditReport, audit
from toolroll.evaluation.audit.faults import NOT_SAMPLED, OTHER_PREFIX
from toolroll.evaluation.audit.request_log import read_record
from toolroll.rollout.types import Message


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


def audited(
    name: str, said: list[str], tmp_path: Path, get_delta: Delta
) -> tuple[AuditReport, list[str]]:
    """The report on one episode, and the texts of the places with a fault."""
    tokenizer = tokenizer_for(trl_template(name))
    sample, lines = play(tokenizer, said, [ORDER, USER, USER][: len(said)], get_delta)
    log = tmp_path / "host_0.log"
    log.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    report = audit([sample], record=read_record(log, tokenizer.encode))
    faults = [kind.fault for kind in report.kinds.values()]
    ids = [sample["tokens"][fault.start : fault.stop] for fault in faults]
    return report, [str(tokenizer.decode(each)) for each in ids]


@pytest.fixture(params=["alike", pytest.param("slime", marks=pytest.mark.peers)])
def get_delta(request: pytest.FixtureRequest) -> Delta:
    if request.param == "alike":
        return delta
    folder = example_folder()
    if folder is None:
        pytest.skip("the example's files are in slime's checkout on GitHub only: make test-peers")
    return token_delta(folder.parents[1])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_it_trains_newlines_after_stop_tokens(name: str, tmp_path: Path, get_delta: Delta) -> None:
    report, texts = audited(name, [CALL, "Is that all?", "Done."], tmp_path, get_delta)
    assert {kind: found.places for kind, found in report.kinds.items()} == {NOT_SAMPLED: 3}
    assert texts == ["\n"]


def test_it_trains_thoughts_after_tokens_not_served(tmp_path: Path, get_delta: Delta) -> None:
    """Qwen3's template drops the thoughts of earlier turns when a user message comes."""
    said = [f"<think>\nI look.\n</think>\n\n{text}" for text in (CALL, "Is that all?", "Done.")]
    report, _ = audited("qwen3", said, tmp_path, get_delta)
    assert report.kinds[OTHER_PREFIX].places == 1  # after the first user message
    assert report.kinds[NOT_SAMPLED].places == 3  # and the newline, in each turn


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
