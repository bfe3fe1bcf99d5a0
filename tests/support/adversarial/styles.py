"""Chat templates in the styles of published families, each with the peculiarity of its family.

Maps names to (source, the control tokens that end a turn, the added control tokens).
"""

from __future__ import annotations

Style = tuple[str, tuple[str, ...], tuple[str, ...]]

_GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\n"
    "<tool_response>{{ m.content }}</tool_response>{% else %}<|system|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_GLM_CONTROL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

_COMMAND = (
    "{% set ns = namespace(n=0, ids=[]) %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% set ns.ids = ns.ids + [c.id] %}{% endfor %}{% endfor %}{% for m in messages %}"
    '{% if m.role == \'tool\' %}<|turn|>system\n[{"tool_call_id": "{% for i in ns.ids %}'
    "{% if i == m.tool_call_id %}{{ loop.index0 }}{% endif %}{% endfor %}"
    '", "results": {{ m.content | tojson }}}]<|end|>{% elif m.role == \'assistant\' and '
    "m.tool_calls %}<|turn|>assistant\n{{ m.content or '' }}[{% for c in m.tool_calls %}"
    '{"tool_call_id": "{{ ns.n }}", "tool_name": "{{ c.function.name }}'
    '", "parameters": {{ c.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}'
    "{% set ns.n = ns.n + 1 %}{% endfor %}]<|end|>{% else %}<|turn|>{{ m.role }}\n{{ m.content }}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

_ROUNDS = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "[Round {{ ns.n + 1 }}]\n\n问：{{ m.content }}\n\n{% set ns.n = ns.n + 1 %}"
    "{% elif m.role == 'assistant' %}答：{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n\n{% else %}{{ m.role }}"
    ": {{ m.content }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}答：{% endif %}"
)

_ROUNDS_BY_INDEX = (
    "{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index0 // 2 + 1 }}"
    "] 问：{{ m.content }}\n{% elif m.role == 'assistant' %}答：{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% else %}{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "答：{% endif %}"
)

_HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>{{ "
    "m.reasoning_content }}"
    "<|end|>{% endif %}{% for c in m.tool_calls %}<|start|>assistant to=functions.{{ "
    "c.function.name }}"
    "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% elif loop.last and not add_generation_prompt %}<|start|>assistant"
    "{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
    "<|start|>assistant{% endif %}<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
    "{% set users = rest | selectattr('role', 'equalto', 'user') | list %}{% for m in rest %}"
    "{% if m.role == 'user' %}{% if tools and m == users[-1] %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% if loop.last and sys %}"
    "[INST]{{ sys }}\n\n{{ m.content }}[/INST]{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}|{{ m.tool_call_id }}"
    "[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}|{{ c.id }}{% endfor %}</s>{% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)
_MISTRAL_CONTROL = (
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "</s>",
)  # fmt: skip

_LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}"
    "[INST] {% if loop.index0 == 1 and messages[0].role == 'system' %}<<SYS>>\n"
    "{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}{{ m.content | trim }}"
    " [/INST]{% elif m.role == 'tool' %}[INST] {{ m.name }}: {{ m.content | trim }}"
    " [/INST]{% else %} {{ (m.content or '') | trim }}{% for c in m.tool_calls or [] %}"
    " {{ c.function | tojson }}{% endfor %} </s>{% endif %}{% endfor %}"
)

_GEMMA = (
    "{% for m in messages %}{% if m.role == 'user' %}<|turn|>user\n{{ m.content | trim }}<|end|>\n"
    "{% elif m.role == 'assistant' %}<|turn|>model\n{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_calls and loop.nextitem is defined and loop.nextitem.role == 'tool' %}"
    "<tool_response>{{ loop.nextitem.content }}</tool_response>{% endif %}{{ m.content or '' }}"
    "<|end|>\n{% elif m.role == 'system' %}<|turn|>system\n{{ m.content }}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)

_DEEPSEEK = (
    "{% set ns = namespace(tool=false, sys='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.sys = ns.sys + m.content %}{% endif %}{% endfor %}{{ ns.sys }}"
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% set ns.tool = false %}{% elif m.role == 'assistant' %}{% if not ns.tool %}"
    "<|Assistant|>{% endif %}{% set text = m.content or '' %}{% if '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}{{ text }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|end|>{% set ns.tool = false %}"
    "{% elif m.role == 'tool' %}<tool_response>{{ m.content }}"
    "</tool_response>{% set ns.tool = true %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}<|Assistant|>{% endif %}"
)

_QWEN3 = (
    "{% set ns = namespace(open=true, last=messages | length - 1) %}{% for m in messages[::-1] %}"
    "{% if ns.open and m.role == 'user' and not m.content.startswith('<tool_response>') %}"
    "{% set ns.open = false %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<|turn|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n"
    "{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{{ (m.content or '').lstrip('\n"
    "') }}{% else %}{{ m.content or '' }}{% endif %}{% for c in m.tool_calls or [] %}"
    '{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n{"name": "{{ c.function.name }}'
    '", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>\n'
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "<|turn|>user{% endif %}\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>\n"
    "{% endif %}{% else %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

_PHI = (
    "{% for m in messages %}<|turn|>{{ m.role }}<|sep|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant<|sep|>{% endif %}"
)

_EOM = (
    "{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.tool_calls %}<|eom|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)

_RESULT_IN_TURN = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}<|result|>"
    "{% elif m.role == 'assistant' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|turn|>assistant\n{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.tool_calls %}<|run|>{% else %}<|end|>{% endif %}"
    "{% else %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn|>assistant\n{% endif %}"
)

STYLES: dict[str, Style] = {
    "style_glm": (_GLM, ("<|user|>", "<|observation|>"), _GLM_CONTROL),
    "style_command_numbered": (_COMMAND, ("<|end|>",), ()),
    "style_chatglm_rounds": (_ROUNDS, ("<|end|>",), ()),
    "style_chatglm_rounds_by_index": (_ROUNDS_BY_INDEX, ("<|end|>",), ()),
    "style_harmony": (
        _HARMONY,
        ("<|return|>", "<|call|>"),
        ("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"),
    ),
    "style_mistral": (_MISTRAL, ("</s>",), _MISTRAL_CONTROL),
    "style_llama2": (_LLAMA2, ("</s>",), ("</s>",)),
    "style_gemma": (_GEMMA, ("<|end|>",), ()),
    "style_deepseek": (_DEEPSEEK, ("<|end|>",), ("<|User|>", "<|Assistant|>")),
    "style_qwen3": (_QWEN3, ("<|end|>",), ()),
    "style_phi": (_PHI, ("<|end|>",), ("<|sep|>",)),
    "style_eom": (_EOM, ("<|end|>", "<|eom|>"), ("<|eom|>", "<|head|>", "<|/head|>")),
    "style_result_in_turn": (_RESULT_IN_TURN, ("<|end|>", "<|run|>"), ("<|run|>", "<|result|>")),
}
