"""Inkling: each message is `<|message_model|>`, a marker for its kind, its content, and
`<|end_message|>`.

The kind is `<|content_thinking|>` or `<|content_text|>`. A call is
`<|message_model|>name<|content_invoke_tool_json|>{"name": ..., "args": {...}}<|end_message|>`.

The prompt ends with `<|message_model|>`, so a reply starts inside a header. Invariant: if a message
is a call, the word before its kind marker is the tool's name. Otherwise the word is text.
"""

from __future__ import annotations

import re

from toolroll.parsers.formats.json_blocks import JsonBlockParser
from toolroll.parsers.reading.collect import Collector
from toolroll.parsers.reading.json_text import Names, made_call
from toolroll.parsers.reading.source import Source, Steps

_MESSAGE, _TEXT, _THINKING = "<|message_model|>", "<|content_text|>", "<|content_thinking|>"
_JSON, _PLAIN = "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"
_END, _STOP = "<|end_message|>", "<|content_model_end_sampling|>"
_MARKS = (_MESSAGE, _TEXT, _THINKING, _JSON, _PLAIN, _END, _STOP)
_HEADER = re.compile(r"[^\s<]*")


class InklingParser(JsonBlockParser):
    """The format of Inkling, which the module describes.

    A message that sends plain text to a tool (`<|content_invoke_tool_text|>`) becomes an invalid
    call. Its `name` is empty, even if a name precedes the marker.
    """

    name = "inkling"
    opener = _JSON
    closer = _END
    names = Names(arguments=("args", "arguments", "parameters"))
    wrappers = (_MESSAGE, _TEXT, _THINKING, _PLAIN, _STOP)
    ends = (_STOP,)
    bounds = (_MESSAGE, _PLAIN)
    reasoning = None

    def read(self, source: Source, out: Collector, *, in_reasoning: bool | None) -> Steps[None]:
        if self.reasoning is None:
            yield from self._messages(source, out, thinks=bool(in_reasoning))
        else:
            yield from super().read(source, out, in_reasoning=in_reasoning)

    def read_calls(self, source: Source, out: Collector, pos: int) -> Steps[None]:
        yield from self._messages(source, out, pos, thinks=False)

    def _messages(
        self, source: Source, out: Collector, pos: int = 0, *, thinks: bool
    ) -> Steps[None]:
        begin = pos
        header = not thinks  # True if a header may start at `pos`; its message starts at `begin`
        while True:
            name, marker = (yield from self._header(source, pos)) if header else ("", "")
            stop = pos + len(name)
            if not marker:
                begin, marker = yield from source.until(
                    pos, _MARKS, out.reasoning if thinks else out.content
                )
                name, stop = "", begin
            if not marker:
                out.reasoning_closed = not thinks
                return
            pos, header = stop + len(marker), marker == _MESSAGE
            if marker in (_JSON, _PLAIN):
                pos = yield from (
                    self.read_marked(source, out, begin, pos, name)
                    if marker == _JSON
                    else self._plain(source, out, begin, pos)
                )
                thinks = False
            elif marker in (_END, _STOP):
                (out.reasoning if thinks else out.content)("\n")
                thinks = False
            elif marker != _MESSAGE:
                thinks = marker == _THINKING

    def _header(self, source: Source, pos: int) -> Steps[tuple[str, str]]:
        """Return the tool's name at `pos`, and the call's marker after the name. The marker is ""
        if there is no call.
        """
        stop = yield from source.run(pos, _HEADER)
        marker = yield from source.starts(stop, _JSON, _PLAIN)
        return source.text[pos:stop], marker

    def _plain(self, source: Source, out: Collector, begin: int, start: int) -> Steps[int]:
        """Add the call whose text is at `start`. Return the position after the call."""
        end, marker = yield from source.until(start, (_END, _STOP, _MESSAGE, _JSON, _PLAIN))
        raw, stop = source.text[start:end], end + len(marker) if marker in (_END, _STOP) else end
        out.call(made_call("", {"text": raw}, raw, (begin, stop)))
        return stop
