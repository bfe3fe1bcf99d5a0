"""DeepSeek 3.2, 4 and 4.1, GigaChat 3.5, Kimi K3 and Step 3: each call and each parameter is a
tag with a name. Except in Step 3, an attribute of each parameter says whether its value is a
string.
"""

from __future__ import annotations

from toolroll.parsers.formats.tags import Shape, TagParser
from toolroll.parsers.reasoning import get_reasoning


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


class DeepSeekV32Parser(TagParser):
    """DeepSeek 3.2: a block of calls starts with `<｜DSML｜function_calls>`."""

    name = "deepseekv32"
    shape = _dsml("DSML", "function_calls", "invoke", "parameter")


class DeepSeekV4Parser(TagParser):
    """DeepSeek 4: a block of calls starts with `<｜DSML｜tool_calls>`."""

    name = "deepseekv4"
    shape = _dsml("DSML", "tool_calls", "invoke", "parameter")


class DeepSeekV41Parser(TagParser):
    """DeepSeek 4.1: a block of calls starts with `<｜DSML｜ calls>`. A space precedes the name of
    each tag.
    """

    name = "deepseekv41"
    shape = _dsml("DSML", " calls", " invoke", " parameter")


class GigaChat35Parser(TagParser):
    """GigaChat 3.5: a block of calls starts with `<｜GCML｜tool_calls>`."""

    name = "gigachat35"
    shape = _dsml("GCML", "tool_calls", "invoke", "parameter")


class KimiK3Parser(TagParser):
    """Kimi K3: a block of calls starts with `<|open|>tools<|sep|>`. Visible text is in a separate
    `response` tag.
    """

    name = "kimi_k3"
    shape = Shape(
        block=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        call=('<|open|>call tool="', "<|close|>call<|sep|>"),
        name_end=('"<|sep|>',),
        key=('<|open|>argument key="', '"<|sep|>'),
        value=("", "<|close|>argument<|sep|>"),
        typed_by=('" type="', "string"),
        attribute_end='" ',
        attribute=lambda text: text.replace("&quot;", '"').replace("&amp;", "&"),
    )
    reasoning = get_reasoning("kimi_k3")
    wrappers = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")


class Step3Parser(TagParser):
    """Step 3: a block of calls starts with `<｜tool_calls_begin｜>`."""

    name = "step3"
    shape = Shape(
        block=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        call=(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        name_end=('">',),
        key=('<steptml:parameter name="', '">'),
        value=("", "</steptml:parameter>"),
    )
