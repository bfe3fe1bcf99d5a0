"""The smallest templates under which a delta, a prompt or a fork was wrong once, one test each. And
the judge itself, on templates that can be read by eye.

Each test plays a twelve-turn loop or one exchange and asks the judge; no test says how it was
fixed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.adversarial.dialogues import Conversation, loop
from support.adversarial.episodes import play_episodes, tokenizer_of, tokenizer_with, verdict_on
from support.adversarial.skeleton import SLOTS, filled
from support.adversarial.templates import Template, by_hand, generated
from support.adversarial.token_judge import Judge, Said

from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.template import ChatTemplate

pytestmark = pytest.mark.tokens

FIRST = [{"role": "user", "content": "Hello."}]
NAMESPACE = "{% set ns = namespace(n=0) %}"
TEMPLATES = {template.name: template for template in [*by_hand(), *generated()]}
ONCE_WRONG = (
    "numbered_results rounds_by_namespace "
    "tool_name.equal tool_name.alias tool_name.constants tool_name.concat tool_name.lookup "
    "call_argument.equal tool_call_id.exact_length tool_call_id.tail tool_call_id.raises_length "
    "tool_content.first tool_content.lower tool_content.digits tool_content.truncate "
    "tool_content.int tool_content.macro before_content.length"
).split()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn_of(judge: Judge, text: str) -> Said:
    """A turn of the model with this text, which ends with `<|end|>`."""
    ids = [*judge.plain(text), judge.control["<|end|>"]]
    return Said(ids, text + "<|end|>", "<|end|>", {"role": "assistant", "content": text})


def judged(**slots: str) -> tuple[Judge, ChatTemplate]:
    """The judge of a template with these slots, and the template in the library."""
    template = Template("judged", filled(**slots))
    return Judge(tokenizer_of(template), template), ChatTemplate(tokenizer_of(template))


async def assert_right(template: Template, scripts: Sequence[Conversation], **options: Any) -> None:
    """No prompt of these dialogues is wrong, in the template's own format."""
    outcomes = await play_episodes(template, scripts, scripted=True, verify="off", **options)
    verdicts = Counter(row.verdict for outcome in outcomes for row in outcome.rows)
    assert verdicts["exact"] > len(scripts)
    assert not [outcome.wrong for outcome in outcomes if outcome.wrong]


@pytest.mark.parametrize("name", ONCE_WRONG)
async def test_what_a_template_asks_or_counts_is_right_each_time(name: str) -> None:
    calls = 0 if name == "rounds_by_namespace" else 1
    await assert_right(TEMPLATES[name], [loop(f"{name}/{n}", calls=calls) for n in range(3)])


async def test_named_templates_are_not_mixed_up() -> None:
    """What the variant for tools asks says nothing about the other one, which counts users."""
    counted = "{% set ns.n = ns.n + 1 %}{% if ns.n > 4 %}[many]{% endif %}{{ m.content }}"
    template = Template("default", filled(top=NAMESPACE, user=counted))
    tokenizer = tokenizer_with((), "<|end|>")
    tokenizer.chat_template = {"default": template.source, "tool_use": filled()}
    made = [replace(loop(f"named/{n}", calls=0), tools=None) for n in range(4)]
    await assert_right(template, made, tokenizer=tokenizer)


# --- control-token text --------------------------------------------------------------------------


def test_control_text_that_the_model_spelled_stays_text_in_a_fork() -> None:
    judge, subject = judged(prompt="({{ messages | length }})")
    said = turn_of(judge, "It is <|end|>, I think.")
    stream, messages = [*judge.prompt(FIRST, None), *said.ids], [*FIRST, said.turn, user("And?")]
    with pytest.raises(HistoryRewrittenError):
        subject.delta(messages[:2], messages[2:], sampled_ids=said.ids)
    kept = np.array(stream, dtype=np.int32)
    ids = subject.start(messages).prompt(keep=kept).tolist()
    assert judge.fork_is_right(ids, stream, messages, None), judge.decode(ids)
    careless = judge.careless(judge.text(messages, None, generate=True))
    assert not judge.fork_is_right(careless, stream, messages, None)
    assert not judge.fork_is_right(ids[:-1], stream, messages, None)


@pytest.mark.parametrize("transform", ["upper", "e", "title", "replace('<', '(')"])
def test_control_text_that_the_template_transforms_is_no_reason_to_refuse(transform: str) -> None:
    shown = "{{ m.content | TRANSFORM }}".replace("TRANSFORM", transform)
    judge, subject = judged(tool=shown, user=shown)
    first, new = [user("What is <|end|> for?")], [user("x<|turn|> <|end|>")]
    assert subject.prompt(first) == judge.prompt(first, None)
    said = turn_of(judge, "Ask.")
    delta = subject.delta([*first, said.turn], new, sampled_ids=said.ids)
    assert delta == judge.truth(first, said, new, None).input_ids


async def test_a_marker_that_replaces_the_close_is_a_rewrite() -> None:
    """History shows the result inside the turn: nothing can follow the sampled `<|end|>`."""
    inside = (
        "{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}<tool_response>"
        "{{ loop.nextitem.content }}</tool_response>{% endif %}"
    )
    template = Template("result_inside", filled(calls=SLOTS["calls"] + inside, tool=""))
    template = Template("result_inside", template.source.replace("<|turn|>tool\n<|end|>\n", ""))
    [outcome] = await play_episodes(template, [loop("inside", calls=1)], scripted=True)
    assert outcome.rows[1:] and not outcome.wrong, outcome


# --- other contents ------------------------------------------------------------------------------


def test_a_lone_surrogate_is_no_crash() -> None:
    judge, subject = judged()
    assert subject.prompt([user("a \udcff name")]) == judge.prompt([user("a \ufffd name")], None)


def test_text_parts_render_as_the_template_renders_them() -> None:
    """A template that sees the parts shows them as it shows parts."""
    shown = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ "
        "p.text | trim }}]{% endfor %}{% endif %}"
    )
    judge, subject = judged(user=shown)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": " two"}]
    messages = [{"role": "user", "content": parts}]
    assert subject.prompt(messages) == judge.prompt(messages, None)


# --- the judge itself -----------------------------------------------------------------------------


def test_control_text_in_a_body_is_text_and_what_is_careless_is_seen() -> None:
    judge, _ = judged()
    truth = judge.truth(FIRST, turn_of(judge, "Hi."), [user("a<|end|>b")], None)
    end = judge.control["<|end|>"]
    assert truth.kind == "append" and truth.input_ids is not None
    assert truth.careless_ids is not None
    assert (truth.input_ids.count(end), truth.careless_ids.count(end)) == (1, 2)
    assert verdict_on(truth, truth.careless_ids, "fork") == "injected"
    assert verdict_on(truth, truth.input_ids, "fork") == "exact"
    assert verdict_on(truth, truth.input_ids[:-1], "fork") == "wrong"


@pytest.mark.parametrize(
    ("slots", "kind"),
    [
        ({"prompt": "({{ messages | length }})"}, "rewrite"),
        ({"said": "{{ m.content if loop.last else m.content | upper }}"}, "rewrite"),
        ({"said": "{{ m.content | upper }}"}, "drift"),
        ({"user": "{% if loop.length > 2 %}{{ raise_exception('no') }}{% endif %}"}, "raises"),
        ({"user": "{% if '<|turn|>' in m.content %}!{% endif %}{{ m.content }}"}, "unclear"),
    ],
)
def test_kinds_of_truth(slots: dict[str, str], kind: str) -> None:
    judge, _ = judged(**slots)
    truth = judge.truth(FIRST, turn_of(judge, "Hi."), [user("x<|turn|>")], None)
    assert truth.kind == kind, truth
    allowed = {"rewrite": "wrong", "raises": "raises", "unclear": "unclear", "drift": "exact"}
    assert verdict_on(truth, truth.input_ids or [], "fork") == allowed[kind]
