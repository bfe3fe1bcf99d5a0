"""The served chat template under other switches (`chat_template_kwargs`), a bounded number of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import orjson

from toolroll.rollout.server.errors import refused
from toolroll.rollout.template.chat_template import ChatTemplate

_KEPT = 16
_RESERVED = frozenset({"messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "strftime_now", "conversation"})


class Variants:
    """Chat templates by their switches; one object per set of switches as long as it is in use."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._made: OrderedDict[bytes, ChatTemplate] = OrderedDict()

    def get(self, switches: Mapping[str, Any]) -> ChatTemplate:
        """The template with `switches` over its own."""
        taken = _RESERVED.intersection(switches)
        if taken:
            name = f"chat_template_kwargs.{min(taken)}"
            raise refused(name, f"{name} is not a switch of the template")
        if all(name in self._template.renderer.kwargs and self._template.renderer.kwargs[name] == switches[name] for name in switches):
            return self._template
        key = orjson.dumps(switches, option=orjson.OPT_SORT_KEYS)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._template.with_kwargs(switches)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return made
