"""Classes of Atropos under their published names.

`ManagedServerAdapter` and `AtroposManagedClient` make a managed server look like an
`openai.AsyncOpenAI` for one rollout. A reply has the tokens of its own call. `DummyManagedServer`
is a `ManagedServer` for a server that returns no token ids. `SequenceNode` is a token sequence in
Atropos' form: masked tokens are -100, and prompt tokens have the logprob 1.0.

Invariants of `SequenceNode`: a token without loss in this node is masked and has the logprob 1.0.
Such a token belongs to a prompt, or to a reply that is excluded from training or trained in another
node. A token with loss has the engine's logprob. If the engine gave none, `TokenError` is raised. A
sampled token that is not excluded from training is unmasked in exactly one node of a state.

Invariants of `DummyManagedServer`: every token is masked, and `metadata["trainable"]` is False. If
there is a tokenizer, the tokens are made from text (`source` "transcript"), so they are not the
sampled tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion import ChoiceLogprobs as OpenAIChoiceLogprobs
from pydantic import BaseModel, Field

from toolroll.rollout.errors import UsageError
from toolroll.rollout.session.session import Session, check_trained_logprobs
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.encode import Encoder
from toolroll.rollout.types import IdArray, Trajectory

_SAMPLING = {"n": 1, "temperature": 1.0, "top_p": 1.0}
"""The published defaults of `create`."""


class LogprobContent(ChatCompletionTokenLogprob):
    """The logprob of one token. It includes the token's id."""

    token: str = ""
    token_id: int = 0
    top_logprobs: list[Any] | None = None  # type: ignore[assignment]


class ChoiceLogprobs(OpenAIChoiceLogprobs):
    """The logprobs of a choice, one for each of its `token_ids`."""

    content: list[LogprobContent] = Field(default_factory=list)  # type: ignore[assignment]


class EnhancedChoice(Choice):
    """A choice with the ids that were sampled. A server without token ids gives None."""

    token_ids: list[int] | None = None
    logprobs: ChoiceLogprobs | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class EnhancedChatCompletion(ChatCompletion):
    """A chat completion with the ids of its prompt. A server without token ids gives None."""

    choices: list[EnhancedChoice]  # type: ignore[assignment]
    prompt_token_ids: list[int] | None = None


class ManagedServerAdapter:
    """Calls `managed_server`, a `ManagedServer` or `DummyManagedServer`, as one calls an
    `AsyncOpenAI`. `base_url` is only an attribute.

    Attributes that are not defined here, such as `post`, `copy` or `responses`, are those of the
    managed server's `client`.
    """

    def __init__(self, managed_server: Any, base_url: str) -> None:
        self.managed_server = managed_server
        self.base_url = base_url
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._chat))
        self.completions = SimpleNamespace(create=managed_server.completion)

    async def _chat(self, **kwargs: Any) -> Any:
        return await self.managed_server.chat_completion(**kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "managed_server":  # in a copy that is not initialized yet
            raise AttributeError(name)
        return getattr(self.managed_server.client, name)


class AtroposManagedClient(ManagedServerAdapter):
    """A `ManagedServerAdapter` whose chat completions are `EnhancedChatCompletion`s.

    As published, `reset` clears the tokens of `managed_server`, `copy` returns the client itself,
    and `close` leaves the server open. Arguments of `create` that are None are left out, and
    `max_completion_tokens` takes precedence over `max_tokens`.
    """

    def __init__(self, managed_server: Any, model: str, base_url: str | None = None) -> None:
        super().__init__(managed_server, base_url or "http://managed-server")
        self.model = model

    async def _chat(self, **kwargs: Any) -> Any:
        arguments = {name: value for name, value in kwargs.items() if value is not None}
        if "max_completion_tokens" in arguments:
            arguments.pop("max_tokens", None)
        reply = await super()._chat(**{"model": self.model, **_SAMPLING, **arguments})
        if not isinstance(reply, ChatCompletion):  # a stream
            return reply
        return EnhancedChatCompletion.model_validate(reply.model_dump())

    def reset(self) -> None:
        """Drop the tokens so far."""
        self.managed_server.reset()

    async def close(self) -> None:
        """Do nothing: the managed server is closed by the code that opened it."""

    def copy(self, **options: Any) -> AtroposManagedClient:
        """Return this client, for the same tokens."""
        return self


# --- token sequences ------------------------------------------------------------------------------


MASKED = -100
PROMPT_LOGPROB = 1.0


class SequenceNode(BaseModel):
    """One sequence. All lists have the same length."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] | None = None


def trajectory_node(trajectory: Trajectory, encoder: Encoder) -> SequenceNode:
    """Return `trajectory` as one node."""
    trained = trajectory.loss_mask.astype(bool)
    last = trajectory.turns[-1] if trajectory.turns else None
    metadata = {
        "finish_reason": last.finish_reason if last is not None else None,
        "turns": len(trajectory.turns),
        "fork_reason": trajectory.fork_reason,
    }
    logprobs = np.where(trained, trajectory.logprobs, PROMPT_LOGPROB)
    text = encoder.decode(trajectory.input_ids)
    return _node(text, trajectory.input_ids, trained, logprobs, metadata)


def tree_nodes(
    session: Session, sampled: Sequence[Node], encoder: Encoder
) -> dict[str, SequenceNode]:
    """Return one sequence for each node in `sampled`: the tokens from the root to the node. The key
    is the text of the sequence. If several sequences have the same text (identical answers to one
    prompt), the keys of the later ones get the suffix "#2", "#3" and so on.

    `metadata["parent"]` is the key of the last sampled node on the path to this node, or None.
    """
    keys: dict[Node, str] = {}
    nodes: dict[str, SequenceNode] = {}
    for node in sampled:
        ids = session.path_ids(node)
        text = encoder.decode(ids)
        key = keys[node] = new_key(text, nodes)
        completion = node.completion
        assert completion is not None
        trained = np.zeros(len(ids), dtype=bool)
        trained[node.start :] = node.excluded is None
        logprobs = np.full(len(ids), PROMPT_LOGPROB)
        if node.excluded is None:
            sampled_logprobs = completion.logprobs
            logprobs[node.start :] = np.nan if sampled_logprobs is None else sampled_logprobs
        parent = next((keys[step] for step in reversed(node.path()[:-1]) if step in keys), None)
        metadata = {"finish_reason": completion.finish_reason, "parent": parent}
        nodes[key] = _node(text, ids, trained, logprobs, metadata)
    return nodes


def new_key(text: str, used: Collection[str]) -> str:
    """Return `text`. If it is in `used`, add the first suffix "#2", "#3" ... that makes it new."""
    names = (text, *(f"{text}#{number}" for number in range(2, len(used) + 2)))
    return next(name for name in names if name not in used)


def _node(
    text: str,
    ids: IdArray,
    trained: npt.NDArray[np.bool_],
    logprobs: npt.NDArray[np.floating],
    metadata: Mapping[str, Any],
) -> SequenceNode:
    check_trained_logprobs(logprobs, trained)
    return SequenceNode(
        full_text=text,
        tokens=ids.tolist(),
        masked_tokens=np.where(trained, ids, MASKED).tolist(),
        logprobs=logprobs.tolist(),
        metadata={"trainable": bool(trained.any()), **metadata},
    )


# --- a server without token ids -------------------------------------------------------------------


class DummyManagedServer:
    """Passes calls on to `server` and records the texts of the replies.

    `server`: an `openai.AsyncOpenAI`, or an object with the coroutines `chat_completion` and
    `completion`, such as Atropos' servers. `model`: the model for calls that name none. It is
    needed if `server` is an `AsyncOpenAI`, because its methods require a model. `track_tree`
    selects the form of `get_state`.
    """

    def __init__(
        self,
        server: Any,
        tokenizer: Any = None,
        track_tree: bool | None = None,  # noqa: FBT001 - as published
        *,
        model: str | None = None,
    ) -> None:
        self.server = server
        self.track_tree = track_tree
        self._named = {"model": model} if model is not None else {}
        self._tokenizer = tokenizer
        self._nodes: dict[str, SequenceNode] = {}

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return a chat completion from `server`."""
        reply: ChatCompletion = await self._ask("chat_completion", kwargs)
        before = _written(kwargs.get("messages") or ())
        for choice in reply.choices:
            self._keep(f"{before}assistant:{choice.message.content or ''}", choice.finish_reason)
        return reply

    async def completion(self, **kwargs: Any) -> Completion:
        """Return a text completion from `server`."""
        reply: Completion = await self._ask("completion", kwargs)
        for choice in reply.choices:
            self._keep(f"{kwargs.get('prompt') or ''}{choice.text}", choice.finish_reason)
        return reply

    async def _ask(self, name: str, kwargs: Mapping[str, Any]) -> Any:
        arguments = {**self._named, **kwargs}
        if not isinstance(self.server, AsyncOpenAI):
            return await getattr(self.server, name)(**arguments)
        arguments.pop("split", None)
        client = self.server.chat if name == "chat_completion" else self.server
        return await client.completions.create(**arguments)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Raise `UsageError`, because a server without token ids has no prompt logprobs."""
        raise UsageError(
            "a DummyManagedServer has no logprobs: use a ManagedServer with an SGLang engine"
        )

    def get_state(self) -> dict[str, Any]:
        """Return `{"nodes": [...]}`. If `track_tree` is True, return `{"sequences": {...}, "tree":
        {...}}` instead. The keys of both are the full texts. If a text repeats, its key gets a
        suffix such as "#2".
        """
        if self.track_tree:
            return {"sequences": dict(self._nodes), "tree": dict(self._nodes)}
        return {"nodes": list(self._nodes.values())}

    def reset(self) -> None:
        """Drop the nodes."""
        self._nodes.clear()

    def _keep(self, text: str, finish_reason: str | None) -> None:
        encode = self._tokenizer.encode if self._tokenizer is not None else None
        tokens = list(encode(text, add_special_tokens=False)) if encode is not None else []
        metadata = {
            "trainable": False,
            "dummy_tokens": True,
            "source": "transcript",
            "finish_reason": finish_reason,
        }
        self._nodes[new_key(text, self._nodes)] = SequenceNode(
            full_text=text,
            tokens=tokens,
            masked_tokens=[MASKED] * len(tokens),
            logprobs=[PROMPT_LOGPROB] * len(tokens),
            metadata=metadata,
        )


def _written(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(
        f"{message.get('role')}:{message.get('content') or ''}\n\n" for message in messages
    )
