"""Chat templates that depend on every field of a message, on its neighbors, and on the conversation
before it.

A template is a skeleton with slots, some of which are replaced. The templates in `by_hand` are
hand-written; those in `generated` test one property (`TESTS`) of one field (`FIELDS`). Imports
nothing of toolroll.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from support.adversarial.patches import PATCHES
from support.adversarial.skeleton import SLOTS, filled
from support.adversarial.styles import STYLES


@dataclass(frozen=True)
class Template:
    """`stops`: the control tokens that end an assistant turn, the tokenizer's EOS first.
    `control`: control tokens besides those of the embedded tokenizer. `closes`: what history shows
    in the place of a stop token (gpt-oss: `<|end|>` for `<|return|>`)."""

    name: str
    source: str
    stops: tuple[str, ...] = ("<|end|>",)
    control: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()


# --- one question of one field --------------------------------------------------------------------

_CALL = (
    "(messages[: loop.index0] | selectattr('tool_calls', 'defined') | list | last).tool_calls[0]"
)
_LAST_USER = "(messages | selectattr('role', 'equalto', 'user') | list | last).content"

FIELDS: Mapping[str, tuple[str, str]] = {
    "tool_name": ("tool", "(m.name or '')"),
    "tool_content": ("tool", "(m.content or '')"),
    "tool_call_id": ("tool", "(m.tool_call_id or '')"),
    "tool_extra": ("tool", "(m.origin or '')"),
    "user_content": ("user", "(m.content or '')"),
    "user_name": ("user", "(m.name or '')"),
    "call_name": ("tool", f"({_CALL}.function.name)"),
    "call_arguments": ("tool", f"({_CALL}.function.arguments | tojson)"),
    "call_argument": ("tool", f"({_CALL}.function.arguments.city | string)"),
    "call_id": ("tool", f"({_CALL}.id or '')"),
    "before_content": ("tool", "(messages[loop.index0 - 1].content or '')"),
    "before_thought": ("user", "(messages[loop.index0 - 1].reasoning_content or '')"),
    "first_content": ("prompt", "(messages[0].content or '')"),
    "last_content": ("prompt", "(messages[-1].content or '')"),
    "last_name": ("prompt", "(messages[-1].name or '')"),
    "last_user": ("opening", f"({_LAST_USER} or '')"),
    "tools_text": ("prompt", "(tools | tojson)"),
    "after_call_id": ("after", "(m.tool_call_id or m.role)"),
}
"""Field: the slot in which it is asked, and the expression."""

TESTS: Mapping[str, str] = {
    "equal": "{% if {X} in ['python', '42', 'call_1', 'yes'] %}[E]{% endif %}",
    "chain": "{% if {X} == 'python' or {X} == 'ok' or {X} == 'Paris' %}[C]{% endif %}",
    "starts": "{% if {X}.startswith('get_') or {X}.startswith('call_') %}[S]{% endif %}",
    "ends": "{% if {X}.endswith('e') or {X}.endswith('1') %}[Z]{% endif %}",
    "first": "{% if {X} and {X}[0] in 'gcpT{' %}[F]{% endif %}",
    "slice": "{{ {X}[:3] }}|",
    "tail": "{{ {X}[-2:] }}|",
    "length": "{% if {X} | length > 8 %}[L]{% endif %}",
    "exact_length": "{% if {X} | length == 9 %}[9]{% endif %}",
    "length_modulo": "{% if {X} | length % 3 == 0 %}[%]{% endif %}",
    "shown_length": "{{ {X} | length }}:",
    "lower": "{% if 'error' in {X} | lower or 'py' in {X} | lower %}[!]{% endif %}",
    "digits": "{% if {X}.isdigit() %}[D]{% endif %}",
    "upper_test": "{% if {X} == {X} | upper %}[U]{% endif %}",
    "int": "{% if {X} | int > 5 %}[>]{% endif %}",
    "float": "{{ {X} | float(1.5) | round(1) }}",
    "upper": "{{ {X} | upper }}",
    "title": "{{ {X} | title }}",
    "truncate": "{{ {X} | truncate(12) }}",
    "escape": "{{ {X} | e }}",
    "trim": "<{{ {X} | trim }}>",
    "json": "{{ {X} | tojson }}",
    "replace": "{{ {X} | replace('a', '@') }}",
    "words": "{% if {X} | wordcount > 2 %}[W]{% endif %}",
    "lines": "{% if {X}.split('\n') | length > 1 %}[N]{% endif %}",
    "alias": "{% set a = {X} %}{% set b = a %}{% if b in ['python', 'ok'] %}[A]{% endif %}",
    "set_block": "{% set a %}{{ {X} }}!{% endset %}{% if a == 'python!' %}[B]{% endif %}",
    "macro": "{% macro q(t) %}{% if t == 'python' or t[:1] == 'T' %}[M]{% endif %}{% endmacro %}{{ "
    "q({X}) }}",
    "concat": "{% if '' ~ ':' ~ {X} == ':python' or 'a' ~ {X} == 'aok' %}[+]{% endif %}",
    "lookup": "{{ {'python': 'P', 'now': 'N', 'ok': 'K', '42': 'X'}.get({X}, '?') }}",
    "subscript": "{% set d = {'python': 'P', 'ok': 'K'} %}{% if {X} in d %}{{ d[{X}] }}{% endif %}",
    "constants": "{% set x = {X} %}{% for w in ['python', 'now', 'ok', 'Paris'] %}{% if w in x "
    "%}[{{ w }}]{% endif %}{% endfor %}",
    "compare": "{% if {X} > 'h' %}[h]{% endif %}",
    "count": "{% if {X}.count('a') > 1 %}[a]{% endif %}",
    "find": "{% if {X}.find('o') == 1 %}[o]{% endif %}",
    "letters": "{{ {X} | list | unique | list | length }}",
    "reverse": "{{ {X} | reverse }}",
    "filter_block": "{% filter upper %}{{ {X} }}{% endfilter %}",
    "namespace": "{% set k = namespace(v='') %}{% set k.v = {X} %}{% if k.v|length>5 %}[K]{% endif "
    "%}",
    "select": "{% if [{X}] | select('in', ['python', 'ok', '42']) | list %}[s]{% endif %}",
    "ternary": "{{ '[T]' if {X} == 'python' else '[f]' if 'a' in {X} else '' }}",
    "raises": "{% if {X} in ['now', '42', 'call_3'] %}{{ raise_exception('not this') }}{% endif %}",
    "raises_length": "{% if {X} | length == 7 %}{{ raise_exception('7') }}{% endif %}",
    "indent": "{{ {X} | indent(2) }}",
    "wrap": "{{ {X} | wordwrap(24) }}",
    "format": "{{ '%-6s' | format({X}) }}",
    "splitlines": "{% for l in {X}.splitlines() %}{{ l | trim }};{% endfor %}",
}


def generated() -> list[Template]:
    """One template for each question of each field."""
    made = []
    for (field, (slot, expression)), (test, question) in product(FIELDS.items(), TESTS.items()):
        text = question.replace("{X}", expression) + SLOTS[slot]
        made.append(Template(f"{field}.{test}", filled(**{slot: text})))
    return made


def by_hand() -> list[Template]:
    """The templates of `PATCHES` and those of `STYLES`, in other styles of markers and turns."""
    made = [Template(name, filled(**slots)) for name, slots in PATCHES.items()]
    return made + [Template(name, *style) for name, style in STYLES.items()]
