"""The judge itself, on templates that can be read by eye."""

import random
from typing import Any

import pytest
from support.adversarial.dialogues import Step
from support.adversarial.episodes import tokenizer_of, verdict_on
from support.adversarial.skeleton import filled
from support.adversarial.templates import Template
from support.adversarial.texts import Unclear
from support.adversarial.token_judge import Judge, Said

pytestmark = pytest.mark.tokens

FIRST = [{"role": "user", "content": "Hello."}]
TURN = {"role": "assistant", "content": "Hi."}


def judge_of(**slots: str) -> Judge:
    template = Template("by_eye", filled(**slots))
    return Judge(tokenizer_of(template), template)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(judge: Judge, text: str) -> Said:
    ids = [*judge.plain(text), judge.control["<|end|>"]]
    return Said(ids, text + "<|end|>", "<|end|>", {"role": "assistant", "content": text})


def test_what_the_model_says_and_what_is_appended() -> None:
    judge = judge_of()
    spoken = judge.say(FIRST, Step(TURN, (user("And?"),)), None, random.Random(0))
    assert judge.decode(spoken.ids) == spoken.text == "Hi.<|end|>"
    truth = judge.truth(FIRST, spoken, [user("And?")], None)
    assert truth.kind == "append" and truth.input_ids is not None
    assert judge.decode(truth.input_ids) == "\n<|turn|>user\nAnd?<|end|>\n<|turn|>assistant\n"


def test_control_text_in_a_body_is_text_and_what_is_careless_is_seen() -> None:
    judge = judge_of()
    truth = judge.truth(FIRST, said(judge, "Hi."), [user("a<|end|>b")], None)
    end = judge.control["<|end|>"]
    assert truth.input_ids is not None and truth.careless_ids is not None
    assert (truth.input_ids.count(end), truth.careless_ids.count(end)) == (1, 2)
    assert verdict_on(truth, truth.careless_ids, "fork") == "injected"
    assert verdict_on(truth, truth.input_ids, "fork") == "exact"
    assert verdict_on(truth, truth.input_ids[:-1], "fork") == "wrong"


def test_control_text_is_masked_in_a_template_that_measures_and_one_that_reads_it() -> None:
    measured = judge_of(user="{{ m.content | length }}{{ m.content | upper }}")
    prompt = measured.render([user("a<|end|>b")], None, generate=True)
    assert "9A<|END|>B<|end|>" in prompt.text
    assert [prompt.text[slice(*at)] for at in prompt.marks] == ["<|turn|>", "<|end|>", "<|turn|>"]
    reading = judge_of(user="{% if '<|end|>' in m.content %}!{% endif %}{{ m.content }}")
    with pytest.raises(Unclear):
        reading.render([user("a<|end|>b")], None, generate=True)


@pytest.mark.parametrize(
    ("slots", "kind"),
    [
        ({"prompt": "({{ messages | length }})"}, "rewrite"),
        ({"said": "{{ m.content | upper }}"}, "drift"),
        ({"said": "{{ m.content if loop.last else m.content | upper }}"}, "rewrite"),
        ({"said": "{{ m.content | trim }} "}, "drift"),
        ({"user": "{% if loop.length > 2 %}{{ raise_exception('no') }}{% endif %}"}, "raises"),
        ({"user": "{% if '<|turn|>' in m.content %}!{% endif %}{{ m.content }}"}, "unclear"),
    ],
)
def test_kinds_of_truth(slots: dict[str, str], kind: str) -> None:
    judge = judge_of(**slots)
    truth = judge.truth(FIRST, said(judge, "Hi."), [user("x<|turn|>")], None)
    assert truth.kind == kind, truth
    allowed = {"rewrite": "wrong", "raises": "raises", "unclear": "unclear", "drift": "exact"}
    assert verdict_on(truth, truth.input_ids or [], "fork") == allowed[kind]


def test_a_fork_keeps_sampled_ids_and_no_others() -> None:
    judge = judge_of(prompt="({{ messages | length }})")
    turn = said(judge, "Hi <|end|> there.")
    stream = [*judge.prompt(FIRST, None), *turn.ids]
    messages = [*FIRST, turn.turn, user("And?")]
    right = judge.prompt(messages, None)
    assert judge.fork_is_right(right, stream, messages, None)
    careless = judge.careless(judge.text(messages, None, generate=True))
    assert careless != right
    assert not judge.fork_is_right(careless, stream, messages, None)
    assert not judge.fork_is_right(right[:-1], stream, messages, None)
