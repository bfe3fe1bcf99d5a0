"""A prompt that is too long is recognized by the clients of other projects, which then shorten the
conversation instead of sending it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.endpoints import Bench, endpoint

from toolroll.testing import Fault

LONG: Any = [{"role": "user", "content": "word " * 100}]
REFUSED = (
    b'{"error":{"message":"The input (4096 tokens) is longer than the model\'s context length '
    b'(4096 tokens)."}}'
)
"""SGLang's own answer; the endpoint's is the same error (tests/unit/server/test_refusals.py)."""

Ask = Callable[[Bench, bool], Awaitable[Any]]


async def _read(reply: Any, *, stream: bool) -> None:
    if stream:
        async for _ in reply:
            pass


def _litellm(provider: str, path: str, method: str = "acompletion") -> tuple[Ask, str]:
    async def ask(bench: Bench, stream: bool) -> None:
        litellm = pytest.importorskip("litellm")
        litellm.drop_params = True
        where = {"api_base": f"{bench.url}{path}", "api_key": "unused", "num_retries": 0}
        asked = {"input": LONG} if method == "aresponses" else {"messages": LONG}
        reply = await getattr(litellm, method)(
            model=f"{provider}/m", stream=stream, max_retries=0, **asked, **where
        )
        await _read(reply, stream=stream)

    return ask, "litellm.exceptions.ContextWindowExceededError"


CLIENTS: dict[str, tuple[Ask, str]] = {
    "litellm openai": _litellm("openai", "/v1"),
    "litellm hosted_vllm": _litellm("hosted_vllm", "/v1"),
    "litellm litellm_proxy": _litellm("litellm_proxy", "/v1"),
    "litellm anthropic": _litellm("anthropic", ""),
    "litellm responses": _litellm("openai", "/v1", "aresponses"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
async def test_clients_recognize_an_overflow(
    tokenizer: Any, client: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    ask, expected = CLIENTS[client]
    faults = lambda request: Fault(status=400, body=REFUSED)
    async with endpoint(tokenizer, lambda request: "Hello.", faults=faults) as bench:
        with pytest.raises(Exception) as caught:
            await ask(bench, stream)
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(caught.value).__mro__]
    assert expected in kinds
    assert len(bench.engine.log) == 1, "the request was sent again"
