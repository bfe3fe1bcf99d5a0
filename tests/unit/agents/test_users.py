"""Simulated users: lines, the HTTP client, and the strategies by which a model plays a user."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_type_hints

import pytest
from aiohttp import web
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter, ValidationError
from support.chat import Seen, completion, endpoint, fails

from toolroll.agents.chat_client import ChatClient
from toolroll.agents.users import (
    STOP_MARKER,
    OpenAIUser,
    OpenAIUsers,
    ScriptedUser,
    UserConfig,
    is_stop,
    visible_text,
)
from toolroll.agents.users.strategies import approves, judging, spoken
from toolroll.rollout.errors import UsageError, UserSimulatorError


def config_of(server: Seen, **fields: Any) -> UserConfig:
    return UserConfig(**{"base_url": f"{server.url}/", "model": "m", "backoff": 1.0, **fields})


@asynccontextmanager
async def simulated(*answers: Any, **fields: Any) -> AsyncIterator[tuple[OpenAIUsers, Seen]]:
    """Users whose client does not pause between its attempts, and their server."""
    async with endpoint(*answers) as server:
        config = config_of(server, **fields)
        client = ChatClient(config, sleep=lambda seconds: asyncio.sleep(0), jitter=lambda: 1.0)
        async with OpenAIUsers(config, client=client) as users:
            yield users, server


async def test_the_roles_are_swapped_and_the_list_grows() -> None:
    """Half a character is sent as a question mark."""
    answers = completion("I want {this}."), completion(f"Bye. {STOP_MARKER}")
    async with simulated(*answers) as (users, server):
        user = users.make()
        assert await user.reset("want {this} and {instruction}") == "I want {this}."
        assert is_stop(await user.step("Done.\ud800"))
    first, second = (body.pop("messages") for body in server.bodies)
    assert (server.bodies, server.keys) == ([{"model": "m"}] * 2, [None] * 2)
    orders, greeting = first
    assert orders["role"] == "system" and "want {this} and {instruction}" in orders["content"]
    assert greeting == {"role": "user", "content": "Hi! How can I help you today?"}
    spoken = {"role": "assistant", "content": "I want {this}."}
    assert second == [*first, spoken, {"role": "user", "content": "Done.?"}]
    assert user.messages[-1]["content"].startswith("Bye.")
    names = "calls prompt_tokens completion_tokens retries errors".split()
    metrics = user.metrics()
    assert metrics == {
        **{f"user_{name}": n for name, n in zip(names, (2, 18, 8, 0, 0), strict=True)},
        "user_seconds": metrics["user_seconds"],
    }
    assert metrics["user_seconds"] > 0


async def test_the_request_is_one_that_the_openai_sdk_could_send() -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 50, "seed": 3}
    more: dict[str, Any] = {"extra_body": {"top_k": 5}, "api_key": "k1"}
    async with simulated(completion("hi"), **settings, **more) as (users, server):
        for seed in (None, 8, 8, 9):
            await users.make(seed=seed).reset("x")
    body, *others = server.bodies
    assert body.pop("top_k") == 5
    assert set(body) <= set(get_type_hints(CompletionCreateParamsNonStreaming))
    TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body)
    assert {key: body[key] for key in settings} == settings
    assert server.keys[0] == "Bearer k1"
    eight, again, nine = (other["seed"] for other in others)
    assert eight == again != nine
    assert 0 <= eight < 2**31


@pytest.mark.parametrize(
    "answer",
    [
        completion(None, reasoning_content="###STOP###"),
        completion("<think>open ###STOP###"),
        completion(None, refusal="I cannot pretend to be a customer."),
    ],
)
async def test_an_answer_without_text_is_tried_again_with_another_seed(answer: Any) -> None:
    async with simulated(answer, completion("<think>hm</think> hi"), seed=1) as (users, server):
        user = users.make()
        assert await user.reset("x") == "hi"
        assert [body["seed"] for body in server.bodies] == [1, 2]
        assert (user.metrics()["user_calls"], user.metrics()["user_retries"]) == (2, 1)
    async with simulated(answer, retries=1) as (users, server):
        user = users.make()
        with pytest.raises(UserSimulatorError, match="2 replies without visible text"):
            await user.reset("x")
        assert [message["role"] for message in user.messages] == ["system"]


async def test_a_failed_request_is_the_users_failure_and_counted() -> None:
    """A failed step leaves the list of messages as it was."""
    cut = completion("I am", finish="length")
    answers = fails(503), completion("hi"), fails(400, "no such model"), completion("two"), cut
    words = (
        r"^the user simulator at http.*/v1/chat/completions failed after 1 attempt: HTTP 400: no"
    )
    async with simulated(*answers) as (users, _):
        user = users.make()
        assert await user.reset("x") == "hi"
        before = user.messages
        with pytest.raises(UserSimulatorError, match=f"{words} such model"):
            await user.step("y")
        metrics = user.metrics()
        assert [metrics[f"user_{name}"] for name in ("calls", "retries", "errors")] == [1, 1, 1]
        assert user.messages == before
        assert await user.step("b") == "two"
        with pytest.raises(UserSimulatorError, match="token limit truncated"):
            await user.step("c")


async def test_concurrency_is_bounded_and_episodes_are_separate() -> None:
    running, most, three = 0, 0, asyncio.Barrier(3)

    async def count(body: dict[str, Any]) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await three.wait()
        running -= 1
        return web.json_response(completion("I am " + body["messages"][0]["content"]))

    async with simulated(count, max_concurrency=3, system_prompt="{instruction}") as (users, _):
        lines = await asyncio.gather(*(users.make().reset(str(i)) for i in range(12)))
        assert lines == [f"I am {i}" for i in range(12)]
        assert most == 3


async def test_a_user_alone_opens_and_closes_its_own_client() -> None:
    async with endpoint(completion("hi")) as server:
        user = OpenAIUser(config_of(server))
        with pytest.raises(UsageError, match="before reset"):
            await user.step("x")
        assert await user.reset("x") == "hi"
        await user.close()
        await user.close()


@pytest.mark.parametrize(
    "fields", [{"system_prompt": "no place"}, {"extra_body": {"messages": []}}]
)
def test_a_wrong_config_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        UserConfig(**{"base_url": "http://h/v1", "model": "m", **fields})


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("<think>a</think>b<think>c</think> d", "b d"),
        ("a <think>b", "a"),
        ("thought</think>\n\nhi", "hi"),
        ("<think>a\nb</think>\nhi", "hi"),
    ],
)
def test_visible_text(text: str, visible: str) -> None:
    assert visible_text(text) == visible


async def test_scripted_lines_the_stop_rule_and_verdicts() -> None:
    user = ScriptedUser(["a", "b"])
    assert [await user.reset(""), await user.step("x")] == ["a", "b"]
    with pytest.raises(UserSimulatorError, match="2 lines"):
        await user.step("x")
    assert await user.reset("") == "a"
    assert user.metrics() == {"user_calls": 1}
    ever = ScriptedUser([], default="z")
    assert [await ever.reset(""), await ever.step("")] == ["z", "z"]
    await ever.close()
    assert is_stop("###END###", "###END###") and not is_stop("stop")
    assert approves("Yes") and approves("no, I mean: YES.") and approves("hm")
    assert not approves("No.") and not approves("yes and no")
    assert len(judging([{"role": "system", "content": "x"}], "y")) == 1


# --- strategies: what the agent hears, and what the supervisor is asked ---------------------------


async def lines(answers: list[str], strategy: str, *replies: str, **settings: Any) -> Any:
    """What the user says at `reset` and after each of the agent's `replies`, its metrics, and the
    requests that `answers` were given to.
    """
    given: dict[str, Any] = {"strategy": strategy, "seed": 5, "retries": 1, **settings}
    async with simulated(*map(completion, answers), **given) as (users, server):
        user = users.make(seed=1)
        heard = [await user.reset("You want {line}, not {transcript}.")]
        heard += [await user.step(reply) for reply in replies]
        assert [m["content"] for m in user.messages if m["role"] == "assistant"] == heard
        return heard, user.metrics(), server.bodies


async def test_react_hears_the_response_only_and_needs_one() -> None:
    answers = [
        "Thought:\nI say ###STOP### later.\n\nUser Response:\nI want a refund.",
        "**Thought:** fine\n**User Response:** ###STOP###",
    ]
    heard, _, (first, second) = await lines(answers, "react", "Your order?")
    assert heard == ["I want a refund.", "###STOP###"]
    assert "User Response:\n<the one line that is sent>" in first["messages"][0]["content"]
    assert "later" not in str(second["messages"]), "a thought is not kept"
    heard, _, (first, second) = await lines(["Just words.", "Response: Hello."], "react")
    assert heard == ["Hello."] and first["seed"] != second["seed"]
    with pytest.raises(UserSimulatorError, match="without visible text"):
        await lines(["Just words."], "react")


async def test_verify_says_a_refused_line_anew_but_not_for_ever() -> None:
    answers = ["A lie.", "No.", "The truth.", "<think>no?</think>Yes."]
    heard, metrics, (lie, verdict, truth, _) = await lines(answers, "verify")
    assert heard == ["The truth."]
    assert (metrics["user_revisions"], metrics["user_calls"]) == (1, 4)
    text = verdict["messages"][0]["content"]
    assert "You want {line}, not {transcript}." in text, "braces in the orders are text"
    assert "Agent: Hi! How can I help you today?" in text and "A lie." in text
    assert lie["messages"] == truth["messages"]
    assert lie["seed"] != truth["seed"], "else it would lie again"
    refused = ["One.", "no", "Two.", "no", "Three.", "no"]
    heard, metrics, bodies = await lines(refused, "verify")
    assert (heard, len(bodies), metrics["user_revisions"]) == (["Three."], 5, 2)
    heard, _, bodies = await lines(refused, "verify", revisions=0)
    assert (heard, len(bodies)) == (["One."], 1)


async def test_reflection_mends_a_refused_line() -> None:
    mended = "Reflection:\nIt is a lie.\n\nUser Response:\nThe truth."
    answers = ["A lie.", "no", mended, "yes", "Bye.", "yes"]
    heard, _, bodies = await lines(answers, "reflection", "And now?")
    assert heard == ["The truth.", "Bye."]
    assert "A lie." not in str(bodies[4]["messages"]), "what was refused was never said"
    assert "Customer: The truth." in bodies[5]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Thought: a\nUser Response: b", "b"),
        ("User Response: a\nUser Response:\n\nb c\nd", "b c\nd"),
        ("thought\n  user response:x", "x"),
        ("The User Response: is here", ""),
        ("User Response:", ""),
    ],
)
def test_spoken(text: str, line: str) -> None:
    assert spoken(text) == line
