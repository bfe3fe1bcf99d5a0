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
_RESULT: Message = {"role": "tool", "content": "x", "name": "x", "tool_call_id": "callid000"}


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
    """The last control token behind a text turn, which is its close, and that of a turn with calls where it is another one
    (Gemma 4, gpt-oss). Where there is none (GLM: the stop token is the next role's marker), the first one of the user message or
    the tool result that follows."""
    alone = _behind_nonce(renderer, _BASE)
    if alone is None:
        return set()
    closing = encoder.pattern.findall(alone)
    if closing:
        return {closing[-1], *_closing_calls(renderer, encoder)}
    behind = [_behind_nonce(renderer, [*_BASE, message]) for message in _FOLLOW]
    found = {match.group() for text in behind if text is not None and (match := encoder.pattern.search(text))}
    return found | _marker_behind_call(renderer, encoder)


def _closing_calls(renderer: Renderer, encoder: Encoder) -> set[str]:
    """The last control token behind a turn with calls, if it stands there once however many calls there are: it is no part of one."""
    one, two = _behind_nonce(renderer, _calling(1)), _behind_nonce(renderer, _calling(2), first=True)
    closing = encoder.pattern.findall(one or "")
    return {closing[-1]} if closing and two is not None and two.count(closing[-1]) == 1 else set()


def _marker_behind_call(renderer: Renderer, encoder: Encoder) -> set[str]:
    """The role marker with which a tool result begins, where nothing closes the turn before it."""
    alone, then = _behind_nonce(renderer, _calling(1)), _behind_nonce(renderer, [*_calling(1), _RESULT])
    if alone is None or then is None or not then.startswith(alone.rstrip("\n")):
        return set()
    match = encoder.pattern.match(then, len(alone.rstrip("\n")))
    return {match.group()} if match else set()


def _calling(count: int) -> list[Message]:
    calls = [
        {"id": f"callid{at:03d}", "type": "function", "function": {"name": "x", "arguments": {"x": NONCE}}} for at in range(count)
    ]
    return [_BASE[0], {"role": "assistant", "content": "", "tool_calls": calls}]


def _behind_nonce(renderer: Renderer, messages: list[Message], *, first: bool = False) -> str | None:
    """The text behind the last nonce, or behind the first; None where the template refuses the messages or leaves it out."""
    try:
        text = renderer.render(messages, None, generate=False)
    except TemplateError:
        return None
    at = text.find(NONCE) if first else text.rfind(NONCE)
    return text[at + len(NONCE) :] if at >= 0 else None
