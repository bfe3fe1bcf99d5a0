"""Templates that show a turn otherwise once it is history: each part of a turn, each moment, each
change; and turns that history closes otherwise.

`kept` finds what an episode's prompts keep although the template shows it otherwise. Imports
nothing of toolroll.
"""

import html
from collections.abc import Iterator, Sequence
from itertools import product

from support.adversarial.skeleton import SLOTS, filled
from support.adversarial.templates import Template

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
