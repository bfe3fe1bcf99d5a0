"""A correct sequence of an episode, with its verifier."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.episodes import call, serving
from support.listed_environment import LOOK

from toolroll.rollout.model.conversation import Conversation
from toolroll.rollout.template.served import ServedSequence
from toolroll.rollout.template.verify import Verifier
from toolroll.testing import load_embedded_tokenizer

USER = {"role": "user", "content": "Where is <|end|>?"}


@asynccontextmanager
async def talked(tokenizer: Any, **more: Any) -> AsyncIterator[Conversation]:
    """A conversation of four turns."""
    async with serving(tokenizer, lambda request: call(at="Rome")) as (_, model):
        conversation = Conversation(model, [USER], [LOOK], session_id="s", **more)
        for _ in range(3):
            turn = await conversation.reply({"max_new_tokens": 64})
            [made] = turn.message["tool_calls"]
            answer = {"role": "tool", "tool_call_id": made["id"], "name": "look"}
            conversation.extend([{**answer, "content": "In <|end|>."}])
        await conversation.reply({"max_new_tokens": 64})
        yield conversation


async def verified_sequence(tokenizer: Any = None) -> tuple[Verifier, ServedSequence]:
    """The sequence of `talked`, and its verifier."""
    async with talked(tokenizer or load_embedded_tokenizer(), verify="sample") as conversation:
        return conversation.template.verifier, conversation._sequence()
