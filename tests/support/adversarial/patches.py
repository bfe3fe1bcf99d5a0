"""Hand-written templates, each with other slots of the skeleton."""

from support.adversarial.skeleton import SLOTS

_NS = "{% set ns = namespace(n=0, seen=[], flag=false, name='') %}"
_RESULT = SLOTS["tool"]
_LAST_USER_AT = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)

_IN_SLOTS: dict[str, dict[str, str]] = {
    "plain": {},
    "numbered_results": {
        "top": _NS,
        "tool": f"{{{{ ns.n }}}}: {_RESULT}{{% set ns.n = ns.n + 1 %}}",
    },
    "numbered_calls": {
        "top": _NS,
        "call": '<tool_call>{"id": {{ ns.n }}, "name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}</tool_call>{% set ns.n = ns.n + 1 %}",
    },
    "rounds_by_namespace": {
        "top": _NS,
        "user": "{% set ns.n = ns.n + 1 %}[Round {{ ns.n }}] {{ m.content }}",
    },
    "index_in_header": {
        "user": "#{{ loop.index }} {{ m.content }}",
        "tool": "#{{ loop.index0 }}" + _RESULT,
    },
    "index_parity": {"tool": "{% if loop.index is divisibleby 3 %}[3]{% endif %}" + _RESULT},
    "revindex": {"user": "{{ loop.revindex }} {{ m.content }}"},
    "loop_length": {"user": "{{ loop.length }} {{ m.content }}"},
    "loop_last": {"tool": "{% if loop.last %}[last]{% endif %}" + _RESULT},
    "loop_cycle": {"tool": "{{ loop.cycle('a', 'b', 'c', 'd', 'e') }}" + _RESULT},
    "loop_changed": {"tool": "{% if loop.changed(m.name) %}[{{ m.name }}]{% endif %}" + _RESULT},
    "message_count_prompt": {"prompt": "{% if messages | length > 7 %}[long]{% endif %}"},
    "message_count_modulo": {"prompt": "{% if messages | length % 5 == 0 %}[5]{% endif %}"},
    "message_count_shown": {"prompt": "({{ messages | length }})"},
    "results_counted": {
        "prompt": "{{ messages | selectattr('role', 'equalto', 'tool') | list | length }} results "
    },
    "calls_counted_once_six": {
        "top": _NS,
        "tool": "{% set ns.n = ns.n + 1 %}{% if ns.n == 6 %}[six]{% endif %}" + _RESULT,
    },
    "results_since_user": {
        "top": _NS,
        "each": "{% if m.role == 'user' %}{% set ns.n = 0 %}{% elif m.role == 'tool' %}{% set ns.n "
        "= ns.n + 1 %}{% endif %}",
        "tool": "{% if ns.n > 3 %}[many]{% endif %}" + _RESULT,
    },
    "budget_of_characters": {
        "top": _NS,
        "each": "{% set ns.n = ns.n + (m.content or '') | length %}",
        "prompt": "{% if ns.n > 300 %}[budget]{% endif %}",
    },
    "budget_left": {
        "prompt": "{{ 9000 - (messages | map(attribute='content') | map('string') | map('length') "
        "| sum) }} left "
    },
    "long_conversation_refused": {
        "top": "{% if messages | length > 15 %}{{ raise_exception('too long') }}{% endif %}"
    },
    "seen_names": {
        "top": _NS,
        "tool": "{% if m.name in ns.seen %}[again]{% endif %}{% set ns.seen = ns.seen + [m.name] %}"
        + _RESULT,
    },
    "seen_contents": {
        "top": _NS,
        "tool": "{% if m.content in ns.seen %}[same]{% else %}{{ m.content }}{% endif %}{% set "
        "ns.seen = ns.seen + [m.content] %}",
    },
    "python_was_called": {
        "top": _NS,
        "tool": "{% if m.name == 'python' %}{% set ns.flag = true %}{% endif %}{% if ns.flag "
        "%}[py]{% endif %}" + _RESULT,
    },
    "name_toggles": {
        "top": _NS,
        "tool": "{% if m.name == 'python' %}{% set ns.flag = not ns.flag %}{% endif %}{{ ns.flag }}"
        + _RESULT,
    },
    "merged_results": {
        "each": "{% set lead = loop.previtem is not defined or loop.previtem.role != 'tool' %}",
        "tool": "{{ '[first]' if lead else '[next]' }}" + _RESULT,
    },
    "extra_keys": {
        "tool": "{{ m.origin }}{% if m.meta is defined %}{{ m.meta.lang }}{% endif %}" + _RESULT,
        "user": "{% if m.tags is defined %}{{ m.tags[0] }}{% endif %}{{ m.content }}",
    },
    "tools_at_last_user": {
        "head": "",
        "top": _LAST_USER_AT,
        "user": "{% if tools and loop.index0 == ns.last %}{{ tools | tojson }}\n{% endif %}{{ "
        "m.content }}",
    },
    "reasoning_dropped": {
        "top": _LAST_USER_AT,
        "think": "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ "
        "m.reasoning_content }}\n</think>\n\n{% endif %}",
    },
    "text_behind_calls": {
        "said": "{% if not m.tool_calls %}{{ m.content }}{% endif %}",
        "calls": SLOTS["calls"] + "{% if m.tool_calls %}{{ m.content or '' }}{% endif %}",
    },
    "text_moved_behind_result": {
        "said": "{% if not m.tool_calls or loop.last %}{{ m.content or '' }}{% endif %}",
        "tool": _RESULT
        + "{% if loop.previtem.tool_calls %}{{ loop.previtem.content or '' }}{% endif %}",
    },
    "all_trimmed": {
        "said": "{{ (m.content or '').strip() }}",
        "user": "{{ m.content.strip() }}",
        "tool": "{{ m.content.strip() }}",
    },
    "ids_shown": {
        "call": '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
        '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}</tool_call>',
        "tool": "{{ m.tool_call_id }} " + _RESULT,
    },
    "macro_for_all": {
        "top": "{% macro show(x, tag) %}{% if tag == 'tool' and x[:1] == '{' %}json {% endif %}{{ "
        "x }}{% endmacro %}",
        "tool": "{{ show(m.content, m.role) }}",
        "user": "{{ show(m.content, m.role) }}",
    },
    "macro_with_caller": {
        "top": "{% macro box(t) %}[{{ t }}{{ caller() }}]{% endmacro %}",
        "tool": "{% call box(m.name) %}{{ m.content }}{% endcall %}",
    },
    "dictionary_of_marks": {
        "top": "{% set marks = {'python': '<py>', 'now': '<clock>'} %}",
        "tool": "{{ marks[m.name] if m.name in marks else '<tool>' }}" + _RESULT,
    },
    "list_of_rules": {
        "top": "{% set rules = [('error', 'E'), ('true', 'T'), ('{', 'J')] %}",
        "tool": "{% for word, mark in rules %}{% if word in m.content | lower %}{{ mark }}{% endif "
        "%}{% endfor %}" + _RESULT,
    },
    "renamed_loop": {
        "loop": "{% set all = messages %}{% for m in all %}{% set who = m['name'] %}",
        "tool": "{% if who == 'python' %}[py]{% endif %}" + _RESULT,
    },
    "no_newlines": {
        "user": "{{ m.content }}",
        "after": "",
        "tool": "{{ m.content.replace('\n', ' ') }}",
    },
    "last_name_kept": {"top": _NS, "tool": "{{ ns.name }}>{% set ns.name = m.name %}" + _RESULT},
    "thought_opened": {"opening": "<think>\n", "think": SLOTS["think"]},
    "thought_opened_and_dropped": {"opening": "<think>\n", "think": ""},
    "thought_closed": {"opening": "<think>\n\n</think>\n\n", "think": ""},
    "text_as_json": {"tool": "{{ m.content | tojson }}", "user": "{{ m.content | tojson }}"},
    "text_escaped": {"tool": "{{ m.content | e }}", "user": "{{ m.content | upper }}"},
}
_CALL = (
    "{% set c = (messages[: loop.index0] | selectattr('tool_calls', 'defined') | list | last)"
    ".tool_calls[0].function %}"
)
_BEFORE_RESULTS = {
    "name_by_id": "{% for p in messages %}{% for c in p.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id %}{{ c.function.name }}: {% endif %}{% endfor %}{% endfor %}",
    "arguments_by_id": "{% for p in messages %}{% for c in p.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id %}{% for k, v in c.function.arguments.items() %}{{ k }}"
    "={{ v }} {% endfor %}{% endif %}{% endfor %}{% endfor %}",
    "previous_had_text": "{% if messages[loop.index0 - 1].content %}[said]{% endif %}",
    "previous_thought": "{% if 'check' in (loop.previtem.reasoning_content or '') %}[c]{% endif %}",
    "argument_value": _CALL + "{% if c.arguments.city == 'Paris' %}[Paris]{% endif %}",
    "argument_types": _CALL + "{% for v in c.arguments.values() %}"
    "{{ 's' if v is string else 'n' if v is number else 'o' }}{% endfor %}",
    "argument_count": _CALL + "{{ c.arguments | length }}",
    "keys_counted": "{{ m | length }}",
    "keys_listed": "{{ m.keys() | sort | join(',') }} ",
    "extra_key_flag": "{% if m.cached %}[cached]{% endif %}",
    "without_name": "{% if not m.name %}{{ raise_exception('no name') }}{% endif %}",
    "dated_old": "{% if strftime_now('%Y') | int > 2000 %}[new]{% endif %}",
    "known_tools_only": "{% if tools and m.name in (tools | map(attribute='function.name') | list)"
    " %}[known]{% else %}[unknown]{% endif %}",
    "ids_of_calls_tested": "{% if not m.tool_call_id %}{{ raise_exception('id') }}{% endif %}"
    "{{ 'c' if m.tool_call_id.startswith('call_') else 'o' }}",
    "empty_refused": "{% if not m.content | trim %}{{ raise_exception('empty') }}{% endif %}",
    "computed_key": "{% set key = 'na' ~ 'me' %}{% if m[key] == 'python' %}[py]{% endif %}",
    "nested_loop": "{% for o in messages %}{% if o.role == 'user' and o.content == m.content "
    "%}[echo]{% endif %}{% endfor %}",
}
_IN_ONE_SLOT = {
    "after": {"batches": "{% if loop.index % 4 == 0 %}<|pad|>{% endif %}"},
    "head": {"dated_head": "<|turn|>system\n{{ strftime_now('%B') }}<|end|>\n" + SLOTS["head"]},
    "loop": {"window_of_six": "{% for m in messages[-6:] %}"},
    "prompt": {
        "users_names": "{{ messages | map(attribute='role') | unique | join(',') }} ",
        "system_again": "{% if messages[0].role == 'system' %}<|turn|>system\n"
        "{{ messages[0].content }}<|end|>\n{% endif %}",
        "last_result_again": "{{ messages[-1].content if messages[-1].role == 'tool' else '' }}",
        "dated_prompt": "[{{ strftime_now('%Y') }}]",
        "tools_counted": "{{ tools | length if tools else 0 }} tools ",
        "mapped": "{{ messages | selectattr('name', 'equalto', 'python') | list | length }}",
        "grouped": "{% for g, l in messages | groupby('role') %}{{ g[0] }}{{ l | length }}"
        "{% endfor %} ",
    },
    "opening": {
        "first_user_again": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[:5] }}"
        "{% break %}{% endif %}{% endfor %}",
        "no_think_switch": "{% if '/no_think' in messages[-1].content %}"
        "<think>\n\n</think>\n\n{% endif %}",
    },
    "tool": {
        "next_role": _RESULT
        + "{% if loop.nextitem is defined and loop.nextitem.role == 'user' %}.{% endif %}",
        "whole_message": "{{ m | tojson }}",
        "old_results_cut": "{% if loop.index0 < messages | length - 4 %}{{ m.content[:4] }}…"
        "{% else %}{{ m.content }}{% endif %}",
        "old_results_dropped_at_ten": "{% if messages | length > 10 and loop.index < 5 %}[old]"
        "{% else %}{{ m.content }}{% endif %}",
        "with_block": "{% with t = m.content %}{{ t[:1] | upper }}{{ t[1:] }}{% endwith %}",
    },
    "user": {
        "next_content": "{{ m.content }}{% if loop.nextitem is defined and loop.nextitem.role == "
        "'user' and loop.nextitem.content | length > 12 %}~{% endif %}",
        "two_back": "{% if loop.index0 > 2 and messages[loop.index0 - 2].role == 'tool' %}[t]"
        "{% endif %}{{ m.content }}",
        "message_items": "{% for k, v in m.items() %}{% if k != 'role' %}{{ k }}={{ v }};"
        "{% endif %}{% endfor %}",
        "content_kind": "{{ 's' if m.content is string else 'o' }}{{ m.content }}",
        "parts": "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ "
        "p.text }}]{% endfor %}{% endif %}",
    },
    "think": {
        "empty_thought_at_end": "{% if m.reasoning_content or loop.last %}<think>\n"
        "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    },
    "calls": {
        "calls_reordered": "{% for c in (m.tool_calls or []) | sort(attribute='function.name') %}"
        "{CALL}{% endfor %}",
        "second_call_hidden": "{% for c in (m.tool_calls or [])[:1] %}{CALL}{% endfor %}",
        "ids_of_nine": "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('nine characters') }}{% endif %}{CALL}{% endfor %}",
    },
    "call": {
        "calls_renamed": '<tool_call>{"name": "{{ c.function.name | upper }}", "arguments": {{ '
        "c.function.arguments | tojson }}}</tool_call>",
        "calls_by_alias": "<tool_call>{{ {'python': 'py', 'now': 'clock'}.get(c.function.name, "
        "c.function.name) }}({{ c.function.arguments | tojson }})</tool_call>",
        "arguments_text": '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ \'\' + '
        "c.function.arguments }}}</tool_call>",
        "arguments_either": "<tool_call>{{ c.function.name }} {{ c.function.arguments if "
        "c.function.arguments is string else c.function.arguments | tojson }}</tool_call>",
        "arguments_items": "<tool_call>{{ c.function.name }}\n"
        "{% for k, v in c.function.arguments.items() %}"
        "<{{ k }}>{{ v if v is string else v | tojson }}</{{ k }}>\n{% endfor %}</tool_call>",
        "arguments_sorted": "<tool_call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments | dictsort %} {{ k }}={{ v }}{% endfor %}</tool_call>",
    },
    "said": {
        "text_truncated_in_history": "{{ (m.content or '') | truncate(30) }}",
        "text_upper_in_history": "{% set t = m.content or '' %}{{ t if loop.last else t | upper }}",
        "text_trimmed": "{{ (m.content or '') | trim }}",
    },
    "each": {
        "roles_alternate": "{% if not loop.first and m.role == loop.previtem.role != 'tool' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}",
        "continue_on_blank": "{% if m.role == 'tool' and not m.content | trim %}"
        "{% continue %}{% endif %}",
    },
}
PATCHES: dict[str, dict[str, str]] = {
    **_IN_SLOTS,
    **{name: {"tool": text + _RESULT} for name, text in _BEFORE_RESULTS.items()},
    **{name: {slot: text} for slot, made in _IN_ONE_SLOT.items() for name, text in made.items()},
}

# --- whole templates ------------------------------------------------------------------------------

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
