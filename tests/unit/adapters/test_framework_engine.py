"""A trainer's engine object as the engine of a model: what is taken and what is refused; and
`EpisodePlayer`, which plays with it: the check of the engine's model, and errors of code that is
not toolroll's.
"""

import re
from typing import Any

import numpy as np
import pytest
from support.episodes import call, opened_model
from support.source import ROOT
from support.vocabulary import Vocabulary

from toolroll import ChatTemplate, Model, StopReason, get_parser
from toolroll.rollout.errors import CompletionError, UsageError
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.types import GenerateRequest, WeightVersion
from toolroll.testing import load_embedded_tokenizer, load_engine, reference_logprobs
from toolroll.trainers.areal import ArealEngine
from toolroll.trainers.driven import DrivenPlayer
from toolroll.trainers.episodes import EpisodePlayer, EpisodeSettings
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
        super().__init__("Trainer", Vocabulary(10, special={4}), context_length=64)
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
    (Sampled([5000], [-1.0], "stop"), "expected an id from 0 to"),
    (Sampled([3], [-1.0], "stop"), "after the id 3, which ends no turn"),
    (Sampled([3], [-1.0], "stop", matched=4), "after the id 3, which ends no turn"),
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
    engine = ArealEngine(object(), object(), Vocabulary(10), context_length=64)
    with pytest.raises(UsageError, match="AReaL's engine has no sampling parameter 'min_p'"):
        await engine.generate(request(min_p=0.1))


@pytest.mark.parametrize("changes", [False, True])
async def test_skyrl_s_turn_has_a_version_only_if_it_did_not_change(changes: bool) -> None:
    class Client:
        weight_version = 4

        async def generate(self, batch: Any) -> Any:
            self.weight_version += changes
            return {"response_ids": [[3]], "response_logprobs": [[-1.0]], "stop_reasons": ["stop"]}

    engine = SkyrlEngine(Client(), Vocabulary(10, special={3}), context_length=64)
    answer = await engine.generate(request())
    assert answer.weight_versions == (() if changes else (WeightVersion("4", 0, 1),))


def test_an_unknown_environment_is_refused_at_once() -> None:
    no_engine: Any = None
    given = load_embedded_tokenizer(), EpisodeSettings(env="dek")
    players: list[Any] = [DrivenPlayer, lambda *given: LoopPlayers(no_engine, *given)]
    for player in players:
        with pytest.raises(UsageError, match="no environment named 'dek'; did you mean 'desk'"):
            player(*given)


# --- EpisodePlayer --------------------------------------------------------------------------------


async def test_nothing_is_played_before_the_model_is_checked(
    tokenizer: Any, unused_tcp_port: int
) -> None:
    """The engine is not up at the first episode, and then has another tokenizer."""
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with opened_model(url, tokenizer, name="embedded", config={"retries": 0}) as model:
        player = EpisodePlayer(model, EpisodeSettings(env="desk", reruns=0))
        result = await player.play(0, {"max_new_tokens": 8})
        assert result.stop_reason is StopReason.ENGINE_ERROR and not result.trajectories
        assert result.info["error"]["message"].startswith(f"{url}: nothing answers")
        async with load_engine(desk_model_path(), port=unused_tcp_port) as engine:
            with pytest.raises(UsageError, match="whose tokenizer is not that of 'embedded'"):
                await player.play(0, {"max_new_tokens": 8})
            assert engine.log == []


class Saying(FrameworkEngine):
    """Begins a call in each turn, and ends it there."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__("Trainer", tokenizer, context_length=4096)
        ids = tokenizer.encode("<tool_call>", add_special_tokens=False)
        self.ids = [*ids, tokenizer.eos_token_id]

    async def sample(self, request: GenerateRequest) -> Sampled:
        return Sampled(self.ids, [-1.0] * len(self.ids), "stop")


class BrokenEngine(FrameworkEngine):
    async def sample(self, request: GenerateRequest) -> Sampled:
        answer: dict[str, Any] = {}
        return Sampled(answer["ids"], answer["logprobs"], "stop")


async def test_an_adapters_wrong_settings_and_errors_are_named(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    template = ChatTemplate(tokenizer)
    parser = get_parser("hermes", template.encoder.control)
    engine = BrokenEngine("own", tokenizer, context_length=4096)
    model = Model(engine, template, parser)
    with pytest.raises(UsageError, match="history has no effect on a model that exists"):
        EpisodePlayer(model, EpisodeSettings(env="desk", history="preserve"))
    settings = EpisodeSettings(env="desk", reruns=0, verify="always", max_observation_bytes=9999)
    player = EpisodePlayer(model, settings)
    result = await player.play(3, {"max_new_tokens": 8})
    await player.aclose()
    assert result.stop_reason is StopReason.INTERNAL_ERROR
    assert "in sample" in result.info["error"]["traceback"]
    place = f"internal_error: KeyError: 'ids' ({__file__.rpartition('/')[2]}, line "
    assert place in caplog.text and "of task " in caplog.text


async def test_why_an_episode_is_not_trained_is_logged(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    template = ChatTemplate(tokenizer)
    model = Model(Saying(tokenizer), template, get_parser("hermes", template.encoder.control))
    settings = EpisodeSettings(
        env="desk", on_invalid_call="stop", agent_args={"mask_invalid": True}
    )
    player = EpisodePlayer(model, settings)
    await player.play(3, {"max_new_tokens": 8}, session_id="s")
    await player.aclose()
    logged = [record.message for record in caplog.records if "not trained" in record.message]
    assert len(logged) == 1
    assert re.fullmatch("episode s of task .+ is not trained: invalid call", logged[0])


async def test_the_adapter_of_the_page(tokenizer: Any) -> None:
    """docs/adapters.md. The model looks a title up, then says goodbye. Each turn is trained as it
    was sampled.
    """
    page = (ROOT / "docs" / "adapters.md").read_text()
    source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
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
