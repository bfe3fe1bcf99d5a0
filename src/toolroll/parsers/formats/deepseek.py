"""DeepSeek V3 and R1 (`function<｜tool▁sep｜>name` and a fenced JSON block) and V3.1
(`name<｜tool▁sep｜>` and JSON).
"""

from __future__ import annotations

from toolroll.parsers.formats.blocks import NamedJsonParser


class DeepSeekV31Parser(NamedJsonParser):
    """The format of DeepSeek V3.1, which the module describes."""

    name = "deepseekv31"
    block = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    separator = "<｜tool▁sep｜>"


class DeepSeekV3Parser(DeepSeekV31Parser):
    """The format of DeepSeek V3 and R1, which the module describes."""

    name = "deepseekv3"
    fence = ("```json", "```")
