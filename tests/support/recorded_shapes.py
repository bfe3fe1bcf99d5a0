"""Clients that send requests in the form of two coding agents, with texts of our own: Codex 0.169.0
over OpenAI's Responses, and Claude Code 2.1.197 over Anthropic's Messages.

Codex: the whole history with each request, `store` false, two developer messages, tools of three
types, labels in `client_metadata`; ids of items are dropped. Claude Code: three system blocks, the
first one different in each request, a system message after the user's first one, `cache_control` on
the newest block only, calls with the defaults of their arguments, a count of tokens before a turn,
and another request for a title.
"""

import json
from typing import Any

from support import anthropic_wire, responses_wire
from support.endpoints import Bench

COMMAND: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
}
_COMMANDED = {"type": "function", "strict": False, "parameters": COMMAND}
_WRITE = {"name": "write", "description": "Write a note.", **_COMMANDED}
CODEX_TOOLS: list[dict[str, Any]] = [
    {"name": "shell", "description": "Run a command.", **_COMMANDED},
    {"type": "namespace", "name": "notes", "description": "A notebook.", "tools": [_WRITE]},
    {"type": "web_search", "external_web_access": False},
]
CLAUDE_COMMAND: dict[str, Any] = {
    **COMMAND,
    "properties": {**COMMAND["properties"], "background": {"type": "boolean", "default": False}},
}
CLAUDE_TOOLS: list[dict[str, Any]] = [
    {"name": name, "description": f"{name} something.", "input_schema": CLAUDE_COMMAND}
    for name in ("Bash", "Read", "Task")
]


class Codex:
    """One thread of Codex, in the session `s`."""

    def __init__(self, bench: Bench, thread: str, *, agent: str = "", parent: str = "") -> None:
        self._bench = bench
        self._labels = {"thread_id": thread, "session_id": "episode"}
        self._more: dict[str, Any] = {
            "context_window_id": f"{thread}-0",
            "window_number": 0,
            "agent_name": agent or "/root",
            **({"parent_thread_id": parent} if parent else {}),
        }
        self.history = [
            _said("developer", "You work in a folder of your own."),
            _said("developer", f"You are {agent or 'the first agent'}."),
            _said("user", "The folder is /tmp/work."),
        ]

    def compact(self, summary: str) -> None:
        """Start another context window, with a summary instead of the history."""
        self._more["context_window_id"] = f"{self._more['context_window_id']}+"
        self.history = [*self.history[:2], _said("user", summary)]

    async def run(self, task: str) -> str:
        """Send the task, and answer the calls until a reply has no call. Return its text."""
        self.history.append(_said("user", task))
        for turn in range(50):
            body = {
                "model": "any",
                "input": self.history,
                "tools": CODEX_TOOLS,
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "reasoning": {"summary": "auto"},
                "store": False,
                "stream": True,
                "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": self._labels["thread_id"],
                "client_metadata": {
                    **self._labels,
                    "turn_id": str(turn),
                    "x-codex-installation-id": "installed",
                    "x-codex-turn-metadata": json.dumps(self._more),
                },
            }
            path = "/sessions/s/v1/responses"
            response = await responses_wire.ask(self._bench, body, path=path, stream=True)
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            for item in response["output"]:
                kept = {name: item[name] for name in item if name not in ("id", "status")}
                self.history.append(kept)
            if not calls:
                return str(response["output"][-1]["content"][0]["text"])
            for item in calls:
                output = f"ran {item['arguments']}\nexit code 0"
                result = {"type": "function_call_output", "call_id": item["call_id"]}
                self.history.append({**result, "output": output})
        raise AssertionError("the model calls on and on")


def _said(role: str, text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": role, "content": content}


class ClaudeCode:
    """One conversation; its session is named by its key."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._requests = 0
        self.history: list[dict[str, Any]] = []

    def _body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        sent: list[dict[str, Any]] = json.loads(json.dumps(messages))
        sent[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        self._requests += 1
        line = f"cc_version=2.1.173; cc_entrypoint=cli; cch={self._requests:05x};"
        return {
            "model": "any",
            "messages": sent,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: {line}"},
                {"type": "text", "text": "You are an agent."},
                {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}},
            ],
            "tools": CLAUDE_TOOLS,
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": json.dumps({"session_id": "episode", "device_id": ""})},
            "max_tokens": 32000,
        }

    async def title(self, task: str) -> str:
        """Request a title, with another system prompt and without tools. Return the title."""
        body = {
            "model": "any",
            "max_tokens": 512,
            "system": [{"type": "text", "text": "Give a title."}],
            "messages": [{"role": "user", "content": task}],
            "stream": True,
        }
        reply = await self._ask(body)
        return str(reply["content"][0]["text"])

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        path = "/sessions/s/v1/messages?beta=true"
        return await anthropic_wire.ask(self._bench, body, path=path, stream=True)

    async def run(self, task: str) -> str:
        """Send the task, and answer the calls until a reply has no call. Return its text."""
        self.history.append({"role": "user", "content": [{"type": "text", "text": task}]})
        if len(self.history) == 1:
            today = [{"type": "text", "text": "Today is Monday."}]
            self.history.append({"role": "system", "content": today})
        for _ in range(50):
            body = self._body(self.history)
            counted = {name: body[name] for name in ("model", "messages", "system", "tools")}
            path = "/sessions/s/v1/messages/count_tokens?beta=true"
            status, _ = await self._bench.post(path, counted)
            assert status == 200
            reply = await self._ask(body)
            calls = [block for block in reply["content"] if block["type"] == "tool_use"]
            for block in calls:
                if "command" in block["input"]:  # else it is not valid, and stays as it is
                    block["input"] = {"background": False, **block["input"]}
            self.history.append({"role": "assistant", "content": reply["content"]})
            if not calls:
                return str(reply["content"][-1]["text"])
            results: list[dict[str, Any]] = []
            for block in calls:
                result = {"type": "tool_result", "tool_use_id": block["id"], "is_error": False}
                results.append({**result, "content": f"ran {json.dumps(block['input'])}"})
            results.append({"type": "text", "text": "Remember your task."})
            self.history.append({"role": "user", "content": results})
        raise AssertionError("the model calls on and on")
