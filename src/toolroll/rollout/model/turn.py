"""Parse a completion into a turn of the conversation: its text, its tool calls, and its message.

All code that samples from a served model uses this module, so that the same tokens always become
the same message.

Some model formats have no ids for tool calls. An id that this module makes has nine characters of
[A-Za-z0-9], because Mistral's chat template accepts only such ids. It is a hash of the session id,
the position of the turn and the index of the call. So the same session id, turn and index always
give the same id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolroll.parsers.base import OfferedTools
from toolroll.parsers.openai import to_openai
from toolroll.parsers.types import ParsedReply
from toolroll.rollout.model.model import Model
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.delta import SampledText
from toolroll.rollout.types import Completion, Message

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LENGTH = 9
ParseHook = Callable[[str, ParsedReply], ParsedReply]
"""Takes the text of a turn and the reply that the model's parser read. Returns the reply to use."""


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One turn of the model: the parsed reply and the message for the conversation. The message's
    `tool_calls` include invalid calls.

    `finish_reason`: that of the `Completion`, or "placeholder" if the turn was cut before a
    placeholder token. `counts`: prompt_tokens, completion_tokens, cached_tokens and engine_retries,
    if known. `seconds`: how long the turn took. `text`: the text without the stop token. `node`:
    the turn's node in the session's token tree. If an agent samples from an API without token ids,
    `text` is empty and `node` is None.
    """

    parsed: ParsedReply
    message: Message
    finish_reason: str = "stop"
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    text: str = ""
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One parsed turn. All fields include the `prefill` that was given to `parse_turn`.

    `sampled`: the whole text and its stop token, to build the next prompt. `text`: the text without
    the stop token, and without a stop string that `parse_turn` got in `stop_strings`. `message`:
    the message in OpenAI's format. Its `tool_calls` include invalid calls.
    """

    sampled: SampledText
    text: str
    parsed: ParsedReply
    message: Message


def parse_turn(
    model: Model,
    template: ChatTemplate,
    completion: Completion,
    sampling_params: Mapping[str, Any],
    *,
    tools: OfferedTools | None,
    seed: str,
    in_reasoning: bool,
    parse: ParseHook | None = None,
    stop_strings: Sequence[str] = (),
    streamed: bool = False,
    prefill: str = "",
    prefill_ids: Sequence[int] = (),
) -> ParsedTurn:
    """Parse `completion` as a turn.

    Args:
        model: The model whose parser reads the text.
        template: The template that the prompt was rendered with.
        completion: What the engine sampled.
        sampling_params: The sampling parameters that were sent.
        tools: The tools that were offered. If None, text that looks like a call stays text.
        seed: A text that identifies the turn. The ids of the calls are derived from it.
        in_reasoning: True if the prompt that was served ends inside reasoning
            (`Cursor.opens_reasoning`). It does not include `prefill`.
        parse: Returns the reply in place of the model's parser.
        stop_strings: The stop strings that were requested. If one of them ended the turn, the text
            ends before it.
        streamed: If True, parse the text like a stream (see `parse_options`).
        prefill: The start of the turn, which the client wrote. The sampled text continues it.
        prefill_ids: The ids of `prefill`.
    """
    ids = completion.output_ids
    sampled = template.sampled(
        ids,
        finish_reason=completion.finish_reason,
        stop_token_ids=stop_ids(completion, sampling_params, model),
    )
    text = before_stop(sampled.body, completion, stop_strings)
    if prefill:
        last = sampled.last_id if sampled.last_id is not None else prefill_ids[-1]
        sampled = replace(sampled, text=prefill + sampled.text, last_id=last)
        text = prefill + text
    plain = [*prefill_ids, *ids[: len(ids) - bool(sampled.stop)].tolist()]
    offsets = template.encoder.offsets(plain, sampled.body)
    parsed = model.parser.parse(
        text,
        ids=plain,
        offsets=offsets,
        **parse_options(tools, in_reasoning=in_reasoning, streamed=streamed),
    )
    if parse is not None:
        parsed = parse(text, parsed)
    parsed = with_call_ids(parsed, seed)
    return ParsedTurn(sampled, text, parsed, to_openai(parsed))


def before_stop(text: str, completion: Completion, stop_strings: Sequence[str]) -> str:
    """If the engine stopped at one of `stop_strings`, return `text` up to this string. Otherwise
    return `text` unchanged.
    """
    matched = completion.matched
    if isinstance(matched, str) and matched in stop_strings:
        return text.partition(matched)[0]
    return text


def stop_ids(completion: Completion, sampling_params: Mapping[str, Any], model: Model) -> list[int]:
    """Return the ids of the stop tokens that were requested, and of the one that ended the turn.
    Placeholder tokens are not included, because no turn contains one.
    """
    matched = [completion.matched] if isinstance(completion.matched, int) else []
    stops = [*(sampling_params.get("stop_token_ids") or ()), *matched]
    return [index for index in stops if index not in model.placeholders]


def parse_options(
    tools: OfferedTools | None, *, in_reasoning: bool, streamed: bool
) -> dict[str, Any]:
    """Return the keyword arguments for the parser's `parse` and `stream`.

    `in_reasoning`: True if the prompt that was served ends inside reasoning.

    A reply may contain a closing reasoning tag without an opening tag. If `streamed` is False, all
    text before such a tag is reasoning. A stream cannot wait for the tag. So if `streamed` is True,
    reasoning starts only at an opening tag, in the prompt or in the reply. Then parsing the whole
    reply gives the same result as parsing it as a stream.
    """
    return {
        "tools": tools or (),
        "in_reasoning": in_reasoning if streamed else in_reasoning or None,
        "calls_as_text": tools is None,
    }


def call_id(seed: str, index: int) -> str:
    """Return the id of the call with the index `index` in its turn. `seed` identifies the turn."""
    number = int.from_bytes(
        hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "big"
    )
    characters = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    return "".join(characters)


def with_call_ids(reply: ParsedReply, seed: str) -> ParsedReply:
    """Return `reply` with an id for every call that has none. `seed` identifies the turn."""
    calls = [
        call if call.id else call.with_id(call_id(seed, index))
        for index, call in enumerate(reply.tool_calls)
    ]
    return replace(reply, tool_calls=tuple(calls))
