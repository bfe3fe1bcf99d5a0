"""Which tokens end an assistant turn: the generation config's, the tokenizer's, and those that the template closes a turn with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template.derive import NONCE
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.template.render import Renderer
from toolroll.rollout.types import Message

_BASE: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": NONCE}]
_FOLLOW: list[Message] = [{"role": "user", "content": "x"}, {"role": "tool", "content": "x", "name": "x"}]


def find_stops(tokenizer: Any, renderer: Renderer, encoder: Encoder) -> set[int]:
    """The ids that end a turn."""
    return {*_configured(tokenizer), *(encoder.control[text] for text in _closing(renderer, encoder))}


def _configured(tokenizer: Any) -> set[int]:
    eos = tokenizer.eos_token_id
    found = set() if eos is None else {int(eos)}
    path = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    if path.is_file():
        listed = orjson.loads(path.read_bytes()).get("eos_token_id")
        found |= set(listed) if isinstance(listed, list) else ({int(listed)} if isinstance(listed, int) else set())
    return found


def _closing(renderer: Renderer, encoder: Encoder) -> set[str]:
    """The last control token behind a text turn, which is its close; where there is none (GLM: the stop token is the next role's
    marker), the first one of the user message or the tool result that follows."""
    alone = _behind_nonce(renderer, _BASE)
    if alone is None:
        return set()
    closing = encoder.pattern.findall(alone)
    if closing:
        return {closing[-1]}
    behind = (_behind_nonce(renderer, [*_BASE, message]) for message in _FOLLOW)
    return {match.group() for text in behind if text is not None and (match := encoder.pattern.search(text))}


def _behind_nonce(renderer: Renderer, messages: list[Message]) -> str | None:
    try:
        text = renderer.render(messages, None, generate=False)
    except TemplateError:
        return None
    return text[text.rfind(NONCE) + len(NONCE) :] if NONCE in text else None
