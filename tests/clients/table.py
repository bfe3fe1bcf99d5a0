"""The clients that `make test-clients` runs, and what each must show."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from support.client_scenario import SAID, THINKING
from support.episodes import call

Dialect = Literal["chat", "responses", "messages"]
OPENAI: tuple[Dialect, ...] = ("chat", "responses")
ALL: tuple[Dialect, ...] = (*OPENAI, "messages")
Replies = tuple[str, str, str]
ANSWER = THINKING + "All seen."
RESULTS = ("seen x", "seen y", "seen z")
"""What the calls return. No call contains it."""


@dataclass(frozen=True)
class Expected:
    """What a client must show in one dialect, streamed or not."""

    overflow: str
    """The error that the client reports if the prompt does not fit the context. With "answer: " at
    its start: the beginning of the answer that the client gives then."""
    requests: int = 1
    """The number of requests with such a prompt that the client sends."""
    turns: tuple[int, ...] = (3,)
    """The number of turns of each sequence, in order of size."""
    forks: tuple[str, ...] = ()
    """A piece of the reason of each fork."""


@dataclass(frozen=True)
class Client:
    """`name` has the version. `packages` are for pip, or for npm if `program` is an `.mjs` file."""

    name: str
    program: str
    packages: tuple[str, ...]
    expected: Mapping[Dialect, Expected]
    replies: tuple[str, ...] = SAID
    """What the model writes, turn by turn."""
    aside: str = ""
    """A text in the prompt of a request that is not part of the task, such as one for a title."""
    results: tuple[str, ...] = RESULTS
    """Texts that the last prompt must contain, because the client made the calls."""
    streams: tuple[bool, ...] = (False, True)
    python: str = ""
    """The Python that the packages need, if the tests' own is too old: `python3.12`."""
    images: int = 0
    """The number of images that the last prompt must contain. Each call shows one."""
    drops: tuple[Dialect, ...] = ()
    """Dialects with tools of a provider's servers, which need `--server-tools drop`."""


def everywhere(overflow: str, *dialects: Dialect, **more: Any) -> dict[Dialect, Expected]:
    """Expect the same in each of `dialects`."""
    return dict.fromkeys(dialects, Expected(overflow, **more))


def both(client: Client, streamed: Mapping[Dialect, Expected]) -> tuple[Client, Client]:
    """`client` not streamed, and the same one with what it shows `streamed`."""
    other = replace(client, expected=streamed, streams=(True,))
    return replace(client, streams=(False,)), other


def shell(
    tool: str,
    argument: str = "command",
    *,
    command: str = "printf 'seen %s' {}",
    several: bool = False,
    answer: str = ANSWER,
) -> Replies:
    """Return the replies of the same task for an agent with a shell, which is its tool `tool`.
    `several`: True if the tool's argument is a list of commands."""
    commands = [command.format(name) for name in "xyz"]
    x, y, z = (call(tool, **{argument: [each] if several else each}) for each in commands)
    return "Let me look. " + x, THINKING + y + z, answer


def sections(**fields: str) -> str:
    """Return a reply in dspy's format."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items())


def react(tool: str, arguments: str) -> str:
    """Return a reply that calls `tool`, in the format of dspy's `ReAct`."""
    return sections(next_thought="What now?", next_tool_name=tool, next_tool_args=arguments)


DROPPED = "its text"
CHANGED = "the client changed what was served"
OTHER = "another conversation"
LANGCHAIN = ("langchain-openai==1.7.4", "langchain-anthropic==1.7.10")
VERCEL = (
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@ai-sdk/anthropic@4.0.105",
    "zod",
)
NODE = "node@24.21.0"
CREWAI: dict[str, Any] = {"requests": 2, "turns": (1, 2), "forks": (DROPPED,)}
INSPECT = Client(
    "inspect-ai 0.3.285",
    "inspect_agent.py",
    ("inspect-ai==0.3.285", "openai==3.57.0", "anthropic==2.14.0"),
    {
        **everywhere("stop reason model_length", "chat", "messages"),
        "responses": Expected("stop reason model_length", 2, turns=(1, 3), forks=(OTHER,)),
    },
    # with it, inspect-ai finds out whether Responses summarizes reasoning
    aside="Please say 'hello, world'",
)

CLIENTS = (
    Client(
        "langgraph 1.2.24",
        "langgraph_agent.py",
        ("langgraph==1.2.24", "langchain==1.5.2", *LANGCHAIN),
        {
            **everywhere("OpenAIContextOverflowError", *OPENAI),
            **everywhere("AnthropicContextOverflowError", "messages"),
        },
    ),
    Client(
        "haystack 3.4.1",
        "haystack_agent.py",
        ("haystack-ai==3.4.1",),
        everywhere("BadRequestError", *OPENAI),
    ),
    Client(
        "agno 3.1.10",
        "agno_agent.py",
        ("agno==3.1.10", "openai", "anthropic"),
        {
            **everywhere("status ERROR", "chat", "messages"),
            "responses": Expected("status ERROR", turns=(1, 2), forks=(DROPPED,)),
        },
    ),
    Client(
        "pydantic-ai 2.68.0",
        "pydantic_ai_agent.py",
        ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
        everywhere("ModelContextWindowExceededError", *ALL),
    ),
    Client(
        "instructor 1.17.0",
        "instructor_structured.py",
        ("instructor==1.17.0", "openai==3.3.0", "anthropic==2.14.0"),
        everywhere("InstructorRetryException", "chat", "messages", turns=(2,)),
        (call("Seen", count="many"), call("Seen", count=3)),
        results=(),
        streams=(False,),
    ),
    Client(
        "strands-agents 1.62.0",
        "strands_agent.py",
        ("strands-agents[openai,anthropic]==1.62.0",),
        everywhere("ContextWindowOverflowException", *ALL),
    ),
    Client(
        "llama-index-core 0.14.25",
        "llama_index_agent.py",
        ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
        everywhere("BadRequestError", *OPENAI),
    ),
    Client(
        "google-adk 2.13.0",
        "google_adk_agent.py",
        ("google-adk==2.13.0", "litellm==1.110.2"),
        everywhere("ContextWindowExceededError", "chat", "messages"),
    ),
    Client(
        "claude-agent-sdk 0.2.189",
        "claude_agent_sdk_agent.py",
        ("claude-agent-sdk==0.2.189",),
        everywhere("ResultError", "messages"),
        tuple(reply.replace('"look"', '"mcp__tools__look"') for reply in SAID),
    ),
    Client(
        "Vercel AI SDK 7.0.173",
        "vercel_ai.mjs",
        ("ai@7.0.173", *VERCEL),
        everywhere("AI_APICallError", *ALL),
    ),
    Client(
        "mini-swe-agent 2.4.6",
        "mini_swe_agent.py",
        ("mini-swe-agent==2.4.6", "litellm==1.110.2"),
        everywhere("ContextWindowExceededError", *ALL),
        shell(
            "bash",
            answer=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo seen"),
        ),
        streams=(False,),
    ),
    Client(
        "semantic-kernel 1.45.0",
        "semantic_kernel_agent.py",
        ("semantic-kernel==1.45.0", "openai==3.57.0"),
        {
            "chat": Expected("ServiceResponseException", turns=(1, 2), forks=(DROPPED,)),
            "responses": Expected("AgentExecutionException"),
        },
        tuple(reply.replace('"look"', '"Tools-look"') for reply in SAID),
    ),
    Client(
        "smolagents 1.26.0, `ToolCallingAgent`",
        "smolagents_agent.py",
        ("smolagents[openai]==1.26.0",),
        everywhere("AgentGenerationError", "chat", turns=(1, 1, 1), forks=(CHANGED, CHANGED)),
        (*SAID[:2], call("final_answer", answer="All seen.")),
    ),
    Client(
        "autogen-agentchat 0.7.5",
        "autogen_agent.py",
        ("autogen-agentchat==0.7.5", "autogen-ext[openai,anthropic]==0.7.5", "anthropic==0.125.0"),
        {
            "chat": Expected("BadRequestError"),
            "messages": Expected("BadRequestError", turns=(1, 2), forks=(CHANGED,)),
        },
    ),
    Client(
        "pi 0.73.1",
        "pi.mjs",
        ("@mariozechner/pi-coding-agent@0.73.1",),
        everywhere("no output", *ALL, requests=2),
        shell("bash"),
        streams=(True,),
    ),
    Client(
        "Qwen Code 0.24.4",
        "qwen_code.mjs",
        ("@qwen-code/qwen-code@0.24.4",),
        everywhere("exit status 1", *OPENAI),
        # Qwen Code may lose the output of a command that ends at once
        shell("run_shell_command", command="printf 'seen %s' {}; sleep 1"),
        streams=(True,),
    ),
    Client(
        "Codex 0.171.0",
        "codex.mjs",
        ("@openai/codex@0.171.0",),
        everywhere("exit status 1", "responses"),
        shell("exec_command", "cmd"),
        drops=("responses",),
        streams=(True,),
    ),
    Client(
        "opencode 1.18.33",
        "opencode.mjs",
        ("opencode-ai@1.18.33",),
        everywhere("exit status 1", *ALL, requests=3, turns=(1, 3), forks=(OTHER,)),
        shell("bash"),
        aside="You are a title generator",
        streams=(True,),
    ),
    Client(
        "Claude Code 2.1.332",
        "claude_code.mjs",
        ("@anthropic-ai/claude-code@2.1.332",),
        everywhere("exit status 1", "messages"),
        shell("Bash"),
        streams=(True,),
    ),
    Client(
        "Cline 3.0.65",
        "cline.mjs",
        ("cline@3.0.65",),
        everywhere("exit status 1", "chat", "messages"),
        shell("run_commands", "commands", several=True),
        drops=("messages",),
        streams=(True,),
    ),
    *both(
        Client(
            "CrewAI 1.15.30",
            "crewai_agent.py",
            ("crewai[anthropic]==1.15.30",),
            everywhere("LLMContextLengthExceededError", *ALL, **CREWAI),
        ),
        # streamed, CrewAI ignores the calls of Responses
        everywhere("BadRequestError", "chat", "messages", **CREWAI),
    ),
    INSPECT,
    replace(
        INSPECT,
        name=f"{INSPECT.name}, with screenshots",
        replies=("Let me look. " + call(at="x"), call(at="y") + call(at="z"), "All seen."),
        images=3,
    ),
    Client(
        "dspy 3.4.1, `ReAct`",
        "dspy_agent.py",
        ("dspy==3.4.1",),
        everywhere(
            "ContextWindowExceededError", *OPENAI, requests=2, turns=(1,) * 5, forks=(OTHER,) * 4
        ),
        (
            *(react("look", f'{{"at": "{name}"}}') for name in "xyz"),
            react("finish", "{}"),
            sections(reasoning="What now?", answer="All seen."),
        ),
        streams=(False,),
    ),
    Client(
        "OpenAI Agents SDK 0.24.0",
        "openai_agents_agent.py",
        ("openai-agents==0.24.0",),
        everywhere("BadRequestError", *OPENAI),
    ),
    Client(
        "deepagents 0.7.32",
        "deepagents_agent.py",
        ("deepagents==0.7.32", *LANGCHAIN),
        everywhere("ContextOverflowError", *ALL),
    ),
    Client(
        "Qwen-Agent 0.0.34",
        "qwen_assistant.py",
        ("qwen-agent[python-executor]==0.0.34", "soundfile", "tqdm", "regex", "mcp==1.30.0"),
        everywhere("ModelServiceError", "chat"),
    ),
    Client(
        "@openai/agents 0.20.0",
        "openai_agents.mjs",
        ("@openai/agents@0.20.0", "zod"),
        everywhere("Error", *OPENAI),
    ),
    Client(
        "Continue CLI 1.5.47",
        "continue.mjs",
        ("@continuedev/cli@1.5.47",),
        everywhere("exit status 1", "chat", "messages"),
        shell("Bash"),
        streams=(True,),
    ),
    Client(
        "Microsoft agent-framework 1.23.0",
        "agent_framework_agent.py",
        ("agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"),
        everywhere("ChatClientException", *OPENAI),
    ),
    Client(
        "AG2 1.2.1",
        "ag2_agent.py",
        ("ag2[openai,anthropic]==1.2.1",),
        everywhere("BadRequestError", *ALL),
    ),
    *both(
        Client(
            "CAMEL 0.2.90",
            "camel_agent.py",
            ("camel-ai==0.2.90", "mcp==1.28.0"),
            everywhere("BadRequestError", "chat"),
        ),
        everywhere("answer: Error: Error code: 400", "chat", turns=(1, 2), forks=(DROPPED,)),
    ),
    Client(
        "Mastra 1.71.0",
        "mastra.mjs",
        (NODE, "@mastra/core@1.71.0", *VERCEL),
        everywhere("AI_APICallError", *ALL),
    ),
    *both(
        Client(
            "OpenHands SDK 1.58.2",
            "openhands_agent.py",
            ("openhands-sdk==1.58.2",),
            everywhere("ConversationRunError", "chat", "messages"),
            python="python3.12",
        ),
        {
            "chat": Expected("ConversationRunError"),
            # streamed, the SDK doubles the reasoning
            "messages": Expected("ConversationRunError", turns=(1, 2), forks=(CHANGED,)),
        },
    ),
    Client(
        "fast-agent 0.10.48",
        "fast_agent_agent.py",
        ("fast-agent-mcp==0.10.48",),
        everywhere("BadRequestError", *ALL),
        streams=(True,),
        python="python3.13",
    ),
    Client(
        "Hermes agent 0.19.0",
        "hermes_agent.py",
        ("hermes-agent==0.19.0",),
        everywhere("failed", *ALL),
        shell("terminal"),
    ),
    Client(
        "gptme 0.35.1",
        "gptme_agent.py",
        ("gptme==0.35.1",),
        everywhere("exit status 1", "chat", turns=(1, 1, 2), forks=(OTHER, CHANGED)),
        shell("shell", answer=call("complete")),
        aside="Generate concise conversation titles.",
        results=RESULTS[:2],  # gptme makes one call per turn
    ),
    Client(
        "Aider 0.86.2",
        "aider_coder.py",
        ("aider-chat==0.86.2",),
        everywhere("no answer", "chat", "messages", turns=(1, 1), forks=(CHANGED,)),
        ("Let me look.", "All seen."),
        results=(),
    ),
    Client(
        "browser-use 0.13.14, `ChatOpenAI`",
        "browser_use_model.py",
        ("browser-use==0.13.14",),
        everywhere("ModelProviderError", "chat", turns=(2,)),
        ('{"at":"x"}', '{"at":"y"}'),
        results=(),
        streams=(False,),
    ),
    Client(
        "OpenClaw 2026.9.6",
        "openclaw.mjs",
        (NODE, "openclaw@2026.9.6"),
        {
            "chat": Expected("exit status 1", turns=(1, 1, 1), forks=(CHANGED, CHANGED)),
            "responses": Expected("exit status 1"),
        },
        shell("exec"),
        streams=(True,),
    ),
    Client(
        "LibreChat agents 3.9.2",
        "librechat.mjs",
        # The newest exporter, which npm takes for it, needs this api.
        (NODE, "@librechat/agents@3.9.2", "zod", "@opentelemetry/api@1.10.0"),
        {**everywhere("Error", *OPENAI), **everywhere("ContextOverflowError", "messages")},
        streams=(True,),
    ),
)
