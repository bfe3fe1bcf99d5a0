"""A tokenizer with named templates: the one for tools is used with tools, and the stop tokens of
both end a turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from support.qwen import tokenizer_for

from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Message

_TURN = (
    "<|{{ m.role }}|>{{ m.content }}CLOSE{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}"
)
DEFAULT = "{% for m in messages %}" + _TURN.replace("CLOSE", "<|eot|>")
TOOL_USE = "{% for m in messages %}[{{ loop.index }}]" + _TURN.replace("CLOSE", "<|eom|>")
TOOL_USE = TOOL_USE.replace("{% if add", "[{{ messages | length + 1 }}]{% if add")
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


def named() -> Any:
    tokenizer = tokenizer_for(DEFAULT + TOOL_USE + "<|user|><|assistant|>")
    tokenizer.chat_template = {"default": DEFAULT, "tool_use": TOOL_USE}
    return tokenizer


def test_each_conversation_has_its_own_template() -> None:
    subject = ChatTemplate(named())
    assert {"<|eot|>", "<|eom|>"} <= set(subject.stop_texts)
    user: Message = {"role": "user", "content": "a"}
    turn: Message = {"role": "assistant", "content": "b"}
    for tools, close in ((None, "<|eot|>"), ([TOOL], "<|eom|>")):
        messages = [user]
        for _ in range(12):
            said = subject.encoder.encode("b" + close, previous=0)
            delta = subject.delta([*messages, turn], [user], tools=tools, sampled_ids=said)
            render = partial(subject.tokenizer.apply_chat_template, tools=tools, tokenize=False)
            prompt = render(messages, add_generation_prompt=True)
            whole = render([*messages, turn, user], add_generation_prompt=True)
            assert prompt + "b" + close + subject.encoder.decode(delta) == whole
            messages += [turn, user]
