"""The agent of Hermes, which uses its own shell."""

from common import BASE, DIALECT, KEY, STREAM, SYSTEM, TASK, Reported, run
from run_agent import AIAgent

MODES = {
    "chat": "chat_completions",
    "responses": "codex_responses",
    "messages": "anthropic_messages",
}


@run
async def main() -> object:
    agent = AIAgent(
        base_url=BASE,
        api_key=KEY,
        api_mode=MODES[DIALECT],
        model="m",
        enabled_toolsets=["terminal"],
        quiet_mode=True,
        ephemeral_system_prompt=SYSTEM,
        stream_delta_callback=(lambda text: None) if STREAM else None,
        skip_context_files=True,
        skip_memory=True,
    )
    result = agent.run_conversation(TASK)
    if result.get("failed"):
        raise Reported("failed")
    return result["final_response"]
