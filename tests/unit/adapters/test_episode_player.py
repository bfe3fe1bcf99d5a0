"""`EpisodePlayer`: the check of the engine's model, and errors of code that is not toolroll's."""

from typing import Any

import pytest
from support.episodes import opened_model

from toolroll import ChatTemplate, Model, StopReason, UsageError, get_parser
from toolroll.rollout.model.tokenizers import desk_model_path
from toolroll.rollout.types import GenerateRequest
from toolroll.testing import load_engine
from toolroll.trainers.episodes import EpisodePlayer, EpisodeSettings
from toolroll.trainers.framework_engine import FrameworkEngine, Sampled


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


class BrokenEngine(FrameworkEngine):
    async def sample(self, request: GenerateRequest) -> Sampled:
        answer: dict[str, Any] = {}
        return Sampled(answer["ids"], answer["logprobs"], "stop")


async def test_an_adapters_wrong_settings_and_errors_are_named(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    template = ChatTemplate(tokenizer)
    parser = get_parser("hermes", template.encoder.control)
    engine = BrokenEngine("own", context_length=4096, vocab_size=len(tokenizer))
    model = Model(engine, template, parser)
    with pytest.raises(UsageError, match="history has no effect on a model that exists"):
        EpisodePlayer(model, EpisodeSettings(env="desk", history="preserve"))
    player = EpisodePlayer(model, EpisodeSettings(env="desk", reruns=0))
    result = await player.play(3, {"max_new_tokens": 8})
    await player.aclose()
    assert result.stop_reason is StopReason.INTERNAL_ERROR
    assert "in sample" in result.info["error"]["traceback"]
    place = f"internal_error: KeyError: 'ids' ({__file__.rpartition('/')[2]}, line "
    assert place in caplog.text and "of task " in caplog.text
