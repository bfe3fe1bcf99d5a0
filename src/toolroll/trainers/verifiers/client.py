"""`EndpointClient`: a verifiers client for `toolroll serve`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any

from toolroll.rollout.errors import UsageError

_CHAT = "/chat/completions"
_STREAM = ("stream", "stream_options")


class EndpointClient:
    """A verifiers `Client`. Its answers have `Response.tokens`: the ids of the prompt, the sampled
    ids and their logprobs.

    `config` is verifiers' `TrainClientConfig`, with the address of `toolroll serve` as `base_url`.
    The config's renderer settings are not used. With a config of this class, verifiers calls
    `get_response` for each turn, even if the harness streams. If the endpoint returns routed
    experts, `expert_layers`, the model's number of layers, passes them on. Raise `UsageError` if
    verifiers is not installed.
    """

    def __init__(self, config: Any, *, expert_layers: int | None = None) -> None:
        self._expert_layers = expert_layers
        self._inner: Any = _module("clients.eval").EvalClient(config)

    async def get_response(
        self,
        dialect: Any,
        body: Mapping[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return verifiers' `Response` for one chat completion request in the session `session_id`.

        Raise `ProviderError` if `dialect` is not chat completions, if `n` is not 1, if the answer
        lacks token ids or logprobs, or if the engine aborted the turn.
        """
        if dialect.upstream_path != _CHAT:
            raise _error(
                f"only chat completions have token ids here, not {dialect.upstream_path}: use a "
                "harness that calls /v1/chat/completions",
                400,
            )
        for n in (body.get("n"), getattr(sampling, "n", None)):
            if n not in (None, 1):
                raise _error(f"n={n} is not supported: a turn has one answer, so leave n out", 400)
        fields = {name: value for name, value in body.items() if name not in _STREAM}
        response = await self._inner.get_response(
            dialect, {**fields, "logprobs": True}, sampling, session_id, turn, headers
        )
        response.tokens = _tokens(response.raw)
        (choice,) = response.raw["choices"]
        experts = choice.get("routed_experts")
        if experts and self._expert_layers:  # set later: the class would leave `dtype` out
            response.tokens.routed_experts = _in_layers(experts, self._expert_layers)
        return response

    async def relay(self, *arguments: Any, **named: Any) -> Any:
        """Raise `NotImplementedError`, because a streamed answer has no token ids."""
        raise NotImplementedError("use a TrainClientConfig: a streamed answer has no token ids")

    async def relay_aux(self, *arguments: Any, **named: Any) -> Any:
        """Return the answer to a request that is not a turn of the model."""
        return await self._inner.relay_aux(*arguments, **named)

    async def close(self) -> None:
        """Close the connections."""
        await self._inner.close()


def register(server: Any, config: Any, *, expert_layers: int | None = None) -> EndpointClient:
    """Make `server`, a started interception server of verifiers, use an `EndpointClient` for
    `config` and `expert_layers`. Without this call, verifiers creates a client of its own.

    The server closes the client when it stops.
    """
    client = EndpointClient(config, expert_layers=expert_layers)
    key = config.model_dump_json()
    server.clients[key] = client
    _registered.add(key)
    server.stack.push_async_callback(client.close)
    return client


_registered: set[str] = set()
"""The configs for which `register` has created a client."""


def is_registered(config: Any) -> bool:
    """Return True if `register` has created a client for `config` in this process."""
    return config.model_dump_json() in _registered


def _tokens(raw: Mapping[str, Any]) -> Any:
    """Return verifiers' `TurnTokens` for a chat completion."""
    (choice,) = raw["choices"]
    prompt, ids = raw.get("prompt_token_ids"), choice.get("token_ids")
    content = (choice.get("logprobs") or {}).get("content") or []
    if not prompt or ids is None or [entry.get("token_id") for entry in content] != ids:
        raise _error(
            "the answer has no token ids, or its logprobs are for other ids: base_url must be the "
            "address of `toolroll serve`",
            422,
        )
    if any(entry.get("logprob") is None for entry in content):
        raise _error("a sampled token of the answer has no logprob", 422)
    if choice.get("finish_reason") not in ("stop", "length", "tool_calls"):
        raise _error(f"the engine ended the turn with {choice.get('finish_reason')!r}", 503)
    return _module("types").TurnTokens(
        prompt_ids=prompt,
        completion_ids=ids,
        completion_logprobs=[entry["logprob"] for entry in content],
    )


def _in_layers(experts: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the `routed_experts` of a choice with the shape [tokens, layers, top_k]."""
    tokens, per_token = experts["shape"]
    if per_token % layers:
        text = f"{per_token} routed experts per token are not those of {layers} layers"
        raise _error(f"{text}: set expert_layers to the model's number of layers", 422)
    return {**experts, "shape": [tokens, layers, per_token // layers]}


def _error(text: str, status_code: int) -> Exception:
    error: Exception = _module("errors").model_error(text, status_code=status_code)
    return error


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"verifiers.v1.{name}")
    except ImportError as error:
        raise UsageError(
            f"EndpointClient needs verifiers with its dependencies ({error}): "
            "pip install verifiers==0.4.0"
        ) from error


# Make `isinstance(client, Client)` True. verifiers itself has no such check.
with contextlib.suppress(ImportError):
    importlib.import_module("verifiers.v1.clients.client").Client.register(EndpointClient)
