"""The ways of other projects to get from messages to the ids of the next prompt, each as one small
class. Projects that are not installed are skipped.

A way gets a conversation once (`begin`: the first prompt), and then for each turn the sampled text
and the new messages (`turn`). It returns the whole next prompt. Only `begin` and `turn` are timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

from benchmarks.conversations import as_sampled
from toolroll.rollout.types import Message, Tool


class Way(Protocol):
    """One way of prompt building."""

    name: str

    def begin(self, messages: list[Message], tools: list[Tool]) -> Sequence[int]:
        """Return the ids of the first prompt."""
        ...

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        """Return the ids of the next prompt."""
        ...


class FullRender:
    """Render and tokenise everything each turn."""

    name = "full render + full tokenise"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._messages: list[Message] = []
        self._tools: list[Tool] = []

    def begin(self, messages: list[Message], tools: list[Tool]) -> Sequence[int]:
        self._messages, self._tools = list(messages), tools
        return self._ids()

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        self._messages += [readable(assistant), *new]
        return self._ids()

    def _ids(self) -> Sequence[int]:
        text = self._tokenizer.apply_chat_template(
            self._messages, tools=self._tools, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class PublishedLoop:
    """The text loop of slime's tau-bench example (commit 624b824a): text to the engine, ids by
    differences of renders.
    """

    name = "published loop (text payload)"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._messages: list[Message] = []
        self._tools: list[Tool] = []
        self._ids: list[int] = []

    def begin(self, messages: list[Message], tools: list[Tool]) -> Sequence[int]:
        self._messages, self._tools = list(messages), tools
        text = published_payload(self._tokenizer, self._messages, tools)
        self._ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        published_payload(self._tokenizer, self._messages, tools)
        return self._ids

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        for message in (plain(assistant), *new):
            self._messages.append(message)
            self._ids += published_delta(self._tokenizer, self._messages)
        published_payload(self._tokenizer, self._messages, self._tools)
        return self._ids


def published_payload(tokenizer: Any, messages: list[Message], tools: list[Tool]) -> str:
    """Return the text that the published loop sends to the engine."""
    kwargs: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "tools": tools}
    return str(tokenizer.apply_chat_template(messages, **kwargs))


def published_delta(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Return the ids that the last message adds, like `get_token_delta` of slime's example: three
    whole renders for an assistant message, two for others, and one or two encodes.
    """

    def render(stop: int, *, generate: bool = False) -> str:
        kwargs: dict[str, Any] = {"tokenize": False, "add_generation_prompt": generate}
        return str(tokenizer.apply_chat_template(messages[:stop], **kwargs))

    count = len(messages)
    text, before = render(count), render(count - 1)
    if messages[-1]["role"] == "assistant":
        prompt = render(count - 1, generate=True)
        tokenizer.encode(prompt[len(before) :], add_special_tokens=False)
    ids: list[int] = tokenizer.encode(text[len(before) :], add_special_tokens=False)
    return ids


class Renderers:
    """renderers 0.1.12: `bridge_to_next_turn` of its hand-written Qwen3 renderer."""

    name = "renderers, bridge, retention all"

    def __init__(self, tokenizer: Any) -> None:
        configs, base = (
            importlib.import_module("renderers.configs"),
            importlib.import_module("renderers.base"),
        )
        self._renderer = base.create_renderer(
            tokenizer, configs.Qwen3RendererConfig(thinking_retention="all")
        )
        self._tools: list[Tool] = []
        self._prompt: list[int] = []

    def begin(self, messages: list[Message], tools: list[Tool]) -> Sequence[int]:
        self._tools = tools
        self._prompt = list(
            self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        )
        return self._prompt

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        bridged = self._renderer.bridge_to_next_turn(
            self._prompt, sampled_ids, new, tools=self._tools
        )
        self._prompt = list(bridged.token_ids)
        return self._prompt


class Strands:
    """strands-sglang 0.6.2: `SGLangModel.tokenize_prompt_messages` and its rollout's lists."""

    name = "strands-sglang"

    def __init__(self, tokenizer: Any) -> None:
        package = importlib.import_module("strands_sglang")
        logging.getLogger("strands_sglang").setLevel(logging.WARNING)
        client = package.SGLangClient("http://127.0.0.1:1")
        self._model = package.SGLangModel(client=client, tokenizer=tokenizer, enable_thinking=False)
        _ = self._model.message_separator
        self._messages: list[Any] = []
        self._system = ""
        self._specs: list[Any] = []
        self._prompt: list[int] = []

    def begin(self, messages: list[Message], tools: list[Tool]) -> Sequence[int]:
        self._model.reset()
        self._system = str(messages[0]["content"])
        self._messages = [strands_message(message) for message in messages[1:]]
        self._specs = [strands_tool(tool) for tool in tools]
        return self._next()

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        rollout = self._model.rollout
        rollout.add_prompt(self._prompt)
        rollout.add_response(sampled_ids)
        self._model.processed_messages = len(self._messages) + 1
        self._messages.append({"role": "assistant", "content": [{"text": ""}]})
        self._messages += [strands_message(message) for message in new]
        return self._next()

    def _next(self) -> Sequence[int]:
        self._prompt = self._model.tokenize_prompt_messages(
            self._messages, self._system, self._specs
        )
        return list(self._model.rollout.token_ids + self._prompt)


class Verl:
    """verl 0.9.1: its continuous-token builder for Qwen. `with_tools`: pass the tools to each
    merge, like its agent loop.
    """

    def __init__(self, tokenizer: Any, *, with_tools: bool) -> None:
        self.name = "verl, continuous tokens" + ("" if with_tools else ", tools=None")
        self._builder = verl_module().QwenContinuousTokenBuilder(tokenizer)
        self._with_tools = with_tools
        self._messages: list[Message] = []
        self._tools: list[Tool] = []
        self._ids: list[int] = []

    def begin(self, messages: list[Message], tools: list[Tool]) -> Sequence[int]:
        self._messages, self._tools = list(messages), tools
        self._ids = self._builder.build_initial_tokens(messages, tools=tools)
        return self._ids

    def turn(self, assistant: Message, sampled_ids: list[int], new: list[Message]) -> Sequence[int]:
        before = [*self._messages, readable(assistant)]
        after = [*before, *new]
        ids = self._builder.merge_assistant_tokens(self._ids, sampled_ids).token_ids
        tools = self._tools if self._with_tools else None
        self._ids = self._builder.merge_context_tokens(before, after, ids, tools=tools).token_ids
        self._messages = after
        return self._ids


def readable(message: Message) -> Message:
    """Return an assistant message for a template: content "" instead of None."""
    return {**message, "content": message.get("content") or ""}


def plain(message: Message) -> Message:
    """Return an assistant message in the form of the published loop: the whole reply as text."""
    return {"role": "assistant", "content": as_sampled(message)}


def strands_message(message: Message) -> dict[str, Any]:
    """Return a message in strands' format."""
    if message["role"] == "tool":
        result = {
            "toolUseId": message["tool_call_id"],
            "content": [{"text": message["content"]}],
            "status": "success",
        }
        return {"role": "user", "content": [{"toolResult": result}]}
    return {"role": message["role"], "content": [{"text": message["content"]}]}


def strands_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool in strands' format."""
    function = tool["function"]
    return {
        "name": function["name"],
        "description": function["description"],
        "inputSchema": {"json": function["parameters"]},
    }


def verl_module() -> ModuleType:
    """Return verl's continuous-token module, without importing its parent packages, which import
    ray.
    """
    name = "verl.utils.tokenizer.continuous_token"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec("verl")
    folder = next(iter(spec.submodule_search_locations or ())) if spec else ""
    for above in ("verl", "verl.utils", "verl.utils.tokenizer"):
        package = ModuleType(above)
        package.__path__ = [folder + above.removeprefix("verl").replace(".", "/")]
        package.__spec__ = importlib.util.spec_from_loader(above, None, is_package=True)
        sys.modules[above] = package
    return importlib.import_module(name)


def missing(package: str, module: str) -> str | None:
    """Return why a peer is skipped; None if it is installed."""
    there = module in sys.modules or importlib.util.find_spec(module) is not None
    return None if there else f"{package} is not installed"
