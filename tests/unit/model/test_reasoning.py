"""A reply begins inside reasoning if the prompt that was served for it ends there."""

import copy
import json
from typing import Any

import pytest
from support.dialect_bodies import DIALECTS, PATHS, body_of, reply_of
from support.endpoints import endpoint
from support.episodes import call, serving
from support.listed_environment import TOOL

from toolroll import ChatTemplate, Message
from toolroll.endpoint.in_process import ManagedSession
from toolroll.parsers.reasoning import get_reasoning
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.template.encode import Encoder
from toolroll.testing import load_embedded_tokenizer

PARAMS = {"max_new_tokens": 64, "temperature": 1.0}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
SOURCE = load_embedded_tokenizer().chat_template
HEAD, GENERATION, _ = SOURCE.rpartition("{%- if add_generation_prompt -%}")
TURN = "{{ '<|turn|>assistant\n' }}"
PLAIN = HEAD + GENERATION + TURN + "{% endif %}"
ALWAYS = HEAD + TURN + "{{ '<think>\n' }}"
"""Writes the generation prompt even if it is not asked for."""
THINKS = HEAD + GENERATION + TURN + "{{ '<think>\n\n' }}{% endif %}"
FORCED = HEAD + GENERATION + TURN + "{{ '<think>\nOkay,' }}{% endif %}"
NOT_AFTER_TOOLS = (  # DeepSeek-V3.1, DeepSeek-R1-Distill
    HEAD + GENERATION + TURN + "{% if messages[-1].role != 'tool' %}{{ '<think>' }}{% endif %}"
    "{% endif %}"
)
SWITCH = (  # Nemotron-Nano-v2, and Qwen templates with <|think_off|>
    HEAD + GENERATION + TURN + "{% set all = messages | map(attribute='content') | join %}"
    "{{ '<think></think>' if '/no_think' in all else '<think>\n' }}{% endif %}"
)
CLOSED = HEAD + GENERATION + TURN + "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
TEXTS_ONLY = "{% for message in messages %}{{ message.content }}{% endfor %}"
EXPLAINED = "{{ 'Begin with <think>.' }}" + PLAIN


def user(text: str = "And?") -> Message:
    return {"role": "user", "content": text}


def tool(text: str = "1") -> Message:
    return {"role": "tool", "tool_call_id": "c0", "name": "look", "content": text}


CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c0", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    ],
}
CASES: list[tuple[str, list[Message], bool]] = [
    (PLAIN, [user()], False),
    (THINKS, [user()], True),
    (THINKS, [user(), CALL, tool()], True),
    (FORCED, [user()], True),
    (FORCED, [user(), CALL, tool("</think>")], True),
    (CLOSED, [user()], False),
    (NOT_AFTER_TOOLS, [user()], True),
    (NOT_AFTER_TOOLS, [user(), CALL, tool()], False),
    (NOT_AFTER_TOOLS, [user(), CALL, tool(), user()], True),
    (SWITCH, [user()], True),
    (SWITCH, [user("/no_think")], False),
    (SWITCH, [user(), CALL, tool(), user("/no_think")], False),
    # A tag that a message contains does not open the reply's reasoning.
    (PLAIN, [user("Say <think>")], False),
    (PLAIN, [user("<think>"), CALL, tool()], False),
    (PLAIN, [user(), CALL, tool("<think>")], False),
    (TEXTS_ONLY, [user("Say <think>\n")], False),
    (EXPLAINED, [user()], False),
    (THINKS, [user("Say <think>")], True),
    (NOT_AFTER_TOOLS, [user(), CALL, tool("<think>")], False),
    (ALWAYS, [user()], True),
    (ALWAYS, [user("Is <think> a tag?")], True),
]


ENCODER = Encoder(load_embedded_tokenizer())
OTHER_TAGS = ["mistral", "apertus2509", "kimi", "gemma4", "kimi_k3", "k2_horizon"]
BRIEF = [CASES[0], CASES[2], CASES[7], CASES[14]]


@pytest.mark.parametrize(
    "case",
    [
        *(("qwen3", *case) for case in CASES),
        *((name, *case) for name in OTHER_TAGS for case in BRIEF),
    ],
)
def test_only_a_tag_after_all_messages_opens_the_reply(case: Any) -> None:
    name, source, messages, expected = case
    tags = get_reasoning(name)
    pairs = [("<think>", tags.open), ("</think>", tags.close)]
    if tags.others:
        pairs = list(zip(("<think>", "</think>"), tags.others[0], strict=True))

    def written(item: Any) -> Any:
        text = json.dumps(item, ensure_ascii=False)
        for ours, theirs in pairs:
            text = text.replace(ours, theirs)
        return json.loads(text)

    messages = written(messages)
    template = ChatTemplate(
        ENCODER.tokenizer, chat_template=written(source), history="preserve", encoder=ENCODER
    )
    assert template.start(messages).opens_reasoning(tags) is expected
    assert not template.start(messages).opens_reasoning(None)
    if CALL in messages and source != TEXTS_ONLY:
        turn = messages.index(CALL)
        sampled = template.sampled(template.encoder.encode(call(at="x") + "<|end|>", previous=0))
        _, cursor = template.start(messages[:turn]).after(sampled, messages[turn:])
        assert cursor.opens_reasoning(tags) is expected


def tokenizer_with(source: str) -> Any:
    tokenizer = copy.deepcopy(load_embedded_tokenizer())
    tokenizer.chat_template = source
    return tokenizer


REPLIES = [f"I look it up.</think>{call(at='x')}", "It is sunny.", "Done?</think>Yes."]
EXPECTED = [("I look it up.", ""), (None, "It is sunny."), ("Done?", "Yes.")]


def parts(message: Any) -> tuple[str | None, str]:
    return message.get("reasoning_content"), message.get("content") or ""


@pytest.mark.parametrize("history", ["fork", "preserve"])
async def test_a_run_reads_each_reply_by_its_own_prompt(history: str) -> None:
    """With "fork", the second prompt starts a new sequence, because the template drops thoughts."""
    source = NOT_AFTER_TOOLS.replace("message.reasoning_content", "false")
    tokenizer, replies = tokenizer_with(source), iter(REPLIES)
    async with serving(tokenizer, lambda _: next(replies), history=history) as (_, served):
        talk = Conversation(served, [SYSTEM, user()], [TOOL], session_id="s")
        turns = [await talk.reply(PARAMS)]
        answered = turns[0].message["tool_calls"][0]["id"]
        talk.extend([{**tool(), "tool_call_id": answered}])
        turns.append(await talk.reply(PARAMS))
        talk.extend([user()])
        turns.append(await talk.reply(PARAMS))
    assert [parts(turn.message) for turn in turns] == EXPECTED
    assert bool(talk.forks) == (history == "fork")


@pytest.mark.parametrize(
    ("hooked", "expected"),
    [
        ("<|turn|>user\nAnd?<|end|>\n<|turn|>assistant\n", (None, "Hm.")),
        ("<|turn|>user\nAnd?<|end|>\n<|turn|>assistant\n<think>\n", ("Hm.", "")),
    ],
)
@pytest.mark.parametrize("source", [PLAIN, THINKS])
async def test_ids_of_a_hook_replace_the_templates(source: str, hooked: str, expected: Any) -> None:
    async with serving(tokenizer_with(source), lambda request: "Hm.") as (_, served):
        ids = served.template.encoder.encode(hooked)
        talk = Conversation(served, [user()], [], session_id="s", prompt_hook=lambda *_: ids)
        assert parts((await talk.reply(PARAMS)).message) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_endpoint_reads_each_reply_by_its_own_prompt(dialect: Any, stream: bool) -> None:
    replies = iter(REPLIES)
    history: list[Any] = [SYSTEM, user()]
    made = []
    async with endpoint(tokenizer_with(NOT_AFTER_TOOLS), lambda request: next(replies)) as bench:
        for _ in REPLIES:
            body = body_of(dialect, history, stream=stream)
            url = f"{bench.url}/sessions/s{PATHS[dialect]}"
            async with bench.http.post(url, json=body) as response:
                message, _ = reply_of(dialect, await response.text(), stream=stream)
            made.append(message)
            calls = message.get("tool_calls")
            answers = [{**tool(), "tool_call_id": calls[0]["id"]}] if calls else [user()]
            history += [message, *answers]
        await bench.trajectories()
    assert [parts(message) for message in made] == EXPECTED


@pytest.mark.parametrize(("source", "thought"), [(NOT_AFTER_TOOLS, True), (PLAIN, False)])
async def test_a_prefill_continues_what_the_prompt_opened(source: str, thought: bool) -> None:
    async with endpoint(tokenizer_with(source), lambda request: " is a sum.") as bench:
        session = ManagedSession(bench.endpoint, session="s")
        messages: list[Any] = [user(), {"role": "assistant", "content": "This"}]
        reply = await session.chat_completion(messages=messages)
        message = reply.choices[0].message.model_dump()
    assert parts(message) == ((" is a sum.", "") if thought else (None, " is a sum."))
