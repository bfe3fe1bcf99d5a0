"""First prompts of known shapes: as the template writes them, without a render, and given up aloud where a template belies them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.oracle_data import template_paths, tokenizer_for

from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Message

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
COUNTING = "{% if messages[0].content | length > 300 %}LONG{% endif %}" + PLAIN


def asked(words: str) -> list[Message]:
    return [{"role": "user", "content": words}]


def counted(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each render from now on."""
    renders: list[int] = []
    render = template.renderer.render

    def counting(*args: Any, **kwargs: Any) -> str:
        renders.append(1)
        return render(*args, **kwargs)

    monkeypatch.setattr(template.renderer, "render", counting)
    return renders


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss"])
def test_a_known_shape_costs_no_render_and_is_the_templates_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(path for known, path in template_paths().items() if known.split("/")[-1] == name)
    tokenizer = tokenizer_for(path.read_text(encoding="utf-8"))
    template = ChatTemplate(tokenizer)
    texts = [f"How many {n} are there? <|im_end|> {'x' * n}" for n in range(12)]
    expected = [ChatTemplate(tokenizer).prompt(asked(text)) for text in texts]
    renders = counted(template, monkeypatch)
    assert [template.prompt(asked(text)) for text in texts] == expected
    assert 0 < len(renders) < 2 * len(texts)


def test_a_template_that_measures_its_texts_is_found_out_aloud(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(tokenizer_for(PLAIN), chat_template=COUNTING)
    rendered = ChatTemplate(tokenizer_for(PLAIN), chat_template=COUNTING).encode_conversation
    long = asked("a long question " * 30)
    with caplog.at_level(logging.ERROR, "toolroll"):
        for n in range(9):  # the eighth use of a frame is compared with the render
            template.prompt(asked(f"short {n}"))
        assert not caplog.records
        assert template.prompt(long) == rendered(long, None, generate=True)
    assert "first prompt" in caplog.text
    assert template.prompt(long) == rendered(long, None, generate=True)


def test_a_prompt_that_the_template_refuses_is_refused_each_time() -> None:
    template = ChatTemplate(tokenizer_for(PLAIN), chat_template="{{ raise_exception('no') }}")
    for _ in range(3):
        with pytest.raises(TemplateError, match="no"):
            template.prompt(asked("x"))
