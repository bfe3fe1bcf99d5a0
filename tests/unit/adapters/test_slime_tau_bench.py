"""slime's tau-bench example: each defect of its tokens and episodes, with the number of the defect.

The checks of tokens are shown to fail on the published way of making tokens, which is re-made here
or in `support.published`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.episodes import call, judge, serving
from support.forked_episodes import result_of
from support.listed_environment import ListedWorld
from support.published import (
    TOOLS_LAST,
    DiffingAgent,
    episode,
    observed,
    qwen,
    retold,
    text_of,
    with_bos,
)
from support.qwen import qwen3_tokenizer, tokenizer_for, trl_template
from support.results import trajectory as a_trajectory
from support.slime_mirror import Sample
from support.slime_trainer import router_of
from support.tau import MINI, scripted

from toolroll.agents.loop.call_policy import CallPolicy
from toolroll.agents.trainable_agents import (
    TrainableAgentMixin,
    TrainableToolCallingAgent,
    agent_factory,
    call_to_action_sglang,
)
from toolroll.rollout.model.model import Model
from toolroll.rollout.model.rollout_args import read_args
from toolroll.rollout.types import InteractionResult, Status, StepResult, StopReason, Task
from toolroll.testing import EmbeddedEngine, Reply

pytestmark = pytest.mark.tokens

RESULT = "<tool_response>\nORDER-1\n</tool_response>"


def _begins_after_generation_prompt(tokenizer: Any, result: InteractionResult, _: Any) -> None:
    [trajectory] = result.trajectories
    for turn in trajectory.turns:
        before = tokenizer.decode(trajectory.input_ids[: turn.start])
        assert before.endswith("<|im_start|>assistant\n")
        assert not trajectory.loss_mask[turn.start - 3 : turn.start].any()


def _holds_result(tokenizer: Any, result: InteractionResult, _: Any) -> None:
    for trajectory in result.trajectories:
        assert text_of(tokenizer, trajectory).count(RESULT) == 7
        for turn in trajectory.turns:
            assert "<think>" not in tokenizer.decode(trajectory.input_ids[turn.start : turn.stop])


def _holds_user(tokenizer: Any, result: InteractionResult, _: Any) -> None:
    """The template drops reasoning before a user message, so there is a fork."""
    shown = "<|im_start|>user\nMy order is 17.<|im_end|>\n<|im_start|>assistant\n"
    assert shown in text_of(tokenizer, result.trajectories[min(1, len(result.trajectories) - 1)])


def _renders_as_the_template(
    tokenizer: Any, result: InteractionResult, engine: EmbeddedEngine
) -> None:
    ends = [i for i, message in enumerate(result.messages) if message["role"] == "assistant"]
    for entry, end in zip(engine.log, ends, strict=True):
        text = tokenizer.apply_chat_template(
            result.messages[:end], tools=result.tools, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(entry.input_ids) == text


def _holds_both(tokenizer: Any, result: InteractionResult, _: Any) -> None:
    both = "".join(f"<tool_response>\n{text}\n</tool_response>\n" for text in ("R1", "R2"))
    both = f"<|im_start|>user\n{both.rstrip()}<|im_end|>\n"
    assert both in text_of(tokenizer, result.trajectories[0])


THOUGHT = [
    "<think>\nThey want it soon.\n</think>\n\nWhich order?",
    "<think>\nFound.\n</think>\n\nIt shipped.",
    "Goodbye.",
]
ONE_SEQUENCE = {"history": "preserve"}
ALL_CALLS = {"policy": CallPolicy(parallel_calls="all")}
CASES: dict[str, Any] = {
    "a01 every turn is sampled and trained after a generation prompt": (
        qwen,
        (["Where is it?", "Thanks."], ["on its way"]),
        [call(at="here"), "It shipped.", "You are welcome."],
        _begins_after_generation_prompt,
        (1, {}, {}),
    ),
    "a03 no reasoning is put into a turn and no character of a result is lost": (
        lambda: qwen("qwen3"),
        (["Where is it?"], ["ORDER-1"] * 7),
        [call(at="here")] * 7 + ["It shipped."],
        _holds_result,
        (None, {}, {}),
    ),
    "a04 a user message after reasoning is there whole": (
        lambda: qwen("qwen3"),
        (["Where is it?", "My order is 17."], []),
        THOUGHT,
        _holds_user,
        (2, {}, ONE_SEQUENCE),
    ),
    "a09 tools that move with the last user message fork": (
        lambda: tokenizer_for(TOOLS_LAST),
        (["Hi", "And now?"], []),
        ["Hello.", "Bye."],
        _renders_as_the_template,
        (2, {"policy": CallPolicy()}, ONE_SEQUENCE),
    ),
    "a10 two tool results in a row are one block and whole": (
        qwen,
        (["Look twice."], ["R1", "R2"]),
        [call(at="a") + "\n" + call(at="b"), "Both."],
        _holds_both,
        (1, ALL_CALLS, {}),
    ),
}
"""For each defect: the tokenizer, the texts of the user and of the tool, the replies, the check,
the number of sequences, the options of both episodes, and those of the published one only.
"""


@pytest.mark.parametrize("case", CASES)
async def test_the_tokens_are_right_and_the_published_ones_are_not(case: str) -> None:
    make_tokenizer, (user_texts, tool_texts), replies, check, options = CASES[case]
    sequences, ours, published = options
    tokenizer = make_tokenizer()
    world = lambda: ListedWorld(user_texts=user_texts, tool_texts=tool_texts)
    result, engine = await episode(tokenizer, world(), replies, **ours)
    check(tokenizer, result, engine)
    judge(result, engine, "s")
    assert sequences in (None, len(result.trajectories))
    options = {**ours, **published}
    wrong, engine = await episode(tokenizer, world(), replies, kind=DiffingAgent, **options)
    with pytest.raises(AssertionError):
        check(tokenizer, wrong, engine)


async def test_a02_only_what_was_sampled_is_trained() -> None:
    """Neither the newline behind a stop token nor the close of a turn that was cut."""
    tokenizer = qwen()
    cut = Reply(output_ids=tokenizer.encode("It will arrive on"), stop=False)
    world = ListedWorld(user_texts=["When?", "Go on.", "Yes?"])
    replies: list[str | Reply] = ["One moment.", cut, "Monday."]
    result, engine = await episode(tokenizer, world, replies, on_length="continue")
    judge(result, engine, "s")
    [trajectory] = result.trajectories
    # the model sampled this stop token, and trains it
    assert trajectory.input_ids[trajectory.turns[0].stop - 1] == tokenizer.eos_token_id
    assert tokenizer.decode(observed(trajectory, 0)).startswith("\n<|im_start|>user")
    assert trajectory.turns[1].finish_reason == "length"
    assert tokenizer.decode(observed(trajectory, 1)).startswith("<|im_end|>\n<|im_start|>user")
    for turn in trajectory.turns[:2]:
        mask = trajectory.loss_mask.copy()
        mask[turn.stop] = 1
        wrong = dataclasses.replace(trajectory, loss_mask=mask)
        with pytest.raises(AssertionError):
            judge(dataclasses.replace(result, trajectories=(wrong,)), engine, "s")


@pytest.mark.parametrize("on_length", ["stop", "continue"])
async def test_a02_a_tool_call_that_was_cut_is_not_said_to_the_user(on_length: str) -> None:
    tokenizer = qwen()
    cut = Reply(output_ids=tokenizer.encode('Let me look. <tool_call>{"name": "lo'), stop=False)
    world = ListedWorld(user_texts=["When?", "What?"])
    result, _ = await episode(tokenizer, world, [cut, "Never."], on_length=on_length)
    assert "tool_call" not in " ".join(action.content for action in world.seen)
    if on_length == "stop":
        assert world.seen == []
        assert (result.status, result.stop_reason) == (Status.TRUNCATED, StopReason.LENGTH)
    else:
        assert result.messages[3]["role"] == "tool"
        assert result.messages[3]["content"].startswith("Error: ")


def _each_begins_a_sequence(served: list[list[int]], sequences: list[list[int]]) -> None:
    for ids in served:
        assert any(sequence[: len(ids)] == ids for sequence in sequences)


async def test_a05_what_was_served_is_the_beginning_of_what_is_trained() -> None:
    tokenizer = qwen("qwen3")
    world = ListedWorld(user_texts=["Where is it?", "My order is 17.", "Thanks."])
    result, engine = await episode(tokenizer, world, THOUGHT)
    prompts = [entry.input_ids.tolist() for entry in engine.log]
    assert len(prompts) == 3
    _each_begins_a_sequence(prompts, [t.input_ids.tolist() for t in result.trajectories])
    thoughts = iter(THOUGHT)
    raw = [
        message | {"content": next(thoughts)} if message["role"] == "assistant" else message
        for message in map(dict, result.messages)
    ]
    with pytest.raises(AssertionError):
        _each_begins_a_sequence(prompts, [retold(tokenizer, raw)])


@pytest.mark.parametrize("ids", [[49122, 385], [198, 198, 9707], [198, 198, 49122, 385]])
async def test_a06_the_split_that_was_sampled_is_trained(ids: list[int]) -> None:
    tokenizer = qwen3_tokenizer(trl_template("qwen2_5"))  # the ids are of the whole vocabulary
    end = tokenizer.eos_token_id
    sampled = [*ids, end]
    result, engine = await episode(tokenizer, hi(), [Reply(output_ids=sampled)])
    [trajectory] = result.trajectories
    turn, trained = trajectory.turns[0], trajectory.input_ids.tolist()
    assert trained[turn.start : turn.stop] == sampled == engine.log[0].output_ids
    judge(result, engine, "s")
    again = tokenizer.encode(tokenizer.decode(ids))
    assert again != ids, "text would give other tokens"
    turns = [[*entry.input_ids.tolist(), *entry.output_ids] for entry in engine.log]
    _each_begins_a_sequence(turns, [trained])
    retokenised = [*trained[: turn.start], *again, *trained[turn.stop - 1 :]]
    with pytest.raises(AssertionError):
        _each_begins_a_sequence(turns, [retokenised])


def hi() -> ListedWorld:
    return ListedWorld(user_texts=["Hi", "Yes?"])


class Recording(TrainableToolCallingAgent):
    """Keeps the payloads; `without` and `text` make them as the published example does."""

    payloads: list[dict[str, Any]]
    without = ""
    text = False

    async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        if "payloads" not in vars(self):
            self.payloads = []
        payload = {name: value for name, value in payload.items() if name != self.without}
        if self.text:
            assert isinstance(self.model, Model)
            payload["text"] = self.model.template.encoder.decode(payload.pop("input_ids"))
        self.payloads.append(payload)
        return await super()._call_llm(url, payload)


class WithoutLogprobs(Recording):
    without = "return_logprob"


class AsText(Recording):
    text = True


def _has_logprobs(result: InteractionResult) -> None:
    trained = [t.logprobs[t.loss_mask == 1] for t in result.trajectories]
    assert sum(map(len, trained)) > 0 and all(np.isfinite(logprobs).all() for logprobs in trained)
    assert len(result.logprobs or ()) == len(result.loss_mask) == result.response_length


async def test_a07_every_trained_token_has_the_engine_s_logprob() -> None:
    result, engine = await episode(qwen(), hi(), ["Hello."])
    _has_logprobs(result)
    judge(result, engine, "s")
    recorded, _ = await episode(qwen(), hi(), ["Hello."], kind=Recording)
    _has_logprobs(recorded)
    # an answer without logprobs is an error, and no sample
    wrong, _ = await episode(qwen(), hi(), ["Hello."], kind=WithoutLogprobs)
    assert (wrong.status, wrong.reward) == (Status.ABORTED, None)
    with pytest.raises(AssertionError):
        _has_logprobs(wrong)


async def test_a08_the_engine_is_given_ids_and_one_bos() -> None:
    tokenizer = with_bos()
    payloads: list[Mapping[str, Any]] = []

    class Spy(Recording):
        async def _call_llm(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
            payloads.append(payload)
            return await super()._call_llm(url, payload)

    count = lambda ids: ids.tolist().count(tokenizer.bos_token_id)
    for kind in (TrainableToolCallingAgent, Spy):
        result, engine = await episode(tokenizer, hi(), ["Hello.", "Bye."], kind=kind)
        assert [count(entry.input_ids) for entry in engine.log] == [1, 1]
        assert count(result.trajectories[0].input_ids) == 1
    names = ["input_ids", "return_logprob", "sampling_params"]
    assert [sorted(payload) for payload in payloads] == [names] * 2
    wrong, engine = await episode(tokenizer, hi(), ["Hello."], kind=AsText)
    assert count(engine.log[0].input_ids) == 2
    # the engine says how long its prompt was, and it is not ours
    assert wrong.status is Status.ABORTED


logger = logging.getLogger(__name__)


def res_to_sample(res: InteractionResult, task_index: int) -> Any:
    """The function of slime's example, at `support.slime_mirror.COMMIT`, without its comments."""
    status_mapping = {
        Status.COMPLETED: "completed",
        Status.TRUNCATED: "truncated",
        Status.ABORTED: "aborted",
    }
    status: Any = status_mapping.get(res.status)
    logger.debug(
        f"res_to_sample: response_length="
        f"{res.response_length if hasattr(res, 'response_length') else 'None'}, "
        f"loss_mask_len={len(res.loss_mask) if res.loss_mask else 'None'}, "
        f"tokens_len={len(res.tokens) if res.tokens else 'None'}"
    )
    sample: Any = Sample(
        index=task_index,
        prompt=res.prompt,
        tokens=res.tokens,
        response=res.response,
        reward=res.reward,
        loss_mask=res.loss_mask,
        status=status,
        metadata=res.info,
    )
    if hasattr(res, "response_length"):
        sample.response_length = res.response_length
    return sample


def test_the_result_and_its_sample_are_lists_of_numbers() -> None:
    result = result_of(1.0, a_trajectory(500, ((4, 300), (310, 422))))
    sample = res_to_sample(result, 7)
    mask, tokens, logprobs = sample.loss_mask, sample.tokens, result.logprobs
    assert sum(mask) == 408 and len(mask) == len(logprobs or ()) == sample.response_length == 496
    assert tokens + [5] == [*range(100, 600), 5]  # noqa: RUF005 - as users write it
    assert {type(value) for value in [*mask, *tokens]} == {int}
    assert logprobs is not None and logprobs[0] == -0.25 and logprobs[300] == 0.0
    plain = json.loads(json.dumps([mask, tokens, logprobs, sample.metadata], allow_nan=False))
    assert plain == [mask, tokens, logprobs, {}]
    empty = res_to_sample(result_of(1.0), 7)
    assert (empty.tokens, empty.loss_mask, empty.response_length) == ([], [], 0)


def test_the_result_has_no_logprobs_if_a_trained_token_has_none() -> None:
    unknown = a_trajectory()
    unknown.logprobs[11] = np.nan
    assert result_of(1.0, unknown).logprobs is None
    excluded = dataclasses.replace(unknown, loss_mask=np.zeros_like(unknown.loss_mask))
    assert result_of(1.0, excluded).logprobs == [-0.25, -0.5, -0.75, 0.0, 0.0, -0.25, -0.5, 0.0]


# --- episodes ---------------------------------------------------------------------------------


BAD = {
    "bad JSON": '<tool_call>{"name": "look", "arguments": {"at": </tool_call>',
    "unknown tool": call("fly", to="the moon"),
    "cut": '<tool_call>{"name": "look", "arg',
    "list arguments": '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
    "missing argument": call(),
}


@pytest.mark.parametrize("reply", BAD.values(), ids=BAD)
async def test_a12_a13_an_unreadable_reply_is_corrected(tokenizer: Any, reply: str) -> None:
    world = ListedWorld(user_texts=["Look."], tool_texts=["R1"])
    result, engine = await episode(tokenizer, world, [reply, call(at="a"), "Done."])
    actions = [(action.content, len(action.tool_calls)) for action in world.seen]
    assert actions == [("", 1), ("Done.", 0)]
    answer = result.messages[3]
    assert answer["role"] == "tool" and answer["content"].startswith("Error: ")
    assert answer["content"] in tokenizer.decode(engine.log[1].input_ids)
    assert result.metrics["invalid_calls"] == 1.0 and result.reward == 1.0
    judge(result, engine, "s")


@pytest.mark.parametrize("parameters", ["{bad", "[1]", "", "null", None, '"text"', 5])
def test_a13_the_published_rule_never_raises(parameters: Any) -> None:
    action = call_to_action_sglang([{"name": "look", "parameters": parameters}], "text")
    assert (action.name, action.kwargs) == ("respond", {"content": "text"})


async def test_a14_the_database_is_read_once_for_all_episodes() -> None:
    factory = MINI.factory()
    for task in factory.tasks("test")[:3]:
        await factory.make(scripted()).reset(task, 0)
    bench = factory.bench("test")
    assert bench is factory.bench("test") and bench.database is factory.bench("train").database
    assert bench.domain.data == {}, "the loaded form is not kept beside the compact one"


async def test_a16_the_default_rollout_args_are_enough(tokenizer: Any) -> None:
    config = Namespace(
        agent_strategy="tool-calling", model="m", model_provider="p", temperature=0.0
    )
    defaults = {
        "sglang_router_ip": "127.0.0.1", "sglang_router_port": 30000, "use_http2": False,
    }  # fmt: skip
    agent = agent_factory([], "wiki", config)
    assert agent.rollout_args == defaults
    assert read_args(agent.rollout_args).engine == "http://127.0.0.1:30000"
    async with serving(tokenizer, lambda request: "Goodbye.") as (engine, _):
        forms: list[Any] = [dict, Namespace]
        for form in forms:
            args = form(**router_of(engine), hf_checkpoint="embedded")
            agent = agent_factory([], "wiki", config, rollout_args=args)
            world = ListedWorld(tools=())
            result = await agent.asolve(world, agent.rollout_args, agent.sampling_params, 0)
            await agent.aclose()
            assert result.status is Status.COMPLETED
    with pytest.raises(NotImplementedError):
        agent_factory([], "wiki", Namespace(agent_strategy="react"))


class Seeded(ListedWorld):
    """Keeps its seed."""

    def reset(self, task: Task, seed: int) -> Any:
        self.seed = seed
        return super().reset(task, seed)


async def test_a20_an_episode_counts_what_it_took_at_one_worker(tokenizer: Any) -> None:
    world = Seeded(user_texts=["Hi", "Yes?"], tool_texts=["R"])
    given = {"max_new_tokens": 4096, "temperature": 0.5}
    params = dict(given)
    replies = ["Hello.", call(at="x"), call("fly")]
    result, engine = await episode(
        tokenizer, world, replies, params=params, seed=7, context_length=900
    )
    assert {entry.routing_key for entry in engine.log} == {"s"} and len(engine.log) > 3
    assert world.seed == 7
    metrics = result.metrics
    counts = {
        "turns": len(engine.log),
        "completion_tokens": sum(len(entry.output_ids) for entry in engine.log),
        "prompt_tokens": sum(len(entry.input_ids) for entry in engine.log),
        "tool_calls": 2.0,
        "invalid_calls": 1.0,
        "invalid_calls/unknown_tool": 1.0,
    }
    assert {name: metrics[name] for name in counts} == counts
    assert 0 < metrics["cached_tokens"] < metrics["prompt_tokens"]
    assert metrics["seconds"] > metrics["engine_seconds"] > 0 and metrics["env_seconds"] >= 0
    sent = [dict(entry.sampling_params) for entry in engine.log]
    assert [dict(turn.sampling_params) for turn in result.trajectories[0].turns] == sent
    limits = [params["max_new_tokens"] for params in sent]
    assert sorted(set(limits), reverse=True) == limits, "each turn is told what room is left"
    assert params == given, "what the trainer passes is shared by all its episodes"


async def test_a18_no_steps_are_an_episode_of_no_turns(tokenizer: Any) -> None:
    result, engine = await episode(tokenizer, ListedWorld(), [], steps=0)
    assert (result.status, result.stop_reason) == (Status.TRUNCATED, StopReason.MAX_TURNS)
    assert (result.reward, engine.log) == (0.0, [])


async def test_a20_what_a_step_said_is_not_wiped_by_the_next(tokenizer: Any) -> None:
    looked = {"source": "look", "reward_info": {"r": 1}}
    infos: Any = iter([looked, {"source": "user", "reward_info": None, "cost": None}])
    answers = lambda action: StepResult([{"role": "user", "content": "x"}], info=next(infos))
    result, _ = await episode(tokenizer, ListedWorld(on_step=answers), ["1", "2"], steps=2)
    assert result.info == {"source": "user", "reward_info": {"r": 1}, "cost": None}


class Solver:
    """A published agent's place in the order of classes: behind the mixin."""

    async def asolve(self, *args: Any, **kwargs: Any) -> str:
        return "the agent's own"


def test_a21_the_mixin_comes_first() -> None:
    class Both(TrainableToolCallingAgent, Solver):  # type: ignore[misc]
        """As somebody combines it with an agent of tau-bench's."""

    assert Both.asolve is TrainableAgentMixin.asolve
    assert TrainableToolCallingAgent.__mro__.index(TrainableAgentMixin) == 1


@pytest.mark.parametrize("content", [None, ""])
def test_a22_a_message_without_content_is_no_crash(content: Any) -> None:
    messages = [{"role": "assistant", "content": content}, {"role": "assistant", "content": "Bye."}]
    result = InteractionResult("", 0.0, [], {})
    filled = TrainableToolCallingAgent()._build_final_result(
        result, 1.0, {}, messages, [1], [1, 2], [3]
    )
    assert (filled.response, filled.response_length, list(filled.tokens)) == ("Bye.", 1, [1, 2, 3])
