"""User simulators that call a model at any OpenAI-compatible endpoint (for example, SGLang's).

Invariants:

- Each episode has its own message list, in which the simulator is `assistant` and the agent's
  visible text is `user`.
- The simulator's reasoning reaches neither that list nor the agent.
- Neither a failed request nor an unfinished answer becomes a line of the user or a verdict. It
  raises `UserSimulatorError`, or `EngineUnreachableError` if the server did not answer at all for
  `engine_timeout` seconds.

All episodes that get their users from the same `OpenAIUsers` share one client.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from pydantic import Field, field_validator

from toolroll.agents.chat_client import ChatClient, SamplingClientConfig, history_message
from toolroll.agents.users.scripted import visible_text
from toolroll.agents.users.strategies import (
    REACT_FORMAT,
    UserStrategy,
    approves,
    judging,
    reflecting,
    spoken,
)
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.errors import (
    EngineError,
    EngineUnreachableError,
    UsageError,
    UserSimulatorError,
)
from toolroll.rollout.types import Message, Tool

SYSTEM_PROMPT = """Play the part of a person who writes to a service desk. You are never the desk, and never an assistant.

Who you are and what you want:
{instruction}

How you write:
- One short message at a time, in plain words, without quoting the lines above.
- Begin with your main request. Give a detail when you are asked for it, not before.
- If you are asked for something that the lines above do not say, answer that you do not know.
- Stay with what you want; do not agree to something else unless the lines above allow it.
- As soon as everything is settled, or it is clear that it cannot be, or you are handed to another person, answer with
  ###STOP### and nothing else.
"""  # noqa: E501


class UserConfig(SamplingClientConfig):
    """The address and sampling parameters of the model that plays the user."""

    system_prompt: str = SYSTEM_PROMPT
    """The task's instruction replaces `{instruction}`."""
    strategy: UserStrategy = "llm"
    """How the model writes its lines; see `toolroll.agents.users.strategies`."""
    revisions: int = Field(default=2, ge=0)
    """How many lines in a row the supervisor of `verify` and `reflection` may refuse. The next line
    is sent without its approval.
    """
    first_agent_line: str = "Hi! How can I help you today?"

    @field_validator("system_prompt")
    @classmethod
    def _check_prompt(cls, value: str) -> str:
        if "{instruction}" not in value:
            raise ValueError(
                "must contain the placeholder {instruction}, which the task's instruction replaces"
            )
        return value


CallTool = Callable[[str, Mapping[str, Any]], str]
"""`call(name, arguments)` executes a tool and returns its result."""

_METRICS = (
    "user_calls user_prompt_tokens user_completion_tokens user_seconds user_retries user_errors"
).split()
_CALLS_IN_A_ROW = 30
"""The maximum number of replies with tool calls before the user's line."""


def derive_seed(base: int, episode_seed: int) -> int:
    """Return a sampling seed in [0, 2**31) that depends on `base` and `episode_seed`."""
    digest = hashlib.blake2b(f"{base}:{episode_seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class OpenAIUser:
    """The user of one episode (a `UserSimulator`).

    `client`: a shared client, which the user does not close. By default, the user opens its own
    client, and `close` closes it. `seed`: the episode's seed. Requests have a sampling seed if
    `seed` or `config.seed` is set.

        user = OpenAIUser(UserConfig(base_url="http://127.0.0.1:30000/v1", model="Qwen/Qwen3-8B"))
        print(await user.reset("You want to return the red shoes of your last order."))
        print(await user.step("What is the order number?"))
        await user.close()
    """

    def __init__(
        self, config: UserConfig, *, client: ChatClient | None = None, seed: int | None = None
    ) -> None:
        self._config = config
        self._owns_client = client is None
        self._client = ChatClient(config) if client is None else client
        self._seed = config.seed if seed is None else derive_seed(config.seed or 0, seed)
        self._prompt = config.system_prompt
        self._messages: list[Message] = []
        self._tools: tuple[Tool, ...] = ()
        self._call: CallTool | None = None
        self._metrics: defaultdict[str, float] = defaultdict(float, dict.fromkeys(_METRICS, 0.0))

    def adopt_prompt(self, prompt: str) -> None:
        """Use a benchmark's system prompt, unless the config sets one. The task's instruction
        replaces `{instruction}`.
        """
        if "system_prompt" not in self._config.model_fields_set:
            self._prompt = prompt

    def adopt_tools(self, tools: Sequence[Tool], call: CallTool) -> None:
        """Give the user tools. `call(name, arguments)` executes a tool and returns its result. The
        agent sees only what the user says about the result.
        """
        self._tools, self._call = tuple(tools), call

    async def reset(self, instruction: str) -> str:
        """Return the user's first line, which replies to `config.first_agent_line`."""
        # Not str.format: instructions and templates may contain braces.
        system = self._prompt.replace("{instruction}", instruction)
        if self._config.strategy == "react":
            system += f"\n{REACT_FORMAT}"
        self._messages = [{"role": "system", "content": system}]
        return await self.step(self._config.first_agent_line)

    async def step(self, content: str) -> str:
        """Return the user's reply to `content`. If there is no reply, raise `UserSimulatorError`
        and leave the message list unchanged.
        """
        if not self._messages:
            raise UsageError("step was called before reset(instruction) of the user simulator")
        # A lone surrogate cannot be sent as UTF-8.
        text = content.encode("utf-8", "replace").decode("utf-8")
        messages = [*self._messages, {"role": "user", "content": text}]
        line = await self._ask(messages)
        if self._config.strategy in ("verify", "reflection"):
            line = await self._supervised(messages, line)
        self._messages = [*messages, {"role": "assistant", "content": line}]
        return line

    async def _supervised(self, messages: list[Message], line: str) -> str:
        """Return `line`. If the supervisor refuses it, return the line that replaces it."""
        for revision in range(1, self._config.revisions + 1):
            verdict = await self._complete(judging(messages, line), self._seed)
            if approves(visible_text(verdict.content)):
                break
            self._metrics["user_revisions"] += 1
            if self._config.strategy == "verify":
                line = await self._ask(messages, shift=revision * (self._config.retries + 1))
            else:
                reflection = await self._complete(reflecting(messages, line), self._seed)
                line = spoken(visible_text(reflection.content)) or line
        return line

    async def _ask(self, messages: list[Message], *, shift: int = 0) -> str:
        """Return the next line. Tool calls that the user makes before this line, and their results,
        are added to `messages`. `shift` is added to the seed of each request.
        """
        for _ in range(_CALLS_IN_A_ROW):
            outcome = await self._say(messages, shift)
            if isinstance(outcome, str):
                return outcome
            messages += self._act(outcome)
        self._metrics["user_errors"] += 1
        raise UserSimulatorError(
            f"the user simulator at {self._client.url} called tools {_CALLS_IN_A_ROW} times in a "
            f"row without a line for the agent"
        )

    def _act(self, reply: ParsedReply) -> list[Message]:
        assert self._call is not None
        answers: list[Message] = []
        for call in reply.tool_calls:
            self._metrics["user_tool_calls"] += 1
            if call.ok and call.arguments is not None:
                text = self._call(call.name, call.arguments)
            else:
                text = f"Error: {call.error}"
            answers.append({"role": "tool", "tool_call_id": call.id, "content": text})
        visible = replace(reply, content=visible_text(reply.content), reasoning=None)
        return [history_message(visible), *answers]

    async def _say(self, messages: list[Message], shift: int) -> str | ParsedReply:
        """Return the next line, or a reply with calls. Retry an empty reply with another seed."""
        for attempt in range(self._config.retries + 1):
            # The same seed would result in the same empty reply.
            seed = None if self._seed is None else (self._seed + shift + attempt) % 2**31
            reply = await self._complete(messages, seed, self._tools)
            if reply.tool_calls and self._call is not None:
                return reply
            line = visible_text(reply.content)
            if self._config.strategy == "react":
                line = spoken(line)
            if line:
                return line
            if attempt < self._config.retries:
                self._metrics["user_retries"] += 1
        self._metrics["user_errors"] += 1
        raise UserSimulatorError(
            f"the user simulator at {self._client.url} gave {self._config.retries + 1} replies "
            "without visible text: raise max_tokens, or turn its reasoning off with extra_body"
        )

    async def _complete(
        self, messages: list[Message], seed: int | None, tools: Sequence[Tool] = ()
    ) -> ParsedReply:
        request: dict[str, Any] = {"messages": messages, **self._config.sampling}
        if seed is not None:
            request = {"seed": seed, **request}
        if tools:
            request["tools"] = tools
        start, attempts = perf_counter(), 1
        try:
            completion = await self._client.complete(request)
            attempts = completion.attempts
        except EngineUnreachableError:
            raise
        except EngineError as error:
            attempts = error.attempts
            self._metrics["user_errors"] += 1
            raise UserSimulatorError(f"the user simulator at {error}") from error
        finally:
            self._metrics["user_retries"] += attempts - 1
            self._metrics["user_seconds"] += perf_counter() - start
        self._metrics["user_calls"] += 1
        self._metrics["user_prompt_tokens"] += completion.usage["prompt_tokens"]
        self._metrics["user_completion_tokens"] += completion.usage["completion_tokens"]
        return completion.reply

    @property
    def messages(self) -> list[Message]:
        """Return a copy of the simulator's own message list."""
        return [dict(message) for message in self._messages]

    def metrics(self) -> Mapping[str, float]:
        """Return user_calls, user_prompt_tokens, user_completion_tokens, user_seconds (including
        the pauses between retries), user_retries and user_errors. user_tool_calls and
        user_revisions are included if they are not 0.
        """
        return dict(self._metrics)

    async def close(self) -> None:
        """Close the client if it is the user's own."""
        if self._owns_client:
            await self._client.aclose()


class OpenAIUsers:
    """Creates one `OpenAIUser` per episode. They share one client and its `max_concurrency`.

    config = UserConfig(base_url="http://127.0.0.1:30000/v1", model="Qwen/Qwen3-8B")
    async with OpenAIUsers(config) as users:
        options = EnvironmentOptions(user=users.make)
        env = load_environment("tau-bench/retail").make(options)
    """

    def __init__(self, config: UserConfig, *, client: ChatClient | None = None) -> None:
        self._config = config
        self._client = ChatClient(config) if client is None else client

    async def __aenter__(self) -> OpenAIUsers:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def make(self, seed: int | None = None) -> OpenAIUser:
        """Return the user of one episode. `seed` is the episode's seed."""
        return OpenAIUser(self._config, client=self._client, seed=seed)

    async def close(self) -> None:
        """Close the shared client."""
        await self._client.aclose()
