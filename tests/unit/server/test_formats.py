"""Other tool-call formats than Hermes': forced by grammars that their parsers read, and
streamed.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.deltas import joined, whole
from support.endpoints import endpoint
from support.formats import FORMATS
from support.listed_environment import TOOL

from toolroll.parsers.registry import get_parser
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.in_process import ToolrollClient
from toolroll.rollout.server.requests.tool_choice import call_closer, call_grammar

USER: Any = {"role": "user", "content": "Hi"}


def test_a_format_without_a_grammar_is_refused() -> None:
    for ask in (
        lambda: call_grammar("pythonic", ["look"], several=False),
        lambda: call_closer("llama3"),
    ):
        with pytest.raises(ApiError) as caught:
            ask()
        assert caught.value.status == 400


async def answer(tokenizer: Any, name: str, said: str, *, stream: bool) -> dict[str, Any]:
    """The message that the SDK's client gets, in process, and what it ended with."""
    async with (
        endpoint(tokenizer, lambda request: said, split="random") as bench,
        ToolrollClient(bench.endpoint, session="s") as client,
    ):
        bench.served.parser = get_parser(name, bench.served.template.encoder.control)
        asked: Any = {"model": "m", "messages": [USER], "tools": [TOOL], "stream": stream}
        made: Any = await client.chat.completions.create(**asked)
        chunks = [chunk.model_dump() async for chunk in made] if stream else [made.model_dump()]
        [choice] = chunks[-1]["choices"]
        message = joined(chunks) if stream else whole(choice["message"])
        await bench.trajectories()
        return {**message, "end": choice["finish_reason"], "ids": choice["token_ids"]}


@pytest.mark.parametrize(
    "name",
    ["hermes", "llama3", "qwen3_coder", "glm45", "deepseekv3", "mistral", "pythonic", "gpt-oss"],
)
async def test_it_is_streamed_as_it_is_answered(tokenizer: Any, name: str) -> None:
    form = next(form for form in FORMATS if form.name == name)
    calls = [("look", {"at": "x 🙂"}), ("look", {"at": "</tool"}), ("look", {"up": 1})]
    spoken = form.spoken and name != "gpt-oss"
    thinks = spoken and name != "mistral"
    lead = "<think>\nHm.\n</think>\n\n" * thinks + "I look 🙂.\n" * spoken
    said = lead + form.write(calls)  # type: ignore[arg-type]
    answered, streamed = [
        await answer(tokenizer, name, said, stream=stream) for stream in (False, True)
    ]
    assert streamed == answered
    assert answered["reasoning_content"] == "Hm." * thinks
    assert answered["content"] == "I look 🙂." * spoken
    assert [call["name"] for call in answered["tool_calls"]] == ["look"] * len(calls)
    assert answered["end"] == "tool_calls"
