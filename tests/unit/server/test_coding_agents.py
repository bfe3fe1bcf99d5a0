"""Clients of the recorded shape of Codex and of Claude Code: append-only histories have no forks,
and every sampled token is trained exactly once.
"""

from __future__ import annotations

import json
from typing import Any

from support import anthropic_wire, responses_wire
from support.endpoints import endpoint
from support.listed_environment import TOOL
from support.recorded_shapes import ClaudeCode, Codex

from toolroll.endpoint.conversation.conversation_tree import NEW_ROOT
from toolroll.testing import PolicyRequest

DROP: dict[str, Any] = {"server_tools": "drop"}
KEPT: dict[str, Any] = {"split": "random", "history": "preserve"}
"""`--history preserve`: Qwen3's template drops the thoughts before a user's message."""
FIRST: dict[str, Any] = {"role": "user", "content": "Look."}
THOUGHT = "<think>\nWhat is next?\n</think>\n\n"


def _call(name: str, command: str) -> str:
    said = json.dumps({"name": name, "arguments": {"command": command}})
    return f"<tool_call>\n{said}\n</tool_call>"


def _saying(*names: str) -> Any:
    said = [
        "I look first. " + _call(names[0], "ls"),
        THOUGHT + _call(names[0], "cat a.txt") + "\n" + _call(names[1], "it\u2019s \u201cso\u201d"),
        THOUGHT + "Then this. " + _call(names[1], "x <|im_end|> y"),
        _call(names[0], "make"),
        THOUGHT + "Done.",
    ]
    return lambda request: said[request.call % len(said)]


async def test_codex_in_two_tasks_is_one_trajectory(any_tokenizer: Any) -> None:
    saying = _saying("shell", "notes__write")
    async with endpoint(any_tokenizer, saying, settings=DROP, **KEPT) as bench:
        codex = Codex(bench, "t1")
        assert await codex.run("Make it.") == "Done."
        assert await codex.run("Again.") == "Done."
        [trajectory] = await bench.trajectories()
        assert sum(trajectory["loss_mask"]) == sum(
            len(entry.output_ids) for entry in bench.engine.log
        )
        assert (await bench.get("/sessions/s/trajectories"))["forks"] == []
        assert trajectory["lineage"]["thread_id"] == "t1"


async def test_codex_metadata_for_its_own_servers_is_not_in_the_prompt(tokenizer: Any) -> None:
    """With OpenAI's own provider, Codex adds metadata to each item; its times differ."""
    async with endpoint(tokenizer, lambda request: "Done.") as bench:
        for number in range(2):
            passed = {"turn_id": "t", "create_time": number}
            item = {**FIRST, "internal_chat_message_metadata_passthrough": passed}
            status, answer = await bench.post("/sessions/s/v1/responses", {"input": [item]})
            assert status == 200, answer
        first, second = bench.engine.log
        assert list(first.input_ids) == list(second.input_ids)


async def test_a_websocket_is_refused_so_that_codex_goes_on_over_http(tokenizer: Any) -> None:
    async with endpoint(tokenizer, lambda request: "Done.") as bench:
        url = f"{bench.url}/sessions/s/v1/responses"
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        async with bench.http.get(url, headers=headers) as response:
            assert response.status == 426


async def test_sub_agents_and_compacted_windows_are_labelled_siblings(tokenizer: Any) -> None:
    saying = _saying("shell", "notes__write")
    async with endpoint(tokenizer, saying, settings=DROP) as bench:
        first = Codex(bench, "t1")
        await first.run("Make it.")
        await Codex(bench, "t2", agent="helper", parent="t1").run("Help.")
        first.compact("It is made.")
        await first.run("Again.")
        await bench.post("/sessions/s/reward", {"reward": 1.0})
        session = await bench.get("/sessions/s/trajectories")
        found = await bench.trajectories()
        assert session["reward"] == 1.0
        assert [one["fork_reason"] for one in found] == [None, NEW_ROOT, NEW_ROOT]
        labels = [one["lineage"] for one in found]
        assert [label["context_window_id"] for label in labels] == ["t1-0", "t2-0", "t1-0+"]
        assert [label["agent_name"] for label in labels] == ["/root", "helper", "/root"]
        assert "installed" not in str(labels)
        assert labels[1]["parent_thread_id"] == "t1"
        assert [len(one["turns"]) for one in found] == [5, 5, 5]


async def test_claude_code_is_one_trajectory_and_a_title(any_tokenizer: Any) -> None:
    saying = _saying("Bash", "Read")

    def policy(request: PolicyRequest) -> str:
        return "A title." if request.call == 0 else str(saying(_Shifted(request.call - 1)))

    async with endpoint(any_tokenizer, policy, **KEPT) as bench:
        agent = ClaudeCode(bench)
        assert await agent.title("Make it.") == "A title."
        assert await agent.run("Make it.") == "Done."
        assert await agent.run("Again.") == "Done."
        title, trajectory = await bench.trajectories()
        assert len(title["turns"]) == 1 and trajectory["fork_reason"] == NEW_ROOT
        assert sum(trajectory["loss_mask"]) == sum(
            len(entry.output_ids) for entry in bench.engine.log[1:]
        )
        line = trajectory["lineage"].pop("x-anthropic-billing-header")
        assert line.startswith("cc_version=2.1.173; cc_entrypoint=cli; cch=")
        assert trajectory["lineage"] == {"session_id": "episode"}
        assert all("cch=" not in any_tokenizer.decode(e.input_ids) for e in bench.engine.log)


class _Shifted:
    """A request with another number."""

    def __init__(self, call: int) -> None:
        self.call = call


async def test_a_session_may_change_its_dialect(any_tokenizer: Any) -> None:
    said = ["I look. " + _call("look", "x"), THOUGHT + "One.", "Two."]
    async with endpoint(any_tokenizer, lambda request: said[request.call], **KEPT) as bench:
        chat: list[Any] = [{"role": "system", "content": "Be brief."}, FIRST]
        status, answer = await bench.post(
            "/sessions/s/v1/chat/completions", {"messages": chat, "tools": [TOOL]}
        )
        assert status == 200, answer
        [wanted] = answer["choices"][0]["message"]["tool_calls"]
        items: list[Any] = [
            FIRST,
            {"type": "message", "role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": wanted["id"], **wanted["function"]},
            {"type": "function_call_output", "call_id": wanted["id"], "output": "seen"},
        ]
        body = {"input": items, "instructions": "Be brief.", "tools": [responses_wire.LOOK]}
        path = "/sessions/s/v1/responses"
        answer = await responses_wire.ask(bench, {"model": "m", **body}, path=path, stream=True)
        [text] = answer["output"][-1]["content"]
        given = json.loads(wanted["function"]["arguments"])
        blocks: list[Any] = [
            FIRST,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": wanted["id"], "name": "look", "input": given},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": wanted["id"], "content": "seen"}
                ],
            },
            {"role": "assistant", "content": text["text"]},
            {"role": "user", "content": "And?"},
        ]
        body = {"messages": blocks, "system": "Be brief.", "tools": [anthropic_wire.LOOK]}
        path = "/sessions/s/v1/messages"
        asked = {"model": "m", "max_tokens": 100, **body}
        await anthropic_wire.ask(bench, asked, path=path, stream=False)
        [trajectory] = await bench.trajectories()
        assert len(trajectory["turns"]) == 3
        kinds = [one["object"] for one in (await bench.get("/sessions/s/trace"))["trace"]]
        assert kinds == ["chat.completion", "response", "message"]
