"""The tokens of a message as slime's tau-bench example makes them: what it adds to the render. For
`examples/audit_slime.py`. `slime_delta` is the example's own function, from its checkout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples.audit_slime import Delta, token_delta
from support.published_example import example_folder

from toolroll.rollout.types import Message


def delta(tokenizer: Any, messages: Sequence[Message], **options: bool) -> tuple[list[int], Any]:
    """The ids and the mask of the last message: what it adds to the render.

    `include_generation_prompt`: the ids begin with the generation prompt.
    """
    whole, before, prompt = (
        tokenizer.apply_chat_template(list(part), tokenize=False, add_generation_prompt=generate)
        for part, generate in ((messages, False), (messages[:-1], False), (messages[:-1], True))
    )
    if messages[-1]["role"] != "assistant":
        text = whole[len(before) :] if whole.startswith(before) else ""
        text = text or tokenizer.apply_chat_template([messages[-1]], tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ids, [0] * len(ids)
    said = tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
    if not options.get("include_generation_prompt"):
        return said, [1] * len(said)
    opening = tokenizer.encode(prompt[len(before) :], add_special_tokens=False)
    return opening + said, [0] * len(opening) + [1] * len(said)


def slime_delta() -> Delta | None:
    """The function of slime's checkout, or None if it is not installed."""
    folder = example_folder()
    return None if folder is None else token_delta(folder.parents[1])
