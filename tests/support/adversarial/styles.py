"""Chat templates in the styles of families that the wheel of trl does not have, or has in another
form, each with the peculiarity of its family.

Maps names to (source, the control tokens that end a turn, the added control tokens).
"""

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
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "</s>",
)  # fmt: skip

_LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}"
    "[INST] {% if loop.index0 == 1 and messages[0].role == 'system' %}<<SYS>>\n"
    "{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}{{ m.content | trim }}"
    " [/INST]{% elif m.role == 'tool' %}[INST] {{ m.name }}: {{ m.content | trim }}"
    " [/INST]{% else %} {{ (m.content or '') | trim }}{% for c in m.tool_calls or [] %}"
    " {{ c.function | tojson }}{% endfor %} </s>{% endif %}{% endfor %}"
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
    "style_mistral": (_MISTRAL, ("</s>",), _MISTRAL_CONTROL),
    "style_llama2": (_LLAMA2, ("</s>",), ("</s>",)),
    "style_phi": (_PHI, ("<|end|>",), ("<|sep|>",)),
    "style_eom": (_EOM, ("<|end|>", "<|eom|>"), ("<|eom|>", "<|head|>", "<|/head|>")),
    "style_result_in_turn": (_RESULT_IN_TURN, ("<|end|>", "<|run|>"), ("<|run|>", "<|result|>")),
}
