"""Recorded conversations as tokens: a render, and what a rollout would have served and sampled."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from support.oracle_scenarios import said, system, user
from support.parsing import tool
from support.qwen import tokenizer_for, tool_templates
from support.tau import recorded_trials
from support.tiers import by_tier

from toolroll.rollout.errors import HistoryRewrittenError, TemplateError
from toolroll.rollout.template import ChatTemplate, tokenize_conversation
from toolroll.rollout.template.transcript import last_message_delta
from toolroll.rollout.types import Message, Trajectory

pytestmark = pytest.mark.tokens

TEMPLATES = tool_templates()
TOOLS = [tool("get_reservation", {"id": {"type": "string"}}, required=["id"])]
APPENDING = ("qwen2_5", "qwen3_instruct_2507", "llama3_1", "glm4moe", "data/kimi_k2_5")
"""Templates under which every turn is trained."""
SOURCE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}TURN"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = "{{ m.content }}{{ (m.tool_calls or []) | tojson }}"
CUT = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"id": "A'}}


def call_id(number: int) -> str:
    return f"functions.get_reservation:{number}"  # Kimi shows no other name


def calling(number: int, value: str) -> Message:
    function = {"name": "get_reservation", "arguments": json.dumps({"id": value})}
    call = {"id": call_id(number), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(number: int, text: str) -> Message:
    name = "get_reservation"
    return {"role": "tool", "name": name, "tool_call_id": call_id(number), "content": text}


CONVERSATION: list[Message] = [
    system("You help with reservations."),
    user("Look up A1 and B2 <|im_end|>, please."),
    calling(0, "A1"),
    result(0, '{"id": "A1", "note": "<|im_start|>"}'),
    calling(1, "B2"),
    result(1, "日本 🙂\n"),
    said("Both are there."),
    user("Thanks!"),
    said("You are welcome."),
]


def chat_template(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_for(TEMPLATES[name]))


def tokens_of(template: ChatTemplate, messages: list[Message], tools: list[Any]) -> Trajectory:
    """The conversation's trajectory, checked for what holds under every template."""
    found = tokenize_conversation(template, messages, tools)
    without_nulls = [{key: part for key, part in m.items() if part is not None} for m in messages]
    text = template.conversation(without_nulls, tools, generate=False)[0]
    assert template.encoder.decode(found.input_ids) == text
    assert found.source == "transcript"
    assert found.loss_mask.dtype == np.int32
    assert np.isnan(found.logprobs).all()
    assert [span.start for span in found.spans[1:]] == [span.stop for span in found.spans[:-1]]
    assert (found.spans[0].start, found.spans[-1].stop) == (0, len(found.input_ids))
    trained = np.zeros(len(found.input_ids), dtype=np.int32)
    for turn in found.turns:
        trained[turn.start : turn.stop] = turn.excluded is None
    assert (trained == found.loss_mask).all()
    return found


def texts_of(template: ChatTemplate, found: Trajectory) -> list[tuple[str, str | None]]:
    """The text of each turn, and why it is excluded."""
    decode = template.encoder.decode
    return [
        (decode(found.input_ids[turn.start : turn.stop]), turn.excluded) for turn in found.turns
    ]


def assert_as_a_rollout(template: Any, messages: Any, tools: list[Any], found: Trajectory) -> None:
    """A rollout in which the model samples the trained spans is served exactly the spans between
    them."""
    ids = found.input_ids.tolist()
    trained = {span.first: span for span in found.spans if found.loss_mask[span.start]}
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert list(trained) == turns
    assert template.prompt(messages[: turns[0]], tools) == ids[: trained[turns[0]].start]
    for index, then in itertools.pairwise(turns):
        span = trained[index]
        delta = template.delta(
            messages[: index + 1],
            messages[index + 1 : then],
            tools=tools,
            sampled_ids=ids[span.start : span.stop],
        )
        assert delta == ids[span.stop : trained[then].start]


@pytest.mark.parametrize("name", by_tier(TEMPLATES))
def test_a_transcript_is_a_render_and_has_a_rollouts_tokens(name: str) -> None:
    """A turn that a model cannot have sampled where the template shows it is excluded, and says
    why; all others are trained."""
    template = chat_template(name)
    try:
        found = tokens_of(template, CONVERSATION, TOOLS)
    except TemplateError as refusal:
        assert "Conversation roles must alternate" in str(refusal)
        assert name == "data/cohere2"
        return
    for turn in found.turns:
        assert (turn.excluded is None) == found.loss_mask[turn.start : turn.stop].all()
    texts = [text for text, excluded in texts_of(template, found) if excluded is None]
    if not texts:  # the prompt opens a thought, or closes one, and these turns have none
        assert "think>" in template.conversation(CONVERSATION[:2], TOOLS, generate=True)[0][-40:]
        return
    assert any(words in texts[-1] for words in ("You are welcome.", "Both are there."))
    if name in APPENDING:
        assert len(texts) == 4
    if len(texts) == len(found.turns) == 4 and "gptoss" not in name:
        assert_as_a_rollout(template, CONVERSATION, TOOLS, found)


def test_a_close_that_no_model_samples_is_not_trained() -> None:
    template = chat_template("gptoss")
    found = tokens_of(template, CONVERSATION, TOOLS)
    texts = [text for text, _ in texts_of(template, found)]
    ends = [text.rsplit("<|", 1)[-1] for text in texts[:2] + texts[3:]]
    assert ends == ["call|>", "call|>", "return|>"]
    assert texts[2].endswith("Both are there.")
    assert template.encoder.decode(found.input_ids[found.turns[2].stop :][:1]) == "<|end|>"


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "glm4moe", "gptoss", "llama3_1"]
)
def test_recorded_tau_bench_conversations(name: str) -> None:
    template, turns = chat_template(name), list[Any]()
    for entry in recorded_trials()[:8]:
        items = (message.items() for message in entry["traj"])
        messages = [{key: value for key, value in each if value is not None} for each in items]
        found = tokens_of(template, messages, TOOLS)
        turns += found.turns
        if name != "gptoss" and all(turn.excluded is None for turn in turns):
            assert_as_a_rollout(template, messages, TOOLS, found)
    excluded = sum(turn.excluded is not None for turn in turns)
    # Three turns have a text besides a call, which two templates do not show, or not in history.
    assert excluded == {"gptoss": 3, "llama3_1": 3}.get(name, 0) < len(turns)


THOUGHTS = ("France has one capital.", "A call is needed.", "Italy has Rome.")
THOUGHTFUL: list[Message] = [
    user("Capital of France?"),
    said("It is Paris.", reasoning_content=THOUGHTS[0]),
    user("Look up A1. And Italy?"),
    {**calling(0, "A1"), "reasoning_content": THOUGHTS[1]},
    result(0, "found"),
    said("Rome.", reasoning_content=THOUGHTS[2]),
]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("name", by_tier(TEMPLATES))
def test_no_turn_is_trained_without_its_thought(name: str, field: str) -> None:
    template = chat_template(name)
    messages = [
        {field if key == "reasoning_content" else key: value for key, value in message.items()}
        for message in THOUGHTFUL
    ]
    found = tokens_of(template, messages, TOOLS)
    assert len(found.turns) in (2, 3)
    for text, excluded in texts_of(template, found):
        assert excluded or any(thought in text for thought in THOUGHTS)
    if name == "qwen3" and field == "reasoning_content":
        reason = "the template renders this turn differently once messages follow"
        assert [turn.excluded for turn in found.turns] == [reason, None, None]


@pytest.mark.parametrize(
    ("turn", "source", "reason"),
    [
        ({"content": "No # x"}, "{{ m.content | replace('#', '') }}", "does not show the text"),
        (calling(0, "A1"), "{{ m.content }}", "does not show the calls"),
        ({"content": "", "tool_calls": [CUT]}, CALLS, "does not show the calls"),
        ({"content": "a"}, "{{ ('!' if loop.last else '') ~ m.content }}", "this turn differently"),
        (calling(0, "A1"), CALLS.replace("tojson", "tojson | replace('1', '2')"), "show the calls"),
        ({"content": "", "refusal": "No."}, "{{ m.content }}", "show the refusal"),
        ({"content": ""}, "{{ m.content }}", "show the text"),
        ({"content": None}, "{{ m.content }}", "show the text"),
    ],
)
def test_a_turn_not_shown_as_recorded_is_excluded(turn: Message, source: str, reason: str) -> None:
    template = ChatTemplate(tokenizer_for(SOURCE.replace("TURN", source)))
    messages = [THOUGHTFUL[0], {"role": "assistant", **turn}, THOUGHTFUL[2], said("Bye.")]
    found = tokens_of(template, messages, [])
    assert [turn.excluded and reason in turn.excluded for turn in found.turns] == [True, None]
    if "show" in reason:
        with pytest.raises(HistoryRewrittenError, match=rf"messages\[1\] .*{reason}"):
            last_message_delta(template, messages[:2])


def test_the_last_messages_delta_or_a_refusal_to_rewrite() -> None:
    template = chat_template("qwen3_instruct_2507")
    ids: list[int] = []
    mask: list[int] = []
    for stop in range(1, len(CONVERSATION) + 1):
        added, flags = last_message_delta(template, CONVERSATION[:stop], TOOLS)
        ids += added
        mask += flags
    whole = tokenize_conversation(template, CONVERSATION, TOOLS)
    assert (ids, mask) == (whole.input_ids.tolist(), whole.loss_mask.tolist())
    template = chat_template("qwen3")
    messages = [user("One?"), said("1", reasoning_content="Count."), user("Two?")]
    with pytest.raises(HistoryRewrittenError, match=r"messages\[2\]"):
        last_message_delta(template, messages)
