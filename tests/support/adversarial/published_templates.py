"""Published chat templates with the tokens that end a turn, which renders show.

Imports nothing of toolroll.
"""

from __future__ import annotations

from typing import Any

from support.adversarial.dialogues import Message
from support.adversarial.templates import Template
from support.adversarial.texts import CLOSES
from support.adversarial.token_judge import Judge, Refused
from support.qwen import tokenizer_for

MARK = "Zw7Qmark"
ENDS = (*CLOSES, "</s>", "[EOS]", "<|role_end|>", "<eos>", "<_end>", "<|EOT|>")


def template_of(name: str, source: str) -> tuple[Template, Any]:
    """The template with its stop tokens, and its tokenizer. Raises `Refused` with the reason if it
    cannot be told what ends a turn."""
    tokenizer = tokenizer_for(source)
    judge = Judge(tokenizer, Template(name, source))
    stops = _stops(judge)
    closes = ("<|end|>",) if "<|return|>" in stops else ()
    return Template(name, source, stops, tuple(judge.control), closes), tokenizer


def _stops(judge: Judge) -> tuple[str, ...]:
    """What ends a text turn, and a turn with calls if it is something else; for a template that
    writes no end, the control tokens with which the next role begins."""
    user = {"role": "user", "content": "x"}
    text, call = [user, {"role": "assistant", "content": MARK}], [user, _calling(1)]
    if not _text_after(judge, call):  # DeepSeek-R1 hides calls next to content, even if empty
        call = [user, {**_calling(1), "content": None}]
    found = [_close(judge, text), _call_close(judge, call)]
    if not found[0]:  # GLM
        result = {"role": "tool", "name": "now", "content": "x", "tool_call_id": "callid000"}
        found = [_next(judge, text, user), _next(judge, call, result)]
    stops = tuple(dict.fromkeys(stop for stop in found if stop))
    if not stops:
        raise Refused("it cannot be told what ends a turn")
    return stops


def _text_after(judge: Judge, messages: list[Message], *, first: bool = False) -> str:
    """The text after the last mark (or the first one); empty if the turn is not rendered."""
    try:
        text = judge.text(messages, None, generate=False)
    except Refused:
        return ""
    return text.partition(MARK)[2] if first else text.rpartition(MARK)[2] if MARK in text else ""


def _close(judge: Judge, messages: list[Message]) -> str:
    behind = judge.pattern.findall(_text_after(judge, messages))
    return next((text for text in behind if text in ENDS), behind[-1] if len(behind) == 1 else "")


def _call_close(judge: Judge, one: list[Message]) -> str:
    """The end of a turn with calls: a known one, or what stands there once however many calls
    there are (Gemma 4 stops where the result begins)."""
    text = _text_after(judge, one)
    behind = judge.pattern.findall(text)
    known = next((text for text in behind if text in ENDS), "")
    if known or not behind or not text.rstrip().endswith(behind[-1]):
        return known
    two = _text_after(judge, [one[0], {**_calling(2), "content": one[1]["content"]}], first=True)
    return behind[-1] if two.count(behind[-1]) == 1 else ""


def _next(judge: Judge, messages: list[Message], new: Message) -> str:
    """The control token with which `new` begins behind a turn that has no end of its own."""
    alone, then = _text_after(judge, messages).rstrip("\n"), _text_after(judge, [*messages, new])
    found = judge.pattern.match(then, len(alone)) if then.startswith(alone) else None
    return found.group() if found else ""


def _calling(count: int) -> Message:
    function = {"name": "now", "arguments": {"city": MARK}}
    calls = [
        {"id": f"callid{n:03d}", "type": "function", "function": function} for n in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
