"""First prompts of known shapes: as the template writes them, without a render, and given up aloud where a template belies them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.qwen import tokenizer_for, trl_template

from toolroll.rollout.errors import TemplateError
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.types import Message

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
COUNTING = "{% if messages[0].content | wordcount > 3 %}LONG{% endif %}" + PLAIN


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
    tokenizer = tokenizer_for(trl_template(name))
    template = ChatTemplate(tokenizer)
    texts = [f"How many {n} are there? <|im_end|> {'x' * n}" for n in range(12)]
    expected = [ChatTemplate(tokenizer).prompt(asked(text)) for text in texts]
    renders = counted(template, monkeypatch)
    assert [template.first_prompt(asked(text), None)[1].input_ids.tolist() for text in texts] == expected
    assert 0 < len(renders) < 6


def test_a_template_that_counts_the_words_is_found_out_aloud(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(tokenizer_for(PLAIN), chat_template=COUNTING)
    for words in ("one", "two"):
        _, delta = template.first_prompt(asked(words), None)
        assert template.check_prompt(asked(words), None, delta.input_ids) is None
    long = asked("five words and one more")
    wrong = template.first_prompt(long, None)[1]
    assert wrong.framed
    with caplog.at_level(logging.ERROR, "toolroll"):
        assert template.check_prompt(long, None, wrong.input_ids) == "prompt"
    assert "first prompt" in caplog.text
    right = template.first_prompt(long, None)[1]
    assert not right.framed
    assert right.input_ids.tolist() == template.prompt(long)
    assert template.check_prompt(long, None, right.input_ids) is None


def test_a_prompt_that_the_template_refuses_is_refused_each_time() -> None:
    template = ChatTemplate(tokenizer_for(PLAIN), chat_template="{{ raise_exception('no') }}")
    for _ in range(3):
        with pytest.raises(TemplateError, match="no"):
            template.prompt(asked("x"))
