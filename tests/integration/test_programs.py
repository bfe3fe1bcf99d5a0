"""Programs in sandboxes, whose model is the real SGLang server. A proxy before the server says what
it sampled, and transformers computes the logprobs again. The model is random, so no reward is
earned. `python -m clients.harbor --sglang` does the same with published coding agents."""

from pathlib import Path

import pytest
from support.episodes import opened_model
from support.processes import Server
from support.program_trials import AGENT, command_of, factory, play, program, refusal, write_task
from support.proxy import CLOSE, counting_proxy, engine_answers, judge_answers, largest_error
from support.qwen import qwen3_tokenizer
from support.tiny_model import tiny_model

LIMIT, USERS = 24, 2
CLAUDE = AGENT.with_name("claude_shape.py")


@pytest.mark.skipif(bool(refusal()), reason=f"needs user namespaces: {refusal()}")
@pytest.mark.parametrize(("file", "turns"), [(AGENT, 1 + USERS), (CLAUDE, 2)])
async def test_each_answer_of_the_server_is_trained_once(
    file: Path, turns: int, tmp_path: Path, sglang_float32: Server
) -> None:
    write_task(tmp_path)
    variables = {"USERS": str(USERS), "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(LIMIT)}
    params = {"temperature": 1.0, "max_new_tokens": LIMIT}
    with counting_proxy(sglang_float32.url) as proxy:
        async with opened_model(proxy.url, qwen3_tokenizer(), "qwen25") as model:
            agent = program(model, command_of(file), variables=variables, verify="always")
            episodes = await play(factory(tmp_path), agent, samples=2, sampling_params=params)
        answers = engine_answers(proxy)
    for episode in episodes.values():
        result = episode.result
        own = [each for each in answers if each.session == result.info["program"]["session"]]
        assert (result.reward, len(own)) == (0.0, turns)
        judge_answers(result.trajectories, own)
        assert largest_error(tiny_model(), result.trajectories) <= CLOSE
