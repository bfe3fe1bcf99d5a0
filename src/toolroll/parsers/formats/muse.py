"""Muse Glimmer: a message `to=name<|message|>` with a block of `<atem:invoke name="...">` contains
calls. A message `to=self` is reasoning, and a message `to=user` is content.

The prompt ends with `<|start|>assistant`, so a reply starts inside a header.
"""

from __future__ import annotations

import re

from toolroll.parsers.formats.tags import Shape, TagParser
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.source import Source, Steps

_BLOCK = ("<atem:function_calls>", "</atem:function_calls>")
_ENDS = ("<|eom|>", "<|eot|>")
_RECIPIENT = re.compile(r"(?:<\|start\|>)?\s*(?:assistant)?\s*to=([^\s<]+)\s*")
_SPOKEN = ("user", "commentary")


class MuseParser(TagParser):
    """The format of Muse Glimmer, which the module describes."""

    name = "muse"
    reasoning = None
    wrappers = (
        "<|start|>assistant",
        "<|start|>",
        "<|message|>",
        *_ENDS,
        "to=self",
        *(f"to={name}" for name in _SPOKEN),
    )
    shape = Shape(
        block=_BLOCK,
        call=('<atem:invoke name="', "</atem:invoke>"),
        name_end=('">',),
        key=('<atem:parameter name="', '">'),
        value=("", "</atem:parameter>"),
    )

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        thinks = False
        while True:
            begin = yield from source.skip(pos)
            if (yield from source.starts(begin, "to=", "<|start|>")):
                stop, marker = yield from source.until(begin, ("<|message|>", *_ENDS, _BLOCK[0]))
                header = source.text[begin:stop]
                match = _RECIPIENT.fullmatch(header) if len(header) < 300 else None
                pos = stop + len(marker) if marker == "<|message|>" else stop
                thinks = match is not None and match[1] == "self"
                body_at = yield from source.skip(pos)
                if (
                    match is not None
                    and match[1] not in ("self", *_SPOKEN)
                    and (yield from source.starts(body_at, _BLOCK[0]))
                ):
                    pos = yield from self._block(source, out, begin, body_at)
                    continue
                if match is None or match[1] not in ("self", *_SPOKEN):
                    out.content(f"{header}\n".replace("<|start|>", ""))
            add_text = out.reasoning if thinks else out.content
            begin, marker = yield from source.until(
                pos, (*(() if thinks else _BLOCK[:1]), "<|start|>", *_ENDS), add_text
            )
            if not marker:
                out.reasoning_closed = not thinks
                return
            if marker == _BLOCK[0]:
                pos = yield from self._block(source, out, begin, begin)
            else:
                pos = begin if marker == "<|start|>" else begin + len(marker)
                add_text("\n")
                thinks = False
