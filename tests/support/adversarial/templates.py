"""Chat templates that depend on every field of a message, on its neighbors, and on the conversation
before it.

A template is a skeleton with slots, some of which are replaced. The templates in `by_hand` are
hand-written; those in `generated` test one property (`TESTS`) of one field (`FIELDS`). Imports
nothing of toolroll.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from support.adversarial.patches import PATCHES, STYLES
from support.adversarial.skeleton import SLOTS, filled


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


# --- turns that history shows otherwise -----------------------------------------------------------

_WHEN = {
    "always": "true",
    "in_history": "not loop.last",
    "when_old": "loop.index0 < messages | length - 4",
    "before_a_user": "loop.nextitem is defined and loop.nextitem.role == 'user'",
}
_CHANGES = {
    "masked": "{X} | replace('a', '*') | replace('e', '*')",
    "cut": "({X})[:12]",
    "one_less": "({X})[:-1]",
    "first_line": "({X}).split('\\n')[0]",
    "reversed": "({X}) | reverse",
    "other_case": "({X}).swapcase()",
    "sorted": "({X}).split(' ') | sort | join(' ')",
    "marked": "({X}) ~ ' (old)'",
    "counted": "'(' ~ (({X}) | length) ~ ') ' ~ ({X})",
    "twice": "({X}) ~ ' / ' ~ ({X})",
}
_ADDS = {"marked", "counted", "twice", "text_after_calls"}
"""Changes that keep all of the text. Shown always, they are a part of the format."""
_PARTS = {
    "text": ("said", "{{ {X} }}", "(m.content or '')"),
    "thought": ("think", "{% if m.reasoning_content %}<think>\n{{ {X} }}\n</think>\n\n{% endif %}",
                "(m.reasoning_content or '')"),
    "city": ("call", '<tool_call>{"name": "{{ c.function.name }}", "arguments": {"city": {{ ({X}) '
             '| tojson }}{% if c.function.arguments.days is defined %}, "days": '
             "{{ c.function.arguments.days | tojson }}{% endif %}}}</tool_call>",
             "(c.function.arguments.city | string)"),
    "name": ("call", '<tool_call>{"name": "{{ {X} }}", "arguments": '
             "{{ c.function.arguments | tojson }}}</tool_call>", "c.function.name"),
}  # fmt: skip
_OTHERWISE = {
    "first_call_only": ("call", "{% if loop.first %}{CALL}{% endif %}"),
    "names_only": ("call", "<tool_call>{{ c.function.name }}</tool_call>"),
    "one_argument": ("call", '<tool_call>{"name": "{{ c.function.name }}", "arguments": {"city": '
                     "{{ c.function.arguments.city | tojson }}}}</tool_call>"),
    "thought_as_text": ("think", "{{ m.reasoning_content or '' }}\n\n"),
    "no_text_beside_calls": ("said", "{% if not m.tool_calls %}{{ m.content or '' }}{% endif %}"),
    "text_after_calls": ("calls", "{CALLS}{% if m.tool_calls %}{{ m.content or '' }}{% endif %}"),
    "calls_reversed": ("calls", "{% for c in (m.tool_calls or []) | reverse %}{CALL}{% endfor %}"),
}  # fmt: skip
_CLOSES = {
    "other_at_the_end": "{{ '<|return|>' if loop.last else '<|end|>' }}\n",
    "other_in_history": "{{ '<|end|>' if loop.last else '<|return|>' }}\n",
    "other_when_old": "{{ '<|end|>' if loop.index0 < messages | length - 4 else '<|return|>' }}",
    "by_the_next_role": "{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}<|call|>"
    "{% else %}<|end|>{% endif %}\n",
    "by_the_calls": "{{ '<|call|>' if m.tool_calls else '<|return|>' }}",
    "call_at_the_end": "{% if m.tool_calls %}{{ '<|call|>' if loop.last else '<|end|>' }}"
    "{% else %}<|return|>{% endif %}",
    "two_in_history": "<|end|>{% if not loop.last %}<|return|>{% endif %}\n",
    "none_in_history": "{% if loop.last %}<|end|>{% endif %}\n",
    "text_in_history": "{{ '<|end|>' if loop.last else '[end]' }}\n",
    "mark_before_it": "{% if not loop.last %} #{% endif %}<|end|>\n",
    "mark_behind_it": "<|end|>{% if not loop.last %}#{% endif %}\n",
    "by_length": "{{ '<|end|>' if loop.last or (m.content or '') | length < 10 else '<|return|>' "
    "}}\n",
    "by_parity": "{{ '<|end|>' if loop.revindex0 is even else '<|return|>' }}\n",
}
_CONTROL = ("<|return|>", "<|call|>")


def rewriting() -> list[Template]:
    made = []
    for when, (part, (slot, shown, text)), (change, to) in product(
        _WHEN, _PARTS.items(), _CHANGES.items()
    ):
        changed, plain = (shown.replace("{X}", x) for x in (to.replace("{X}", text), text))
        made.append(Template(f"{part}.{when}.{change}", _choosing(when, slot, changed, plain)))
    for when, (name, (slot, shown)) in product(_WHEN, _OTHERWISE.items()):
        made.append(Template(f"{name}.{when}", _choosing(when, slot, shown, SLOTS[slot])))
    calls = SLOTS["calls"].replace("{CALL}", SLOTS["call"])
    for (name, close), known in product(_CLOSES.items(), ("all", "eos")):
        stops = [stop for stop in ("<|return|>", "<|call|>", "<|end|>") if stop in close]
        stops = stops if known == "all" else ["<|end|>"]
        source = filled().replace(f"{calls}<|end|>\n", f"{calls}{close}")
        made.append(Template(f"close.{name}.{known}", source, tuple(stops), _CONTROL))
    return made


def _choosing(when: str, slot: str, changed: str, plain: str) -> str:
    inner = {"{CALLS}": SLOTS["calls"], "{CALL}": SLOTS["call"]}
    for name, text in inner.items():
        changed, plain = (one.replace(name, text) for one in (changed, plain))
    choice = f"{{% if changed %}}{changed}{{% else %}}{plain}{{% endif %}}"
    return filled(each=f"{{% set changed = {_WHEN[when]} %}}", **{slot: choice})


def kept(template: Template, prompts: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the prompts from which on an episode keeps text that `template` shows otherwise.
    `prompts`: each as it was served, and as the template renders its messages.
    """
    part, when, *change = template.name.split(".")
    is_format = when == "always" and {part, *change} & _ADDS
    differed = False
    for served, rendered in prompts:
        text, shown = _plain(served), _plain(rendered)
        differs = text != shown and not (is_format and _has(shown, text))
        if differs and not differed:
            yield served[-300:]
        differed = differs


def _plain(text: str) -> str:
    return "".join(html.unescape(text).split()).replace("\\", "")


def _has(text: str, part: str) -> bool:
    """Whether `part` is left if something is taken from `text`."""
    rest = iter(text)
    return all(letter in rest for letter in part)
