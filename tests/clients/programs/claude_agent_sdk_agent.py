"""claude-agent-sdk, which runs the Claude Code of its own wheel, with a tool of an MCP server in
this process."""

from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool
from common import KEY, STREAM, SYSTEM, TASK, URL, Reported, look, run


@tool("look", "Look at something.", {"at": str})
async def look_tool(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": look(arguments["at"])}]}


@run
async def main() -> object:
    options = ClaudeAgentOptions(
        model="m",
        system_prompt=SYSTEM,
        tools=[],
        mcp_servers={"tools": create_sdk_mcp_server("tools", tools=[look_tool])},
        allowed_tools=["mcp__tools__look"],
        setting_sources=[],
        include_partial_messages=STREAM,
        env={
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )
    async for message in query(prompt=TASK, options=options):
        if isinstance(message, ResultMessage):
            result = message
    if result.is_error:
        raise Reported(result.result or result.subtype)
    return result.result
