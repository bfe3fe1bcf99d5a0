"""Hand-written templates, each with other slots of the skeleton."""

from __future__ import annotations

from support.adversarial.skeleton import SLOTS

_NS = "{% set ns = namespace(n=0, seen=[], flag=false, name='') %}"
_RESULT = SLOTS["tool"]
_LAST_USER_AT = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)

PATCHES: dict[str, dict[str, str]] = {
    "plain": {},
    # --- counters
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
    "batches": {"after": "{% if loop.index % 4 == 0 %}<|pad|>{% endif %}"},
    # --- memory
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
    "last_name_kept": {"top": _NS, "tool": "{{ ns.name }}>{% set ns.name = m.name %}" + _RESULT},
    "name_by_id": {
        "tool": "{% for p in messages %}{% for c in p.tool_calls or [] %}"
        "{% if c.id == m.tool_call_id %}{{ c.function.name }}: {% endif %}{% endfor %}{% endfor %}"
        + _RESULT
    },
    "arguments_by_id": {
        "tool": "{% for p in messages %}{% for c in p.tool_calls or [] %}"
        "{% if c.id == m.tool_call_id %}{% for k, v in c.function.arguments.items() %}{{ k }}"
        "={{ v }} {% endfor %}{% endif %}{% endfor %}{% endfor %}" + _RESULT
    },
    "users_names": {"prompt": "{{ messages | map(attribute='role') | unique | join(',') }} "},
    "first_user_again": {
        "opening": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[:5] }}{% break "
        "%}{% endif %}{% endfor %}"
    },
    "system_again": {
        "prompt": "{% if messages[0].role == 'system' %}<|turn|>system\n{{ messages[0].content "
        "}}<|end|>\n{% endif %}"
    },
    "last_result_again": {
        "prompt": "{% if messages[-1].role == 'tool' %}{{ messages[-1].content }}{% endif %}"
    },
    # --- neighbors
    "merged_results": {
        "each": "{% set lead = loop.previtem is not defined or loop.previtem.role != 'tool' %}",
        "tool": "{{ '[first]' if lead else '[next]' }}" + _RESULT,
    },
    "next_role": {
        "tool": _RESULT
        + "{% if loop.nextitem is defined and loop.nextitem.role == 'user' %}.{% endif %}"
    },
    "next_content": {
        "user": "{{ m.content }}{% if loop.nextitem is defined and loop.nextitem.role == 'user' "
        "and loop.nextitem.content | length > 12 %}~{% endif %}"
    },
    "previous_had_text": {
        "tool": "{% if messages[loop.index0 - 1].content %}[said]{% endif %}" + _RESULT
    },
    "previous_thought": {
        "tool": "{% if 'check' in (loop.previtem.reasoning_content or '') %}[check]{% endif %}"
        + _RESULT
    },
    "two_back": {
        "user": "{% if loop.index0 > 2 and messages[loop.index0 - 2].role == 'tool' %}[t]{% endif "
        "%}{{ m.content }}"
    },
    "argument_value": {
        "tool": "{% set c = (messages[: loop.index0] | selectattr('tool_calls', 'defined') | list "
        "| last).tool_calls[-1] %}{% if c.function.arguments.city == 'Paris' %}[Paris]{% endif %}"
        + _RESULT
    },
    "argument_types": {
        "tool": "{% set c = (messages[: loop.index0] | selectattr('tool_calls', 'defined') | list "
        "| last).tool_calls[0] %}{% for v in c.function.arguments.values() %}"
        "{{ 's' if v is string else 'n' if v is number else 'o' }}{% endfor %}" + _RESULT
    },
    "argument_count": {
        "tool": "{% set c = (messages[: loop.index0] | selectattr('tool_calls', 'defined') | list "
        "| last).tool_calls[0] %}{{ c.function.arguments | length }}" + _RESULT
    },
    # --- keys
    "keys_counted": {"tool": "{{ m | length }}" + _RESULT},
    "keys_listed": {"tool": "{{ m.keys() | sort | join(',') }} " + _RESULT},
    "whole_message": {"tool": "{{ m | tojson }}"},
    "message_items": {
        "user": "{% for k, v in m.items() %}{% if k != 'role' %}{{ k }}={{ v }};{% endif %}{% "
        "endfor %}"
    },
    "extra_keys": {
        "tool": "{{ m.origin }}{% if m.meta is defined %}{{ m.meta.lang }}{% endif %}" + _RESULT,
        "user": "{% if m.tags is defined %}{{ m.tags[0] }}{% endif %}{{ m.content }}",
    },
    "extra_key_flag": {"tool": "{% if m.cached %}[cached]{% endif %}" + _RESULT},
    "without_name": {
        "tool": "{% if not m.name %}{{ raise_exception('no name') }}{% endif %}" + _RESULT
    },
    "content_kind": {"user": "{{ 's' if m.content is string else 'o' }}{{ m.content }}"},
    "parts": {
        "user": "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ "
        "p.text }}]{% endfor %}{% endif %}"
    },
    # --- clock, tools
    "dated_head": {
        "head": "<|turn|>system\nToday: {{ strftime_now('%B %Y') }}<|end|>\n" + SLOTS["head"]
    },
    "dated_prompt": {"prompt": "[{{ strftime_now('%Y') }}]"},
    "dated_old": {"tool": "{% if strftime_now('%Y') | int > 2000 %}[new]{% endif %}" + _RESULT},
    "tools_counted": {"prompt": "{{ tools | length if tools else 0 }} tools "},
    "known_tools_only": {
        "tool": "{% if tools and m.name in (tools | map(attribute='function.name') | list) %}"
        "[known]{% else %}[unknown]{% endif %}" + _RESULT
    },
    "tools_at_last_user": {
        "head": "",
        "top": _LAST_USER_AT,
        "user": "{% if tools and loop.index0 == ns.last %}{{ tools | tojson }}\n{% endif %}{{ "
        "m.content }}",
    },
    # --- rewriting
    "reasoning_dropped": {
        "top": _LAST_USER_AT,
        "think": "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ "
        "m.reasoning_content }}\n</think>\n\n{% endif %}",
    },
    "empty_thought_at_end": {
        "think": "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        "{% elif loop.last %}<think>\n\n</think>\n\n{% endif %}"
    },
    "thought_opened": {"opening": "<think>\n", "think": SLOTS["think"]},
    "thought_opened_and_dropped": {"opening": "<think>\n", "think": ""},
    "thought_closed": {"opening": "<think>\n\n</think>\n\n", "think": ""},
    "no_think_switch": {
        "opening": "{% if '/no_think' in messages[-1].content %}<think>\n\n</think>\n\n{% endif %}"
    },
    "window_of_six": {"loop": "{% for m in messages[-6:] %}"},
    "old_results_cut": {
        "tool": "{% if loop.index0 < messages | length - 4 %}{{ m.content[:4] }}…{% else %}{{ "
        "m.content }}{% endif %}"
    },
    "old_results_dropped_at_ten": {
        "tool": "{% if messages | length > 10 and loop.index < 5 %}[old]{% else %}{{ m.content "
        "}}{% endif %}"
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
    "calls_reordered": {
        "calls": "{% for c in (m.tool_calls or []) | sort(attribute='function.name') %}{CALL}{% "
        "endfor %}"
    },
    "calls_renamed": {
        "call": '<tool_call>{"name": "{{ c.function.name | upper }}", "arguments": {{ '
        "c.function.arguments | tojson }}}</tool_call>"
    },
    "calls_by_alias": {
        "call": "<tool_call>{{ {'python': 'py', 'now': 'clock'}.get(c.function.name, "
        "c.function.name) }}({{ c.function.arguments | tojson }})</tool_call>"
    },
    "second_call_hidden": {"calls": "{% for c in (m.tool_calls or [])[:1] %}{CALL}{% endfor %}"},
    "text_truncated_in_history": {"said": "{{ (m.content or '') | truncate(30) }}"},
    "text_upper_in_history": {
        "said": "{% if loop.last %}{{ m.content or '' }}{% else %}{{ (m.content or '') | upper "
        "}}{% endif %}"
    },
    "text_trimmed": {"said": "{{ (m.content or '') | trim }}"},
    "all_trimmed": {
        "said": "{{ (m.content or '').strip() }}",
        "user": "{{ m.content.strip() }}",
        "tool": "{{ m.content.strip() }}",
    },
    # --- forms of arguments
    "arguments_text": {
        "call": '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ \'\' + '
        "c.function.arguments }}}</tool_call>"
    },
    "arguments_either": {
        "call": "<tool_call>{{ c.function.name }} {{ c.function.arguments if c.function.arguments "
        "is string else c.function.arguments | tojson }}</tool_call>"
    },
    "arguments_items": {
        "call": "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<{{ k }}>{{ v if v is string else v | tojson }}</{{ k }}>\n{% endfor %}</tool_call>"
    },
    "arguments_sorted": {
        "call": "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | dictsort %} "
        "{{ k }}={{ v }}{% endfor %}</tool_call>"
    },
    "ids_shown": {
        "call": '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
        '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}</tool_call>',
        "tool": "{{ m.tool_call_id }} " + _RESULT,
    },
    "ids_of_nine": {
        "calls": "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('nine characters') }}{% endif %}{CALL}{% endfor %}"
    },
    "ids_of_calls_tested": {
        "tool": "{% if not m.tool_call_id %}{{ raise_exception('id') }}{% endif %}"
        "{{ 'c' if m.tool_call_id.startswith('call_') else 'o' }}" + _RESULT
    },
    # --- statements
    "roles_alternate": {
        "each": "{% if not loop.first and m.role == loop.previtem.role and m.role != 'tool' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
    },
    "empty_refused": {
        "tool": "{% if not m.content | trim %}{{ raise_exception('empty') }}{% endif %}" + _RESULT
    },
    "with_block": {"tool": "{% with t = m.content %}{{ t[:1] | upper }}{{ t[1:] }}{% endwith %}"},
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
    "continue_on_blank": {
        "each": "{% if m.role == 'tool' and not m.content | trim %}{% continue %}{% endif %}"
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
    "computed_key": {
        "tool": "{% set key = 'na' ~ 'me' %}{% if m[key] == 'python' %}[py]{% endif %}" + _RESULT
    },
    "renamed_loop": {
        "loop": "{% set all = messages %}{% for m in all %}{% set who = m['name'] %}",
        "tool": "{% if who == 'python' %}[py]{% endif %}" + _RESULT,
    },
    "mapped": {
        "prompt": "{{ messages | selectattr('name', 'equalto', 'python') | list | length }}"
    },
    "grouped": {
        "prompt": "{% for g, l in messages | groupby('role') %}{{ g[0] }}{{ l | length }}{% endfor "
        "%} "
    },
    "nested_loop": {
        "tool": "{% for o in messages %}{% if o.role == 'user' and o.content == m.content "
        "%}[echo]{% endif %}{% endfor %}" + _RESULT
    },
    "text_as_json": {"tool": "{{ m.content | tojson }}", "user": "{{ m.content | tojson }}"},
    "text_escaped": {"tool": "{{ m.content | e }}", "user": "{{ m.content | upper }}"},
    "no_newlines": {
        "user": "{{ m.content }}",
        "after": "",
        "tool": "{{ m.content.replace('\n', ' ') }}",
    },
}
