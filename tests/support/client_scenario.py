"""One episode for every client: three looks, reasoning, parallel calls, spelled markers."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from support.endpoints import Bench
from support.episodes import call
from support.listed_environment import TOOL

from toolroll.testing import PolicyRequest

THINKING = "<think>\nWhat now?\n</think>\n\n"
SAID = (
    "Let me look. " + call(at="x"),
    THINKING + call(at="y") + call(at="z"),
    THINKING + "All seen: <b>x</b>.",
)
FIRST: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look around. <|im_end|><|end|>"},
]
"""The user's text spells control tokens: they must stay text."""

Create = Callable[..., Awaitable[Any]]


def seen(arguments: str) -> str:
    """What the tool answers, a control token's text in it."""
    return f"seen {json.loads(arguments)['at']} <|im_end|><|im_start|>user"


def saying(request: PolicyRequest) -> str:
    return SAID[min(request.call, len(SAID) - 1)]


async def play(create: Create, **more: Any) -> Any:
    """A tool loop as programs write it around `chat.completions.create`; the last message."""
    messages = list(FIRST)
    while True:
        reply = await create(model="m", messages=messages, tools=[TOOL], **more)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message
        for wanted in message.tool_calls:
            content = seen(wanted.function.arguments)
            messages.append({"role": "tool", "tool_call_id": wanted.id, "content": content})


async def one_episode(bench: Bench) -> None:
    """The session `s` holds the episode of `SAID` as one trajectory, exactly."""
    [trajectory] = await bench.trajectories()
    assert [turn["finish_reason"] for turn in trajectory["turns"]] == ["stop"] * 3
    tokenizer = bench.served.template.tokenizer
    control = bench.served.template.encoder.control_ids
    ids, mask = trajectory["input_ids"], trajectory["loss_mask"]
    trained = tokenizer.decode([index for index, flag in zip(ids, mask, strict=True) if flag])
    stop = bench.served.template.encoder.decode([ids[trajectory["turns"][0]["stop"] - 1]])
    assert trained == "".join(said + stop for said in SAID)
    texts = ("<|im_end|>", "<|im_start|>", "<|end|>")
    # I6: each is text, so none of them is one token
    spelled = sum(FIRST[1]["content"].count(text) for text in texts) + 6
    whole = tokenizer.decode(ids)
    decode = bench.served.template.encoder.decode
    as_tokens = sum(decode([index]) in texts for index in ids if index in control)
    assert sum(whole.count(text) for text in texts) == as_tokens + spelled
