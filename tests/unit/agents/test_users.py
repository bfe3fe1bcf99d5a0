"""Simulated users: the lines, and the HTTP client against a real local server with scripted
answers.
"""

from __future__ import annotations

import asyncio
from typing import Any, get_type_hints

import pytest
from aiohttp import web
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter, ValidationError
from support.chat import UNFINISHED, Answer, Seen, endpoint

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
from toolroll.rollout.errors import UsageError, UserSimulatorError


def says(content: Any, finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": content, **message}
    return {
        "choices": [{"index": 0, "message": said, "finish_reason": finish}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2},
    }


def fails(status: int, text: str = "no") -> Answer:
    return lambda body: web.Response(status=status, text=text)


def config_of(server: Seen, **fields: Any) -> UserConfig:
    return UserConfig(**{"base_url": f"{server.url}/", "model": "m", "backoff": 1.0, **fields})


def users_at(server: Seen, **fields: Any) -> OpenAIUsers:
    """Users whose client does not pause between its attempts."""
    config = config_of(server, **fields)
    client = ChatClient(config, sleep=lambda seconds: asyncio.sleep(0), jitter=lambda: 1.0)
    return OpenAIUsers(config, client=client)


async def test_the_roles_are_swapped_and_the_list_grows() -> None:
    async with (
        endpoint(says("I want {this}."), says(f"Bye. {STOP_MARKER}")) as server,
        users_at(server) as users,
    ):
        user = users.make()
        assert await user.reset("want {this} and {instruction}") == "I want {this}."
        assert is_stop(await user.step("Done."))
        first, second = (body["messages"] for body in server.bodies)
        assert [m["role"] for m in first] == ["system", "user"]
        assert "want {this} and {instruction}" in first[0]["content"]
        assert first[1]["content"] == "Hi! How can I help you today?"
        assert second == [
            *first,
            {"role": "assistant", "content": "I want {this}."},
            {"role": "user", "content": "Done."},
        ]
        metrics = user.metrics()
        assert metrics.pop("user_seconds") > 0  # type: ignore[attr-defined]
        assert metrics == {
            "user_calls": 2,
            "user_prompt_tokens": 14,
            "user_completion_tokens": 4,
            "user_retries": 0,
            "user_errors": 0,
        }
        assert user.messages[-1]["content"].startswith("Bye.")


async def test_the_request_is_one_that_the_openai_sdk_could_send() -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 50, "seed": 3}
    async with (
        endpoint(says("hi")) as server,
        users_at(server, **settings, extra_body={"top_k": 5}, api_key="k1") as users,
    ):
        await users.make().reset("x")
        (body,) = server.bodies
        assert body.pop("top_k") == 5
        assert set(body) <= set(get_type_hints(CompletionCreateParamsNonStreaming))
        TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body)
        assert {key: body[key] for key in settings} == settings
        assert server.keys[0] == "Bearer k1"
        await users.make(seed=8).reset("x")
        await users.make(seed=8).reset("x")
        await users.make(seed=9).reset("x")
        _, eight, again, nine = (body["seed"] for body in server.bodies)
        assert eight == again != nine
        assert 0 <= eight < 2**31


async def test_no_settings_no_fields() -> None:
    async with endpoint(says("hi")) as server, users_at(server) as users:
        await users.make().reset("x")
        assert set(server.bodies[0]) == {"model", "messages"}
        assert server.keys == [None]


async def hangs(body: dict[str, Any]) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    "empty", [None, "", "  ", "<think>###STOP###</think>", "<think>never closed ###STOP###"]
)
async def test_an_empty_answer_is_asked_again_with_another_seed(empty: str | None) -> None:
    async with (
        endpoint(
            says(empty, reasoning_content="###STOP###"), says("<think>hm</think> hi")
        ) as server,
        users_at(server, seed=1) as users,
    ):
        user = users.make()
        assert await user.reset("x") == "hi"
        assert [body["seed"] for body in server.bodies] == [1, 2]
        assert user.metrics()["user_calls"] == 2
        assert user.metrics()["user_retries"] == 1
    async with endpoint(says(empty)) as server, users_at(server, retries=1) as users:
        user = users.make()
        with pytest.raises(UserSimulatorError, match="2 replies without visible text"):
            await user.reset("x")
        assert [m["role"] for m in user.messages] == ["system"]


async def test_a_failed_request_is_the_users_failure_and_counted() -> None:
    async with (
        endpoint(fails(503), says("hi"), fails(400, "no such model")) as server,
        users_at(server) as users,
    ):
        user = users.make()
        assert await user.reset("x") == "hi"
        with pytest.raises(
            UserSimulatorError,
            match=r"^the user simulator at http.*/v1/chat/completions failed after 1 attempt: "
            r"HTTP 400: no such model",
        ):
            await user.step("y")
        metrics = user.metrics()
        assert [metrics[f"user_{name}"] for name in ("calls", "retries", "errors")] == [1, 1, 1]


@pytest.mark.parametrize("finish", UNFINISHED)
async def test_an_unfinished_answer_is_not_a_line_of_the_user(finish: str | None) -> None:
    cut = says("Yes, that is all. ###STO", finish)
    async with (
        endpoint(cut, says(f"Yes. {STOP_MARKER}"), cut) as server,
        users_at(server, retries=1, max_tokens=50, seed=1) as users,
    ):
        user = users.make()
        assert is_stop(await user.reset("x"))
        before = user.messages
        with pytest.raises(UserSimulatorError, match=f"finish_reason {finish!r}"):
            await user.step("Anything else?")
        assert user.messages == before
        # Only a truncated answer needs more room.
        more = 100 if finish == "length" else 50
        assert [body["max_tokens"] for body in server.bodies] == [50, more] * 2


@pytest.mark.parametrize("finish", UNFINISHED)
async def test_an_unfinished_verdict_is_not_a_verdict(finish: str | None) -> None:
    async with (
        endpoint(says("My order is W1."), says("Let me think: ", finish)) as server,
        users_at(server, retries=0, strategy="verify") as users,
    ):
        with pytest.raises(UserSimulatorError, match=f"finish_reason {finish!r}"):
            await users.make().reset("x")


async def test_a_refusal_is_not_a_line_of_the_user() -> None:
    refusal = says(None, refusal="I cannot pretend to be a customer.")
    async with endpoint(refusal) as server, users_at(server, retries=1) as users:
        with pytest.raises(UserSimulatorError, match="without visible text"):
            await users.make().reset("x")


async def test_a_failed_step_leaves_the_list_as_it_was() -> None:
    async with endpoint(says("one"), fails(400), says("two")) as server, users_at(server) as users:
        user = users.make()
        await user.reset("x")
        before = user.messages
        with pytest.raises(UserSimulatorError):
            await user.step("a")
        assert user.messages == before
        assert await user.step("b") == "two"


async def test_half_a_character_from_the_agent_is_sent_as_a_question_mark() -> None:
    async with endpoint(says("hi")) as server, users_at(server) as users:
        user = users.make()
        await user.reset("x")
        assert await user.step("a\ud800b") == "hi"
        assert server.bodies[-1]["messages"][-1]["content"] == "a?b"


async def test_cancelled_passes_through() -> None:
    arrived = asyncio.Event()

    async def wait(body: dict[str, Any]) -> web.Response:
        arrived.set()
        return await hangs(body)

    async with endpoint(wait) as server, users_at(server) as users:
        task = asyncio.create_task(users.make().reset("x"))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_concurrency_is_bounded_and_episodes_are_separate() -> None:
    running, most, three = 0, 0, asyncio.Barrier(3)

    async def count(body: dict[str, Any]) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await three.wait()
        running -= 1
        return web.json_response(says("I am " + body["messages"][0]["content"]))

    async with (
        endpoint(count) as server,
        users_at(server, max_concurrency=3, system_prompt="{instruction}") as users,
    ):
        lines = await asyncio.gather(*(users.make().reset(str(i)) for i in range(12)))
        assert lines == [f"I am {i}" for i in range(12)]
        assert most == 3


async def test_a_user_alone_opens_and_closes_its_own_client() -> None:
    async with endpoint(says("hi")) as server:
        user = OpenAIUser(config_of(server))
        with pytest.raises(UsageError, match="before reset"):
            await user.step("x")
        assert await user.reset("x") == "hi"
        await user.close()
        await user.close()


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = UserConfig(base_url="http://h/v1", model="m", api_key_env="A_KEY_FOR_TESTS")
    monkeypatch.delenv("A_KEY_FOR_TESTS", raising=False)
    with pytest.raises(UsageError, match="A_KEY_FOR_TESTS, which is not set"):
        OpenAIUsers(config)
    monkeypatch.setenv("A_KEY_FOR_TESTS", "s3cret")
    assert config.key() == "s3cret"
    assert "s3cret" not in repr(UserConfig(base_url="http://h/v1", model="m", api_key="s3cret"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "fields",
    [
        {"base_url": "h:1"},
        {"system_prompt": "no place"},
        {"extra_body": {"messages": []}},
        {"api_key": "a", "api_key_env": "b"},
        {"tempreature": 1},
        {"timeout": 0},
    ],
)
def test_a_wrong_config_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        UserConfig(**{"base_url": "http://h/v1", "model": "m", **fields})


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("hi", "hi"),
        ("<think>a</think>b<think>c</think> d", "b d"),
        ("a <think>b", "a"),
        ("thought</think>\n\nhi", "hi"),
        ("<think>a\nb</think>\nhi", "hi"),
        ("<think>", ""),
    ],
)
def test_visible_text(text: str, visible: str) -> None:
    assert visible_text(text) == visible


def test_the_stop_rule() -> None:
    assert is_stop("thanks ###STOP###")
    assert not is_stop("stop")
    assert is_stop("###END###", "###END###")


async def test_scripted_lines() -> None:
    user = ScriptedUser(["a", "b"])
    assert [await user.reset(""), await user.step("x")] == ["a", "b"]
    with pytest.raises(UserSimulatorError, match="2 lines"):
        await user.step("x")
    assert await user.reset("") == "a"
    assert user.metrics() == {"user_calls": 1}
    ever = ScriptedUser([], default="z")
    assert [await ever.reset(""), await ever.step("")] == ["z", "z"]
    await ever.close()
