"""A trainer's engine object as the engine of a model: what is taken and what is refused."""

from typing import Any

import numpy as np
import pytest

from toolroll.rollout.errors import CompletionError, UsageError
from toolroll.rollout.types import GenerateRequest, WeightVersion
from toolroll.testing import load_embedded_tokenizer
from toolroll.trainers.areal import ArealEngine
from toolroll.trainers.driven import DrivenPlayer
from toolroll.trainers.episodes import EpisodeSettings
from toolroll.trainers.framework_engine import (
    VLLM_NAMES,
    FrameworkEngine,
    LoopPlayers,
    Sampled,
    renamed,
)
from toolroll.trainers.skyrl.generator import _SGLANG_NAMES, SkyrlEngine


def request(**params: Any) -> GenerateRequest:
    given = {"max_new_tokens": 8, "stop_token_ids": [9], **params}
    return GenerateRequest(np.array([1, 2], dtype=np.int32), given, "session")


class Fixed(FrameworkEngine):
    """Answers with `sampled`."""

    def __init__(self, sampled: Sampled) -> None:
        super().__init__("Trainer", context_length=64, vocab_size=10)
        self.sampled = sampled

    async def sample(self, request: GenerateRequest) -> Sampled:
        return self.sampled


@pytest.mark.parametrize(("params", "ids", "reason", "matched"), [
    ({}, [3, 9], "stop", 9), ({}, [3, 4], "stop", 4), ({}, [3, 9], "length", None),
    ({}, [], "abort", None), ({"stop": ["text"]}, [3, 9], "stop", 9),
    ({"stop": ["text"]}, [3, 4], "stop", None),
])  # fmt: skip
async def test_a_turn_is_taken_as_it_is(
    params: dict[str, Any], ids: list[int], reason: str, matched: int | None
) -> None:
    """A turn that a text ended has no stop token."""
    seen: list[list[int]] = []
    answer = await Fixed(Sampled(ids, [-1.0] * len(ids), reason)).generate(
        request(**params), progress=lambda sampled: seen.append(list(sampled))
    )
    assert answer.output_ids.tolist() == ids and seen == [ids]
    assert (answer.finish_reason, answer.matched) == (reason, matched)
    assert answer.logprobs is not None and answer.logprobs.tolist() == [-1.0] * len(ids)


@pytest.mark.parametrize(("sampled", "words"), [
    (Sampled([3], None, "stop"), "0 logprobs for 1 sampled ids"),
    (Sampled([3, 4], [-1.0], "stop"), "1 logprobs for 2 sampled ids"),
    (Sampled([3], [float("nan")], "stop"), "0 logprobs for 1 sampled ids"),
    (Sampled([3], [-1.0], "error"), "stop reason 'error', which is unknown"),
    (Sampled([], [], "stop"), "stopped without a token"),
    (Sampled([3], [0.5], "stop"), "NaN or above zero"),
    (Sampled([3], [-3e38], "stop"), "expected a finite number"),
    (Sampled([3.7], [-1.0], "stop"), "not a list of token ids"),  # type: ignore[list-item]
    (Sampled([5000], [-1.0], "stop"), "expected an id from 0 to"),
    (Sampled([3] * 9, [-1.0] * 9, "length"), "expected at most max_new_tokens = 8"),
])  # fmt: skip
async def test_an_incomplete_turn_is_refused(sampled: Sampled, words: str) -> None:
    with pytest.raises(CompletionError, match=words):
        await Fixed(sampled).generate(request())


async def test_sampling_parameters_have_one_name_on_each_side() -> None:
    ours = {"max_new_tokens": 8, "sampling_seed": 1, "top_p": 0.5}
    theirs = {"max_tokens": 8, "seed": 1, "top_p": 0.5}
    assert renamed(ours | {"no_stop_trim": True}, VLLM_NAMES, engine="X") == theirs
    assert renamed(theirs | {"skip_special_tokens": False}, _SGLANG_NAMES, engine="X") == ours
    with pytest.raises(UsageError, match="X has no sampling parameter 'regex'"):
        renamed({"regex": "a"}, VLLM_NAMES, engine="X")
    engine = ArealEngine(object(), object(), [0] * 10, context_length=64)
    with pytest.raises(UsageError, match="AReaL's engine has no sampling parameter 'min_p'"):
        await engine.generate(request(min_p=0.1))


@pytest.mark.parametrize("changes", [False, True])
async def test_skyrl_s_turn_has_a_version_only_if_it_did_not_change(changes: bool) -> None:
    class Client:
        weight_version = 4

        async def generate(self, batch: Any) -> Any:
            self.weight_version += changes
            return {"response_ids": [[3]], "response_logprobs": [[-1.0]], "stop_reasons": ["stop"]}

    answer = await SkyrlEngine(Client(), context_length=64, vocab_size=10).generate(request())
    assert answer.weight_versions == (() if changes else (WeightVersion("4", 0, 1),))


def test_an_unknown_environment_is_refused_at_once() -> None:
    no_engine: Any = None
    given = load_embedded_tokenizer(), EpisodeSettings(env="dek")
    players: list[Any] = [DrivenPlayer, lambda *given: LoopPlayers(no_engine, *given)]
    for player in players:
        with pytest.raises(UsageError, match="no environment named 'dek'; did you mean 'desk'"):
            player(*given)
