"""Write tool calls in the format of each model family that `toolroll.parsers` reads, according to
its specification.

A writer returns the text of the reply after the visible `text`, without the stop token.
`tests/support/examples.py` names
the sources.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
Writer = Callable[[Sequence[Call]], str]


def dumps(value: Any) -> str:
    """JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    """A value as tagged formats write it: strings as they are, the rest as JSON."""
    return value if isinstance(value, str) else dumps(value)


_WAY_OUT = re.compile(
    r"</[^>]*(?:function|invoke|tool_call)>\s*</|<\|close\|>call<\|sep\|><\|close"
)
"""The end of a call and of its block: what a value of a tagged format cannot spell."""


@dataclass(frozen=True)
class Format:
    """`parallel`: whether a reply may hold several calls. `typed`: values are read by the tool's
    schema. `keys`: "any" text, or a "word" only. `ambiguous`: strings that this format cannot
    carry, as a pattern. `markers`: what strings are made of in tests. `wide`: integers of more than
    64 bits too. `spoken`: plain text may stand before the calls."""

    name: str
    write: Writer
    markers: tuple[str, ...]
    parallel: bool = True
    typed: bool = False
    keys: str = "any"
    ambiguous: str | None = None
    null: bool = True
    wide: bool = True
    spoken: bool = True

    def carries(self, value: Any) -> bool:
        """Whether every string in `value` can be written so that it can be told from the
        format's own marks.
        """
        if isinstance(value, str):
            return self.ambiguous is None or (
                re.search(self.ambiguous, value) is None and _WAY_OUT.search(value) is None
            )
        if isinstance(value, dict):
            return all(self.carries(one) for one in value.values())
        return all(self.carries(one) for one in value) if isinstance(value, list) else True


def tagged(
    block: tuple[str, str],
    call: tuple[str, str, str],
    parameter: tuple[str, str, str],
    between: str = "\n",
) -> Writer:
    """A writer of calls as elements: `call` is its opener, what ends the name, its closer;
    `parameter` the same for the key.
    """

    def write(calls: Sequence[Call]) -> str:
        parts = []
        for name, arguments in calls:
            inner = "".join(
                f"{parameter[0]}{key}{parameter[1]}{bare(value)}{parameter[2]}{between}"
                for key, value in arguments.items()
            )
            parts.append(f"{call[0]}{name}{call[1]}{between}{inner}{call[2]}{between}")
        return block[0] + between + "".join(parts) + block[1]

    return write


def hermes(calls: Sequence[Call]) -> str:
    """`<tool_call>` around JSON."""
    blocks = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )
    return "\n".join(blocks)


def interns1(calls: Sequence[Call]) -> str:
    """`<|action_start|> <|plugin|>`."""
    return "".join(
        f"<|action_start|> "
        f"<|plugin|>\n{dumps({'name': name, 'parameters': arguments})}<|action_end|>\n"
        for name, arguments in calls
    )


def qwen3_coder(calls: Sequence[Call]) -> str:
    """`<function=` in `<tool_call>`."""
    parts = []
    for name, arguments in calls:
        inner = "".join(
            f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        parts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(parts)


def mimo(calls: Sequence[Call]) -> str:
    """As Qwen3-Coder's, escaped and in one line."""
    parts = []
    for name, arguments in calls:
        inner = "".join(
            f"<parameter={key}>{html.escape(bare(value))}</parameter>\n"
            for key, value in arguments.items()
        )
        parts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(parts)


def glm(newline: str) -> Writer:
    """`<arg_key>` and `<arg_value>`, parted by `newline`."""

    def write(calls: Sequence[Call]) -> str:
        parts = []
        for name, arguments in calls:
            inner = "".join(
                f"<arg_key>{key}</arg_key>{newline}<arg_value>{bare(value)}</arg_value>{newline}"
                for key, value in arguments.items()
            )
            parts.append(f"<tool_call>{name}{newline}{inner}</tool_call>")
        return newline.join(parts)

    return write


def iquest_q1(calls: Sequence[Call]) -> str:
    """GLM's pairs between other markers."""
    parts = []
    for name, arguments in calls:
        inner = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{bare(value)}</arg_value>"
            for key, value in arguments.items()
        )
        parts.append(f"<iquest_tool_call>{name}{inner}</iquest_tool_call>")
    return "".join(parts)


def minicpm5(calls: Sequence[Call]) -> str:
    """`<function name=` and `<param name=`, escaped."""
    parts = []
    for name, arguments in calls:
        inner = "".join(
            f'<param name="{key}">{html.escape(bare(value))}</param>'
            for key, value in arguments.items()
        )
        parts.append(f'<function name="{name}">{inner}</function>')
    return "".join(parts)


def muse(calls: Sequence[Call]) -> str:
    """A message to each tool."""
    parts = []
    for name, arguments in calls:
        inner = "".join(
            f'<atem:parameter name="{key}">{bare(value)}</atem:parameter>\n'
            for key, value in arguments.items()
        )
        block = (
            f"<atem:function_calls>\n<atem:invoke "
            f'name="{name}">\n{inner}</atem:invoke>\n</atem:function_calls>'
        )
        parts.append(f" to={name}<|message|>{block}")
    return "<|eom|><|start|>assistant".join(parts)


def gigachat3(calls: Sequence[Call]) -> str:
    """JSON behind a marker."""
    (name, arguments) = calls[0]
    return (
        f"<|message_sep|>\n\nfunction "
        f"call<|role_sep|>\n{dumps({'name': name, 'arguments': arguments})}"
    )


def hunyuan(calls: Sequence[Call]) -> str:
    """GLM's pairs in a block, a separator behind the name."""
    parts = []
    for name, arguments in calls:
        inner = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        parts.append(f"<tool_call>{name}<tool_sep>\n{inner}</tool_call>\n")
    return "<tool_calls>\n" + "".join(parts) + "</tool_calls>"


def dsml(brand: str, block: str, invoke: str = "invoke", parameter: str = "parameter") -> Writer:
    """Tagged calls whose parameters say whether they are strings."""
    mark = f"｜{brand}｜"

    def write(calls: Sequence[Call]) -> str:
        parts = []
        for name, arguments in calls:
            inner = ""
            for key, value in arguments.items():
                head = f'name="{key}" string="{"true" if isinstance(value, str) else "false"}"'
                inner += f"<{mark}{parameter} {head}>{bare(value)}</{mark}{parameter}>\n"
            parts.append(f'<{mark}{invoke} name="{name}">\n{inner}</{mark}{invoke}>\n')
        return f"<{mark}{block}>\n" + "".join(parts) + f"</{mark}{block}>"

    return write


def kimi_k3(calls: Sequence[Call]) -> str:
    """Channels of opened and closed names."""
    kinds = {
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        dict: "object",
        list: "array",
        type(None): "null",
    }
    parts = []
    for index, (name, arguments) in enumerate(calls, 1):
        inner = "".join(
            f'<|open|>argument key="{key}" '
            f'type="{kinds[type(value)]}"<|sep|>{bare(value)}<|close|>argument<|sep|>'
            for key, value in arguments.items()
        )
        parts.append(
            f'<|open|>call tool="{name}" index="{index}"<|sep|>{inner}<|close|>call<|sep|>'
        )
    return "<|open|>tools<|sep|>" + "".join(parts) + "<|close|>tools<|sep|>"


def deepseekv3(calls: Sequence[Call]) -> str:
    """A fenced block of JSON behind the name."""
    parts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def deepseekv31(calls: Sequence[Call]) -> str:
    """JSON behind the name."""
    parts = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(parts) + "<｜tool▁calls▁end｜>"


def kimi_k2(calls: Sequence[Call]) -> str:
    """An id that holds the name."""
    parts = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(parts) + "<|tool_calls_section_end|>"


def mistral(calls: Sequence[Call]) -> str:
    """A list of JSON objects."""
    return "[TOOL_CALLS] " + dumps(
        [{"name": name, "arguments": arguments} for name, arguments in calls]
    )


def mistral_named(calls: Sequence[Call]) -> str:
    """The newer form."""
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def llama3(calls: Sequence[Call]) -> str:
    """JSON objects parted by semicolons."""
    return "; ".join(
        f'{{"name": "{name}", "parameters": {dumps(arguments)}}}' for name, arguments in calls
    )


def python_calls(calls: Sequence[Call]) -> str:
    """A list of Python calls."""
    parts = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(parts)}]"


def lfm2(calls: Sequence[Call]) -> str:
    """The same between markers."""
    return f"<|tool_call_start|>{python_calls(calls)}<|tool_call_end|>"


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
    return "[" + ",".join(map(_gemma, value)) + "]" if isinstance(value, list) else dumps(value)


def gemma4(calls: Sequence[Call]) -> str:
    """Objects with bare keys and quoted strings."""
    return "".join(
        f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>" for name, arguments in calls
    )


def harmony(calls: Sequence[Call]) -> str:
    """Messages to a function."""
    parts = (
        f"<|channel|>commentary to=functions.{name} "
        f"<|constrain|>json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    )
    return "<|start|>assistant".join(parts)


def cohere(calls: Sequence[Call]) -> str:
    """A list of JSON objects in an action block."""
    found = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": arguments}
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{dumps(found)}<|END_ACTION|>"


def apertus(calls: Sequence[Call]) -> str:
    """A list of `{name: arguments}`."""
    return (
        f"<|tools_prefix|>{dumps([{name: arguments} for name, arguments in calls])}<|tools_suffix|>"
    )


def k2_horizon(*, told: bool) -> Writer:
    """GLM's pairs in a block, with the type of each value between them where it is `told`."""

    def write(calls: Sequence[Call]) -> str:
        parts = []
        for name, arguments in calls:
            inner = ""
            for key, value in arguments.items():
                kind = f"<ifm|arg_type>{_KINDS[type(value)]}</ifm|arg_type>\n" if told else ""
                inner += f"<ifm|arg_key>{key}</ifm|arg_key>\n{kind}"
                inner += f"<ifm|arg_value>{bare(value)}</ifm|arg_value>\n"
            parts.append(f"<ifm|tool_call>{name}\n{inner}</ifm|tool_call>\n")
        return "<ifm|tool_calls>\n" + "".join(parts) + "</ifm|tool_calls>"

    return write


def k2_horizon_json(calls: Sequence[Call]) -> str:
    """JSON in each element of the block."""
    parts = (
        f"<ifm|tool_call>\n{dumps({'name': name, 'arguments': arguments})}\n</ifm|tool_call>\n"
        for name, arguments in calls
    )
    return "<ifm|tool_calls>\n" + "".join(parts) + "</ifm|tool_calls>"


_M3 = "]<]minimax[>["


def _m3(key: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = "".join(_m3(name, one) for name, one in value.items())
    else:
        inner = (
            "".join(_m3("item", one) for one in value) if isinstance(value, list) else bare(value)
        )
    return f"{_M3}<{key}>{inner}{_M3}</{key}>"


def minimax_m3(calls: Sequence[Call]) -> str:
    """Elements in elements, a token before each tag."""
    parts = []
    for name, arguments in calls:
        inner = "".join(_m3(key, value) for key, value in arguments.items())
        parts.append(f'{_M3}<invoke name="{name}">{inner}{_M3}</invoke>\n')
    return f"{_M3}<tool_call>\n" + "".join(parts) + f"{_M3}</tool_call>"


def inkling(calls: Sequence[Call]) -> str:
    """A message for each call, behind the text's own."""
    parts = (
        f"<|message_model|>{name}<|content_invoke_tool_json|>"
        f"{dumps({'name': name, 'args': arguments})}<|end_message|>"
        for name, arguments in calls
    )
    return "".join(parts)


def beam(calls: Sequence[Call]) -> str:
    """A message to each tool, its arguments as elements, sorted by name."""
    parts = []
    for name, arguments in calls:
        inner = "".join(
            f'<rfl:parameter name="{key}">\n{bare(arguments[key])}\n</rfl:parameter>'
            for key in sorted(arguments)
        )
        parts.append(f" to={name}<|channel|>analysis <|constrain|>xml<|message|>{inner}")
    return "<|end|><|start|>assistant".join(parts) + "<|call|>"


_KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
_COMMON = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "\n",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
    "é",
    "𝛑",
)
_MINIMAX = tagged(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
)
_DOTS = tagged(
    ("<dots_function_call>", "</dots_function_call>"),
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
)
_STEP3 = tagged(
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    (
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        '">',
        "</steptml:invoke><｜tool_call_end｜>",
    ),
    ('<steptml:parameter name="', '">', "</steptml:parameter>"),
)
_QWEN_MARKS = ("<function=f>", "</function>", "<parameter=k>", "</parameter>")
_GLM_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_INVOKE_MARKS = (
    '<invoke name="f">',
    "</invoke>",
    '<parameter name="k">',
    "</parameter>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
)
_DEEP_MARKS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "```json",
    "```",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_IFM_MARKS = (
    "<ifm|arg_key>",
    "</ifm|arg_key>",
    "<ifm|arg_type>",
    "<ifm|arg_value>",
    "</ifm|arg_value>",
    "</ifm|tool_call>",
)
_BEAM_END = (
    r'\n<rfl:parameter name="|\n</rfl:parameter>\s*(?:<rfl:parameter '
    r'name="|<\||\Z)|<\|(?:call|end|return|start)\|>'
)
_DSML_MARKS = (
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">',
    '<｜DSML｜parameter name="k" string="true">', "</｜DSML｜parameter>",
    "</｜DSML｜invoke>", "</｜DSML｜function_calls>",
)  # fmt: skip


def _values(start: str, close: str, *following: str) -> str:
    """A pattern for what no value can carry: its end tag `close` before one of `following`, and a
    parameter's `start` (a pattern) without an end tag.
    """
    ends = "|".join((*map(re.escape, following), r"\Z"))
    return rf"{re.escape(close)}\s*(?:{ends})|{start}(?![\s\S]*{re.escape(close)})"


_QWEN = _values(r"<parameter=[\w.\-]+>", "</parameter>", "<parameter=", "</function>")
_GLM_TAGS = r"<arg_key>[\w.\-]+</arg_key>\s*<arg_value>", "</arg_value>", "<arg_key>"
_INVOKE = _values(r'<parameter name="[\w.\-]+">', "</parameter>", '<parameter name="', "</invoke>")
_DSML = _values(
    r'<｜DSML｜parameter name="[\w.\-]+(?:" string="[^"\n]*)?">',
    "</｜DSML｜parameter>",
    "<｜DSML｜parameter",
    "</｜DSML｜invoke>",
)
_IFM = _values(
    r"<ifm\|arg_key>[\w.\-]+</ifm\|arg_key>\s*<ifm\|arg_(?:type|value)>",
    "</ifm|arg_value>",
    "<ifm|arg_key>",
    "</ifm|tool_call>",
)


def _raw(name: str, write: Writer, marks: tuple[str, ...], ambiguous: str, **more: Any) -> Format:
    return Format(
        name, write, (*_COMMON, *marks), typed=True, keys="word", ambiguous=ambiguous, **more
    )


FORMATS: tuple[Format, ...] = (
    Format("hermes", hermes, _COMMON),
    Format("interns1", interns1, (*_COMMON, "<|action_start|> <|plugin|>", "<|action_end|>")),
    _raw("qwen3_coder", qwen3_coder, _QWEN_MARKS, _QWEN),
    _raw("mimo", mimo, _QWEN_MARKS, r"(?!)"),
    _raw("glm45", glm("\n"), _GLM_MARKS, _values(*_GLM_TAGS, "</tool_call>")),
    _raw("glm47", glm(""), _GLM_MARKS, _values(*_GLM_TAGS, "</tool_call>")),
    _raw(
        "hunyuan",
        hunyuan,
        (*_GLM_MARKS, "<tool_sep>", "</tool_calls>"),
        _values(*_GLM_TAGS, "</tool_call>"),
    ),
    _raw("minimax-m2", _MINIMAX, _INVOKE_MARKS, _INVOKE),
    _raw("dots", _DOTS, _INVOKE_MARKS, _INVOKE),
    _raw(
        "deepseekv32",
        dsml("DSML", "function_calls"),
        _DSML_MARKS,
        _DSML,
    ),
    _raw(
        "deepseekv4",
        dsml("DSML", "tool_calls"),
        _DSML_MARKS,
        _DSML,
    ),
    _raw("deepseekv41", dsml("DSML", " calls", " invoke", " parameter"), _DSML_MARKS, r"(?!)"),
    _raw("gigachat35", dsml("GCML", "tool_calls"), _DSML_MARKS, r"(?!)"),
    _raw("step3", _STEP3, ("<steptml:", "</steptml:invoke>", "<｜tool_call_end｜>"), r"(?!)"),
    _raw("kimi_k3", kimi_k3, ("<|open|>", "<|close|>call", "<|sep|>"), r"(?!)"),
    Format("deepseekv3", deepseekv3, (*_COMMON, *_DEEP_MARKS)),
    Format("deepseekv31", deepseekv31, (*_COMMON, *_DEEP_MARKS)),
    Format(
        "kimi_k2",
        kimi_k2,
        (*_COMMON, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    Format("mistral", mistral, (*_COMMON, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    Format("mistral", mistral_named, (*_COMMON, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    Format("llama3", llama3, (*_COMMON, "<|python_tag|>", ";"), spoken=False),
    Format(
        "pythonic",
        python_calls,
        (*_COMMON, "<|python_start|>", "[f(a=1)]", "',", '"],'),
        keys="word",
    ),
    Format(
        "lfm2",
        lfm2,
        (*_COMMON, "<|tool_call_start|>", "<|tool_call_end|>", "',", '"],'),
        keys="word",
    ),
    Format("gemma4", gemma4, (*_COMMON, "<|tool_call>", "<tool_call|>", ",", ":"), keys="word"),
    Format(
        "gpt-oss",
        harmony,
        (*_COMMON, "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|start|>"),
    ),
    Format("cohere_command4", cohere, (*_COMMON, "<|START_ACTION|>", "<|END_ACTION|>")),
    _raw("iquest_q1", iquest_q1, _GLM_MARKS, _values(*_GLM_TAGS, "</iquest_tool_call>")),
    _raw("minicpm5", minicpm5, _QWEN_MARKS, r"(?!)"),
    _raw(
        "muse",
        muse,
        ("<atem:invoke>", "</atem:invoke>", "</atem:function_calls>", "<|eom|>"),
        r"(?!)",
        spoken=False,
    ),
    Format(
        "gigachat3", gigachat3, (*_COMMON, "<|function_call|>", "<|message_sep|>"), parallel=False
    ),
    Format("apertus2509", apertus, (*_COMMON, "<|tools_prefix|>", "<|tools_suffix|>")),
    _raw(
        "k2_horizon",
        k2_horizon(told=False),
        _IFM_MARKS,
        _IFM,
    ),
    _raw(
        "k2_horizon",
        k2_horizon(told=True),
        _IFM_MARKS,
        _IFM,
    ),
    Format("k2_horizon", k2_horizon_json, (*_COMMON, *_IFM_MARKS)),
    _raw(
        "minimax-m3",
        minimax_m3,
        ("<tool_call>", "</invoke>", "<item>", "</item>", "</a>", "]<]", "[>["),
        r"\]<\]minimax\[>\[",
    ),
    Format(
        "inkling",
        inkling,
        (*_COMMON, "<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>"),
    ),
    _raw(
        "beam",
        beam,
        ('<rfl:parameter name="k">', "</rfl:parameter>", "<|call|", "\n"),
        _BEAM_END,
        spoken=False,
    ),
)


def schema_of(value: Any) -> dict[str, Any]:
    """A schema that only the kind of `value` fits, and of what is in it."""
    schema: dict[str, Any] = {"type": _KINDS[type(value)]}
    if isinstance(value, dict) and value:
        schema["properties"] = {key: schema_of(one) for key, one in value.items()}
    if isinstance(value, list) and value:
        schema["prefixItems"] = [schema_of(one) for one in value]
    return schema


def tools_for(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Tools that these calls fit."""
    properties: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        properties.setdefault(name, {}).update(
            {key: schema_of(value) for key, value in arguments.items()}
        )
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": name,
                "parameters": {"type": "object", "properties": found},
            },
        }
        for name, found in properties.items()
    ]
