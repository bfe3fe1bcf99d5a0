"""The bodies of requests, as pydantic models.

Invariants: an unknown field is refused by name, never ignored. null means "not set", as in the
SDKs. A label that does not affect the answer (`user`, `metadata` ...) is accepted and dropped.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolroll.endpoint.endpoint_settings import SameNames, Stops
from toolroll.endpoint.errors import refusal_of
from toolroll.rollout.session.trajectory_json import Number

IGNORED_FIELDS = frozenset(
    {"user", "metadata", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)
"""Fields that do not affect the answer. `lineage_of` reads labels from the body before."""

M = TypeVar("M", bound=BaseModel)


class Body(BaseModel):
    """A request's body, or an object in it. Fields that the subclass does not have are refused."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    """The options of a stream. `include_obfuscation`, which pads events against traffic analysis,
    is not supported: it must be false.
    """

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Common(Body):
    """The fields that all APIs of models share."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool = False
    session_id: str | None = None
    """A field that only this endpoint has."""


class Sampling(Common, SameNames):
    """The fields that chat and text completions share."""

    n: int = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    stop: Stops = None
    seed: int | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        """The number of tokens that the request allows."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """The number of top logprobs at each position, or None if the request wants no logprobs."""
        raise NotImplementedError


class FunctionDefinition(BaseModel):
    """The function of a tool. If `strict` is true, a grammar forces its arguments to follow the
    schema (`tool_choice.strict_tag`).
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(BaseModel):
    """One tool."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The function that must be called."""

    name: str


class NamedChoice(Body):
    """A tool choice that names a function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(Body):
    """A named JSON schema."""

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """An output format: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: list[Any] = Field(min_length=1)
    """Checked by `messages.read_messages`."""
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool | None = None
    """If true, the model continues the last message, which must be the assistant's (`prefill`)."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """Passed to the chat template as a variable (`TemplateCache.add_effort`)."""
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None

    @property
    def token_limit(self) -> int | None:
        """Return `max_completion_tokens`, or `max_tokens` if it is not set."""
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit

    @property
    def top(self) -> int | None:
        """The number of top logprobs at each position, or None if the request wants no logprobs."""
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(Sampling):
    """`POST /v1/completions`. `prompt`: one text, or one list of ids."""

    prompt: str | list[int]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def top(self) -> int | None:
        """`logprobs`, under the same name as in a chat request."""
        return self.logprobs


class TokenizeRequest(Body):
    """`POST /tokenize`. The input is a plain text (`prompt`), or `messages`, which are rendered as
    for a chat completion.
    """

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[ToolDefinition] | None = None
    prompt: str | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class SessionRequest(Body):
    """`POST /sessions`. `sampling_params` (with SGLang's names) are defaults for the session's
    requests.
    """

    session_id: str | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)


class RewardRequest(Body):
    """`POST /sessions/{id}/reward`."""

    reward: Number
    info: dict[str, Any] = Field(default_factory=dict)


def read(kind: type[M], body: dict[str, Any], *, ignored: bool = True) -> M:
    """Validate `body` as the pydantic model `kind` and return it. If `ignored` is True, drop the
    fields in `IGNORED_FIELDS`. Raises `ApiError` (400), which names the field at fault.
    """
    fields = {
        name: value
        for name, value in body.items()
        if value is not None and not (ignored and name in IGNORED_FIELDS)
    }
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise refusal_of(error) from error
