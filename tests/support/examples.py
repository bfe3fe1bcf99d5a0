"""A well-formed reply and some broken ones of each family, from the published specification or
template of the format.

The tool is `get_weather(city: string, days: integer)`. `source` names the publication of the
format.
"""

# ruff: noqa: E501 - a format's line breaks are its own

from __future__ import annotations

from dataclasses import dataclass

from support.parsing import tool

TOOLS = [
    tool(
        "get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, required=["city"]
    ),
    tool("get_time"),
]


@dataclass(frozen=True)
class Example:
    """`good`: a reply with text and calls. `broken`: what is wrong -> the reply."""

    source: str
    good: str
    broken: dict[str, str]


_W = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
_P = '{"city": "Paris", "days": 2}'

_M3 = "]<]minimax[>["


def _dsml(brand: str, block: str, blank: str = "") -> str:
    """Two calls in DSML of that `brand` and `block`; `blank` stands before the other names."""
    mark = f"｜{brand}｜"
    return (
        f'<{mark}{block}>\n<{mark}{blank}invoke name="get_weather">\n<{mark}{blank}parameter '
        f'name="city" string="true">Paris</{mark}{blank}parameter>\n'
        f'<{mark}{blank}parameter name="days" '
        f'string="false">2</{mark}{blank}parameter>\n</{mark}{blank}invoke>\n'
        f'<{mark}{blank}invoke name="get_time">\n</{mark}{blank}invoke>\n</{mark}{block}>'
    )


EXAMPLES: dict[str, Example] = {
    "hermes": Example(
        "https://huggingface.co/Qwen/Qwen2.5-7B-Instruct (chat_template)",
        f'I look it up.\n<tool_call>\n{_W}\n</tool_call>\n<tool_call>\n{{"name": "get_time", '
        f'"arguments": {{}}}}\n</tool_call>',
        {
            "a brace is missing": f"<tool_call>\n{_W[:-1]}\n</tool_call>",
            "a bare word for a string": "<tool_call>\n"
            + _W.replace('"Paris"', "Paris")
            + "\n</tool_call>",
            "no closing tag, and text": f"<tool_call>\n{_W}\nI wait.",
        },
    ),
    "interns1": Example(
        "https://huggingface.co/internlm/Intern-S1 (tool calling)",
        'Sure.<|action_start|> <|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris", '
        '"days": 2}}<|action_end|>\n',
        {"no name": f'<|action_start|> <|plugin|>\n{{"parameters": {_P}}}<|action_end|>'},
    ),
    "qwen3_coder": Example(
        "https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct (chat_template)",
        "I look it "
        "up.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        {
            "a parameter is not closed": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>",
            "no number": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\ntwo\n</parameter>\n"
            "</function>\n</tool_call>",
            "no function": "<tool_call>\nget_weather\n</tool_call>",
        },
    ),
    "mimo": Example(
        "https://huggingface.co/XiaomiMiMo/MiMo-V2-Flash (chat_template)",
        "<tool_call>\n<function=get_weather>\n<parameter=city>Paris &amp; Lyon</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</tool_call>",
        {
            "no closing tag of the "
            "function": "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</tool_call>"
        },
    ),
    "glm45": Example(
        "https://huggingface.co/zai-org/GLM-4.5 (chat_template)",
        "I look it "
        "up.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
        {
            "a key without a value": "<tool_call>get_weather\n<arg_key>city</arg_key>\n</tool_call>",
            "JSON in place of pairs": f"<tool_call>{_W}</tool_call>",
        },
    ),
    "hunyuan": Example(
        "https://huggingface.co/tencent/Hunyuan-A13B-Instruct (chat_template)",
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n</tool_calls>",
        {"an empty block": "<tool_calls>\n</tool_calls>"},
    ),
    "minimax-m2": Example(
        "https://huggingface.co/MiniMaxAI/MiniMax-M2 (docs/tool_calling_guide.md)",
        'I look it up.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n'
        '</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        {
            "a quote is missing": "<minimax:tool_call>\n<invoke "
            'name="get_weather>\n</invoke>\n</minimax:tool_call>',
            "the second call is broken": '<minimax:tool_call>\n<invoke name="get_time">\n'
            '</invoke>\n<invoke name="get_weather">\nParis\n</invoke>\n</minimax:tool_call>',
        },
    ),
    "dots": Example(
        "SGLang 0.5.23 (dots_detector)",
        '<dots_function_call>\n<invoke name="get_weather">\n<parameter '
        'name="city">Paris</parameter>\n</invoke>\n</dots_function_call>',
        {
            "text in place of parameters": "<dots_function_call>\n<invoke "
            'name="get_weather">Paris</invoke>\n</dots_function_call>'
        },
    ),
    "deepseekv3": Example(
        "https://huggingface.co/deepseek-ai/DeepSeek-V3-0324 (chat_template)",
        f"I look it "
        f"up.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{_P}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        {
            "no fence": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n{_P}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "broken JSON": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{city: 1}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
        },
    ),
    "deepseekv31": Example(
        "https://huggingface.co/deepseek-ai/DeepSeek-V3.1 (ToolCall)",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_P}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{{}}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        {
            "the separator is missing": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        },
    ),
    "deepseekv32": Example(
        "https://huggingface.co/deepseek-ai/DeepSeek-V3.2 (encoding)",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" '
        'string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        {
            "JSON in place of parameters": f"<｜DSML｜function_calls>\n<｜DSML｜invoke "
            f'name="get_weather">\n{_P}\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
            "a parameter is not closed": "<｜DSML｜function_calls>\n"
            '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        },
    ),
    "deepseekv4": Example(
        "SGLang 0.5.23 (deepseekv4_detector)",
        "I look it up.\n\n" + _dsml("DSML", "tool_calls"),
        {
            "JSON in place of parameters": f"<｜DSML｜tool_calls>\n<｜DSML｜invoke "
            f'name="get_weather">\n{_P}\n</｜DSML｜invoke>\n'
            "</｜DSML｜tool_calls>",
            "the block of V3.2": "<｜DSML｜function_calls>\n<｜DSML｜invoke "
            'name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            "no number": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
            'name="days" string="false">two'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        },
    ),
    "deepseekv41": Example(
        "SGLang 0.5.23 (deepseekv41_detector)",
        "I look it up.\n\n" + _dsml("DSML", " calls", " "),
        {
            "the blank is missing": "<｜DSML｜ calls>\n<｜DSML｜invoke "
            'name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜ calls>',
            "a call is not closed": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_time">\n</｜DSML｜ '
            "calls>",
        },
    ),
    "gigachat35": Example(
        "SGLang 0.5.23 (gigachat35_detector)",
        "I look it up.\n\n" + _dsml("GCML", "tool_calls"),
        {
            "the first parameter is not "
            "closed": '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="get_weather">\n'
            '<｜GCML｜parameter name="city" string="true">Paris\n</｜GCML｜invoke>\n'
            '<｜GCML｜invoke name="get_time">\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>',
            "an unknown tool": "<｜GCML｜tool_calls>\n<｜GCML｜invoke "
            'name="get_rain">\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>',
        },
    ),
    "k2_horizon": Example(
        "SGLang 0.5.23 (k2_v3_detector)",
        "<ifm|think_fast>\nI must look it "
        "up.\n</ifm|think_fast>\n<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n"
        "<ifm|arg_value>Paris</ifm|arg_value>\n<ifm|arg_key>days</ifm|arg_key>\n<ifm|arg_type>integer</ifm|arg_type>\n<ifm|arg_value>2"
        "</ifm|arg_value>\n</ifm|tool_call>\n<ifm|tool_call>get_time\n</ifm|tool_call>\n</ifm|tool_calls>",
        {
            "JSON": f'<ifm|tool_call>{_W}</ifm|tool_call>\n<ifm|tool_call>[{{"function": {_W}}}, '
            f'{{"name": "get_time"}}]</ifm|tool_call>',
            "broken JSON": f"<ifm|tool_calls>\n<ifm|tool_call>{_W[:-1]}</ifm|tool_call>\n</ifm|tool_calls>",
            "the type is not closed": "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>days</ifm|arg_key><ifm|arg_type>integer"
            "<ifm|arg_value>2</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
            "a key without a value": "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>days</ifm|arg_key></ifm|tool_call></ifm|tool_calls>",
        },
    ),
    "minimax-m3": Example(
        "SGLang 0.5.23 (minimax_m3)",
        f"<mm:think>I must look it up.</mm:think>I look it up.\n{_M3}<tool_call>\n{_M3}<invoke "
        f'name="get_weather">{_M3}<city>Paris{_M3}</city>'
        f"{_M3}<days>2{_M3}</days>{_M3}</invoke>\n{_M3}<invoke "
        f'name="get_time">{_M3}<zones>{_M3}<item>UTC{_M3}</item>{_M3}<item>{_M3}<dst>true'
        f"{_M3}</dst>{_M3}</item>{_M3}</zones>{_M3}</invoke>\n{_M3}</tool_call>",
        {
            "text in place of elements": f"{_M3}<tool_call>\n{_M3}<invoke "
            f'name="get_weather">Paris{_M3}</invoke>\n{_M3}</tool_call>',
            "another closing tag": f"{_M3}<tool_call>\n{_M3}<invoke "
            f'name="get_weather">{_M3}<city>Paris{_M3}</days>{_M3}</invoke>\n'
            f"{_M3}</tool_call>",
            "tags without the token": "<tool_call>\n<invoke "
            'name="get_time"></invoke>\n</tool_call>',
            "white space before the tags": f"{_M3}\n<tool_call>\n{_M3}<invoke "
            f'name="get_weather">{_M3} <city>Paris{_M3} '
            f"</city>{_M3}</invoke>\n"
            f"{_M3}</tool_call>",
            "text between elements": f"{_M3}<tool_call>{_M3}<invoke "
            f'name="get_time">{_M3}<a>x{_M3}<b>1{_M3}</b>{_M3}</a>{_M3}</invoke>'
            f"{_M3}</tool_call>",
        },
    ),
    "inkling": Example(
        "SGLang 0.5.23 (inkling_detector)",
        "<|content_thinking|>I must look it up.<|end_message|><|message_model|><|content_text|>I "
        "look it up.<|end_message|>"
        '<|message_model|>get_weather<|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"Paris","days":2}}<|end_message|>'
        '<|message_model|>get_time<|content_invoke_tool_json|>{"name":"get_time","args":{}}<|end_message|>',
        {
            "plain text": "get_time<|content_invoke_tool_text|>now, please<|end_message|>",
            "broken JSON, and text": 'get_time<|content_invoke_tool_json|>{"name":"get_time","args":}<|end_message|><|message_model|>'
            "<|content_text|>I wait.<|end_message|><|content_model_end_sampling|>",
            "arguments of another name": '<|content_invoke_tool_json|>{"name":"get_weather","arguments":["Paris"]}<|end_message|>',
            "no end of the message": '<|content_invoke_tool_json|>{"name":"get_time","args":{}}<|message_model|><|content_text|>I wait.',
        },
    ),
    "beam": Example(
        "SGLang 0.5.23 (beam)",
        "<|channel|>analysis<|message|>I must look it up.<|end|><|start|>assistant "
        "to=get_weather<|channel|>analysis <|constrain|>xml<|message|>"
        '<rfl:parameter name="city">\nParis\n</rfl:parameter><rfl:parameter '
        'name="days">\n2\n</rfl:parameter><|end|><|start|>assistant '
        "to=get_time<|channel|>analysis <|constrain|>xml<|message|><|call|>",
        {
            "an answer": "<|channel|>final<|message|>Hello.",
            "a closing tag is missing": " to=get_weather<|channel|>analysis <|constrain|>"
            'xml<|message|><rfl:parameter name="city">\nParis\n<rfl:parameter name="days">\n2\n'
            "</rfl:parameter><|call|>",
            "the last closing tag is "
            "missing": " to=get_weather<|channel|>analysis <|constrain|>xml<|message|>"
            '<rfl:parameter name="city">\nParis<|call|>',
            "JSON": f" to=get_weather<|channel|>analysis <|constrain|>xml<|message|>{_P}<|call|>",
        },
    ),
    "kimi_k2": Example(
        "https://huggingface.co/moonshotai/Kimi-K2-Instruct (docs/tool_call_guidance.md)",
        f"I look it "
        f"up.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_P}<|tool_call_end|>"
        "<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        {
            "only a number for a name": "<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            "one id twice": "<|tool_calls_section_begin|>"
            + "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            * 2
            + "<|tool_calls_section_end|>",
        },
    ),
    "kimi_k3": Example(
        "SGLang 0.5.23 (kimik3_detector)",
        "<|open|>response<|sep|>I look it up.<|close|>response<|sep|><|open|>tools<|sep|><|open|>"
        'call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>'
        'Paris<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>'
        "argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        {
            "an argument is not closed": '<|open|>tools<|sep|><|open|>call tool="get_time" '
            'index="1"<|sep|><|open|>argument key="a"<|sep|>'
        },
    ),
    "step3": Example(
        "https://huggingface.co/stepfun-ai/step3 (chat_template)",
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke "
        'name="get_weather">\n<steptml:parameter name="city">Paris</steptml:parameter>\n'
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
        {
            "another type of call": "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>code<｜tool_sep｜>x<｜tool_call_end｜>\n<｜tool_calls_end｜>"
        },
    ),
    "mistral": Example(
        "https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.3 (chat_template)",
        f'I look it up.[TOOL_CALLS] [{_W[:-1]}, "id": "a1B2c3D4e"}}, {{"name": "get_time", '
        f'"arguments": {{}}}}]',
        {
            "the newer form": f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{_P}[TOOL_CALLS]get_time[ARGS]{{}}",
            "a trailing comma": f"[TOOL_CALLS] [{_W},]",
            "no arguments": "[TOOL_CALLS]get_time",
        },
    ),
    "llama3": Example(
        "https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/",
        f'{{"name": "get_weather", "parameters": {_P}}}',
        {
            "the tag before it": f'<|python_tag|>{{"name": "get_weather", "parameters": {_P}}}; '
            f'{{"name": "get_time", "parameters": {{}}}}',
            "single quotes": "{'name': 'get_weather', 'parameters': {'city': 'Paris'}}",
            "JSON that is no call": '{"city": "Paris", "temperature": 21}',
        },
    ),
    "pythonic": Example(
        "https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/",
        "[get_weather(city='Paris', days=2), get_time()]",
        {
            "a value without its name": "[get_weather('Paris')]",
            "an expression": "[get_weather(city='Paris', days=1+1)]",
            "a list in prose": "Use x[get(a)] or [1, 2].",
        },
    ),
    "lfm2": Example(
        "https://huggingface.co/LiquidAI/LFM2-1.2B (tool use)",
        '<|tool_call_start|>[get_weather(city="Paris", days=2), get_time()]<|tool_call_end|>I look '
        "it up.",
        {
            "a quote inside": "<|tool_call_start|>[get_weather(city='L'Aquila')]<|tool_call_end|>",
            "a bracket is missing": '<|tool_call_start|>[get_weather(city="Paris"<|tool_call_end|>',
        },
    ),
    "gemma4": Example(
        "https://ai.google.dev/gemma/docs (function calling), Gemma 4's chat_template",
        "I look it "
        'up.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
        {
            "no call:": "<|tool_call>get_time{}<tool_call|>",
            "a string is not closed": '<|tool_call>call:get_weather{city:<|"|>Paris}<tool_call|>',
        },
    ),
    "gpt-oss": Example(
        "https://cookbook.openai.com/articles/openai-harmony",
        "<|channel|>analysis<|message|>I must look it "
        "up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{_P}<|call|>",
        {
            "an answer": "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
            "the recipient first": " to=functions.get_time<|channel|>commentary json<|message|>{}",
            "broken JSON": "<|channel|>commentary to=functions.get_weather "
            "<|constrain|>json<|message|>{city}<|call|>",
        },
    ),
    "cohere_command4": Example(
        "https://docs.cohere.com/docs/tool-use, Command A's chat_template",
        "<|START_THINKING|>I look it up.<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f"{_P}}}\n]<|END_ACTION|>",
        {
            "an answer": "<|START_RESPONSE|>Hello.<|END_RESPONSE|>",
            "a comma is missing": '<|START_ACTION|>[{"tool_call_id": "0" "tool_name": '
            '"get_time"}]<|END_ACTION|>',
        },
    ),
    "apertus2509": Example(
        "https://huggingface.co/swiss-ai/Apertus-8B-Instruct-2509 (chat_template)",
        f'I look it up.<|tools_prefix|>[{{"get_weather": {_P}}}, {{"get_time": '
        f"{{}}}}]<|tools_suffix|>",
        {"an empty object": "<|tools_prefix|>[{}]<|tools_suffix|>"},
    ),
    "iquest_q1": Example(
        "SGLang 0.5.23 (iquest_q1_detector)",
        "<iquest_tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></iquest_tool_call>",
        {
            "no name": "<iquest_tool_call><arg_key>city</arg_key><arg_value>Paris</arg_value></iquest_tool_call>"
        },
    ),
    "minicpm5": Example(
        "SGLang 0.5.23 (minicpm5_detector)",
        'I look it up.<function name="get_weather"><param name="city"><![CDATA[Paris & '
        'Lyon]]></param><param name="days">2</param></function>',
        {
            "a parameter is not closed": '<function name="get_weather"><param '
            'name="city">Paris</function>'
        },
    ),
    "muse": Example(
        "the chat template muse_glimmer of trl 1.16.0",
        " to=self<|message|>I must look it up.<|eom|><|start|>assistant "
        'to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        "<atem:parameter "
        'name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        {
            "an answer": " to=user<|message|>Hello.",
            "no block": " to=get_time<|message|>Now, please.",
        },
    ),
    "gigachat3": Example(
        "SGLang 0.5.23 (gigachat3_detector)",
        f"I look it up.<|message_sep|>\n\nfunction call<|role_sep|>\n{_W}",
        {"broken JSON": '<|function_call|>{"name": "get_weather", "arguments": {city}}'},
    ),
}
