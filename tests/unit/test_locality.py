"""Which chat templates look at history one message at a time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.qwen import all_templates, tokenizer_for

from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.features import Features, History
from toolroll.rollout.types import Message

LOOP = "{% for m in messages %}%s{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("%s", "{{ m.role }}{{ m.content }}"),
        LOOP.replace("%s", "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}x{% endif %}"),
        LOOP.replace("%s", "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}x{% endif %}"),
        LOOP.replace("%s", "{% for c in m.tool_calls %}{{ loop.index }}{{ c.name }}{% endfor %}"),
        LOOP.replace("%s", "{% set text = m.content | trim %}{{ text }}{{ loop.previtem.role }}"),
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if loop.index0 == 0 %}x{% endif %}{{ m.content }}{% endfor %}",
        "{% if messages | length != 0 %}" + LOOP.replace("%s", "{{ m.content }}") + "{% endif %}",
        "{{ strftime_now('%d') }}{% for t in tools %}{{ t | tojson }}{% endfor %}" + LOOP.replace("%s", "{{ m.content }}"),
    ],
)
def test_local(source: str) -> None:
    assert Features(source).local


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(n=0) %}" + LOOP.replace("%s", "{% set ns.n = ns.n + 1 %}{{ ns.n }}"),
        LOOP.replace("%s", "{{ loop.index }}"),
        LOOP.replace("%s", "{{ loop.index0 }}"),
        LOOP.replace("%s", "{{ loop.length }}"),
        LOOP.replace("%s", "{{ loop.revindex0 }}"),
        LOOP.replace("%s", "{{ loop.cycle('a', 'b') }}"),
        LOOP.replace("%s", "{% if loop.changed(m.role) %}x{% endif %}"),
        LOOP.replace("%s", "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}x{% endif %}"),
        LOOP.replace("%s", "{% if messages[loop.index0 - 2] %}x{% endif %}"),
        LOOP.replace("%s", "{{ messages[-1].role }}"),
        LOOP.replace("%s", "{{ messages[1].role }}"),
        LOOP.replace("%s", "{% for n in messages %}{{ n.role }}{% endfor %}"),
        LOOP.replace("%s", "{% set x = loop %}{{ x.index }}"),
        LOOP.replace("%s", "{% if m.content == 'stop' %}{% break %}{% endif %}{{ m.content }}"),
        "{% set seen = [] %}" + LOOP.replace("%s", "{% set _ = seen.append(m) %}{{ seen | length }}"),
        "{% set turn = cycler('a', 'b') %}" + LOOP.replace("%s", "{{ turn.next() }}"),
        "{% set comma = joiner(',') %}" + LOOP.replace("%s", "{{ comma() }}"),
        "{{ messages | length }}" + LOOP.replace("%s", "{{ m.content }}"),
        "{{ messages | selectattr('role', 'equalto', 'tool') | list | length }}",
        "{% for m in messages if m.role != 'system' %}{{ loop.first }}{% endfor %}",
        "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages[2:] %}{{ m.content }}{% endfor %}",
        "{% macro show(all) %}{{ all | length }}{% endmacro %}{{ show(messages) }}",
        "{% set rest = messages if tools else messages[1:] %}{% for m in rest %}{{ m.content }}{% endfor %}",
        "{% set rest = messages[1:] %}{% for m in rest %}{{ messages[loop.index0 + 1].role }}{% endfor %}",
        "{{ messages",
    ],
)
def test_not_local(source: str) -> None:
    assert not Features(source).local


def test_the_templates_of_the_wheel_that_are() -> None:
    local = {name for name, source in all_templates().items() if Features(source).local}
    assert {"qwen2_5", "qwen3_instruct_2507", "llama3", "llama3_2", "phi3"} <= local
    assert not local & {"qwen3", "deepseekv3", "gptoss", "glm4moe", "gemma3", "qwen3_5_think", "nemotron_3_nano"}


# --- what it is good for ---------------------------------------------------------------------------------------------

TEXT = st.sampled_from(["", " ", "Yes.", "a\nb", "<tool_response>", "<think>"])


@st.composite
def conversations(draw: Any) -> list[Message]:
    """Random ones, that end with an assistant turn."""
    messages: list[Message] = [{"role": "system", "content": "Be brief."}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": "Hello."})
    for at in range(draw(st.integers(1, 6))):
        calls = draw(st.integers(0, 2))
        turn: Message = {"role": "assistant", "content": draw(TEXT)}
        if calls:
            turn["tool_calls"] = [
                {"id": f"call{at:03d}{n:02d}", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
                for n in range(calls)
            ]
        messages.append(turn)
        messages += [
            {"role": "tool", "tool_call_id": f"call{at:03d}{n:02d}", "name": "look", "content": draw(TEXT)} for n in range(calls)
        ]
        messages += [] if calls and draw(st.booleans()) else [{"role": "user", "content": draw(TEXT)}]
    cut = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: cut + 1]


@pytest.fixture(scope="module", params=["qwen3_instruct_2507", "llama3_2"])
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    """One local template, whose frames stay from one example to the next."""
    return ChatTemplate(tokenizer_for(all_templates()[request.param]))


@given(messages=conversations(), body=TEXT)
def test_a_frame_of_another_history_gives_what_this_one_renders(template: ChatTemplate, messages: list[Message], body: str) -> None:
    calls = messages[-1].get("tool_calls")
    new = [{"role": "tool", "tool_call_id": each["id"], "name": "look", "content": body} for each in calls or ()]
    new = new or [{"role": "user", "content": body}]
    ids = [*template.encoder.encode("said"), template.tokenizer.eos_token_id]
    try:
        derived = template.deriver.derive(messages, new, None, template.sampled(ids))
    except TemplateError:
        return  # a message of the past is refused (Llama 3 takes one call a turn): the conversation ended there
    if derived.rewritten is not None:
        with pytest.raises(HistoryRewrittenError):
            template.delta(messages, new, sampled_ids=ids)
        return
    assert template.delta(messages, new, sampled_ids=ids) == template.encoder.encode(derived.text, derived.bodies)


def test_frames_of_a_local_template_are_found_again_whatever_came_before() -> None:
    template = ChatTemplate(tokenizer_for(all_templates()["qwen3_instruct_2507"]))
    keys = set()
    for turns in range(1, 30):
        history = History(template.features)
        history.extend([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
        for at in range(turns):
            history.extend([{"role": "assistant", "content": "a" * (at % 3)}, {"role": "user", "content": "b" * (at % 2)}])
        history.extend([{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}])
        keys.add(history.key)
    assert len(keys) == 1
