"""What a request repeats of what was served: found whatever its client changed, and the key of a
retry.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from support.endpoints import Bench, endpoint
from support.episodes import call
from support.listed_environment import TOOL

from toolroll.endpoint import replies
from toolroll.endpoint.conversation.messages import read_messages
from toolroll.endpoint.conversation.template_cache import TemplateCache
from toolroll.endpoint.errors import ApiError
from toolroll.endpoint.http.json_response import JsonResponse
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.endpoint.sessions.pending import request_key
from toolroll.rollout.template import ChatTemplate
from toolroll.testing import Reply, load_embedded_tokenizer

USER: Any = {"role": "user", "content": "Hi"}


def asked(arguments: Any, **more: Any) -> dict[str, Any]:
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


TEMPLATES = TemplateCache(ChatTemplate(load_embedded_tokenizer()))
TALK: list[Any] = [
    USER,
    asked('{"at": 1}'),
    {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    USER,
]


def test_a_message_is_refused_by_its_place() -> None:
    for wrong, param in (
        (3, "messages[4]"),
        ({"role": "user", "content": 3}, "messages[4].content"),
    ):
        with pytest.raises(ApiError) as refused:
            read_messages([*TALK, wrong], TEMPLATES, IgnoredFields())
        assert refused.value.param == param
    with pytest.raises(ApiError, match="the last message is from the assistant"):
        read_messages([*TALK, {"role": "assistant", "content": "a"}], TEMPLATES, IgnoredFields())
    with pytest.raises(ApiError, match="messages is empty"):
        read_messages([], TEMPLATES, IgnoredFields())


def test_a_retrys_key_depends_on_the_whole_body_and_not_on_the_order_of_keys() -> None:
    body = {"messages": TALK, "model": "m", "temperature": 0.5}
    turned = {
        "temperature": 0.5,
        "model": "m",
        "messages": [dict(reversed(message.items())) for message in TALK],
    }
    assert request_key("chat", turned) == request_key("chat", body)
    changed = [
        {**body, "temperature": 0.6},
        {**body, "messages": TALK[:3]},
        {**body, "messages": [*TALK, USER]},
        {**body, "messages": [{"role": "user", "content": "Ho"}, *TALK[1:]]},
        {**body, "messages": [USER, asked({"at": 1}), *TALK[2:]]},
        {**body, "messages": [USER, asked({"at": 1.0}), *TALK[2:]]},
        {**body, "messages": [USER, asked({"at": True}), *TALK[2:]]},
    ]
    keys = {
        request_key("chat", body),
        request_key("text", body),
        *(request_key("chat", other) for other in changed),
    }
    assert len(keys) == len(changed) + 2


async def post(bench: Bench, messages: list[Any], **more: Any) -> Any:
    status, answer = await bench.post(
        "/sessions/s/v1/chat/completions", {"messages": messages, "tools": [TOOL], **more}
    )
    assert status == 200, answer
    return answer


async def test_equal_replies_after_siblings_belong_to_their_own_branch() -> None:
    """Two answers that say the same with other thoughts, and two that say the same behind them:
    the thoughts tell which goes on.
    """
    said = [
        "<think>\nOne.\n</think>\n\nWell.",
        "<think>\nTwo.\n</think>\n\nWell.",
        "Go on.",
        "Go on.",
        "Done.",
    ]
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


async def test_equal_siblings_are_told_apart_by_the_ids_of_their_calls() -> None:
    """Of two equal answers with calls of other ids the one that is repeated goes on, however
    often the other has.
    """
    async with endpoint(
        load_embedded_tokenizer(), lambda request: Reply(call(at="x")), split="random"
    ) as bench:
        answers = [choice["message"] for choice in (await post(bench, [USER], n=2))["choices"]]
        for _ in range(2):
            for message in answers:
                [given] = message["tool_calls"]
                await post(
                    bench,
                    [
                        USER,
                        message,
                        {"role": "tool", "tool_call_id": given["id"], "content": "seen"},
                    ],
                )
        first, second, *later = [node for node, _ in bench.endpoint.sessions.find("s").trace]
        assert [node.parent and node.parent.parent for node in later] == [first, second] * 2
        await bench.trajectories()


SAID = [
    "<think>\nOne.\n</think>\n\nWell.",
    "<think>\nTwo.\n</think>\n\nWell.",
    "Go on.",
    "Never mind.",
    "Done.",
]


async def test_a_reply_without_its_reasoning_matches_the_branch_of_the_next_reply() -> None:
    """It repeats the first sibling; what follows then was said after the second one."""
    async with endpoint(load_embedded_tokenizer(), lambda request: SAID[request.call]) as bench:

        async def post(*messages: Any, n: int = 1) -> list[Any]:
            status, answer = await bench.post(
                "/sessions/s/v1/chat/completions", {"messages": messages, "n": n}
            )
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
        status, answer = await bench.post(
            "/sessions/s/v1/chat/completions", {"messages": [USER, message, USER]}
        )
        assert (status, answer["error"]["param"]) == (400, param), answer


async def test_arguments_of_very_many_levels_are_served() -> None:
    async with endpoint(load_embedded_tokenizer(), lambda request: "Well.") as bench:
        messages = [
            USER,
            asked("[" * 260 + "]" * 260),
            {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        ]
        status, answer = await bench.post("/sessions/s/v1/chat/completions", {"messages": messages})
        assert status == 200, answer


CHAT = "/sessions/s/v1/chat/completions"
RETRY = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_retry_of_a_repeated_request_gets_the_last_answer(
    tokenizer: Any, tmp_path: Path, restarted: bool
) -> None:
    """The client sent the request again, so it has the first answer."""
    body = {"messages": [USER]}
    says = lambda request: f"Answer {request.index}."
    async with endpoint(tokenizer, says, out=tmp_path) as bench:
        _, last = [(await bench.post(CHAT, body))[1] for _ in range(2)]
        if not restarted:
            assert (await bench.post(CHAT, body, **RETRY))[1] == last
            return
    async with endpoint(tokenizer, says, out=tmp_path) as bench:
        assert (await bench.post(CHAT, body, **RETRY))[1] == last


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_written_is_not_kept_for_a_retry_but_written_again(
    tokenizer: Any, stream: bool
) -> None:
    """Neither the body, nor the prompt's ids as JSON text."""
    body = {"messages": [USER], "stream": stream}
    async with endpoint(tokenizer, lambda request: "Hello.") as bench:
        answers = []
        for headers in ({}, RETRY):
            async with bench.http.post(bench.url + CHAT, json=body, headers=headers) as response:
                answers.append(await response.read())
        assert answers[0] == answers[1]
        [reply] = bench.endpoint.sessions.find("s").pending.all()
        assert isinstance(reply, replies.Reply) and "prompt_json" not in vars(reply.result)
        gc.collect()  # the responses of other tests
        responses = [found for found in gc.get_objects() if isinstance(found, JsonResponse)]
        assert stream or responses
        assert all(found.body is None for found in responses)


@pytest.mark.parametrize("cut", [False, True])
async def test_a_call_without_arguments_that_is_sent_back_unchanged_does_not_fork(
    tokenizer: Any, cut: bool
) -> None:
    first = Reply("<tool_call>" if cut else "<tool_call></tool_call>", stop=not cut)
    async with endpoint(tokenizer, lambda request: "Done." if request.call else first) as bench:
        _, answer = await bench.post(CHAT, {"messages": [USER], "tools": [TOOL]})
        message = answer["choices"][0]["message"]
        [made] = message["tool_calls"]
        assert made["function"]["arguments"] == ""
        result = {"role": "tool", "tool_call_id": made["id"], "content": "no arguments"}
        await bench.post(CHAT, {"messages": [USER, message, result], "tools": [TOOL]})
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 2
