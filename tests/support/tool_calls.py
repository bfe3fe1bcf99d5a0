"""The same tool call in four formats."""

from __future__ import annotations

SAID = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>',
    "llama3": '{"name": "look", "parameters": {"at": "x"}}',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\nx\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
}
