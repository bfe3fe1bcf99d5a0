"""The smallest templates under which a delta, a prompt or a fork was wrong once, one test each.

Each test plays a twelve-turn loop or one exchange and asks the judge; no test says how it was
fixed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.adversarial.dialogues import Conversation, Step, loop
from support.adversarial.episodes import play_episodes, tokenizer_of, tokenizer_with
from support.adversarial.skeleton import SLOTS, filled
from support.adversarial.templates import Template, by_hand, generated
from support.adversarial.token_judge import Judge, Said

from toolroll.rollout.errors import HistoryRewrittenError
from toolroll.rollout.template import ChatTemplate

pytestmark = pytest.mark.tokens

NAMESPACE = "{% set ns = namespace(n=0) %}"
TEMPLATES = {template.name: template for template in [*by_hand(), *generated()]}
ONCE_WRONG = (
    "numbered_results rounds_by_namespace "
    "tool_name.equal tool_name.alias tool_name.constants tool_name.concat tool_name.lookup "
    "call_argument.equal tool_call_id.exact_length tool_call_id.tail tool_call_id.raises_length "
    "tool_content.first tool_content.lower tool_content.digits tool_content.truncate "
    "tool_content.int tool_content.macro before_content.length"
).split()


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
    first = [{"role": "user", "content": "What ends a turn?"}]
    turn = {"role": "assistant", "content": "It is <|end|>, I think."}
    sampled = [*judge.plain(turn["content"]), judge.control["<|end|>"]]
    stream = [*judge.prompt(first, None), *sampled]
    new = [{"role": "user", "content": "Thanks."}]
    with pytest.raises(HistoryRewrittenError):
        subject.delta([*first, turn], new, sampled_ids=sampled)
    kept = np.array(stream, dtype=np.int32)
    ids = subject.start([*first, turn, *new]).prompt(keep=kept).tolist()
    assert judge.fork_is_right(ids, stream, [*first, turn, *new], None), judge.decode(ids)


@pytest.mark.parametrize("transform", ["upper", "e", "title", "replace('<', '(')"])
def test_control_text_that_the_template_transforms_is_no_reason_to_refuse(transform: str) -> None:
    shown = "{{ m.content | TRANSFORM }}".replace("TRANSFORM", transform)
    judge, subject = judged(tool=shown, user=shown)
    first = [{"role": "user", "content": "What is <|end|> for?"}]
    assert subject.prompt(first) == judge.prompt(first, None)
    step = Step(
        {"role": "assistant", "content": "Ask."},
        ({"role": "user", "content": "x<|turn|> <|end|>"},),
    )
    said = Said(
        [*judge.plain("Ask."), judge.control["<|end|>"]], "Ask.<|end|>", "<|end|>", step.turn
    )
    delta = subject.delta([*first, step.turn], step.new, sampled_ids=said.ids)
    assert delta == judge.truth(first, said, step.new, None).input_ids


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
    shown = judge.prompt([{"role": "user", "content": "a \ufffd name"}], None)
    assert subject.prompt([{"role": "user", "content": "a \udcff name"}]) == shown


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
