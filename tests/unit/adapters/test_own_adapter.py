"""docs/adapters.md: the adapter of the page, played."""

import re
from typing import Any

import pytest
from support.episodes import call
from support.source import ROOT

from toolroll.testing import reference_logprobs


async def test_the_adapter_of_the_page(tokenizer: Any) -> None:
    """The model looks a title up, then says goodbye. Each turn is trained as it was sampled."""
    page = (ROOT / "docs" / "adapters.md").read_text()
    source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert len(source.splitlines()) <= 45
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(source, "adapters.md", "exec"), names)
    served: list[tuple[list[int], list[int], list[float]]] = []

    async def engine(prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        assert params["max_new_tokens"] == 512
        text = "Bye." if len(served) % 2 else call("search_catalog", title="x")
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        served.append((prompt, ids, reference_logprobs(prompt, ids)))
        return {"ids": ids, "logprobs": served[-1][2], "finish_reason": "stop"}

    samples = await names["rollout"](engine, tokenizer, [0, 1])
    assert len(samples) == 2
    trained = 0
    for sample in samples:
        whole = sample["prompt"] + sample["response"]
        for prompt, ids, logprobs in served:
            if whole[: len(prompt) + len(ids)] == prompt + ids:
                start = len(prompt) - len(sample["prompt"])
                turn = slice(start, start + len(ids))
                assert sample["loss_mask"][turn] == [1] * len(ids)
                assert sample["logprobs"][turn] == pytest.approx(logprobs)
                trained += len(ids)
    assert trained == sum(sum(sample["loss_mask"]) for sample in samples)
    assert trained == sum(len(ids) for _, ids, _ in served)
