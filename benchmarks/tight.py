"""The tight loop: the least that an episode costs in Python with aiohttp, as a floor for the other
loops.

It appends ids to arrays and sends the JSON of the known ids, encodes a new message together with
the template's text around it, and caches the ids of system prompt and tools. It has no validation,
verification, limits, retries, traces or files, and text of a control token in a message becomes
that token. The frame of a message is right for templates like Qwen's instruct ones only.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from benchmarks.world import RecordedFactory, call_of
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import Action, EnvironmentOptions, Task
from toolroll.rollout.types import Message, Tool

PARAMS = {"temperature": 1.0, "max_new_tokens": 512}
_MARK = "@@BODY@@"


class Prompts:
    """Encodes first prompts and new messages. One serves all episodes."""

    def __init__(self, tok: Any) -> None:
        self._tok = tok
        self._heads: dict[str, list[int]] = {}
        said = {"role": "assistant", "content": "@@SAID@@"}
        start: list[Message] = [{"role": "user", "content": "Hi"}, said]
        self._frames = {}
        for role in ("tool", "user"):
            text = self._render([*start, {"role": role, "content": _MARK}], None)
            text = text[text.index("<|im_end|>", text.index("@@SAID@@")) + len("<|im_end|>") :]
            self._frames[role] = text.split(_MARK)

    def first(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """Return the ids of a first prompt."""
        text = self._render(messages, tools)
        end = text.rindex("<|im_start|>user")
        head = self._heads.get(text[:end])
        if head is None:
            head = self._heads[text[:end]] = self._encode(text[:end])
        return head + self._encode(text[end:])

    def new(self, message: Message) -> list[int]:
        """Return the ids of a message after a sampled turn, with the generation prompt."""
        before, after = self._frames[message["role"]]
        return self._encode(f"{before}{message['content']}{after}")

    def _render(self, messages: list[Message], tools: list[Tool] | None) -> str:
        kwargs: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        return str(self._tok.apply_chat_template(messages, tools=tools, **kwargs))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tok.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@dataclass
class Episode:
    """What a trainer needs, and the messages."""

    messages: list[Message] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    mask: bytearray = field(default_factory=bytearray)
    json: bytearray = field(default_factory=bytearray)
    turns: int = 0
    reward: float | None = None

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Append sampled ids with their log-probabilities, or other ids without."""
        self.ids.extend(ids)
        self.logprobs.extend(logprobs or [0.0] * len(ids))
        self.mask += bytes([logprobs is not None]) * len(ids)
        self.json += (b"," if self.json else b"") + b",".join(map(b"%d".__mod__, ids))


async def play(
    episode: Episode, factory: RecordedFactory, task: Task, prompts: Prompts, post: Any, params: Any
) -> None:
    """Play one episode. `post` sends a body to the engine and returns the decoded answer."""
    env = factory.make(EnvironmentOptions())
    observation = await env.reset(task, 0)
    episode.messages = list(observation.messages)
    episode.append(prompts.first(episode.messages, list(observation.tools or ())))
    tail = b'],"sampling_params":%b,"return_logprob":true}' % orjson.dumps(params)
    done = False
    while not done:
        answer = await post(b"".join((b'{"input_ids":[', episode.json, tail)))
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        episode.append(answer["output_ids"], logprobs)
        episode.turns += 1
        said, call = answer["text"], call_of(answer["text"])
        calls = (ToolCall(*call, "", id=f"call{episode.turns}"),) if call else ()
        episode.messages.append({"role": "assistant", "content": said})
        result = await env.step(Action(said, calls))
        for message in result.messages:
            episode.messages.append(message)
            episode.append(prompts.new(message))
        episode.reward, done = result.reward, result.done


async def run(
    url: str,
    tok: Any,
    factory: RecordedFactory,
    tasks: Iterable[Task],
    concurrency: int,
    begun: Callable[[Episode], None] = lambda episode: None,
    *,
    params: Any = PARAMS,
) -> None:
    """Play `tasks`, `concurrency` at once. `begun` gets each episode before its first turn."""
    prompts, waiting = Prompts(tok), iter(tasks)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=timeout,
        headers={"Content-Type": "application/json"},  # SGLang wants it
    ) as http:

        async def post(body: bytes) -> Any:
            async with http.post(f"{url}/generate", data=body) as response:
                return orjson.loads(await response.read())

        async def player() -> None:
            for task in waiting:
                episode = Episode()
                begun(episode)
                await play(episode, factory, task, prompts, post, params)

        await asyncio.gather(*(player() for _ in range(concurrency)))
