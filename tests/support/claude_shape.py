"""A program that sends requests in the shape of Claude Code's, with texts of our own: a request for
a title, a system block that differs in each request, `cache_control` on the newest block, and a
reminder after each result. It needs only Python. As in Claude Code, the variable
CLAUDE_CODE_ATTRIBUTION_HEADER=0 leaves the differing block out, and CLAUDE_CODE_MAX_OUTPUT_TOKENS
limits each reply.
"""

import json
import os
import subprocess
import urllib.request
from typing import Any

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"name": "Bash", "description": "Run a command.", "input_schema": SCHEMA}]
REMINDER = "<system-reminder>Do not forget the list of things to do.</system-reminder>"
asked, limit = 0, int(os.environ.get("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "4096"))


def ask(messages: Any, **options: Any) -> Any:
    request = urllib.request.Request(
        os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages?beta=true",
        json.dumps({"model": "any", "max_tokens": limit, "messages": messages, **options}).encode(),
        {"Content-Type": "application/json", "x-api-key": os.environ["ANTHROPIC_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["content"]


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def step(history: Any) -> Any:
    global asked
    asked += 1
    sent = json.loads(json.dumps(history))
    sent[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    header = text(f"x-anthropic-billing-header: cc_version=2.1.173; cch={asked:05x};")
    shown = os.environ.get("CLAUDE_CODE_ATTRIBUTION_HEADER") != "0"
    system = [header] * shown + [text("You code.", cache_control={"type": "ephemeral"})]
    return ask(sent, system=system, tools=TOOLS, thinking={"type": "adaptive"})


task = os.environ["INSTRUCTION"]
ask([{"role": "user", "content": task}], system=[text("Give a title.")])
history: Any = [{"role": "user", "content": [text(task)]}]
while True:
    reply = step(history)
    history.append({"role": "assistant", "content": reply})
    calls = [block for block in reply if block["type"] == "tool_use"]
    if not calls:
        break
    results = []
    for block in calls:
        done = subprocess.run(block["input"]["command"], shell=True, capture_output=True, text=True)
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": done.stdout or "ok"}
        results.append(result)
    history.append({"role": "user", "content": [*results, text(REMINDER)]})
