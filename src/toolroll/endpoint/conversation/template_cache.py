"""`TemplateCache`: the served chat template with the switches of a request. A switch is a template
variable that the request sets with `chat_template_kwargs` or `reasoning_effort`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache, partial
from typing import Any

import orjson
from jinja2 import meta

from toolroll.endpoint.errors import refused
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.render import TOOL, USER, call_turn, tool_result
from toolroll.rollout.template.sandbox import compile_template
from toolroll.rollout.types import Message

_KEPT = 16
_RESERVED = frozenset(
    "messages tools chat_template add_generation_prompt tokenize strftime_now conversation".split()
)
_EFFORTS = ("reasoning_effort", "enable_thinking", "thinking")
"""The names that chat templates use for the reasoning effort. The last two are booleans."""


class TemplateCache:
    """Keeps the most recently used combinations of the served template and switches. `images`:
    messages may contain images, if the template shows them.
    """

    def __init__(self, template: ChatTemplate, *, images: bool = False) -> None:
        self._template = template
        self.images = images and template.images is not None
        self._shows = lru_cache(_KEPT)(self._find_shown)
        self._with_switches = lru_cache(_KEPT)(lambda key: template.with_kwargs(orjson.loads(key)))

    def effort_switches(
        self, effort: str | None, param: str, ignored: IgnoredFields
    ) -> dict[str, Any]:
        """Return the switch for `effort`, the value of the request's field `param`. If the template
        has no such switch, no effort changes a token: add `param` to `ignored`. Only "none" is
        refused then, because a model that always reasons cannot honor it.
        """
        if effort is None:
            return {}
        name = self.effort_switch
        if name is not None:
            return {name: effort if name == "reasoning_effort" else effort != "none"}
        if effort == "none":
            problem = f"the chat template has no switch for {param} (such as {', '.join(_EFFORTS)})"
            raise refused(param, f"{problem}: leave it out")
        ignored.add(param)
        return {}

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads but does not set, among them its switches."""
        renderer = self._template.renderer
        if renderer.code is not None:
            return frozenset(inspect.signature(renderer.code).parameters)
        environment = compile_template(renderer.source, renderer.now).environment
        return frozenset(meta.find_undeclared_variables(environment.parse(renderer.source)))

    @cached_property
    def effort_switch(self) -> str | None:
        """The name of the template's switch for the reasoning effort, or None if it has none."""
        return next((name for name in _EFFORTS if name in self.variables), None)

    def may_show(self, name: str, value: Any, *, role: str | None = None) -> bool:
        """Return True if the template may show `value` in the field `name` of a message of `role`,
        or of a call if `role` is None.
        """
        if not re.search(rf"\b{re.escape(name)}\b", self._template.renderer.source):
            return False
        return role is None or not isinstance(value, str) or self._shows(role, name)

    def _find_shown(self, role: str, name: str) -> bool:
        """Return True if a text in the field changes a small conversation."""
        first = {"role": "developer" if role == "developer" else "system", "content": "x"}
        last = {"role": "assistant", "content": "x"}
        talk = [first, USER, call_turn({"x": "x"}), tool_result(), last, USER]
        marked = [{**turn, name: "Pq1zP"} if turn["role"] == role else turn for turn in talk]
        render = partial(self._template.renderer.render, tools=[TOOL], generate=True)
        for start in (0, 1):  # some templates refuse the first message
            try:
                return render(talk[start:]) != render(marked[start:])
            except TemplateError:
                continue
        return True

    @property
    def developer(self) -> bool:
        """True if the template mentions the role `developer`."""
        return "developer" in self._template.renderer.source

    @cached_property
    def system_anywhere(self) -> bool:
        """True if the template renders each system message at its own place in the conversation."""
        marks = ("Pq1zP", "Pq2zP", "Pq3zP", "Pq4zP")
        roles = ("system", "system", "user", "system")
        messages: list[Message] = [
            {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
        ]
        try:
            text = self._template.renderer.render(
                [*messages, {"role": "user", "content": "x"}], None, generate=True
            )
        except TemplateError:
            return False
        places = [text.find(mark) for mark in marks]
        return min(places) >= 0 and places == sorted(places)

    def get(self, switches: Mapping[str, Any]) -> ChatTemplate:
        """Return the served template with `switches` added to its own. Raise `ApiError` if a name
        in `switches` is reserved.
        """
        reserved = _RESERVED.intersection(switches)
        if reserved:
            name = f"chat_template_kwargs.{min(reserved)}"
            raise refused(name, f"{name} is not a switch of the template")
        changed = self._own(switches)
        return self._with_switches(_key(changed)) if changed else self._template

    def switches_of(self, template: ChatTemplate) -> dict[str, Any]:
        """Return the switches that `get` added to `template`."""
        return self._own(template.renderer.kwargs)

    def _own(self, switches: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `switches` whose values differ from those of the served template."""
        defaults = self._template.renderer.kwargs
        return {
            name: value
            for name, value in switches.items()
            if name not in defaults or _key({name: defaults[name]}) != _key({name: value})
        }


def same_switches(template: ChatTemplate, other: ChatTemplate) -> bool:
    """Return True if two templates of one cache have equal switches. They may be two objects,
    because the cache keeps only the templates that were used most recently.
    """
    return template is other or _key(template.renderer.kwargs) == _key(other.renderer.kwargs)


def _key(switches: Mapping[str, Any]) -> bytes:
    """Return equal bytes for equal switches, in any order. 1, 1.0 and true give different bytes,
    and so do two orders of keys inside a switch, because a template may render them differently.
    """
    return orjson.dumps(dict(sorted(switches.items())), default=repr)
