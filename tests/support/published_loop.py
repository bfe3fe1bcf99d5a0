"""A loop like slime's tau-bench example: it sends the rendered conversation as text, and trains
what each message adds to the render. `slime_delta` is the example's own function, from its
checkout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from support.audited import request_line
from support.published_example import example_folder

from toolroll.rollout.types import Message

Delta = Callable[..., tuple[list[int], list[int]]]


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
    """`get_token_delta` of slime's checkout, or None if it is not installed."""
    folder = example_folder()
    spec = folder and spec_from_file_location("token_delta", folder / "token_delta.py")
    if not spec or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Delta = module.get_token_delta
    return found


def play(
    tokenizer: Any, said: Sequence[str], answers: Sequence[Message], get_delta: Delta = delta
) -> tuple[dict[str, Any], list[str]]:
    """One episode, as a sample of slime, and the lines of the engine's log. The engine samples each
    text of `said` and the stop token; `answers` follow the turns.
    """
    messages: list[Message] = [{"role": "user", "content": "I want to return my order."}]
    tokens = tokenizer.encode(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        add_special_tokens=False,
    )
    mask: list[int] = []
    lines = []
    for text, answer in zip(said, answers, strict=True):
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids.append(tokenizer.eos_token_id)
        lines.append(request_line(tokenizer.encode(prompt), ids, text=prompt))
        for message in ({"role": "assistant", "content": text}, answer):
            messages.append(message)
            opens = {"include_generation_prompt": bool(mask)} if answer is not message else {}
            added, bits = get_delta(tokenizer, messages, **opens)
            tokens, mask = tokens + added, mask + bits
    return {"tokens": tokens, "loss_mask": mask, "response_length": len(mask)}, lines
