"""What OpenRLHF's `agent_func_openai_server_executor` gets wrong: a test for each defect that
can be tested. That the tokens are exact is in `test_same_episodes.py`.
"""

import asyncio
import re
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
from openai import InternalServerError
from support.client import request
from support.client_scenario import SAID
from support.forked_episodes import sequence
from support.qwen import tokenizer_for, trl_template
from support.vllm_mirror import LlmEngine, asked_params

from toolroll.rollout.errors import UsageError
from toolroll.testing import EmbeddedEngine, load_embedded_tokenizer
from toolroll.trainers.openrlhf import AgentExecutor, VllmEngine
from toolroll.trainers.openrlhf import executor as openrlhf_executor


@asynccontextmanager
async def actor(
    says: Any = "Hello.", tokenizer: Any = None, **more: Any
) -> AsyncIterator[tuple[EmbeddedEngine, LlmEngine]]:
    """OpenRLHF's engine, with the embedded one behind it. `says`: a text, or a policy."""
    policy = (lambda request: says) if isinstance(says, str) else says
    async with EmbeddedEngine(tokenizer or load_embedded_tokenizer(), policy, **more) as engine:
        yield engine, LlmEngine(engine.url)


async def execute(executor: AgentExecutor, llm: LlmEngine, **given: Any) -> dict[str, Any]:
    """As OpenRLHF calls it."""
    defaults = {
        "prompt": "Hi", "label": "L", "sampling_params": asked_params(), "max_length": 2048,
        "hf_tokenizer": load_embedded_tokenizer(), "llm_engine": llm, "images": None,
    }  # fmt: skip
    return await executor.execute(**{**defaults, **given})


async def played(
    executor: AgentExecutor, says: Any = "Hello.", tokenizer: Any = None, **given: Any
) -> tuple[dict[str, Any], EmbeddedEngine]:
    """A sample, and its engine."""
    tokenizer = tokenizer or load_embedded_tokenizer()
    async with actor(says, tokenizer) as (engine, llm):
        return await execute(executor, llm, hf_tokenizer=tokenizer, **given), engine


class Chatter(AgentExecutor):
    """Talks for `lines` turns; `more` goes with every call."""

    def __init__(self, lines: int = 2, **more: Any) -> None:
        super().__init__()
        self.lines, self.more = lines, more

    async def run_agent(self, prompt: Any, label: Any, session_id: str) -> float:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(self.lines):
            reply = await self.client.chat.completions.create(
                model="m", messages=messages, **self.more
            )
            messages += [reply.choices[0].message, {"role": "user", "content": "Hi"}]
        return 1.0


class Published(AgentExecutor):
    """The published body: every argument of its default `run_agent`, and `token_ids`."""

    log_defaults: ClassVar = {"n": 0.5}

    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.outcome, self.replies = outcome, list[Any]()

    async def run_agent(self, prompt: str, label: str, session_id: str) -> Any:
        reply = await self.client.chat.completions.create(
            model=self.model_name,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=self.sampling_params.max_tokens,
            temperature=self.sampling_params.temperature,
            top_p=self.sampling_params.top_p,
            logprobs=self.sampling_params.logprobs is not None,
            top_logprobs=self.sampling_params.logprobs or 1,
            extra_body={"session_id": session_id},
        )
        self.replies.append(reply)
        return self.outcome


async def test_the_published_run_agent() -> None:
    """It was called with a client, and had no `self.client`, `self.model_name` ... All samples have
    the same logs, which are floats: OpenRLHF makes one tensor of each, over the batch.
    """

    class Overflowing(Chatter):
        log_defaults = Published.log_defaults

    outcomes: list[tuple[Any, float | None, float | None, float]] = [
        ({}, None, None, 0.5),
        (None, None, None, 0.5),
        (0.5, 0.5, 0.5, 0.5),
        ({"reward": 1.0, "scores": 0.0, "extra_logs": {"n": 1}}, 1.0, 0.0, 1.0),
        ({"reward": 1, "scores": True}, 1.0, 1.0, 0.5),
        ({"reward": 0, "scores": np.int64(1)}, 0.0, 1.0, 0.5),
        (True, 1.0, 1.0, 0.5),
    ]
    overflow, _ = await played(Overflowing(100), max_length=120)
    assert {type(overflow["reward"]), type(overflow["scores"])} == {float}
    logs = [overflow["extra_logs"]]
    for outcome, reward, scores, n in outcomes:
        executor = Published(outcome)
        result, _ = await played(executor)
        assert (result["reward"], result["scores"]) == (reward, scores)
        assert {type(result["reward"]), type(result["scores"])} == {type(reward)}
        [reply] = executor.replies
        prompt, completion = result["action_ranges"][0]
        assert reply.token_ids == {
            "prompt_token_ids": result["observation_tokens"][:prompt],
            "completion_token_ids": result["observation_tokens"][prompt:completion],
        }
        logs.append(result["extra_logs"])
        assert logs[-1]["n"] == n
    assert overflow["extra_logs"]["n"] == 0.5
    assert {tuple(each) for each in logs} == {("turns", "left_out_tokens", "delivered_share", "n")}
    assert {type(value) for each in logs for value in each.values()} == {float}


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("good", "run_agent returned str: return a finite number, None, or a dict"),
        (float("nan"), "a finite number, None"),
        ({"reward": float("nan")}, "the reward nan: it must be a finite number or None"),
        ({"reward": 1.0, "scores": float("inf")}, "the scores inf: it must be"),
        ({"reward": 1.0, "extra_logs": None}, "the extra_logs None: they must be a dict"),
        ({"extra_logs": {"n": "few"}}, r"the extra_logs\['n'\] 'few': it must be a finite number"),
    ],
)
async def test_a_result_of_run_agent_that_cannot_be_read(outcome: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        await played(Published(outcome))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"extra_logs": {"n": 2, "m": 1, "text": "x"}},
            "extra_logs m, text are left out: .* log_defaults",
        ),
        ({"steps": 3, 1: 2}, "whose keys 1, steps are left out: a result has reward, scores"),
    ],
)
async def test_what_openrlhf_does_not_take_is_left_out(more: Any, words: str) -> None:
    """As in the published executor. It ended the episode, after it was played."""
    outcome = {"reward": 1.0, "extra_logs": {"n": 2}, **more}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        results = [(await played(Published(outcome)))[0] for _ in range(2)]
    rows = [(result["reward"], result["extra_logs"]["n"]) for result in results]
    assert rows == [(1.0, 2.0)] * 2
    assert not any({"m", "text"} & set(result["extra_logs"]) for result in results)
    [warning] = caught
    assert re.search(words, str(warning.message))


async def test_a_first_prompt_that_is_too_long_loses_its_first_tokens() -> None:
    """It was refused, and with it the whole group was lost."""
    long = " ".join(f"word{number}" for number in range(200))
    params = asked_params(max_tokens=100)
    result, _ = await played(Chatter(2), prompt=long, max_length=300, sampling_params=params)
    whole, _ = await played(Chatter(1), prompt=long, max_length=5000)
    start = result["action_ranges"][0][0]
    assert start == 200
    cut = result["observation_tokens"][:start]
    assert cut == whole["observation_tokens"][: whole["action_ranges"][0][0]][-200:]
    assert len(result["action_ranges"]) == 2


async def test_a_result_has_openrlhf_s_fields_and_images_are_refused() -> None:
    result, _ = await played(AgentExecutor())
    fields = (
        "prompt label images mm_train_inputs reward scores observation_tokens action_ranges "
        "rollout_log_probs truncated extra_logs"
    )
    assert set(result) == set(fields.split())
    with pytest.raises(UsageError, match="images"):
        await played(AgentExecutor(), images=["cat.png"])


async def test_of_a_fork_one_sequence_is_taken_and_the_rest_counted() -> None:
    """OpenRLHF takes one. A history that is preserved gives one."""

    class Preserving(Chatter):
        history = "preserve"

    thinks = tokenizer_for(trl_template("qwen3"))  # its template removes earlier thoughts
    for executor, turns in ((Chatter(3), 1), (Preserving(3), 3)):
        result, engine = await played(executor, SAID[1], thinks)
        assert len(result["action_ranges"]) == turns and len(engine.log) == 3
        trained = sum(stop - start for start, stop in result["action_ranges"])
        sampled = sum(len(entry.output_ids) for entry in engine.log)
        assert result["extra_logs"]["left_out_tokens"] == sampled - trained
    outcome, untrained = openrlhf_executor._outcome(1.0, {}), sequence((1, 3, "invalid"), length=3)
    output = openrlhf_executor._result(untrained, outcome, 0, overflow=False, logprobs=True)
    assert output["extra_logs"]["delivered_share"] == 1.0, "without trainable tokens"


async def test_limits_and_what_is_truncated() -> None:
    """No limit is the room that is left. A turn that no longer fits leaves the turns before it, and
    `truncated` looks at every turn.
    """
    result, engine = await played(Chatter(100), "One two three four five six.", max_length=120)
    limits = [entry.sampling_params["max_new_tokens"] for entry in engine.log]
    assert limits == [120 - len(entry.input_ids) for entry in engine.log]
    assert result["truncated"]
    assert len(result["action_ranges"]) == len(engine.log) > 1
    assert len(result["observation_tokens"]) <= 120
    says = lambda request: ["One two three four five six seven.", "Yes."][request.index]
    result, engine = await played(Chatter(2), says, sampling_params=asked_params(max_tokens=5))
    assert [entry.finish_reason for entry in engine.log] == ["length", "stop"]
    assert result["truncated"]


async def test_a_call_s_parameters_are_sampled_with() -> None:
    """The trainer's, where the call leaves them open."""
    more = {
        "stop": ["STOP"],
        "max_completion_tokens": 7,
        "extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2},
    }
    async with actor("One STOP two.") as (_, llm):
        params = asked_params(temperature=0.3, top_p=0.8)
        await execute(Chatter(1, **more), llm, sampling_params=params)
    [seen] = llm.seen
    assert (seen.temperature, seen.top_p) == (0.3, 0.8)
    assert (seen.stop, seen.max_tokens, seen.top_k, seen.min_p) == (["STOP"], 7, 5, 0.1)
    assert (seen.repetition_penalty, seen.min_tokens) == (1.1, 2)


async def test_an_actor_reports_whole_turns_and_no_invented_logprobs() -> None:
    reported: list[list[int]] = []
    async with actor("one two three") as (_, llm):
        engine = VllmEngine(llm, load_embedded_tokenizer(), asked_params(), max_length=100)
        turn = await engine.generate(request(), progress=lambda ids: reported.append(list(ids)))
        assert reported == [turn.output_ids.tolist()] and len(turn.output_ids) > 2
        llm.without_logprobs = True
        with pytest.raises(InternalServerError):
            await execute(Chatter(1), llm)


async def test_samples_in_flight_keep_their_own_parameters() -> None:
    """And all call the engine in the caller's event loop, where they leave no task."""
    executor, limits = Chatter(3), {1.0: 40, 0.5: 3, 0.1: 9}
    async with actor(token_latency=0.002) as (engine, llm):
        before = asyncio.all_tasks()
        params = [asked_params(temperature=t, max_tokens=limit) for t, limit in limits.items()]
        playing = (
            execute(executor, llm, sampling_params=each, prompt=f"I am {each.temperature}")
            for each in params
        )
        results = await asyncio.gather(*playing)
        assert llm.loops == {id(asyncio.get_running_loop())}
        left = [task for task in asyncio.all_tasks() - before if not task.done()]
        # a RequestHandler is the embedded engine's own
        assert [task for task in left if "RequestHandler" not in repr(task)] == []
    assert [len(result["action_ranges"]) for result in results] == [3] * 3
    decode = load_embedded_tokenizer().decode
    for temperature, limit in limits.items():
        sent = [
            (entry.sampling_params["temperature"], entry.sampling_params["max_new_tokens"])
            for entry in engine.log
            if f"I am {temperature}" in decode(entry.input_ids)
        ]
        assert sent == [(temperature, limit)] * 3
