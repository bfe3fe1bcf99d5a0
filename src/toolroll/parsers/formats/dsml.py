"""DeepSeek 3.2, 4 and 4.1, GigaChat 3.5, Kimi K3 and Step 3: tagged calls. An attribute of each
parameter marks strings (except in Step 3).
"""

from __future__ import annotations

from toolroll.parsers.formats.tags import Shape, TagParser
from toolroll.parsers.reasoning import Tags


def _dsml(brand: str, block: str, invoke: str, parameter: str) -> Shape:
    mark = f"｜{brand}｜"
    return Shape(
        block=(f"<{mark}{block}>", f"</{mark}{block}>"),
        call=(f'<{mark}{invoke} name="', f"</{mark}{invoke}>"),
        name_end=('">',),
        key=(f'<{mark}{parameter} name="', '">'),
        value=("", f"</{mark}{parameter}>"),
        typed_by=('" string="', "true"),
        json_body=True,
        self_closing='"/>',
    )


_V32 = _dsml("DSML", "function_calls", "invoke", "parameter")
_V4 = _dsml("DSML", "tool_calls", "invoke", "parameter")
_V41 = _dsml("DSML", " calls", " invoke", " parameter")
_GCML = _dsml("GCML", "tool_calls", "invoke", "parameter")
_K3 = Shape(
    block=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    call=('<|open|>call tool="', "<|close|>call<|sep|>"),
    name_end=('"<|sep|>',),
    key=('<|open|>argument key="', '"<|sep|>'),
    value=("", "<|close|>argument<|sep|>"),
    typed_by=('" type="', "string"),
    attribute_end='" ',
)
_STEP3 = Shape(
    block=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    call=(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        "</steptml:invoke><｜tool_call_end｜>",
    ),
    name_end=('">',),
    key=('<steptml:parameter name="', '">'),
    value=("", "</steptml:parameter>"),
)


class DeepSeekV32Parser(TagParser):
    """DeepSeek 3.2: `<｜DSML｜function_calls>`."""

    name = "deepseekv32"
    shape = _V32


class DeepSeekV4Parser(TagParser):
    """DeepSeek 4: `<｜DSML｜tool_calls>`."""

    name = "deepseekv4"
    shape = _V4


class DeepSeekV41Parser(TagParser):
    """DeepSeek 4.1: `<｜DSML｜ calls>`, with a space before each name."""

    name = "deepseekv41"
    shape = _V41


class GigaChat35Parser(TagParser):
    """GigaChat 3.5: `<｜GCML｜tool_calls>`."""

    name = "gigachat35"
    shape = _GCML


class KimiK3Parser(TagParser):
    """Kimi K3: `<|open|>tools<|sep|>`. Visible text is in a separate response element."""

    name = "kimi_k3"
    shape = _K3
    reasoning = Tags("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    wrappers = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")


class Step3Parser(TagParser):
    """Step 3: `<｜tool_calls_begin｜>`."""

    name = "step3"
    shape = _STEP3
