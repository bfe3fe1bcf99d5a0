"""Clients of the recorded shape of Codex and of Claude Code: append-only histories have no forks,
and every sampled token is trained exactly once.
"""

from __future__ import annotations

from typing import Any

from support.episodes import call
from support.recorded_shapes import ClaudeCode, Codex
from support.served import RESPONSES, in_session, serve

from toolroll.endpoint.conversation.conversation_tree import NEW_ROOT

DROP: dict[str, Any] = {"server_tools": "drop"}
KEPT: dict[str, Any] = {"split": "random", "history": "preserve"}
"""`--history preserve`: Qwen3's template drops the thoughts before a user's message."""
THOUGHT = "<think>\nWhat is next?\n</think>\n\n"


def replies(first: str, second: str) -> list[str]:
    """The replies of one task, with calls of two tools."""
    return [
        "I look first. " + call(first, command="ls"),
        THOUGHT
        + call(first, command="cat a.txt")
        + "\n"
        + call(second, command="it\u2019s \u201cso\u201d"),
        THOUGHT + "Then this. " + call(second, command="x <|im_end|> y"),
        call(first, command="make"),
        THOUGHT + "Done.",
    ]


CODEX = replies("shell", "notes__write")


def sampled(trajectory: dict[str, Any]) -> int:
    return int(sum(trajectory["loss_mask"]))


async def test_codex_in_two_tasks_is_one_trajectory(any_tokenizer: Any) -> None:
    async with serve(CODEX * 2, tokenizer=any_tokenizer, settings=DROP, **KEPT) as bench:
        codex = Codex(bench, "t1")
        assert await codex.run("Make it.") == "Done."
        assert await codex.run("Again.") == "Done."
        trajectory = await bench.one_trajectory(turns=10)
        assert sampled(trajectory) == sum(len(entry.output_ids) for entry in bench.engine.log)
        assert await bench.forks() == []
        assert trajectory["lineage"]["thread_id"] == "t1"


async def test_a_websocket_is_refused_so_that_codex_uses_http() -> None:
    async with serve() as bench:
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        url = bench.url + in_session(RESPONSES)
        async with bench.http.get(url, headers=headers) as response:
            assert response.status == 426


async def test_sub_agents_and_compacted_windows_are_labeled_siblings() -> None:
    async with serve(CODEX * 3, settings=DROP) as bench:
        first = Codex(bench, "t1")
        await first.run("Make it.")
        await Codex(bench, "t2", agent="helper", parent="t1").run("Help.")
        first.compact("It is made.")
        await first.run("Again.")
        await bench.send("/sessions/s/reward", {"reward": 1.0})
        assert (await bench.get("/sessions/s/trajectories"))["reward"] == 1.0
        trajectories = await bench.trajectories()
        assert [each["fork_reason"] for each in trajectories] == [None, NEW_ROOT, NEW_ROOT]
        labels = [each["lineage"] for each in trajectories]
        assert [label["context_window_id"] for label in labels] == ["t1-0", "t2-0", "t1-0+"]
        assert [label["agent_name"] for label in labels] == ["/root", "helper", "/root"]
        assert "installed" not in str(labels)
        assert labels[1]["parent_thread_id"] == "t1"
        assert [len(each["turns"]) for each in trajectories] == [5, 5, 5]


async def test_claude_code_is_one_trajectory_and_a_title(any_tokenizer: Any) -> None:
    turns = ["A title.", *replies("Bash", "Read") * 2]
    async with serve(turns, tokenizer=any_tokenizer, **KEPT) as bench:
        agent = ClaudeCode(bench)
        assert await agent.title("Make it.") == "A title."
        assert await agent.run("Make it.") == "Done."
        assert await agent.run("Again.") == "Done."
        title, trajectory = await bench.trajectories()
        assert len(title["turns"]) == 1 and trajectory["fork_reason"] == NEW_ROOT
        log = bench.engine.log
        assert sampled(trajectory) == sum(len(entry.output_ids) for entry in log[1:])
        line = trajectory["lineage"].pop("x-anthropic-billing-header")
        assert line.startswith("cc_version=2.1.173; cc_entrypoint=cli; cch=")
        assert trajectory["lineage"] == {"session_id": "episode"}
        assert all("cch=" not in bench.prompt(request) for request in range(len(log)))
