"""Write tool calls in the format of each model family that `toolroll.parsers` reads, according to
its specification.

A writer returns the text of the reply after the visible `text`, without the stop token.
`support.examples` names the sources.
"""

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
    comma: str = "",
    first: int = 0,
    value: Callable[[Any], str] = bare,
    whole: Callable[[Any], str] = dumps,
    **kinds: str,
) -> Writer:
    """A writer that fills `call` with each call's {name}, {index} from `first` on and {arguments}
    (JSON, or as `whole` writes them), and with its {inner}: `pair`, filled with each argument's
    {key}, {value}, {kind} and {text} (whether it is a string), with a `comma` between. `kinds`:
    other names of kinds.
    """

    def write(calls: Sequence[Call]) -> str:
        parts = []
        for index, (name, arguments) in enumerate(calls, first):
            inner = []
            for key, found in arguments.items():
                kind, text = _KINDS[type(found)], dumps(isinstance(found, str))
                shown = {"value": value(found), "kind": kinds.get(kind, kind), "text": text}
                inner.append(pair.format(key=key, **shown))
            filled = {"name": name, "index": index, "arguments": whole(arguments)}
            parts.append(call.format(**filled, inner=comma.join(inner)))
        return block[0] + between.join(parts) + block[1]

    return write


def escaped(value: Any) -> str:
    return html.escape(bare(value))


def dsml(brand: str, block: str, invoke: str = "invoke", parameter: str = "parameter") -> Writer:
    """Tagged calls whose parameters say whether they are strings."""
    mark = f"｜{brand}｜"
    return writer(
        f'<{mark}{invoke} name="{{name}}">\n{{inner}}</{mark}{invoke}>\n',
        f'<{mark}{parameter} name="{{key}}" string="{{text}}">{{value}}</{mark}{parameter}>\n',
        block=(f"<{mark}{block}>\n", f"</{mark}{block}>"),
    )


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
    return "[" + ",".join(map(_gemma, value)) + "]" if isinstance(value, list) else dumps(value)


_M3 = "]<]minimax[>["
_M3_PAIR = f"{_M3}<{{key}}>{{value}}{_M3}</{{key}}>"


def _m3(value: Any) -> str:
    if not isinstance(value, dict | list):
        return bare(value)
    pairs = value.items() if isinstance(value, dict) else (("item", one) for one in value)
    return "".join(_M3_PAIR.format(key=key, value=_m3(one)) for key, one in pairs)


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
_JSON_CALL = '{{"name": "{name}", "arguments": {arguments}}}'
_PYTHON: Any = {"call": "{name}({inner})", "pair": "{key}={value}", "value": repr, "comma": ", "}

hermes = writer(f"<tool_call>\n{_JSON_CALL}\n</tool_call>", between="\n")
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
minimax_m3 = writer(
    f'{_M3}<invoke name="{{name}}">{{inner}}{_M3}</invoke>\n',
    _M3_PAIR,
    block=(f"{_M3}<tool_call>\n", f"{_M3}</tool_call>"),
    value=_m3,
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
kimi_k3 = writer(
    '<|open|>call tool="{name}" index="{index}"<|sep|>{inner}<|close|>call<|sep|>',
    '<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>',
    block=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    first=1,
    integer="number",
)
mistral = writer(_JSON_CALL, between=", ", block=("[TOOL_CALLS] [", "]"))
mistral_named = writer("[TOOL_CALLS]{name}[ARGS]{arguments}")
llama3 = writer('{{"name": "{name}", "parameters": {arguments}}}', between="; ")
python_calls = writer(**_PYTHON, between=", ", block=("[", "]"))
lfm2 = writer(**_PYTHON, between=", ", block=("<|tool_call_start|>[", "]<|tool_call_end|>"))
gemma4 = writer("<|tool_call>call:{name}{arguments}<tool_call|>", whole=_gemma)
harmony = writer(
    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
    between="<|start|>assistant",
)
cohere = writer(
    '{{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}}',
    between=", ",
    block=("<|START_ACTION|>[", "]<|END_ACTION|>"),
)
apertus = writer(
    '{{"{name}": {arguments}}}', between=", ", block=("<|tools_prefix|>[", "]<|tools_suffix|>")
)
k2_horizon = writer(_IFM_CALL, _IFM_KEY + _IFM_VALUE, block=_IFM_BLOCK)
k2_horizon_typed = writer(
    _IFM_CALL, _IFM_KEY + "<ifm|arg_type>{kind}</ifm|arg_type>\n" + _IFM_VALUE, block=_IFM_BLOCK
)
k2_horizon_json = writer(f"<ifm|tool_call>\n{_JSON_CALL}\n</ifm|tool_call>\n", block=_IFM_BLOCK)
gigachat3 = writer(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_JSON_CALL}")
inkling = writer(
    '<|message_model|>{name}<|content_invoke_tool_json|>{{"name": "{name}", "args": {arguments}}}'
    "<|end_message|>"
)
_beam = writer(
    " to={name}<|channel|>analysis <|constrain|>xml<|message|>{inner}",
    '<rfl:parameter name="{key}">\n{value}\n</rfl:parameter>',
    between="<|end|><|start|>assistant",
    block=("", "<|call|>"),
)


def beam(calls: Sequence[Call]) -> str:
    """A message to each tool, its arguments as elements, sorted by name."""
    return _beam([(name, dict(sorted(arguments.items()))) for name, arguments in calls])


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
