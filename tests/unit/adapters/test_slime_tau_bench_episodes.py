"""Design A (slime's tau-bench example): each defect of its episodes, as a test with the defect's
number in its name.
"""

from __future__ import annotations

import asyncio
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from support import slime_mirror
from support.episodes import agent, call, judge, serving
from support.published import episode, qwen
from support.tau import MINI, SyncUser, scripted
from support.worlds import ListedWorld

from toolroll.agents.trainable_agents import (
    TrainableAgentMixin,
    TrainableToolCallingAgent,
    agent_factory,
    call_to_action_sglang,
)
from toolroll.rollout.adapters.slime import to_samples
from toolroll.rollout.model.rollout_args import read_args
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.testing import Fault
from toolroll.rollout.types import Action, InteractionResult, Status, StepResult, StopReason, Task


async def test_a11_a_second_call_is_answered_and_only_the_first_is_executed(tokenizer: Any) -> None:
    world = ListedWorld(user_texts=["Look twice."], tool_texts=["R1", "R2"])
    result, engine = await episode(tokenizer, world, [call(at="a") + call(at="b"), "Done."])
    assert [[c.arguments for c in action.tool_calls] for action in world.seen] == [
        [{"at": "a"}],
        [],
    ]
    made, answers = result.messages[2]["tool_calls"], result.messages[3:5]
    assert [entry["id"] for entry in made] == [answer["tool_call_id"] for answer in answers]
    assert answers[0]["content"] == "R1" and answers[1]["content"].startswith(
        "Not executed: only one tool call per turn"
    )
    assert "Not executed" in tokenizer.decode(engine.log[1].input_ids), "the model sees it"
    judge(result, engine, "s")


BAD = {
    "bad JSON": '<tool_call>{"name": "look", "arguments": {"at": </tool_call>',
    "unknown tool": call("fly", to="the moon"),
    "cut": '<tool_call>{"name": "look", "arg',
    "list arguments": '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
    "missing argument": call(),
}


@pytest.mark.parametrize("said", BAD.values(), ids=BAD)
async def test_a12_the_model_hears_what_was_wrong_and_the_user_hears_nothing(
    tokenizer: Any, said: str
) -> None:
    world = ListedWorld(user_texts=["Look."], tool_texts=["R1"])
    result, engine = await episode(tokenizer, world, [said, call(at="a"), "Done."])
    assert [(action.content, len(action.tool_calls)) for action in world.seen] == [
        ("", 1),
        ("Done.", 0),
    ]
    assert result.messages[3]["role"] == "tool" and result.messages[3]["content"].startswith(
        "Error: "
    )
    assert result.messages[3]["content"] in tokenizer.decode(engine.log[1].input_ids)
    assert result.metrics["invalid_calls"] == 1.0 and result.reward == 1.0
    judge(result, engine, "s")


async def test_a12_an_empty_reply_is_no_blank_turn_of_the_user_s(tokenizer: Any) -> None:
    factory = MINI.factory()
    env = factory.make(scripted("Hi"))
    result, engine = await episode(tokenizer, env, ["<think>\nhm\n</think>\n\n", "Goodbye."])
    assert result.messages[3]["content"].startswith("Your reply was empty")
    assert env.metrics()["user_calls"] == 2.0, "the first line, and the answer to the goodbye"
    judge(result, engine, "s")


@pytest.mark.parametrize("said", BAD.values(), ids=BAD)
async def test_a13_an_unreadable_reply_ends_nothing(tokenizer: Any, said: str) -> None:
    result, _ = await episode(tokenizer, ListedWorld(user_texts=["Look."]), [said, "Done."])
    assert result.status is Status.COMPLETED and len(result.trajectories[0].turns) == 2


@pytest.mark.parametrize("parameters", ["{bad", "[1]", "", "null", None, '"text"', 5])
def test_a13_the_published_rule_never_raises(parameters: Any) -> None:
    found = call_to_action_sglang([{"name": "look", "parameters": parameters}], "text")
    assert (found.name, found.kwargs) == ("respond", {"content": "text"})


async def test_a13_an_aborted_sample_is_not_trained(tokenizer: Any) -> None:
    result, _ = await episode(
        tokenizer,
        ListedWorld(user_texts=["a", "b"]),
        ["One."],
        faults=lambda request: Fault(status=400) if request.call == 1 else None,
    )
    assert result.status is Status.ABORTED
    [sample] = to_samples(slime_mirror.Sample(index=0), result)
    assert sample.status is slime_mirror.Sample.Status.ABORTED, (
        "slime asks whether the status is its own enum's"
    )
    assert sample.reward is None and sample.remove_sample and not any(sample.loss_mask)


class BlockingUser(SyncUser):
    """A user simulator that waits for its model without letting go of its thread."""

    def __init__(self) -> None:
        self.waiting, self.release = threading.Event(), threading.Event()

    def step(self, content: str) -> str:
        self.waiting.set()
        assert self.release.wait(60), "nobody else was played meanwhile"
        return super().step(content)


async def test_a14_a_blocking_user_stops_nobody_else(tokenizer: Any) -> None:
    raw, user = MINI.stock_env("retail", "test", 0), BlockingUser()
    raw.user = user
    async with serving(tokenizer, lambda request: "Goodbye.") as (_, served):
        slow = asyncio.create_task(agent(served).asolve(raw, task_index=0, session_id="slow"))
        while not user.waiting.is_set():
            await asyncio.sleep(0.005)
        quick = await agent(served).asolve(ListedWorld(), task=Task("t", 0), session_id="quick")
        assert quick.status is Status.COMPLETED and not slow.done()
        user.release.set()
        assert (await slow).status is Status.COMPLETED


async def test_a14_the_database_is_read_once_for_all_episodes() -> None:
    factory = MINI.factory()
    for task in factory.tasks("test")[:3]:
        await factory.make(scripted()).reset(task, 0)
    bench = factory.bench("test")
    assert bench is factory.bench("test") and bench.database is factory.bench("train").database
    assert bench.domain.data == {}, "the loaded form is not kept beside the compact one"


async def test_a15_the_user_hears_no_reasoning(tokenizer: Any) -> None:
    world = ListedWorld(user_texts=["Hi", "Yes?"])
    result, engine = await episode(
        tokenizer, world, ["<think>\nsecret plan\n</think>\n\nHello", "Bye."]
    )
    assert [action.content for action in world.seen] == ["Hello", "Bye."]
    assert result.messages[2]["reasoning_content"].strip() == "secret plan"
    judge(result, engine, "s")


async def test_a16_the_default_rollout_args_are_enough(tokenizer: Any) -> None:
    config = Namespace(
        agent_strategy="tool-calling", model="m", model_provider="p", temperature=0.0
    )
    made = agent_factory([], "wiki", config)
    assert made.rollout_args == {
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 30000,
        "use_http2": False,
    }
    assert read_args(made.rollout_args).engine == "http://127.0.0.1:30000"
    async with serving(tokenizer, lambda request: "Goodbye.") as (engine, _):
        ip, port = engine.url.removeprefix("http://").split(":")
        where: Mapping[str, Any] = {
            "sglang_router_ip": ip,
            "sglang_router_port": int(port),
            "hf_checkpoint": "embedded",
        }
        for form in (dict(where), Namespace(**where)):
            player = agent_factory([], "wiki", config, rollout_args=form)
            result = await player.asolve(
                ListedWorld(tools=()), player.rollout_args, player.sampling_params, 0
            )
            await player.aclose()
            assert result.status is Status.COMPLETED
    with pytest.raises(NotImplementedError):
        agent_factory([], "wiki", Namespace(agent_strategy="react"))


async def test_a17_an_abort_in_the_first_turn_is_still_a_sample(tokenizer: Any) -> None:
    result, engine = await episode(
        tokenizer, ListedWorld(), ["Hello."], faults=lambda request: Fault(abort_after=0)
    )
    assert (
        result.status is Status.ABORTED
        and result.response_length == 0
        and len(result.tokens) == len(engine.log[0].input_ids)
    )
    nothing = InteractionResult("", None, [], {}, status=Status.ABORTED)
    for found in (result, nothing):
        [sample] = to_samples(slime_mirror.Sample(index=0), found)
        assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs) >= 1
        assert sample.remove_sample and len(sample.tokens) > sample.response_length


async def test_a18_no_steps_are_an_episode_of_no_turns(tokenizer: Any) -> None:
    result, engine = await episode(tokenizer, ListedWorld(), [], steps=0)
    assert (result.status, result.stop_reason, result.reward) == (
        Status.TRUNCATED,
        StopReason.MAX_STEPS,
        0.0,
    )
    assert engine.log == []


async def test_a18_a_full_context_ends_the_episode_and_nothing_over_long_is_sent(
    tokenizer: Any,
) -> None:
    world = ListedWorld(user_texts=["Hi", "word " * 400])
    result, engine = await episode(tokenizer, world, ["Hello."], context_length=400)
    assert (result.status, result.stop_reason, result.reward) == (
        Status.TRUNCATED,
        StopReason.CONTEXT_FULL,
        0.0,
    )
    assert [entry.status for entry in engine.log] == [200]
    assert engine.log[0].sampling_params["max_new_tokens"] < 400 - len(engine.log[0].input_ids) + 1
    judge(result, engine, "s")


async def test_a18_a_request_that_fails_leaves_the_group_alone(tokenizer: Any) -> None:
    faults = lambda request: Fault(status=400) if request.routing_key == "1" else None
    async with serving(tokenizer, lambda request: "Goodbye.", faults=faults) as (_, served):
        play = lambda name: agent(served).asolve(ListedWorld(), task=Task("t", 0), session_id=name)
        group = await asyncio.gather(*(play(str(at)) for at in range(4)))
    assert [result.status.name for result in group] == [
        "COMPLETED",
        "ABORTED",
        "COMPLETED",
        "COMPLETED",
    ]


class Paid(ListedWorld):
    """Gives a reward for each step."""

    def __init__(self, reward_mode: Any, truncated_reward: float | None = None) -> None:
        paid = iter([0.25, 0.5, 0.125])
        super().__init__(user_texts=["a"] * 9, on_step=self._pay)
        self.reward_mode, self._verdict, self._paid = reward_mode, truncated_reward, paid

    def _pay(self, action: Action) -> StepResult:
        reward = next(self._paid)
        return StepResult([{"role": "user", "content": "more"}], reward, done=reward == 0.125)

    def truncated_reward(self) -> float | None:
        return self._verdict


@pytest.mark.parametrize(
    ("mode", "truncated_reward", "steps", "reward"),
    [
        ("sum", None, 9, 0.875),
        ("final", None, 9, 0.125),
        ("sum", None, 2, 0.75),
        ("final", None, 2, 0.0),
        ("final", 0.625, 2, 0.625),
    ],
)
async def test_a19_no_step_s_reward_is_lost(
    tokenizer: Any, mode: str, truncated_reward: float | None, steps: int, reward: float
) -> None:
    """The last or the sum, as the environment says; cut short, the environment's verdict where
    it gives one.
    """
    result, _ = await episode(tokenizer, Paid(mode, truncated_reward), ["1", "2", "3"], steps=steps)
    assert result.reward == reward and result.step_rewards == (0.25, 0.5, 0.125)[:steps]
    assert result.status is (Status.COMPLETED if steps == 9 else Status.TRUNCATED)


class Seeded(ListedWorld):
    """Keeps its seed."""

    def reset(self, task: Task, seed: int) -> Any:
        self.at = seed
        return super().reset(task, seed)


async def test_a20_an_episode_tells_what_it_took_and_stays_at_one_worker(tokenizer: Any) -> None:
    world, params = (
        Seeded(user_texts=["Hi", "Yes?"], tool_texts=["R"]),
        {"max_new_tokens": 4096, "temperature": 0.5},
    )
    result, engine = await episode(
        tokenizer,
        world,
        ["Hello.", call(at="x"), call("fly")],
        params=params,
        seed=7,
        context_length=900,
    )
    assert {entry.routing_key for entry in engine.log} == {"s"} and len(engine.log) > 3
    assert world.at == 7
    numbers = result.metrics
    assert numbers["turns"] == len(engine.log)
    assert numbers["completion_tokens"] == sum(len(entry.output_ids) for entry in engine.log)
    assert numbers["prompt_tokens"] == sum(len(entry.input_ids) for entry in engine.log)
    assert 0 < numbers["cached_tokens"] < numbers["prompt_tokens"]
    assert numbers["seconds"] > numbers["engine_seconds"] > 0 and numbers["env_seconds"] >= 0
    assert (
        numbers["tool_calls"],
        numbers["invalid_calls"],
        numbers["invalid_calls/unknown_tool"],
    ) == (2.0, 1.0, 1.0)
    turns = result.trajectories[0].turns
    assert [dict(turn.sampling_params) for turn in turns] == [
        dict(entry.sampling_params) for entry in engine.log
    ]
    limits = [turn.sampling_params["max_new_tokens"] for turn in turns]
    assert sorted(set(limits), reverse=True) == limits, "each turn is told what room is left"
    assert params == {"max_new_tokens": 4096, "temperature": 0.5}, (
        "what the trainer passes is shared by all its episodes"
    )


async def test_a20_what_a_step_said_is_not_wiped_by_the_next(tokenizer: Any) -> None:
    said = iter(
        [
            {"source": "look", "reward_info": {"r": 1}},
            {"source": "user", "reward_info": None, "cost": None},
        ]
    )
    answers = lambda action: StepResult([{"role": "user", "content": "x"}], info=next(said))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("template", ["qwen3", "embedded"])
async def test_a21_no_marker_of_one_family_is_wired_in(tokenizer: Any, template: str) -> None:
    chosen = tokenizer if template == "embedded" else qwen(template)
    result, engine = await episode(chosen, ListedWorld(user_texts=["Hi", "Yes?"]), ["Hello."])
    assert [
        message["content"] for message in result.messages if message["role"] == "assistant"
    ] == ["Hello.", "Goodbye."]
    judge(result, engine, "s")


async def test_a21_a_turn_costs_the_same_however_long_the_conversation_is(tokenizer: Any) -> None:
    """The template is rendered once a turn."""
    renders: Counter[int] = Counter()
    world = ListedWorld(user_texts=["Hi"] * 30, tool_texts=["R"] * 30)

    def tick() -> str:
        renders[len(world.seen)] += 1
        return ""

    say = lambda request: "Hello." if request.call % 2 else call(at="x")
    async with serving(tokenizer, say) as (engine, served):
        source = "{{- tick() -}}" + served.template.renderer.source
        served.template = ChatTemplate(tokenizer, chat_template=source, kwargs={"tick": tick})
        result = await agent(served, verify="off").asolve(
            world, None, max_num_steps=40, task=Task("t", 0), session_id="s"
        )
    judge(result, engine, "s")
    assert len(world.seen) == 40 and renders[0] > 0 and renders[1] > 0
    assert {renders[at] for at in range(2, 40)} == {1}, dict(renders)


@pytest.mark.parametrize("content", [None, ""])
def test_a22_a_message_without_content_is_no_crash(content: Any) -> None:
    messages = [{"role": "assistant", "content": content}, {"role": "assistant", "content": "Bye."}]
    result = InteractionResult("", 0.0, [], {})
    filled = TrainableToolCallingAgent()._build_final_result(
        result, 1.0, {}, messages, [1], [1, 2], [3]
    )
    assert (filled.response, filled.response_length, list(filled.tokens)) == ("Bye.", 1, [1, 2, 3])


async def test_a22_a_turn_of_nothing_but_a_call_is_in_the_response(tokenizer: Any) -> None:
    result, _ = await episode(tokenizer, ListedWorld(tool_texts=["R"]), [call(at="x"), "Bye."])
    assert result.messages[2]["content"] is None and result.response == "Bye."
