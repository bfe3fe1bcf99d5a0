"""Convert a dialect's `thinking` and effort fields to switches of the chat template, which are
variables such as `enable_thinking`.

Invariants: a value that the template does not support is refused, and the error names the field. An
API's default value is refused only if `chat_template_kwargs` contradicts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from toolroll.rollout.server.conversation.template_cache import TemplateCache
from toolroll.rollout.server.errors import invalid, refused

_THINKING = ("enable_thinking", "thinking")


def all_switches(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return all switches of a request. `given` is its `chat_template_kwargs`, and `own` has the
    switches that its other fields set. Raise `ApiError` if the two set a switch to different
    values.
    """
    for name, value in own.items():
        if name in given and given[name] != value:
            place = f"chat_template_kwargs.{name}"
            words = f"{place} contradicts another field that sets the same switch: give one"
            raise invalid(place, words)
    return {**given, **own}


def effort_switches(
    templates: TemplateCache, effort: str | None, param: str, *, default: str
) -> dict[str, Any]:
    """Return the switch for `effort`, the value of the request's field `param`.

    If the template has no such switch, `effort` must be None or `default`, which is the API's
    default value. Then return an empty dict. Raise `ApiError` for any other value.
    """
    if templates.effort_switch is None:
        if effort in (None, default):
            return {}
        raise refused(param, f"the chat template has no switch for {param}: leave it out")
    return dict(templates.with_effort({}, effort))


def thinking_switches(
    templates: TemplateCache, thinking: Literal["enabled", "disabled"], *, reasons: bool
) -> dict[str, Any]:
    """Return the switch that turns thinking on or off.

    If the template has no such switch, thinking is always on if `reasons` is True (the model's
    parser supports reasoning), and always off if not. Return an empty dict if this is what
    `thinking` asks for. Otherwise raise `ApiError`.
    """
    wanted = thinking == "enabled"
    name = next((name for name in _THINKING if name in templates.variables), None)
    if name is not None:
        return {name: wanted}
    if wanted == reasons:
        return {}
    words = f"the chat template has no switch for thinking ({' or '.join(_THINKING)})"
    raise refused("thinking.type", f"thinking cannot be {thinking}: {words}. Leave thinking out")
