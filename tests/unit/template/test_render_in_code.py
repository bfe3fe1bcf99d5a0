"""Tokenizers and functions that render in Python, in place of a Jinja template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.oracle_scenarios import BASE, CALL, RESULT, TOOLS
from tokenizers import AddedToken

from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.evaluation.certify import certify
from toolroll.parsers.infer import infer_parser
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.render import Renderer
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.rollout.types import Message
from toolroll.testing import load_embedded_tokenizer

pytestmark = pytest.mark.tokens

TALK: Any = [*BASE, CALL, RESULT]


def test_a_tokenizer_with_a_method_of_its_own_is_asked() -> None:
    mine, given = load_embedded_tokenizer(), load_embedded_tokenizer()
    theirs = given.apply_chat_template

    def own(*args: Any, **kwargs: Any) -> str:
        return "own: " + theirs(*args, **kwargs)

    mine.__class__ = type(
        "Own", (type(mine),), {"apply_chat_template": lambda _, *a, **k: own(*a, **k)}
    )
    given.apply_chat_template = own
    for tokenizer in (mine, given):
        assert Renderer(tokenizer).render(TALK, TOOLS, generate=True).startswith("own: ")


def test_a_method_of_its_own_cannot_change_the_tools_of_others() -> None:
    mine = load_embedded_tokenizer()
    theirs = mine.apply_chat_template

    def changing(messages: Any, tools: Any, **kwargs: Any) -> Any:
        messages[0]["content"] = "changed"
        tools[0]["function"].setdefault("strict", False)
        return theirs(messages, tools=tools, **kwargs)

    mine.apply_chat_template = changing
    cursor = ChatTemplate(mine).start(TALK, TOOLS)
    assert '"strict"' in cursor.text and "changed" in cursor.text
    other = ChatTemplate(load_embedded_tokenizer()).start(TALK, TOOLS)
    assert '"strict"' not in other.text and "changed" not in other.text
    assert '"strict"' not in str(cursor._head.tools) and "changed" not in str(cursor._messages)


def code(messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> str:
    """Renders as the embedded template does, changes its arguments, and refuses an empty list."""
    assert messages, "no messages"
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "tokenize": False}
    text = load_embedded_tokenizer().apply_chat_template(messages, **options)
    messages.clear()
    return str(text)


@pytest.mark.parametrize("returned", [None, [1, 2], b"text", "\ud800"])
def test_code_must_return_text(returned: Any) -> None:
    template = ChatTemplate(load_embedded_tokenizer(), chat_template=lambda *_, **__: returned)
    with pytest.raises(TemplateError, match=r"TypeError: it must return the text|surrogates"):
        template.prompt(TALK[:1])


@pytest.mark.parametrize("way", ["function", "method"])
def test_code_renders_without_a_template(way: str) -> None:
    """Models such as Kimi-K3 have no Jinja template."""
    tokenizer, given = load_embedded_tokenizer(), code if way == "function" else None
    own = {"apply_chat_template": lambda _, talk, tokenize, **options: code(talk, **options)}
    tokenizer.chat_template, expected = None, ChatTemplate(load_embedded_tokenizer())
    with pytest.raises(
        TemplateError, match=r"Python function.*\(FILE.py:NAME\).*trust_remote_code"
    ):
        ChatTemplate(tokenizer)
    if way == "method":
        tokenizer.__class__ = type("Own", (type(tokenizer),), own)
    tokenizer.add_tokens([AddedToken("customer_id")])
    subject = ChatTemplate(tokenizer, chat_template=given)
    assert subject.prompt(TALK, TOOLS) == expected.prompt(TALK, TOOLS)
    assert infer_parser(tokenizer, subject.renderer.template) == "hermes"
    assert certify(subject).exact and certify(subject).probes == certify(expected).probes
    assert "customer_id" in subject.encoder.control
    assert "customer_id" in subject.verifier._control.values()
    assert "tokenize" not in TemplateCache(subject).variables or way == "method"
    with pytest.raises(TemplateError, match="no messages"):
        subject.prompt([])
    first: list[Message] = [{"role": "user", "content": "a customer_id <|end|>"}]
    prompt = subject.prompt(first)
    ids = np.array([*prompt, *subject.encoder.encode("So.<|end|>", previous=prompt[-1])], np.int32)
    turns = (TurnSpan(len(prompt), len(ids), 1),)
    served = ServedSequence(ids, turns, [*first, {"role": "assistant", "content": "So."}], ())
    assert subject.verifier.check(served) is None
    ids[1] += 1
    assert subject.verifier.check(served) == "prompt"
