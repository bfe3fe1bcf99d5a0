"""`ManagedSession`: the calls and the state of one rollout, with the methods of Atropos'
`ManagedServer`.

Invariants: a call returns only its own data. `get_state` contains every returned answer exactly
once. It may also contain the answer of a call that was cancelled just before it returned.
Concurrent calls are safe. The session is dropped when its context ends.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, NamedTuple, Self

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import SecretStr

from toolroll.endpoint.conversation.messages import read_messages
from toolroll.endpoint.endpoint import Endpoint
from toolroll.endpoint.endpoint_settings import EndpointSettings
from toolroll.endpoint.in_process.client import ToolrollClient
from toolroll.endpoint.in_process.published import trajectory_node, tree_nodes
from toolroll.endpoint.requests.ignored_fields import IgnoredFields
from toolroll.endpoint.sessions.live_session import LiveSession
from toolroll.parsers.registry import get_parser
from toolroll.rollout.engine import LORA_PATH, Engine, EngineClient, EngineConfig
from toolroll.rollout.errors import EngineError, UsageError, prompt_too_long
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.tokenizers import load_tokenizer
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.chat_template import HistoryPolicy

_UNNAMED = frozenset({"", "none", "default"})
"""Placeholders in Atropos' configurations for names that are not set."""

ATROPOS_ONLY = ("skip_reasoning",)
"""Arguments for Atropos' own servers. They are dropped."""


class ManagedSession:
    """Chat and text completions in one session of `endpoint`, and the session's state. `client` is
    an `AsyncOpenAI` for the same session. `track_tree` selects the form of `get_state`.
    """

    def __init__(
        self, endpoint: Endpoint, *, session: str | None = None, track_tree: bool = False
    ) -> None:
        self.endpoint = endpoint
        self.track_tree = track_tree
        self.client = ToolrollClient(endpoint, session=session)

    async def chat_completion(self, *, split: str = "train", **kwargs: Any) -> ChatCompletion:
        """Return a chat completion. If the last message is the assistant's, the model continues it,
        and the reply is only the continuation.

        `kwargs`: the arguments of `chat.completions.create`, and every other field that the
        endpoint supports. `split`: Atropos' "train" or "eval", which does not affect the tokens.
        """
        if _continues(kwargs.get("messages") or ()):
            kwargs = {"continue_final_message": True, **kwargs}
        reply: ChatCompletion = await self._ask(self.client.chat.completions, split, kwargs)
        return reply

    async def completion(self, *, split: str = "train", **kwargs: Any) -> Completion:
        """Return a text completion. It continues an earlier completion if `prompt` starts with that
        completion's text or ids. `split`: as in `chat_completion`.
        """
        reply: Completion = await self._ask(self.client.completions, split, kwargs)
        return reply

    async def _ask(self, completions: Any, split: str, kwargs: Mapping[str, Any]) -> Any:
        create = completions.create
        async with self._slot(split):
            reply = await create(**_sorted(create, kwargs))
        live = self._live()
        if live is not None:
            await self.endpoint.settle(live)
        return reply

    async def get_logprobs(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Any] | None = None,
        input_ids: Sequence[int] | None = None,
        top_k: int = 1,
        top_logprobs: int | None = None,
        split: str = "train",
        **sampling: Any,
    ) -> dict[str, Any]:
        """Return the logprobs of a prompt, as `prompt_logprobs` does. Nothing is sampled, so the
        arguments in `sampling` (`max_tokens`, `temperature`, `model`) have no effect.

        Give exactly one of `prompt` (text), `messages` and `input_ids` (such as the `tokens` of a
        node). `messages` are rendered with the chat template, followed by the generation prompt
        unless the last message is the assistant's.
        """
        if [prompt, messages, input_ids].count(None) != 2:
            raise UsageError("get_logprobs takes exactly one of prompt, messages and input_ids")
        template = self.endpoint.model.template
        if messages is not None:
            templates = self.endpoint.templates
            read = read_messages(messages, templates, IgnoredFields(), answer=False)
            generate = read[-1]["role"] != "assistant"
            ids: Sequence[int] = template.encode_conversation(read, None, generate=generate)
        else:
            ids = input_ids if input_ids is not None else template.encoder.encode(prompt or "")
        async with self._slot(split):
            return await prompt_logprobs(self.endpoint, ids, top_logprobs or top_k)

    def _slot(self, split: str) -> AbstractAsyncContextManager[Any]:
        """Return the context manager inside which a request of `split` runs. Subclasses override
        this to limit concurrency.
        """
        return nullcontext()

    def _live(self) -> LiveSession | None:
        return self.endpoint.sessions.get(self.client.session)

    def get_state(self) -> dict[str, Any]:
        """Return `{"nodes": [...]}`, with one `SequenceNode` per sequence.

        If `track_tree` is True, return `{"sequences": {...}, "tree": {...}}`. Both values are the
        same, as in Atropos: each maps the full text of each sampled turn to a node in which only
        that turn is unmasked.
        """
        live = self._live()
        if live is None:
            return {"sequences": {}, "tree": {}} if self.track_tree else {"nodes": []}
        self.endpoint.settle_now(live)  # requests through `client` are not settled yet
        encoder = self.endpoint.model.template.encoder
        if self.track_tree:
            nodes = tree_nodes(live.session, [node for node, _ in live.trace], encoder)
            return {"sequences": nodes, "tree": dict(nodes)}
        return {
            "nodes": [
                trajectory_node(sequence, encoder) for sequence in live.session.trajectories()
            ]
        }

    def reset(self) -> None:
        """Drop all nodes. Later calls use a new session."""
        previous = self.client.reset()
        self.endpoint.sessions.discard(previous)

    async def aclose(self) -> None:
        """Drop the session, and close `client`."""
        self.reset()
        await self.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


@asynccontextmanager
async def managed_session(
    engine: Model | EngineClient | EngineConfig | str,
    tokenizer: Any = None,
    *,
    track_tree: bool = False,
    tool_parser: str = "hermes",
    session: str | None = None,
    history: HistoryPolicy = "fork",
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    settings: EndpointSettings | None = None,
) -> AsyncIterator[ManagedSession]:
    """Yield a `ManagedSession` over `engine`.

    `engine` is an address, a configuration, an `Engine` or a `Model`. An `Engine` or a `Model` is
    not closed at the end. `tokenizer` is an object or a name; by default, it is the tokenizer of
    the model that the engine serves. If `engine` is a `Model`, the arguments for the tokenizer,
    parser and template are ignored.
    """
    if isinstance(engine, Model):
        model = engine
    else:
        named = tokenizer if tokenizer is not None else await served_model(engine)
        model = open_model(
            engine,
            named if named is not None and not isinstance(named, str) else load_tokenizer(named),
            tool_parser,
            reasoning=True,
            chat_template=chat_template,
            kwargs=chat_template_kwargs,
            history=history,
        )
    try:
        async with Endpoint(model, settings) as endpoint:
            managed = ManagedSession(
                endpoint, session=session or f"managed-{uuid.uuid4().hex}", track_tree=track_tree
            )
            try:
                yield managed
            finally:
                await managed.aclose()
    finally:
        if model is not engine:
            await close_model(model, engine)


def open_model(
    server: Any,
    tokenizer: Any,
    parser: str | None,
    *,
    reasoning: bool = False,
    **template: Any,
) -> Model:
    """Return the model that `server` serves. `server` and `tokenizer`: see `ManagedServer`.
    `parser`: the name of the format of tool calls (default: replies are not parsed). If `reasoning`
    is False, it leaves reasoning in the content, as Atropos does. `template`: the arguments of
    `ChatTemplate`.
    """
    loaded = _named_tokenizer(server, tokenizer)
    if loaded is None:
        raise UsageError(
            "no tokenizer is named: give tokenizer=..., or a server whose configuration names one "
            "(tokenizer_name or model_name); `managed_session` asks an engine for its model"
        )
    if isinstance(loaded, str):
        loaded = load_tokenizer(loaded)
    chat_template = ChatTemplate(loaded, **template)
    reader = get_parser(parser or "plain", loaded.get_added_vocab())
    if not reasoning:
        reader.reasoning = None
    engine, name = _engine(server, vocab_size=len(loaded)), _config_of(server).model_name or ""
    return Model(engine, chat_template, reader, name=name)


async def close_model(model: Model, server: Any) -> None:
    """Close what `open_model` opened for `server`, and not what belongs to the caller."""
    if isinstance(model.engine, Engine) and model.engine is not server:
        await model.aclose()
    else:
        model.release()


def _named_tokenizer(server: Any, tokenizer: Any) -> Any:
    """Return `tokenizer`, or else the tokenizer of `server`, or else the name in its configuration.
    Return None if there is none.
    """
    direct = tokenizer if tokenizer is not None else getattr(server, "tokenizer", None)
    if direct is not None:
        return direct
    config = _config_of(server)
    return config.tokenizer_name or config.model_name


def _engine(server: Any, *, vocab_size: int) -> Any:
    """Return the engine of `server`: an address, an `EngineConfig`, a server of Atropos, whose
    `config` has an address, or another object with a method `generate`, such as an `EngineClient`.
    """
    if isinstance(server, str):
        return Engine(EngineConfig(engine=_root(server), vocab_size=vocab_size))
    if isinstance(server, EngineConfig):
        return Engine(server)
    config = _config_of(server)
    if config.base_url:  # first, because a server of Atropos may have a method `generate` too
        return Engine(_engine_config(config, config.base_url, vocab_size))
    if callable(getattr(server, "generate", None)):
        return server
    raise UsageError(
        f"a ManagedServer needs the address of an SGLang server, not {type(server).__name__}: "
        "give an address, or an object whose config has a base_url"
    )


class _ServerConfig(NamedTuple):
    """The fields of an Atropos server's `config` that have an effect here. None: not set."""

    base_url: str | None
    server_type: str | None
    api_key: str | None
    timeout: float | None
    model_name: str | None
    tokenizer_name: str | None


def _config_of(server: Any) -> _ServerConfig:
    """Read the `config` of `server`. If it is no server of Atropos, no field is set."""
    config = getattr(server, "config", None)
    fields = {name: getattr(config, name, None) for name in _ServerConfig._fields}
    names = {name: fields[name] for name in ("model_name", "tokenizer_name")}
    unnamed = {name: None for name, value in names.items() if value in _UNNAMED}
    return _ServerConfig(**{**fields, **unnamed})


def _engine_config(config: _ServerConfig, address: str, vocab_size: int) -> EngineConfig:
    if config.server_type in ("vllm", "trl"):
        raise UsageError(
            f"the server at {address} is of type {config.server_type!r}: only SGLang's /generate "
            "gives exact tokens here (server_type='sglang')"
        )
    limits: dict[str, Any] = {"attempt_timeout": config.timeout} if config.timeout else {}
    return EngineConfig(
        engine=_root(address),
        authorization=SecretStr(f"Bearer {config.api_key}") if config.api_key else None,
        vocab_size=vocab_size,
        **limits,
    )


def _root(address: str) -> str:
    """Return `address` without the `/v1` that OpenAI's clients need."""
    return address.rstrip("/").removesuffix("/v1")


async def served_model(engine: EngineClient | EngineConfig | str) -> str | None:
    """Return the name or folder of the model that `engine` serves, or None."""
    if isinstance(engine, str | EngineConfig):
        async with Engine(engine) as client:
            return (await client.model_info()).model_path
    return (await engine.model_info()).model_path


def _continues(messages: Sequence[Any]) -> bool:
    """Return True if the last message is the assistant's. A message is a mapping or an object of
    the SDK.
    """
    last = messages[-1] if messages else None
    role = last.get("role") if isinstance(last, Mapping) else getattr(last, "role", None)
    return role == "assistant"


def _sorted(create: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `kwargs` as arguments for `create`. Names that the SDK does not know go into
    `extra_body`. The endpoint then refuses those that it does not support.
    """
    parameters = inspect.signature(create).parameters
    named = {name: value for name, value in kwargs.items() if name in parameters}
    extra = {name: value for name, value in kwargs.items() if name not in parameters}
    extra |= named.pop("extra_body", None) or {}
    for name in ATROPOS_ONLY:
        extra.pop(name, None)
    return {**named, **({"extra_body": extra} if extra else {})}


# --- logprobs of a prompt -------------------------------------------------------------------------


async def prompt_logprobs(endpoint: Endpoint, ids: Sequence[int], top: int) -> dict[str, Any]:
    """Return `{"prompt_tokens": ids, "prompt_topk_token_ids": [...], "prompt_topk_logprobs":
    [...]}`. The last two have one list per position: first the prompt's own token, then the `top`
    most likely tokens except this token. The lists of the first position are empty, because the
    first token has no logprob.

    Raise `UsageError` if an id is outside the vocabulary or stands for an image,
    `ContextOverflowError` if the prompt is too long, and `EngineError` if the engine answers
    without logprobs.
    """
    await endpoint.refresh()
    limits, engine = endpoint.model_info, endpoint.model.engine
    sent = [int(index) for index in ids]
    if not sent or top < 1:
        raise UsageError("get_logprobs needs a prompt that is not empty, and a top_k of at least 1")
    if not all(0 <= index < (limits.vocab_size or 2**31) for index in sent):
        raise UsageError(f"the prompt has an id outside the vocabulary of {limits.vocab_size}")
    if images := endpoint.model.placeholders.intersection(sent):
        text = endpoint.model.template.encoder.decode(images)
        raise UsageError(f"the prompt has {text}, which stands for an image, a video or audio")
    if limits.context_length is not None and len(sent) >= limits.context_length:
        raise prompt_too_long(len(sent), limits.context_length - 1)
    payload = {
        "input_ids": sent,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        LORA_PATH: endpoint.settings.sampling_params.get(LORA_PATH),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top,
    }
    answer = await endpoint.model.post(f"{engine.url}/generate", payload)
    meta = answer.get("meta_info") or {}
    tokens, ranked = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
    if not tokens or not ranked or not len(tokens) == len(ranked) == len(sent):
        raise EngineError(f"the engine at {engine.url} returned no logprobs of the prompt")
    if [entry[1] for entry in tokens] != sent:
        raise EngineError(f"the engine at {engine.url} returned logprobs of other tokens")
    places = [_place(*pair) for pair in zip(tokens[1:], ranked[1:], strict=True)]
    return {
        "prompt_tokens": sent,
        "prompt_topk_token_ids": [[], *map(list, places)],
        "prompt_topk_logprobs": [[], *(list(logprobs.values()) for logprobs in places)],
    }


def _place(token: Sequence[Any], ranked: Sequence[Sequence[Any]] | None) -> Mapping[int, float]:
    """Return one position's logprobs by token id. Raise `EngineError` if a value is missing."""
    logprobs = {int(entry[1]): entry[0] for entry in (token, *(ranked or ()))}
    if not ranked or not all(isinstance(value, float) for value in logprobs.values()):
        raise EngineError("the engine returned no logprobs for a position of the prompt")
    return logprobs
