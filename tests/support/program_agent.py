"""A small coding agent: it asks the model, and runs the calls of `bash`. It needs only Python. If
the variable USERS is set, it asks that many times more after a reply without a call.
"""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

TOOL = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {}}}}


def ask(messages: Any) -> Any:
    tools = [{"type": "function", "function": TOOL}]
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": tools}
    key = "Bearer " + os.environ["OPENAI_API_KEY"]
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({**body, "temperature": 0}).encode(),
        {"Content-Type": "application/json", "Authorization": key},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


users = int(os.environ.get("USERS", "0"))
messages: Any = [{"role": "user", "content": os.environ["INSTRUCTION"]}]
while True:
    messages.append(ask(messages))
    if not messages[-1].get("tool_calls"):
        if not users:
            break
        users -= 1
        messages.append({"role": "user", "content": "Go on."})
        continue
    for made in messages[-1]["tool_calls"]:
        command = json.loads(made["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        result = {"role": "tool", "tool_call_id": made["id"], "content": done.stdout or "ok"}
        messages.append(result)
sys.stdout.write(messages[-1]["content"] + "\n")
