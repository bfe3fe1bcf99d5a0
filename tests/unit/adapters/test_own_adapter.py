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
        said = "Bye." if self.served and len(self.served) % 2 else call("search_catalog", title="x")
        end = self.tokenizer.convert_tokens_to_ids("<|end|>")
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), end]
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
            start = len(prompt)
            if whole[:start] == prompt and whole[start : start + len(ids)] == ids:
                at = start - len(sample["prompt"])
                assert sample["loss_mask"][at : at + len(ids)] == [1] * len(ids)
                assert sample["logprobs"][at : at + len(ids)] == pytest.approx(logprobs)
                trained += len(ids)
    assert trained == sum(sum(sample["loss_mask"]) for sample in samples)
    assert trained == sum(len(ids) for _, ids, _ in sampler.served)


def test_the_adapter_is_short() -> None:
    assert len(BLOCKS[0].splitlines()) <= 45
