"""Write tool calls in the format of each model family that `toolroll.parsers` reads, according to
its specification.

A writer returns the text of the reply after the visible `text`, without the stop token.
`support.examples` names the sources.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.parsing import tool

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
        """Whether every string in `value` can be told from the format's own marks."""
        if isinstance(value, str):
            return self.ambiguous is None or (
                re.search(self.ambiguous, value) is None and _WAY_OUT.search(value) is None
            )
        if isinstance(value, dict):
            return all(self.carries(one) for one in value.values())
        return all(self.carries(one) for one in value) if isinstance(value, list) else True


_KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def writer(
    call: str,
    pair: str = "",
    *,
    between: str = "",
    block: tuple[str, str] = ("", ""),
    value: Callable[[Any], str] = bare,
) -> Writer:
    """A writer that fills `call` with each call's {name}, {index} and {arguments} (JSON), and with
    its {inner}: `pair`, filled with each argument's {key}, {value} and {kind}.
    """

    def write(calls: Sequence[Call]) -> str:
        parts = []
        for index, (name, arguments) in enumerate(calls):
            inner = "".join(
                pair.format(key=key, value=value(found), kind=_KINDS[type(found)])
                for key, found in arguments.items()
            )
            filled = {"name": name, "index": index, "arguments": dumps(arguments), "inner": inner}
            parts.append(call.format(**filled))
        return block[0] + between.join(parts) + block[1]

    return write


def escaped(value: Any) -> str:
    return html.escape(bare(value))


_QWEN_CALL = "<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
_GLM_PAIR = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
_GLM_LINE = "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
_INVOKE_CALL = '<invoke name="{name}">\n{inner}</invoke>\n'
_INVOKE_PAIR = '<parameter name="{key}">{value}</parameter>\n'
_IFM_BLOCK = "<ifm|tool_calls>\n", "</ifm|tool_calls>"
_IFM_CALL = "<ifm|tool_call>{name}\n{inner}</ifm|tool_call>\n"
_IFM_KEY = "<ifm|arg_key>{key}</ifm|arg_key>\n"
_IFM_VALUE = "<ifm|arg_value>{value}</ifm|arg_value>\n"
_DEEP_BLOCK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

hermes = writer(
    '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>', between="\n"
)
interns1 = writer(
    '<|action_start|> <|plugin|>\n{{"name": "{name}", "parameters": {arguments}}}<|action_end|>\n'
)
qwen3_coder = writer(_QWEN_CALL, "<parameter={key}>\n{value}\n</parameter>\n", between="\n")
mimo = writer(_QWEN_CALL, "<parameter={key}>{value}</parameter>\n", between="\n", value=escaped)
glm45 = writer("<tool_call>{name}\n{inner}</tool_call>", _GLM_PAIR, between="\n")
glm47 = writer("<tool_call>{name}{inner}</tool_call>", _GLM_LINE)
iquest_q1 = writer("<iquest_tool_call>{name}{inner}</iquest_tool_call>", _GLM_LINE)
hunyuan = writer(
    "<tool_call>{name}<tool_sep>\n{inner}</tool_call>\n",
    _GLM_PAIR,
    block=("<tool_calls>\n", "</tool_calls>"),
)
minicpm5 = writer(
    '<function name="{name}">{inner}</function>',
    '<param name="{key}">{value}</param>',
    value=escaped,
)
muse = writer(
    ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{inner}</atem:invoke>'
    "\n</atem:function_calls>",
    '<atem:parameter name="{key}">{value}</atem:parameter>\n',
    between="<|eom|><|start|>assistant",
)
minimax_m2 = writer(
    _INVOKE_CALL, _INVOKE_PAIR, block=("<minimax:tool_call>\n", "</minimax:tool_call>")
)
dots = writer(_INVOKE_CALL, _INVOKE_PAIR, block=("<dots_function_call>\n", "</dots_function_call>"))
step3 = writer(
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n{inner}'
    "</steptml:invoke><｜tool_call_end｜>\n",
    '<steptml:parameter name="{key}">{value}</steptml:parameter>\n',
    block=("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
)
deepseekv3 = writer(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
    between="\n",
    block=_DEEP_BLOCK,
)
deepseekv31 = writer(
    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>", block=_DEEP_BLOCK
)
kimi_k2 = writer(
    "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
    "<|tool_call_end|>",
    block=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
mistral_named = writer("[TOOL_CALLS]{name}[ARGS]{arguments}")
llama3 = writer('{{"name": "{name}", "parameters": {arguments}}}', between="; ")
harmony = writer(
    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
    between="<|start|>assistant",
)
k2_horizon = writer(_IFM_CALL, _IFM_KEY + _IFM_VALUE, block=_IFM_BLOCK)
k2_horizon_typed = writer(
    _IFM_CALL, _IFM_KEY + "<ifm|arg_type>{kind}</ifm|arg_type>\n" + _IFM_VALUE, block=_IFM_BLOCK
)
k2_horizon_json = writer(
    '<ifm|tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</ifm|tool_call>\n',
    block=_IFM_BLOCK,
)
gigachat3 = writer(
    '<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "{name}", "arguments": {arguments}}}'
)
inkling = writer(
    '<|message_model|>{name}<|content_invoke_tool_json|>{{"name": "{name}", "args": {arguments}}}'
    "<|end_message|>"
)


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
    kinds = {**_KINDS, int: "number"}
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


def mistral(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] " + dumps(
        [{"name": name, "arguments": arguments} for name, arguments in calls]
    )


def python_calls(calls: Sequence[Call]) -> str:
    parts = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(parts)}]"


def lfm2(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{python_calls(calls)}<|tool_call_end|>"


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
    return "[" + ",".join(map(_gemma, value)) + "]" if isinstance(value, list) else dumps(value)


def gemma4(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>" for name, arguments in calls
    )


def cohere(calls: Sequence[Call]) -> str:
    found = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": arguments}
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{dumps(found)}<|END_ACTION|>"


def apertus(calls: Sequence[Call]) -> str:
    return (
        f"<|tools_prefix|>{dumps([{name: arguments} for name, arguments in calls])}<|tools_suffix|>"
    )


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
    parts = []
    for name, arguments in calls:
        inner = "".join(_m3(key, value) for key, value in arguments.items())
        parts.append(f'{_M3}<invoke name="{name}">{inner}{_M3}</invoke>\n')
    return f"{_M3}<tool_call>\n" + "".join(parts) + f"{_M3}</tool_call>"


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


_COMMON = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("\n", '"', "'", "\\", "{", "}", "[", "]", "é", "𝛑"),
)
_QWEN_MARKS = ("<function=f>", "</function>", "<parameter=k>", "</parameter>")
_GLM_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_INVOKE_MARKS = (
    *('<invoke name="f">', "</invoke>", '<parameter name="k">', "</parameter>"),
    *("<minimax:tool_call>", "</minimax:tool_call>"),
)
_DEEP_MARKS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json", "```"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
_IFM_MARKS = (
    *("<ifm|arg_key>", "</ifm|arg_key>", "<ifm|arg_type>", "<ifm|arg_value>"),
    *("</ifm|arg_value>", "</ifm|tool_call>"),
)
_KIMI_MARKS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|start|>")
_MUSE_MARKS = ("<atem:invoke>", "</atem:invoke>", "</atem:function_calls>", "<|eom|>")
_M3_MARKS = ("<tool_call>", "</invoke>", "<item>", "</item>", "</a>", "]<]", "[>[")
_INKLING_MARKS = ("<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>")
_BEAM_MARKS = ('<rfl:parameter name="k">', "</rfl:parameter>", "<|call|", "\n")
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
_GLM = _values(*_GLM_TAGS, "</tool_call>")
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


def _json(name: str, write: Writer, *marks: str, **more: Any) -> Format:
    return Format(name, write, (*_COMMON, *marks), **more)


def _raw(
    name: str, write: Writer, marks: tuple[str, ...], ambiguous: str = r"(?!)", **more: Any
) -> Format:
    return _json(name, write, *marks, typed=True, keys="word", ambiguous=ambiguous, **more)


FORMATS: tuple[Format, ...] = (
    _json("hermes", hermes),
    _json("interns1", interns1, "<|action_start|> <|plugin|>", "<|action_end|>"),
    _raw("qwen3_coder", qwen3_coder, _QWEN_MARKS, _QWEN),
    _raw("mimo", mimo, _QWEN_MARKS),
    _raw("glm45", glm45, _GLM_MARKS, _GLM),
    _raw("glm47", glm47, _GLM_MARKS, _GLM),
    _raw("hunyuan", hunyuan, (*_GLM_MARKS, "<tool_sep>", "</tool_calls>"), _GLM),
    _raw("minimax-m2", minimax_m2, _INVOKE_MARKS, _INVOKE),
    _raw("dots", dots, _INVOKE_MARKS, _INVOKE),
    _raw("deepseekv32", dsml("DSML", "function_calls"), _DSML_MARKS, _DSML),
    _raw("deepseekv4", dsml("DSML", "tool_calls"), _DSML_MARKS, _DSML),
    _raw("deepseekv41", dsml("DSML", " calls", " invoke", " parameter"), _DSML_MARKS),
    _raw("gigachat35", dsml("GCML", "tool_calls"), _DSML_MARKS),
    _raw("step3", step3, ("<steptml:", "</steptml:invoke>", "<｜tool_call_end｜>")),
    _raw("kimi_k3", kimi_k3, ("<|open|>", "<|close|>call", "<|sep|>")),
    _json("deepseekv3", deepseekv3, *_DEEP_MARKS),
    _json("deepseekv31", deepseekv31, *_DEEP_MARKS),
    _json("kimi_k2", kimi_k2, *_KIMI_MARKS),
    _json("mistral", mistral, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    _json("mistral", mistral_named, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    _json("llama3", llama3, "<|python_tag|>", ";", spoken=False),
    _json("pythonic", python_calls, "<|python_start|>", "[f(a=1)]", "',", '"],', keys="word"),
    _json("lfm2", lfm2, "<|tool_call_start|>", "<|tool_call_end|>", "',", '"],', keys="word"),
    _json("gemma4", gemma4, "<|tool_call>", "<tool_call|>", ",", ":", keys="word"),
    _json("gpt-oss", harmony, *_HARMONY_MARKS),
    _json("cohere_command4", cohere, "<|START_ACTION|>", "<|END_ACTION|>"),
    _raw("iquest_q1", iquest_q1, _GLM_MARKS, _values(*_GLM_TAGS, "</iquest_tool_call>")),
    _raw("minicpm5", minicpm5, _QWEN_MARKS),
    _raw("muse", muse, _MUSE_MARKS, spoken=False),
    _json("gigachat3", gigachat3, "<|function_call|>", "<|message_sep|>", parallel=False),
    _json("apertus2509", apertus, "<|tools_prefix|>", "<|tools_suffix|>"),
    _raw("k2_horizon", k2_horizon, _IFM_MARKS, _IFM),
    _raw("k2_horizon", k2_horizon_typed, _IFM_MARKS, _IFM),
    _json("k2_horizon", k2_horizon_json, *_IFM_MARKS),
    _raw("minimax-m3", minimax_m3, _M3_MARKS, r"\]<\]minimax\[>\["),
    _json("inkling", inkling, *_INKLING_MARKS),
    _raw("beam", beam, _BEAM_MARKS, _BEAM_END, spoken=False),
)


def written(name: str, **arguments: Any) -> str:
    """The call of f with `arguments`, by the first writer of the format `name`."""
    write = next(form.write for form in FORMATS if form.name == name)
    return write([("f", arguments)])


def schema_of(value: Any) -> dict[str, Any]:
    """A schema that only the kind of `value` fits, and of what is in it."""
    schema: dict[str, Any] = {"type": _KINDS[type(value)]}
    if isinstance(value, dict) and value:
        schema["properties"] = {key: schema_of(one) for key, one in value.items()}
    if isinstance(value, list) and value:
        schema["prefixItems"] = [schema_of(one) for one in value]
    return schema


def tools_for(calls: Sequence[Call]) -> list[dict[str, Any]]:
    properties: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        properties.setdefault(name, {}).update(
            {key: schema_of(value) for key, value in arguments.items()}
        )
    return [tool(name, found) for name, found in properties.items()]


PARALLEL, ONE = True, False
FAMILIES: dict[str, tuple[str, bool]] = {
    "qwen2_5": ("hermes", PARALLEL),
    "qwen3": ("hermes", PARALLEL),
    "qwen3_instruct_2507": ("hermes", PARALLEL),
    "qwen3_vl": ("hermes", PARALLEL),
    "qwen3_5_think": ("qwen3_coder", PARALLEL),
    "qwen3_5_nothink": ("qwen3_coder", PARALLEL),
    "qwen3_8": ("qwen3_coder", PARALLEL),
    "nemotron_3_nano": ("qwen3_coder", PARALLEL),
    "nemotron_3_super": ("qwen3_coder", PARALLEL),
    "glm4moe": ("glm45", PARALLEL),
    "deepseekv3": ("deepseekv3", PARALLEL),
    "gemma4": ("gemma4", PARALLEL),
    "gemma4_v5": ("gemma4", PARALLEL),
    "lfm2_2_5": ("lfm2", PARALLEL),
    "llama3_1": ("llama3", ONE),
    "llama3_2": ("llama3", ONE),
    "gptoss": ("gpt-oss", ONE),
    "muse_glimmer": ("muse", PARALLEL),
    "data/kimi_k2_5": ("kimi_k2", PARALLEL),
    "data/minimax_m2_5": ("minimax-m2", PARALLEL),
}
"""The format of a chat template's calls, and whether it writes several in one turn."""
UNREADABLE = {"lfm2_2_5": r"""\\|'\s*[,)\]}:]|\A'|\A\s*\Z"""}
"""What a template writes so that nobody could read it back: LFM2's puts strings between quotes as
they are.
"""
