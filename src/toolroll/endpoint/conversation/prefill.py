"""A last assistant message that the model continues (`continue_final_message`).

Invariants: the prompt is the prompt of the earlier messages, followed by the ids of the last
message's text. So the prompt is a prefix of the trained sequence. The ids of the last message's
text are never trained. The text is refused if it contains a special token, or if the tokenizer
merges its beginning with the end of the template's generation prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from toolroll.endpoint.conversation.conversation_tree import Prompt
from toolroll.endpoint.errors import ApiError, invalid, refused
from toolroll.endpoint.requests.request_bodies import ChatRequest
from toolroll.endpoint.requests.sampling import ToolUse
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.turn import ParsedTurn, parse_options
from toolroll.rollout.template.chat_template import ChatTemplate
from toolroll.rollout.template.encode import as_ids
from toolroll.rollout.types import Message, Tool

_SEAM = 8
"""The number of the prompt's last tokens that are encoded again, together with the text, to check
that the tokenizer does not merge tokens across the start of the text.
"""


def split_prefill(messages: Sequence[Message], place: str = "") -> tuple[list[Message], str]:
    """Return the messages before the last one, and the text of the last one. Raise `ApiError` if
    the last message is not text from the assistant. `place` is the location of the last message in
    the request's body. The default is its index in `messages`.
    """
    place, last = place or f"messages[{len(messages) - 1}]", messages[-1]
    text = last.get("content")
    if last["role"] != "assistant":
        problem = f"continue_final_message: the last message, {place}, is not the assistant's"
        raise refused("continue_final_message", problem, code="invalid_messages")
    if not text or last.get("tool_calls") or last.get("reasoning_content"):
        problem = f"{place} cannot be continued: it must be text without calls or reasoning"
        raise refused(place, problem, code="invalid_messages")
    if len(messages) == 1:
        raise refused(
            place, f"{place} cannot be continued: it is the only message", code="invalid_messages"
        )
    return list(messages[:-1]), str(text)


def with_prefill(prompt: Prompt, text: str) -> Prompt:
    """Return `prompt` with `text` after its generation prompt. Raise `ApiError` if `text` contains
    a special token, or if the tokenizer merges its beginning with the end of the generation prompt.
    """
    encoder = prompt.template.encoder
    if token := _special(prompt.template, text):
        raise _refused(f"it holds the special token {token!r}")
    before = prompt.input_ids[-_SEAM:].tolist()
    previous = int(prompt.input_ids[-_SEAM - 1]) if len(prompt.input_ids) > _SEAM else None
    before_text = encoder.decode(before)
    ids = encoder.encode(text, previous=before[-1])
    if (
        encoder.encode(before_text + text, previous=previous) != [*before, *ids]
        or encoder.decode([*before, *ids]) != before_text + text
    ):
        raise _refused("its beginning becomes one token with the end of the generation prompt")
    added = as_ids(ids)
    return replace(
        prompt,
        input_ids=np.concatenate([prompt.input_ids, added]),
        delta=np.concatenate([prompt.delta, added]),
        prefill=text,
        prefill_ids=added,
    )


def check_continued(request: ChatRequest, use: ToolUse) -> None:
    """Raise `ApiError` if `request`, which continues a message, has an option that cannot be
    combined with that.
    """
    if request.stream:
        option = "stream"
    elif use.constrained is not None:
        option = "tool_choice" if use.forced else "response_format"
    else:
        return
    problem = f"continue_final_message cannot be combined with {option}"
    raise invalid(option, problem)


def _special(template: ChatTemplate, text: str) -> str | None:
    special = {*template.encoder.special, *template.stop_texts}
    tokens = (match.group() for match in template.encoder.pattern.finditer(text))
    return next((token for token in tokens if token in special), None)


def _refused(why: str) -> ApiError:
    problem = f"the last message cannot be continued token by token: {why}"
    return refused("messages", problem, code="invalid_messages")


def sampled_part(
    model: Model, prompt: Prompt, turn: ParsedTurn, tools: Sequence[Tool] | None
) -> Message:
    """Return the message of `turn` without the prefill, which was not sampled."""
    message, prefill = turn.message, prompt.prefill
    content, reasoning = message.get("content") or "", message.get("reasoning_content")
    if content.startswith(prefill):
        return {**message, "content": content.removeprefix(prefill)}
    options = parse_options(tools, in_reasoning=prompt.in_reasoning, streamed=True)
    parsed = model.parser.parse(prefill, **options)
    sampled = {**message, "content": content.removeprefix(parsed.content) or None}
    if reasoning:
        sampled["reasoning_content"] = reasoning.removeprefix(parsed.reasoning or "")
    return sampled
