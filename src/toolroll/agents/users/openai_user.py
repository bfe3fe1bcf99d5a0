"""A model plays the user, over any OpenAI-compatible endpoint (an SGLang server, for one).

Invariants: each episode has its own message list, in which the simulator is `assistant` and the
agent's visible text is `user`; what the simulator thought never enters that list nor the agent's
ears; a failure is a `UserSimulatorError`, never a line; `CancelledError` passes through. One
`OpenAIUsers` per process shares the session among all episodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import orjson

from toolroll.agents.users.chat import Answer, ChatClient, UserConfig
from toolroll.agents.users.stop import visible_text
from toolroll.agents.users.strategies import REACT_FORMAT, approves, judging, reflecting, spoken
from toolroll.rollout.errors import UsageError, UserSimulatorError
from toolroll.rollout.types import Message, Tool

_CALLS_IN_A_ROW = 30
"""How often a user may act before it says something."""


def derive_seed(base: int, episode_seed: int) -> int:
    """A sampling seed in [0, 2**31) that depends on both."""
    digest = hashlib.blake2b(f"{base}:{episode_seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class OpenAIUser:
    """The user of one episode (a `UserSimulator`).

    `client` is shared where `OpenAIUsers` made this; without one, the user opens a client of its
    own, which `close` closes. `seed` is the episode's: with it, or with `config.seed`, requests
    carry a seed.
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
        self._call: Callable[[str, Mapping[str, Any]], str] | None = None
        self._metrics: dict[str, float] = dict.fromkeys(
            (
                "user_calls",
                "user_prompt_tokens",
                "user_completion_tokens",
                "user_seconds",
                "user_retries",
                "user_errors",
            ),
            0.0,
        )

    def adopt_prompt(self, prompt: str) -> None:
        """Take a benchmark's own system prompt (`{instruction}` is the place of the task's),
        unless the config sets one.
        """
        if "system_prompt" not in self._config.model_fields_set:
            self._prompt = prompt

    def adopt_tools(
        self, tools: Sequence[Tool], call: Callable[[str, Mapping[str, Any]], str]
    ) -> None:
        """Let the user act: `call(name, arguments)` gives a tool's answer. The agent hears of it
        only what the user tells.
        """
        self._tools, self._call = tuple(tools), call

    async def reset(self, instruction: str) -> str:
        """The user's first line, in answer to `config.first_agent_line`."""
        # Not str.format: instructions and templates may contain braces.
        system = self._prompt.replace("{instruction}", instruction)
        if self._config.strategy == "react":
            system += f"\n{REACT_FORMAT}"
        self._messages = [{"role": "system", "content": system}]
        return await self.step(self._config.first_agent_line)

    async def step(self, content: str) -> str:
        """The user's answer to `content`. `UserSimulatorError` where none could be had; the list
        is then unchanged.
        """
        if not self._messages:
            raise UsageError("the user simulator was asked before reset(instruction)")
        # A lone surrogate cannot be sent as UTF-8.
        heard = content.encode("utf-8", "replace").decode("utf-8")
        messages = [*self._messages, {"role": "user", "content": heard}]
        line = await self._ask(messages)
        if self._config.strategy in ("verify", "reflection"):
            line = await self._supervised(messages, line)
        self._messages = [*messages, {"role": "assistant", "content": line}]
        return line

    async def _supervised(self, messages: list[Message], line: str) -> str:
        """`line`, or what is said in its place where the supervisor refuses it."""
        for revision in range(1, self._config.revisions + 1):
            verdict = await self._complete(judging(messages, line), self._seed)
            if approves(visible_text(verdict.content)):
                break
            self._metrics["user_revisions"] = self._metrics.get("user_revisions", 0.0) + 1
            if self._config.strategy == "verify":
                line = await self._ask(messages, shift=revision * (self._config.retries + 1))
            else:
                reflection = await self._complete(reflecting(messages, line), self._seed)
                line = spoken(visible_text(reflection.content)) or line
        return line

    async def _ask(self, messages: list[Message], *, shift: int = 0) -> str:
        """The next line; the user's own calls before it, and their answers, are added to
        `messages`. `shift` changes the seed.
        """
        for _ in range(_CALLS_IN_A_ROW):
            found = await self._say(messages, shift)
            if isinstance(found, str):
                return found
            messages += self._act(found)
        self._metrics["user_errors"] += 1
        raise UserSimulatorError(
            f"the user simulator at {self._client.url} called tools {_CALLS_IN_A_ROW} times "
            f"without a word to the agent"
        )

    def _act(self, answer: Answer) -> list[Message]:
        assert self._call is not None
        calls, answers = list(answer.tool_calls), []
        for call in calls:
            self._metrics["user_tool_calls"] = self._metrics.get("user_tool_calls", 0.0) + 1
            function = call.get("function") or {}
            try:
                arguments = orjson.loads(function.get("arguments") or "{}")
                if not isinstance(arguments, dict):
                    raise ValueError("they are no JSON object")
                text = self._call(str(function.get("name")), arguments)
            except ValueError as error:
                function["arguments"] = "{}"  # servers refuse a history with anything but JSON
                text = f"Error: the arguments cannot be read: {error}"
            answers.append({"role": "tool", "tool_call_id": call.get("id"), "content": text})
        return [
            {
                "role": "assistant",
                "content": visible_text(answer.content) or None,
                "tool_calls": calls,
            },
            *answers,
        ]

    async def _say(self, messages: list[Message], shift: int) -> str | Answer:
        """A line, or an answer with tool calls."""
        for attempt in range(self._config.retries + 1):
            # The same seed would give the same empty answer again.
            seed = None if self._seed is None else (self._seed + shift + attempt) % 2**31
            answer = await self._complete(messages, seed, self._tools)
            if answer.tool_calls and self._call is not None:
                return answer
            line = visible_text(answer.content)
            if self._config.strategy == "react":
                line = spoken(line)
            if line:
                return line
            if attempt < self._config.retries:
                self._metrics["user_retries"] += 1
        self._metrics["user_errors"] += 1
        raise UserSimulatorError(
            f"the user simulator at {self._client.url} gave {self._config.retries + 1} answers "
            f"without visible text; "
            "raise max_tokens, or turn its reasoning off through extra_body"
        )

    async def _complete(
        self, messages: list[Message], seed: int | None, tools: Sequence[Tool] = ()
    ) -> Answer:
        started = self._client.clock()
        try:
            answer = await self._client.complete(
                messages, seed=seed, on_retry=self._count_retry, tools=tools
            )
        except UserSimulatorError:
            self._metrics["user_errors"] += 1
            raise
        finally:
            self._metrics["user_seconds"] += self._client.clock() - started
        self._metrics["user_calls"] += 1
        self._metrics["user_prompt_tokens"] += answer.prompt_tokens
        self._metrics["user_completion_tokens"] += answer.completion_tokens
        return answer

    def _count_retry(self) -> None:
        self._metrics["user_retries"] += 1

    @property
    def messages(self) -> list[Message]:
        """A copy of the simulator's own message list."""
        return [dict(message) for message in self._messages]

    def metrics(self) -> Mapping[str, float]:
        """user_calls, user_prompt_tokens, user_completion_tokens, user_seconds (with waits),
        user_retries, user_errors."""
        return dict(self._metrics)

    async def close(self) -> None:
        """Close the client if it is this user's own."""
        if self._owns_client:
            await self._client.close()


class OpenAIUsers:
    """Makes one `OpenAIUser` per episode; they share a session and `config.max_concurrency`.

    `async with OpenAIUsers(config) as users: options = EnvironmentOptions(user=users.make)`.
    """

    def __init__(self, config: UserConfig, *, client: ChatClient | None = None) -> None:
        self._config = config
        self._client = ChatClient(config) if client is None else client

    async def __aenter__(self) -> OpenAIUsers:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def make(self, seed: int | None = None) -> OpenAIUser:
        """The user of one episode; `seed` is that episode's."""
        return OpenAIUser(self._config, client=self._client, seed=seed)

    async def close(self) -> None:
        """Close the shared session."""
        await self._client.close()
