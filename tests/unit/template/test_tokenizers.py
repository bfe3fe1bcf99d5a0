"""Tokenizers that are not plain: some add a BOS, have named templates, or render in Python."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from support.oracle_scenarios import ASK, BASE, CALL, RESULT, TOOLS, said, user
from support.qwen import tokenizer_for, trl_template
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.evaluation.certify import certify
from toolroll.parsers.infer import infer_parser
from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.render import Renderer
from toolroll.rollout.template.served import ServedSequence, TurnSpan
from toolroll.testing import load_embedded_tokenizer

pytestmark = pytest.mark.tokens

BOS = "<|begin_of_text|>"
TALK: Any = [*BASE, CALL, RESULT]


@pytest.mark.parametrize(("name", "written"), [("llama3_1", 1), ("qwen2_5", 0)])
def test_the_template_alone_says_whether_there_is_a_bos(name: str, written: int) -> None:
    """The template writes it, or nobody does: never twice, and never in a delta."""
    tokenizer: Any = tokenizer_for(trl_template(name), extra=[BOS])
    mark = tokenizer.convert_tokens_to_ids(BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # as Llama's
        single=f"{BOS} $A", special_tokens=[(BOS, mark)]
    )
    assert tokenizer.encode("x")[0] == mark
    template = ChatTemplate(tokenizer)
    prompt = template.prompt(BASE)
    shown = tokenizer.apply_chat_template(BASE, tokenize=False, add_generation_prompt=True)
    assert prompt == tokenizer.encode(shown, add_special_tokens=False)
    assert prompt.count(mark) == written
    sampled = template.encoder.encode("1" + template.stop_texts[0])
    talk = [*BASE, said("1")]
    delta = template.delta(talk, [ASK], sampled_ids=sampled)
    assert mark not in delta
    assert [*prompt, *sampled, *delta] == template.prompt([*talk, ASK])


_TURN = (
    "<|{{ m.role }}|>{{ m.content }}CLOSE{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}"
)
DEFAULT = "{% for m in messages %}" + _TURN.replace("CLOSE", "<|eot|>")
TOOL_USE = "{% for m in messages %}[{{ loop.index }}]" + _TURN.replace("CLOSE", "<|eom|>")
TOOL_USE = TOOL_USE.replace("{% if add", "[{{ messages | length + 1 }}]{% if add")


def test_each_conversation_has_its_own_template() -> None:
    """The one for tools is used with tools, and the stop tokens of both end a turn."""
    tokenizer: Any = tokenizer_for(DEFAULT + TOOL_USE + "<|user|><|assistant|>")
    tokenizer.chat_template = {"default": DEFAULT, "tool_use": TOOL_USE}
    subject = ChatTemplate(tokenizer)
    assert {"<|eot|>", "<|eom|>"} <= set(subject.stop_texts)
    for tools, close in ((None, "<|eot|>"), ([TOOLS[0]], "<|eom|>")):
        render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
        messages = [user("a")]
        for _ in range(12):
            sampled = subject.encoder.encode("b" + close, previous=0)
            after = [*messages, said("b"), user("a")]
            delta = subject.delta(after[:-1], after[-1:], tools=tools, sampled_ids=sampled)
            prompt = render(messages, add_generation_prompt=True)
            whole = render(after, add_generation_prompt=True)
            assert prompt + "b" + close + subject.encoder.decode(delta) == whole
            messages = after


def test_a_tokenizer_with_a_method_of_its_own_is_asked() -> None:
    mine, given = load_embedded_tokenizer(), load_embedded_tokenizer()
    theirs = given.apply_chat_template
    own = lambda *args, **options: "own: " + theirs(*args, **options)
    method = {"apply_chat_template": lambda _, *args, **options: own(*args, **options)}
    mine.__class__, given.apply_chat_template = type("Own", (type(mine),), method), own
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
    first = [user("a customer_id <|end|>")]
    prompt = subject.prompt(first)
    ids = np.array([*prompt, *subject.encoder.encode("So.<|end|>", previous=prompt[-1])], np.int32)
    turns = (TurnSpan(len(prompt), len(ids), 1),)
    served = ServedSequence(ids, turns, [*first, said("So.")], ())
    assert subject.verifier.check(served) is None
    ids[1] += 1
    assert subject.verifier.check(served) == "prompt"
