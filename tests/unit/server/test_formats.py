"""Other tool-call formats than Hermes': forced by grammars that their parsers read, and
streamed.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from support.endpoints import endpoint
from support.tool_calls import SAID
from support.worlds import TOOL

from toolroll.parsers.registry import get_parser
from toolroll.rollout.server.errors import ApiError
from toolroll.rollout.server.tool_choice import call_closer, call_grammar

USER: Any = {"role": "user", "content": "Hi"}


def test_a_format_without_a_grammar_is_refused() -> None:
    for ask in (
        lambda: call_grammar("pythonic", ["look"], several=False),
        lambda: call_closer("llama3"),
    ):
        with pytest.raises(ApiError) as caught:
            ask()
        assert caught.value.status == 400


@pytest.mark.parametrize("name", [*SAID, "mistral", "pythonic"])
async def test_it_is_streamed_as_it_is_read(tokenizer: Any, name: str) -> None:
    others = {
        "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}}]',
        "pythonic": '[look(at="x")]',
    }
    said = {**SAID, **others}[name]
    async with endpoint(tokenizer, lambda request: said, split="random") as bench:
        bench.served.parser = get_parser(name, bench.served.template.encoder.control)
        path = f"{bench.url}/sessions/s/v1/chat/completions"
        async with bench.http.post(
            path, json={"messages": [USER], "tools": [TOOL], "stream": True}
        ) as response:
            lines = (await response.read()).split(b"\n\n")
        deltas = [
            orjson.loads(line[6:])["choices"][0]["delta"]
            for line in lines
            if line and b"[DONE]" not in line
        ]
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or ()]
        assert "".join(part.get("name", "") for part in parts) == "look"
        assert orjson.loads("".join(part["arguments"] for part in parts)) == {"at": "x"}
        assert not any(delta.get("content") for delta in deltas)
        await bench.trajectories()
