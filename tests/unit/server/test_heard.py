"""What a session has heard: known again by its bytes alone, and the same outcome as for a request that is read whole."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.worlds import TOOL

from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.heard import NOTHING, Heard, Hearings, body_key, key_of, text_of
from toolroll.rollout.server.turns import ids_json
from toolroll.rollout.testing import Reply, load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}
THINKING = "<think>\nWhat now?\n</think>\n\n"


def asked(arguments: Any, **more: Any) -> dict[str, Any]:
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def read(hearings: Hearings, messages: list[Any]) -> tuple[Heard, int]:
    """`messages` read by what was heard before, and how many of them were known."""
    text = text_of(messages)
    before = hearings.begin(text)
    new = messages[len(before.messages) :]
    said = before.read_on(text, key_of(before.key, new), new, developer=False)
    hearings.keep(said, None, before)
    return said, len(before.messages)


def outcome(said: Heard) -> Any:
    """All that a request's outcome can depend on, told apart by type too."""
    return (said.text, said.key, orjson.dumps(said.messages), said.ends, said.echo.digest, vars(said.echo))


TALK: list[Any] = [USER, asked('{"at": 1}'), {"role": "tool", "tool_call_id": "c1", "content": "seen"}, USER]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (asked({"at": 1}), asked({"at": True})),
        (asked({"at": 1}), asked({"at": 1.0})),
        (asked({"at": 0.0}), asked({"at": -0.0})),
        (asked({"at": 1, "on": 2}), asked({"on": 2, "at": 1})),
        (asked('{"at": 1}'), asked({"at": 1})),
        (asked("{}"), asked("{}", reasoning_content="Hm")),
        (asked("{}", reasoning_content="Hm"), asked("{}", reasoning_content="Hm.")),
        (asked("{}", content=None), asked("{}", content="")),
        ({"role": "assistant", "content": "\u00e9"}, {"role": "assistant", "content": "e\u0301"}),
        ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": 'a"},{"role":"user","content":"b'}),
        ({"role": "assistant", "content": "a"}, {"content": "a", "role": "assistant"}),
        ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a", "refusal": None}),
        ({"role": "assistant", "content": "a\ufffd"}, {"role": "assistant", "content": "a"}),
    ],
)
def test_what_differs_in_anything_is_not_known(one: Any, other: Any) -> None:
    for first, second in ((one, other), (other, one)):
        hearings = Hearings()
        read(hearings, [USER, first, USER])
        assert hearings.begin(text_of([USER, second, USER, USER])) is NOTHING
        said, known = read(hearings, [USER, second, USER, USER])
        assert known == 0
        assert outcome(said) == outcome(read(Hearings(), [USER, second, USER, USER])[0])
        assert read(hearings, [USER, first, USER, USER])[1] == 3


def test_a_conversation_that_goes_on_is_read_from_where_it_was() -> None:
    hearings = Hearings()
    known = [read(hearings, TALK[:length])[1] for length in (1, 3, 4, 4)]
    assert known == [0, 1, 3, 4]
    assert read(hearings, [*TALK, asked("{}", content="x"), USER])[1] == 4
    assert read(hearings, TALK)[1] == 0  # what was heard has gone on: its beginning is read anew


def test_conversations_side_by_side_and_no_more_of_them_than_are_kept() -> None:
    hearings = Hearings()
    talks: list[list[Any]] = [[{"role": "user", "content": f"Hi {at}"}] for at in range(8)]
    assert [read(hearings, talk)[1] for talk in talks] == [0] * 8
    assert [read(hearings, [*talk, USER])[1] for talk in talks] == [1] * 8
    read(hearings, TALK)
    assert [read(hearings, [*talk, USER, USER])[1] for talk in talks[1:]] == [2] * 7
    assert read(hearings, [*talks[0], USER, USER])[1] == 0


def test_long_texts_are_not_kept_beside_others() -> None:
    hearings = Hearings()
    talks: list[list[Any]] = [[{"role": "user", "content": f"{at}" * 9_000_000}] for at in range(2)]
    for talk in talks:
        read(hearings, talk)
    assert [len(hearings.begin(text_of([*talk, USER])).messages) for talk in talks] == [0, 1]


def test_a_message_is_refused_by_its_place_in_the_whole() -> None:
    hearings = Hearings()
    read(hearings, TALK)
    for wrong, param in ((3, "messages[4]"), ({"role": "user", "content": 3}, "messages[4].content")):
        with pytest.raises(ApiError) as refused:
            read(hearings, [*TALK, wrong])
        assert refused.value.param == param
    with pytest.raises(ApiError, match="the last message is the assistant's"):
        read(hearings, [*TALK, {"role": "assistant", "content": "a"}])
    with pytest.raises(ApiError, match="the body is no JSON"):
        read(hearings, [*TALK, {"role": "user", "content": "\ud800"}])
    assert read(hearings, [*TALK, USER])[1] == 4


TEXTS = st.sampled_from(["", "a", "b", 'a"},{', "]", "\u00e9", "<think>"])
VALUES = st.sampled_from([1, True, 1.0, 0, -0.0, False, None, "1", [1], [True]])
MESSAGES: Any = st.one_of(
    st.builds(lambda text, name: {"role": "user", "content": text, **name}, TEXTS, st.sampled_from([{}, {"name": "n"}])),
    st.builds(lambda text, more: {"role": "assistant", "content": text, **more}, TEXTS, st.sampled_from([{}, {"reasoning": "r"}])),
    st.builds(lambda value, at: asked({"x": value, "y": 1} if at else {"y": 1, "x": value}), VALUES, st.booleans()),
    st.builds(lambda text, at: {"role": "tool", "tool_call_id": f"c{at}", "content": text}, TEXTS, st.integers(0, 2)),
)
LAST: Any = {"role": "user", "content": "last"}


@given(st.lists(st.lists(MESSAGES, max_size=4), max_size=6), st.data())
def test_the_outcome_is_that_of_a_request_that_is_read_whole(talks: list[list[Any]], data: st.DataObject) -> None:
    hearings, sent = Hearings(), list[list[Any]]()
    for talk in talks:
        begun: list[Any] = data.draw(st.sampled_from(sent)) if sent else []
        messages = json.loads(json.dumps([*begun, *talk, LAST]))
        sent.append(messages)
        said, known = read(hearings, messages)
        assert outcome(said) == outcome(read(Hearings(), messages)[0])
        assert text_of(said.messages[:known]) == text_of(read(Hearings(), messages)[0].messages[:known])


def test_a_retrys_key_depends_on_the_whole_body_and_not_on_what_was_heard() -> None:
    def key(body: Any, known: int) -> bytes:
        messages = body["messages"]
        return body_key("chat", body, key_of(key_of(b"", messages[:known]), messages[known:]))

    body = {"messages": TALK, "model": "m", "temperature": 0.5}
    assert len({key(body, known) for known in range(5)}) == 1
    assert key({"temperature": 0.5, "model": "m", "messages": [dict(reversed(message.items())) for message in TALK]}, 2) == key(
        body, 0
    )
    changed = [
        {**body, "temperature": 0.6},
        {**body, "messages": TALK[:3]},
        {**body, "messages": [*TALK, USER]},
        {**body, "messages": [{"role": "user", "content": "Ho"}, *TALK[1:]]},
        {**body, "messages": [USER, asked({"at": 1}), *TALK[2:]]},
        {**body, "messages": [USER, asked({"at": True}), *TALK[2:]]},
    ]
    assert len({key(body, 0), *(key(other, 1) for other in changed)}) == 7


def test_ids_as_json() -> None:
    ids = load_embedded_tokenizer().encode("a b c")
    array = np.array(ids, dtype=np.int32)
    empty = array[:0]
    assert json.loads(b"[" + ids_json(array, empty, ids_json(array[::2]), array) + b"]") == [*ids, *ids[::2], *ids]
    assert ids_json(empty, empty) == b""


# --- over the wire ---------------------------------------------------------------------------------------------------------


async def post(bench: Bench, messages: list[Any], **more: Any) -> Any:
    status, answer = await bench.post("/sessions/s/v1/chat/completions", {"messages": messages, "tools": [TOOL], **more})
    assert status == 200, answer
    return answer


def known(bench: Bench, messages: list[Any]) -> int:
    return len(bench.endpoint.sessions.find("s").hearings.begin(text_of(messages)).messages)


async def grown(bench: Bench, turns: int) -> list[list[Any]]:
    """A conversation of so many turns; what its client sent, request by request, and what it would send next."""
    sent = [[USER]]
    for _ in range(turns):
        message = (await post(bench, sent[-1]))["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": it["id"], "content": "seen"} for it in message.get("tool_calls") or ()]
        sent.append([*sent[-1], message, *(results or [USER])])
    return sent


async def test_only_what_is_new_is_read() -> None:
    said = [THINKING + "Well.", call(at="x", b=[1]), "Done."]
    async with endpoint(load_embedded_tokenizer(), lambda request: said[request.call % 3]) as bench:
        sent = await grown(bench, 6)
        assert known(bench, sent[-1]) == len(sent[-2])
        heard = bench.endpoint.sessions.find("s").hearings.begin(text_of(sent[-1]))
        assert heard.messages == read(Hearings(), sent[-2])[0].messages
        repeated = heard.repeated
        assert repeated is not None and repeated.served == repeated.turn.messages() and repeated.length == len(sent[-2]) - 1
        for one, other in zip(heard.messages, repeated.served, strict=False):
            assert one is other, (one, other)  # held once
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 6


@pytest.mark.parametrize("change", ["a user's text", "a thought", "a thought left out", "arguments", "a result", "a message left out"])
async def test_a_change_far_behind_what_is_known_is_seen(change: str) -> None:
    said = [THINKING + "Well." + call(at=1), "Go on.", "Well.", "Done.", "Done."]
    async with endpoint(load_embedded_tokenizer(), lambda request: said[request.call % 5]) as bench:
        messages = json.loads(json.dumps((await grown(bench, 4))[-1]))
        assert known(bench, messages) == len(messages) - 2
        if change == "a user's text":
            messages[0]["content"] = "Ho"
        elif change == "a thought":
            messages[1]["reasoning_content"] = "Something else."
        elif change == "a thought left out":
            del messages[1]["reasoning_content"]
        elif change == "arguments":
            messages[1]["tool_calls"][0]["function"]["arguments"] = '{"at": true}'
        elif change == "a result":
            messages[2]["content"] = "unseen"
        else:
            del messages[3:5]
        assert known(bench, messages) == 0
        answer = await post(bench, messages)
        whole = bench.endpoint.served.template.prompt(read(Hearings(), messages)[0].messages, [TOOL])
        if change == "a thought left out":
            [trajectory] = await bench.trajectories()
            assert len(trajectory["turns"]) == 5
        else:
            assert answer["prompt_token_ids"] == whole
            assert len(await bench.trajectories()) == 2


async def test_a_thought_changed_back_belongs_to_the_first_path() -> None:
    said = [THINKING + "Well.", "Go on.", "Well.", "Done.", "Done."]
    async with endpoint(load_embedded_tokenizer(), lambda request: said[request.call % 5]) as bench:
        messages = (await grown(bench, 2))[-1]
        other = [messages[0], {**messages[1], "reasoning_content": "Else."}, *messages[2:]]
        await post(bench, other)
        await post(bench, messages)
        await post(bench, [*other, {"role": "assistant", "content": "Mine."}, USER])
        trajectories = await bench.trajectories()
        assert sorted(len([turn for turn in found["turns"] if turn["excluded"] is None]) for found in trajectories) == [1, 1, 3]


async def test_a_turn_behind_a_sibling_of_what_is_known_is_another() -> None:
    """Two answers that say the same with other thoughts, and two that say the same behind them: the thoughts tell which goes on."""
    said = ["<think>\nOne.\n</think>\n\nWell.", "<think>\nTwo.\n</think>\n\nWell.", "Go on.", "Go on.", "Done."]
    async with endpoint(load_embedded_tokenizer(), lambda request: said[request.call]) as bench:
        answers = [choice["message"] for choice in (await post(bench, [USER], n=2))["choices"]]
        assert answers[0] != answers[1]
        last: Any = None
        for message in reversed(answers):
            last = (await post(bench, [USER, message, USER]))["choices"][0]["message"]
        await post(bench, [USER, answers[0], USER, last, USER])
        first, _, _, behind, end = [node for node, _ in bench.endpoint.sessions.find("s").trace]
        assert behind.parent is not None and behind.parent.parent == first
        assert end.parent is not None and end.parent.parent == behind
        await bench.trajectories()


async def test_siblings_are_told_apart_behind_what_is_known() -> None:
    """Of two equal answers with calls of other ids the one that is repeated goes on, however often the other has."""
    async with endpoint(load_embedded_tokenizer(), lambda request: Reply(call(at="x")), split="random") as bench:
        answers = [choice["message"] for choice in (await post(bench, [USER], n=2))["choices"]]
        for _ in range(2):
            for message in answers:
                [given] = message["tool_calls"]
                await post(bench, [USER, message, {"role": "tool", "tool_call_id": given["id"], "content": "seen"}])
        first, second, *later = [node for node, _ in bench.endpoint.sessions.find("s").trace]
        assert [node.parent and node.parent.parent for node in later] == [first, second] * 2
        await bench.trajectories()


SAID = ["<think>\nOne.\n</think>\n\nWell.", "<think>\nTwo.\n</think>\n\nWell.", "Go on.", "Never mind.", "Done."]


async def test_a_beginning_without_its_thoughts_leads_to_either_sibling() -> None:
    """It was heard as the first sibling's; what follows then was said behind the second one."""
    async with endpoint(load_embedded_tokenizer(), lambda request: SAID[request.call]) as bench:

        async def post(*messages: Any, n: int = 1) -> list[Any]:
            status, answer = await bench.post("/sessions/s/v1/chat/completions", {"messages": messages, "n": n})
            assert status == 200, answer
            return [choice["message"] for choice in answer["choices"]]

        _, two = await post(USER, n=2)
        [gone_on] = await post(USER, two, USER)
        bare = {"role": "assistant", "content": "Well."}
        await post(USER, bare, USER)
        await post(USER, bare, USER, gone_on, USER)
        live = bench.endpoint.sessions.find("s")
        _, _, behind_two, _, last = (node for node, _ in live.trace)
        assert last.parent is not None
        assert last.parent.parent == behind_two
        assert live.tree.forks == []


async def test_nothing_is_kept_of_a_request_without_an_answer() -> None:
    async with endpoint(load_embedded_tokenizer(), lambda request: "Well.", context_length=64) as bench:
        status, answer = await bench.post(
            "/sessions/s/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 200}]}
        )
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert bench.endpoint.sessions.find("s").hearings._kept == []


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (3, "messages[1]"),
        ({"role": "tool", "content": "x", "tool_call_id": {"a": 1}}, "messages[1].tool_call_id"),
        ({"role": "assistant", "tool_calls": 5}, "messages[1].tool_calls"),
        ({"role": "user"}, "messages[1].content"),
    ],
)
async def test_a_message_of_another_form_is_refused(message: Any, param: str) -> None:
    async with endpoint(load_embedded_tokenizer(), lambda request: "Well.") as bench:
        status, answer = await bench.post("/sessions/s/v1/chat/completions", {"messages": [USER, message, USER]})
        assert (status, answer["error"]["param"]) == (400, param), answer


async def test_arguments_of_very_many_levels_are_served() -> None:
    async with endpoint(load_embedded_tokenizer(), lambda request: "Well.") as bench:
        messages = [USER, asked("[" * 260 + "]" * 260), {"role": "tool", "tool_call_id": "c1", "content": "seen"}]
        status, answer = await bench.post("/sessions/s/v1/chat/completions", {"messages": messages})
        assert status == 200, answer
