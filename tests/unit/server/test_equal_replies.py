"""Which of several equal replies a request goes on from."""

from __future__ import annotations

import pytest
from support.episodes import call
from support.listed_environment import TOOL
from support.served import USER, assistant, serve, tool_results

from toolroll.testing import Reply

SIBLINGS = ["<think>\nOne.\n</think>\n\nWell.", "<think>\nTwo.\n</think>\n\nWell."]


async def test_equal_replies_after_siblings_belong_to_their_own_branch() -> None:
    """Two answers that say the same with other thoughts, and two that say the same behind them:
    the thoughts tell which goes on.
    """
    async with serve([*SIBLINGS, "Go on.", "Go on.", "Done."]) as bench:
        first, second = (choice["message"] for choice in (await bench.ask(USER, n=2))["choices"])
        assert first != second
        await bench.chat(USER, second, USER, tools=[])
        last = await bench.chat(USER, first, USER, tools=[])
        await bench.chat(USER, first, USER, last, USER, tools=[])
        sampled, _, _, behind, end = (n for n, _ in bench.endpoint.sessions.find("s").trace)
        assert behind.parent is not None and behind.parent.parent == sampled
        assert end.parent is not None and end.parent.parent == behind
        await bench.trajectories()


async def test_equal_siblings_are_told_apart_by_the_ids_of_their_calls() -> None:
    """Of two equal answers with calls of other ids the one that is repeated goes on, however
    often the other has.
    """
    async with serve(call(at="x"), split="random") as bench:
        choices = (await bench.ask(USER, n=2, tools=[TOOL]))["choices"]
        for _ in range(2):
            for choice in choices:
                await bench.chat(USER, choice["message"], *tool_results(choice["message"]))
        first, second, *later = (node for node, _ in bench.endpoint.sessions.find("s").trace)
        assert [node.parent and node.parent.parent for node in later] == [first, second] * 2
        await bench.trajectories()


async def test_a_reply_without_reasoning_is_on_the_next_replys_branch() -> None:
    """It repeats the first sibling; what follows then was said after the second one."""
    async with serve([*SIBLINGS, "Go on.", "Never mind.", "Done."]) as bench:
        _, second = (choice["message"] for choice in (await bench.ask(USER, n=2))["choices"])
        next_reply = await bench.chat(USER, second, USER, tools=[])
        bare = assistant("Well.")
        await bench.chat(USER, bare, USER, tools=[])
        await bench.chat(USER, bare, USER, next_reply, USER, tools=[])
        live = bench.endpoint.sessions.find("s")
        _, _, behind_second, _, last = (node for node, _ in live.trace)
        assert last.parent is not None and last.parent.parent == behind_second
        assert live.tree.forks == []


@pytest.mark.parametrize("cut", [False, True])
async def test_a_call_without_arguments_forks_nothing(cut: bool) -> None:
    first = Reply("<tool_call>" if cut else "<tool_call></tool_call>", stop=not cut)
    async with serve([first, "Done."]) as bench:
        reply = await bench.chat(USER)
        [tool_call] = reply["tool_calls"]
        assert tool_call["function"]["arguments"] == ""
        await bench.chat(USER, reply, *tool_results(reply))
        await bench.one_trajectory(turns=2)


async def test_arguments_of_very_many_levels_are_served() -> None:
    function = {"name": "look", "arguments": "[" * 260 + "]" * 260}
    reply = {"role": "assistant", "tool_calls": [{"id": "c1", "function": function}]}
    async with serve() as bench:
        await bench.ask(USER, reply, *tool_results(reply))
