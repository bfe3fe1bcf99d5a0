"""A loop that makes its tokens as slime's tau-bench example does, audited with the engine's log."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from examples.audit_slime import main
from support.commands import toolroll
from support.published_example import example_folder
from support.qwen import tokenizer_for, trl_template
from support.source import ROOT

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
