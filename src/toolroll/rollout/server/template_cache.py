"""`TemplateCache`: the served chat template with a request's switches (`chat_template_kwargs`,
`reasoning_effort`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import orjson
from jinja2 import meta

from toolroll.rollout.server.errors import refused
from toolroll.rollout.template.caches.sandbox import compile_template
from toolroll.rollout.template.chat_template import ChatTemplate

_KEPT = 16
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "tokenize",
        "strftime_now",
        "conversation",
    }
)
_EFFORTS = ("reasoning_effort", "enable_thinking", "thinking")
"""Names of chat templates' switches for the reasoning effort. The last two are booleans."""


class TemplateCache:
    """The most recently used chat templates, by their switches."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._made: OrderedDict[bytes, ChatTemplate] = OrderedDict()

    def with_effort(self, switches: Mapping[str, Any], effort: str | None) -> Mapping[str, Any]:
        """Return `switches` plus the one for `effort` (OpenAI's `reasoning_effort`)."""
        if effort is None:
            return switches
        name = self._effort
        if name is None:
            words = (
                f"the chat template has no switch for reasoning_effort (it would be "
                f"{', '.join(_EFFORTS)})"
            )
            raise refused("reasoning_effort", f"{words}: leave it out")
        if name in switches:
            raise refused(
                "reasoning_effort",
                f"reasoning_effort and chat_template_kwargs.{name} are the same switch: give one",
            )
        return {**switches, name: effort if name == "reasoning_effort" else effort != "none"}

    @cached_property
    def _effort(self) -> str | None:
        """The template's switch for the effort, or None."""
        renderer = self._template.renderer
        environment = compile_template(renderer.source, renderer.now).environment
        names = meta.find_undeclared_variables(environment.parse(renderer.source))
        return next((name for name in _EFFORTS if name in names), None)

    def get(self, switches: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with `switches` added to its own. Refuse reserved names."""
        taken = _RESERVED.intersection(switches)
        if taken:
            name = f"chat_template_kwargs.{min(taken)}"
            raise refused(name, f"{name} is not a switch of the template")
        own = self._own(switches)
        if not own:
            return self._template
        key = orjson.dumps(own, option=orjson.OPT_SORT_KEYS)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._template.with_kwargs(own)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return made

    def switches_of(self, template: ChatTemplate) -> dict[str, Any]:
        """Return the switches that `get` was given for `template`."""
        return self._own(template.renderer.kwargs)

    def _own(self, switches: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `switches` that differ from those of the served template."""
        given = self._template.renderer.kwargs
        return {
            name: value
            for name, value in switches.items()
            if name not in given or given[name] != value
        }
