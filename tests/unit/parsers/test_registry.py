"""Parsers by name, those of third parties, and reasoning by SGLang's names."""

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.parsing import assert_same_in_pieces
from support.source import ROOT

from toolroll.parsers import registry
from toolroll.parsers.base import ToolCallParser
from toolroll.parsers.formats.hermes import HermesParser
from toolroll.parsers.infer import infer_parser
from toolroll.parsers.reasoning import get_reasoning, reasoning_names
from toolroll.parsers.registry import get_parser, parser_names, register
from toolroll.parsers.types import UnknownParserError
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.rollout_args import read_args

NO_FORMAT = r"not a wire format.*response_template.*infer_parser\(tokenizer\)"


class BangParser(HermesParser):
    """A third party's."""

    name = "bang"
    aliases = ()  # type: ignore[assignment]
    opener = "!!"
    closer = "!!"


@pytest.mark.parametrize("name", parser_names())
def test_a_name_or_an_alias_gets_its_parser(name: str) -> None:
    parser = get_parser(name, ("<tool_call>",))
    assert name in (parser.name, *parser.aliases)
    assert parser.control_tokens == {"<tool_call>"}


@pytest.mark.parametrize("kind", registry.built_in_parsers(), ids=lambda kind: kind.name)
def test_the_page_names_every_parser_and_its_aliases(kind: type[ToolCallParser]) -> None:
    page = (ROOT / "docs" / "parsers.md").read_text(encoding="utf-8")
    table = page.partition("## Formats")[2].partition("\n## ")[0]
    names = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| ([^|]*)", table, re.MULTILINE)))
    assert {kind.name, *kind.aliases} <= set(names)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("response_template", NO_FORMAT),
        ("sglang:response_template", NO_FORMAT),
        ("qwen2.5", "did you mean 'qwen25'"),
        ("!", r"there are .*hermes"),
    ],
)
def test_an_unknown_name_is_told_what_there_is(name: str, words: str) -> None:
    with pytest.raises(UnknownParserError, match=words):
        get_parser(name)
    assert name not in parser_names()
    with pytest.raises(ValueError, match="qwen3"):
        get_parser("qwen25", reasoning=name)


def test_a_registered_parser_needs_a_free_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    register("bang", BangParser)
    assert isinstance(get_parser("bang"), BangParser)
    assert "bang" in parser_names()
    with pytest.raises(ValueError, match="already a tool-call parser named 'qwen25'"):
        register("qwen25", BangParser)


def test_an_entry_point_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolroll_bang.py").write_text(
        "from toolroll.parsers.formats.hermes import HermesParser\n\n\n"
        "class B(HermesParser):\n    name = 'bang2'\n    opener = '!!'\n    closer = '??'\n"
    )
    info = tmp_path / "toolroll_bang-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toolroll-bang\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[toolroll.parsers]\nbang2 = toolroll_bang:B\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    [_] = importlib.metadata.entry_points(group="toolroll.parsers", name="bang2")
    reply = assert_same_in_pieces(get_parser("bang2"), 'Hi !!{"name": "f"}??')
    assert (reply.content, reply.ok_calls[0].name) == ("Hi", "f")
    del sys.modules["toolroll_bang"]


def test_a_name_of_sglang_without_sglang_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt.entrypoints.openai.protocol"):  # not half of it either
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnknownParserError, match="needs SGLang"):
        get_parser("sglang:qwen25")


@pytest.mark.parametrize("name", reasoning_names())
def test_each_reasoning_format_is_read(name: str) -> None:
    tags, parser = get_reasoning(name), get_parser("qwen25", reasoning=name)
    for text, opened, expected in (
        (f"{tags.open}\nI think.\n{tags.close}\n\nHello.", None, ("I think.", "Hello.", True)),
        (f"I think.{tags.close}Hello.", True, ("I think.", "Hello.", True)),
        ("I thi", True, ("I thi", "", False)),
    ):
        reply = assert_same_in_pieces(parser, text, in_reasoning=opened)
        assert (reply.reasoning, reply.content, reply.reasoning_closed) == expected


async def test_auto_takes_the_parser_that_reads_the_template(tokenizer: Any) -> None:
    args = read_args({"parser": "auto"})
    async with Model.from_args(args, tokenizer=tokenizer) as served:
        assert served.parser.name == infer_parser(tokenizer) == "hermes"
        assert served.parser.control_tokens >= {"<tool_call>"}
