"""`Conversation`: one conversation, message by message and token by token."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from support.episodes import call, serving
from support.listed_environment import TOOL
from support.oracle_scenarios import user

from toolroll import Model, ParsedReply
from toolroll.rollout.engine import EncodedRequest
from toolroll.rollout.errors import UsageError
from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.template.delta import RenderedDelta
from toolroll.rollout.types import Completion, GenerateRequest, Message, Tool
from toolroll.testing import EmbeddedEngine, reference_logprobs

pytestmark = pytest.mark.tokens

PARAMS = {"max_new_tokens": 64, "temperature": 1.0}
FIRST: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
]
OTHER: Tool = {**TOOL, "function": {**TOOL["function"], "name": "listen"}}


@asynccontextmanager
async def talking(
    tokenizer: Any,
    said: Any = "Fine.",
    *,
    messages: Sequence[Message] = FIRST,
    tools: Sequence[Tool] = (TOOL,),
    **settings: Any,
) -> AsyncIterator[tuple[Conversation, EmbeddedEngine, Model]]:
    of_engine = settings.keys() & {"context_length", "split", "history", "faults"}
    engine = {name: settings.pop(name) for name in of_engine}
    policy = said if callable(said) else lambda request: said
    async with serving(tokenizer, policy, **engine) as (embedded, served):
        yield Conversation(served, messages, tools, session_id="s", **settings), embedded, served


async def exchange(dialogue: Conversation, turns: int, text: str = "And?") -> None:
    for number in range(turns):
        await dialogue.reply(PARAMS)
        dialogue.extend([user(f"{text} {number}")])


def last_prompt(engine: EmbeddedEngine, served: Model) -> str:
    return served.template.encoder.decode(engine.log[-1].input_ids.tolist())


def assert_templates_own(
    dialogue: Conversation, engine: EmbeddedEngine, served: Model, tools: Sequence[Tool] = (TOOL,)
) -> None:
    """The last prompt reads like the template's own render."""
    render = served.template.renderer.render
    assert last_prompt(engine, served) == render(dialogue.messages[:-1], tools, generate=True)


def tool_result(call_id: str, text: str = "Seen.") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": "look", "content": text}


async def test_lone_surrogates_are_served_as_replacement_characters(tokenizer: Any) -> None:
    tool: Tool = {**TOOL, "function": {**TOOL["function"], "description": "at \udcff"}}
    pair: Message = user([{"type": "text", "text": "a pair \ud83d\ude00 and \ud800"}])
    talk = talking(tokenizer, messages=[user("a \udcff name")], tools=[tool])
    async with talk as (dialogue, engine, served):
        await dialogue.reply(PARAMS)
        dialogue.extend([pair], [tool])
        await dialogue.reply(PARAMS)
    assert [message["content"] for message in dialogue.messages[:2]] == ["a \ufffd name", "Fine."]
    text = last_prompt(engine, served)
    assert "a \ufffd name" in text and "at \ufffd" in text and "a pair 😀 and \ufffd" in text
    assert dialogue.forks == []


async def test_the_callers_messages_are_not_shared(tokenizer: Any) -> None:
    first, new = [dict(message) for message in FIRST], user("More.")
    async with talking(tokenizer, messages=first) as (dialogue, _, _):
        await dialogue.reply(PARAMS)
        dialogue.extend([new])
        first[0]["content"] = new["content"] = "changed behind its back"
        await dialogue.reply(PARAMS)
    contents = [message["content"] for message in dialogue.messages]
    assert contents == ["Be brief.", "Hello.", "Fine.", "More.", "Fine."]


async def test_replies_are_taken_apart_and_extends_are_one_delta(tokenizer: Any) -> None:
    """Templates group tool results: rendered one by one they would read otherwise."""
    replies = call(at="x") + call(at="y"), "Let me look. " + call(at="z")
    policy = lambda request: replies[request.call]
    params = {"max_new_tokens": 128, "stop_token_ids": [5]}
    async with talking(tokenizer, policy) as (dialogue, engine, served):
        first = await dialogue.reply(params)
        for parsed_call in first.parsed.tool_calls:
            dialogue.extend([tool_result(parsed_call.id, f"seen {parsed_call.span}")])
        reply = await dialogue.reply(params)
    assert_templates_own(dialogue, engine, served)
    assert reply.text == replies[1]
    assert reply.parsed.ok_calls[0].arguments == {"at": "z"}
    assert reply.message["tool_calls"][0]["function"]["name"] == "look"
    ids = [parsed.id for each in (first, reply) for parsed in each.parsed.tool_calls]
    assert len(set(ids)) == 3, "no two calls of an episode have one id"
    # Mistral's template takes no other
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    node = reply.node
    assert node is not None and node.ids.tolist() == engine.log[1].output_ids
    recorded = node.tree.turn(node.index, excluded=None).sampling_params
    assert recorded == {**params, "stop_token_ids": sorted([5, tokenizer.eos_token_id])}
    assert engine.log[1].sampling_params == recorded, "what is recorded is what was sent"


CHANGED = (
    "the tool list changed, and the prompt that was already served contains the tools "
    "(added: listen)"
)


@pytest.mark.parametrize(
    ("lists", "forks"),
    [([[TOOL, OTHER]], [CHANGED]), ([[dict(TOOL)]], []), ([[], [TOOL]], [])],
    ids=["other tools", "the same", "none, and the same before the next turn"],
)
async def test_only_another_tool_list_forks(tokenizer: Any, lists: Any, forks: Any) -> None:
    async with talking(tokenizer) as (dialogue, engine, served):
        await dialogue.reply(PARAMS)
        for tools in lists:
            dialogue.extend([user("Again.")], tools)
        await dialogue.reply(PARAMS)
    assert (dialogue.forks, dialogue.tools) == (forks, lists[-1])
    assert_templates_own(dialogue, engine, served, lists[-1])
    trajectories = dialogue.session.trajectories()
    assert len(trajectories) == 1 + len(forks)
    sampled = sum(len(entry.output_ids) for entry in engine.log)
    assert sum(trajectory.trained_tokens for trajectory in trajectories) == sampled


@pytest.mark.parametrize("added", [(), ("And now?",)])
async def test_what_follows_a_failed_request(tokenizer: Any, added: tuple[str, ...]) -> None:
    async with talking(tokenizer) as (dialogue, engine, served):
        if added:
            await dialogue.reply(PARAMS)
            dialogue.extend([user("Again.")])
        with pytest.raises(UsageError):
            await dialogue.reply({**PARAMS, "temperatur": 1})
        dialogue.extend([user(text) for text in added], tools=[TOOL, OTHER])
        await dialogue.reply(PARAMS)
        await dialogue.settle()
    what = "messages" if added else "tools"
    assert dialogue.forks == [f"{what} were added after a request that failed"]
    assert not dialogue.mismatches
    assert_templates_own(dialogue, engine, served, [TOOL, OTHER])


def shift(change: int) -> Any:
    """Return a change of a derivation: text that is appended begins elsewhere."""
    return lambda found: RenderedDelta(found.whole, found.cut + change, found.rewritten)


@pytest.mark.parametrize("verify", ["sample", "always"])
@pytest.mark.parametrize("change", [shift(1), shift(-1), shift(8)])
async def test_a_wrong_delta_excludes_the_episode(tokenizer: Any, verify: Any, change: Any) -> None:
    async with talking(tokenizer, verify=verify) as (dialogue, _, served):
        await exchange(dialogue, 3)
        derive = served.template.parts.deltas.derive
        served.template.parts.deltas.derive = lambda *args, **more: change(derive(*args, **more))  # type: ignore[method-assign]
        await dialogue.reply(PARAMS)
        served.template.parts.deltas.derive = derive  # type: ignore[method-assign]
        await exchange(dialogue, 2)
        await dialogue.settle()
    assert sum(dialogue.mismatches.values()) >= 1
    trajectories = dialogue.session.trajectories()
    assert sum(trajectory.trained_tokens for trajectory in trajectories) == 0
    excluded = {turn.excluded for trajectory in trajectories for turn in trajectory.turns}
    assert all(str(reason).startswith("verification: ") for reason in excluded)


@pytest.mark.parametrize("where", ["prompt", "delta"])
async def test_wrong_tokens_of_the_right_text_are_found(tokenizer: Any, where: str) -> None:
    """The text is right, and split into other tokens than the tokenizer splits it into."""
    async with talking(tokenizer) as (dialogue, _, served):
        encoder = served.template.encoder
        encode, split = encoder.encode, list[Any]()

        def encoded(text: str, bodies: Any = (), *, previous: int | None = None) -> list[int]:
            ids = encode(text, bodies, previous=previous)
            if (previous is None) != (where == "prompt") or split:
                return ids
            words = [
                place
                for place, index in enumerate(ids)
                if len(encoder.text_of(index)) > 1 and index not in encoder.control_ids
            ]
            split.append(words[0])
            letters = [encode(each, previous=0)[0] for each in encoder.text_of(ids[words[0]])]
            return [*ids[: words[0]], *letters, *ids[words[0] + 1 :]]

        encoder.encode = encoded  # type: ignore[method-assign]
        await exchange(dialogue, 3)
        await dialogue.settle()
    assert split
    assert dialogue.mismatches == {f"{where}: tokens": 1}
    assert dialogue.session.trajectories()[0].trained_tokens == 0


@pytest.mark.parametrize("hook", ["prompt_hook", "delta_hook"])
async def test_a_hooks_ids_are_served_compared_and_counted(tokenizer: Any, hook: str) -> None:
    async def run(change: Sequence[int]) -> tuple[Conversation, EmbeddedEngine]:
        given = {hook: lambda _, ids: [*ids.tolist(), *change]}
        async with talking(tokenizer, **given) as (dialogue, engine, _):  # type: ignore[arg-type]
            await exchange(dialogue, 2)
            await dialogue.reply(PARAMS)
            await dialogue.settle()
        return dialogue, engine

    same, _ = await run([])
    assert same.mismatches == {} and same.session.trajectories()[0].trained_tokens > 0
    other, engine = await run([7])
    assert other.mismatches == {hook: 1 if hook == "prompt_hook" else 2}
    trajectories, last = other.session.trajectories(), engine.log[-1]
    assert sum(trajectory.trained_tokens for trajectory in trajectories) == 0
    assert trajectories[0].input_ids.tolist() == [*last.input_ids.tolist(), *last.output_ids]


async def test_checks_under_way_are_dropped_with_a_cancelled_episode(tokenizer: Any) -> None:
    release = threading.Event()
    async with talking(tokenizer, verify="always") as (dialogue, _, served):
        served.template.verifier.check = lambda given: str(release.wait(60))  # type: ignore[assignment, method-assign]
        await exchange(dialogue, 8)
        await dialogue.reply(PARAMS)
        [*_, under_way] = dialogue._checks
        dialogue.cancel_checks()
        await asyncio.gather(under_way, return_exceptions=True)
        release.set()
        assert under_way.cancelled()
    assert dialogue.mismatches == {}


async def test_another_way_to_generate_and_to_parse(tokenizer: Any) -> None:
    requests: list[GenerateRequest] = []
    ids = np.array([100, tokenizer.eos_token_id], dtype=np.int32)

    async def generate(request: GenerateRequest) -> Completion:
        requests.append(request)
        logprobs = np.array(reference_logprobs(request.input_ids, ids.tolist()), dtype=np.float32)
        return Completion(ids, logprobs, "stop", matched=tokenizer.eos_token_id)

    async with talking(tokenizer, generate=generate) as (dialogue, engine, _):
        reply = await dialogue.reply(PARAMS)
        dialogue.extend([user("x")])
        await dialogue.reply(PARAMS)
    assert engine.log == [] and reply.text == tokenizer.decode([100])
    first, second = requests
    assert isinstance(first, EncodedRequest)
    assert first.input_ids_json == ",".join(map(str, first.input_ids.tolist())).encode()
    sent = [*first.input_ids.tolist(), *ids.tolist()]
    assert second.input_ids.tolist()[: len(sent)] == sent
    parse = lambda said, *_: ParsedReply(content=said.upper())
    async with talking(tokenizer, "Fine.", parse=parse) as (dialogue, engine, _):
        reply = await dialogue.reply(PARAMS)
    assert reply.message["content"] == "FINE." and reply.text == "Fine."
    assert reply.node.ids.tolist() == engine.log[0].output_ids  # type: ignore[union-attr]


async def test_a_thought_that_nothing_opens_is_no_content(tokenizer: Any) -> None:
    """A stream of the endpoint cannot wait for the closing tag; an episode can."""
    async with talking(tokenizer, "Hm.</think>Yes.") as (dialogue, _, _):
        reply = await dialogue.reply(PARAMS)
    assert (reply.parsed.reasoning, reply.parsed.content) == ("Hm.", "Yes.")


async def test_text_that_history_does_not_show_is_counted_and_trained(tokenizer: Any) -> None:
    said = call(at="it").replace(', "arg', ', "why": "because", "arg')
    async with talking(tokenizer, said) as (dialogue, engine, _):
        for _ in range(3):
            reply = await dialogue.reply(PARAMS)
            dialogue.extend([tool_result(reply.message["tool_calls"][0]["id"])])
        await dialogue.settle()
    assert (dialogue.forks, dialogue.mismatches) == ([], {"unshown": 2})
    assert "because" in tokenizer.decode(engine.log[2].input_ids)
    turns = [turn for one in dialogue.session.trajectories() for turn in one.turns]
    assert [turn.excluded for turn in turns] == [None] * 3
