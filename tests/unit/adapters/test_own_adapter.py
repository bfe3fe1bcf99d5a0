"""docs/adapters.md: the adapter of the page, played."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.episodes import call
from support.source import ROOT

from toolroll.testing import reference_logprobs

PAGE = (ROOT / "docs" / "adapters.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def block(number: int) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(BLOCKS[number], "adapters.md", "exec"), names)
    return names


class Sampler:
    """Looks a title up, then says goodbye; keeps every prompt and what it sampled."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.served = tokenizer, list[tuple[list[int], list[int], list[float]]]()

    def sample(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        text = "Bye." if len(self.served) % 2 else call("search_catalog", title="x")
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.served.append((prompt, ids, reference_logprobs(prompt, ids)))
        return self.served[-1][1:]


async def test_the_adapter_of_the_page(tokenizer: Any) -> None:
    sampler = Sampler(tokenizer)

    async def engine(ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        assert params["max_new_tokens"] == 512
        sampled, logprobs = sampler.sample(ids)
        return {"ids": sampled, "logprobs": logprobs, "finish_reason": "stop"}

    samples = await block(0)["rollout"](engine, tokenizer, [0, 1])
    assert len(samples) == 2
    trained = 0
    for sample in samples:
        whole = sample["prompt"] + sample["response"]
        for prompt, ids, logprobs in sampler.served:
            if whole[: len(prompt) + len(ids)] == prompt + ids:
                start = len(prompt) - len(sample["prompt"])
                turn = slice(start, start + len(ids))
                assert sample["loss_mask"][turn] == [1] * len(ids)
                assert sample["logprobs"][turn] == pytest.approx(logprobs)
                trained += len(ids)
    assert trained == sum(sum(sample["loss_mask"]) for sample in samples)
    assert trained == sum(len(ids) for _, ids, _ in sampler.served)


def test_the_adapter_is_short() -> None:
    assert len(BLOCKS[0].splitlines()) <= 45
