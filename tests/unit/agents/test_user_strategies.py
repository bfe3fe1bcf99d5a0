"""The ways for a model to play a user: what the agent hears, and what the supervisor is asked."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat import Seen, completion, endpoint

from toolroll.agents.users import OpenAIUsers, UserConfig
from toolroll.agents.users.strategies import approves, judging, spoken
from toolroll.rollout.errors import UserSimulatorError


async def lines(
    server: Seen, strategy: Any, *said: str, **more: Any
) -> tuple[list[str], dict[str, float]]:
    """What the user says at `reset` and in answer to each of `said`, and its metrics."""
    config = UserConfig(
        base_url=server.url, model="m", strategy=strategy, seed=5, retries=1, **more
    )
    async with OpenAIUsers(config) as users:
        user = users.make(seed=1)
        found = [await user.reset("You want {line}, not {transcript}.")]
        found += [await user.step(text) for text in said]
        assert [
            message["content"] for message in user.messages if message["role"] == "assistant"
        ] == found
        return found, dict(user.metrics())


async def test_react_thinks_and_only_the_response_is_heard() -> None:
    answers = [
        "Thought:\nI say ###STOP### later.\n\nUser Response:\nI want a refund.",
        "**Thought:** fine\n**User Response:** ###STOP###",
    ]
    async with endpoint(*map(completion, answers)) as server:
        found, _ = await lines(server, "react", "Your order?")
    assert found == ["I want a refund.", "###STOP###"]
    assert (
        "User Response:\n<the one line that is sent>" in server.bodies[0]["messages"][0]["content"]
    )
    assert "later" not in str(server.bodies[1]["messages"]), "a thought is not kept"


async def test_react_without_a_response_is_asked_again_and_then_a_failure() -> None:
    async with endpoint(completion("Just words."), completion("Response: Hello.")) as server:
        assert (await lines(server, "react"))[0] == ["Hello."]
        assert server.bodies[0]["seed"] != server.bodies[1]["seed"]
    async with endpoint(completion("Just words.")) as server:
        with pytest.raises(UserSimulatorError, match="without visible text"):
            await lines(server, "react")


async def test_verify_says_a_refused_line_anew() -> None:
    answers = ["A lie.", "No.", "The truth.", "<think>no?</think>Yes."]
    async with endpoint(*map(completion, answers)) as server:
        found, metrics = await lines(server, "verify")
    assert found == ["The truth."]
    assert (metrics["user_revisions"], metrics["user_calls"]) == (1, 4)
    judged = server.bodies[1]["messages"][0]["content"]
    assert "You want {line}, not {transcript}." in judged, "braces in the orders are text"
    assert "Agent: Hi! How can I help you today?" in judged
    assert "A lie." in judged
    assert server.bodies[0]["messages"] == server.bodies[2]["messages"]
    assert server.bodies[0]["seed"] != server.bodies[2]["seed"], "else it would lie again"


async def test_what_is_always_refused_is_said_in_the_end() -> None:
    async with endpoint(*map(completion, ["One.", "no", "Two.", "no", "Three.", "no"])) as server:
        found, metrics = await lines(server, "verify")
    assert (found, len(server.bodies), metrics["user_revisions"]) == (["Three."], 5, 2)
    async with endpoint(*map(completion, ["One.", "no"])) as server:
        assert (await lines(server, "verify", revisions=0))[0] == ["One."]
        assert len(server.bodies) == 1


async def test_reflection_mends_a_refused_line() -> None:
    answers = [
        "A lie.",
        "no",
        "Reflection:\nIt is a lie.\n\nUser Response:\nThe truth.",
        "yes",
        "Bye.",
        "yes",
    ]
    async with endpoint(*map(completion, answers)) as server:
        found, _ = await lines(server, "reflection", "And now?")
    assert found == ["The truth.", "Bye."]
    assert "A lie." not in str(server.bodies[4]["messages"]), "what was refused was never said"
    assert "Customer: The truth." in server.bodies[5]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Thought: a\nUser Response: b", "b"),
        ("User Response: a\nUser Response:\n\nb c\nd", "b c\nd"),
        ("thought\n  user response:x", "x"),
        ("The User Response: is here", ""),
        ("User Response:", ""),
        ("", ""),
    ],
)
def test_spoken(text: str, line: str) -> None:
    assert spoken(text) == line


def test_verdicts() -> None:
    assert approves("Yes") and approves("no, I mean: YES.") and approves("hm")
    assert not approves("No.") and not approves("yes and no")
    assert len(judging([{"role": "system", "content": "x"}], "y")) == 1
