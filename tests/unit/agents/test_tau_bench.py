"""tau-bench: a small package with its interface, and the real one (marked `peers`)."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.episodes import judge, serving
from support.tau import (
    BOTH,
    MINI,
    REAL,
    STOP,
    SyncUser,
    TauBench,
    call,
    needed,
    play,
    recorded_trials,
    scripted,
)

from toolroll import Model, ToolCall, TrainableToolCallingAgent
from toolroll.agents.environments.tau_bench import TauBenchEnvironment, TauBenchFactory
from toolroll.agents.loop.adapt import TauStyleEnvironment
from toolroll.agents.text_agent import DoNothingAgent
from toolroll.agents.users import OpenAIUsers, ScriptedUser, UserConfig
from toolroll.rollout.environment import Action, EnvironmentOptions, Observation, Task
from toolroll.rollout.errors import ActionError, EnvironmentFailure, UsageError, UserSimulatorError
from toolroll.rollout.runtime.threads import Threads
from toolroll.testing import EmbeddedEngine, PolicyRequest, play_references, reference_policy

pytestmark = pytest.mark.tokens

BYE = Action("Goodbye.")
Figures = Callable[[str, object], None]


@pytest.fixture(params=BOTH)
def tau(request: pytest.FixtureRequest) -> TauBench:
    """The small tau-bench package of the tests, and the real one."""
    return needed(request.param)


async def reward_of(factory: TauBenchFactory, task: Task, actions: Any) -> float | None:
    return (await play(factory.make(scripted()), task, actions)).reward


async def begin(
    tau: TauBench, index: int = 0, options: EnvironmentOptions | None = None
) -> tuple[TauBenchEnvironment, Observation]:
    """An environment of retail that was reset, and its first observation."""
    factory = tau.factory()
    env = factory.make(options or scripted())
    return env, await env.reset(factory.tasks("test")[index], 0)


async def test_references_pass_and_the_floor_holds(tau: TauBench, record_property: Any) -> None:
    for (domain, split), (count, floor) in tau.counts.items():
        factory = tau.factory(domain)
        tasks = factory.tasks(split)
        passed = [await reward_of(factory, task, factory.reference(task)) for task in tasks]
        idle = [await reward_of(factory, task, [BYE]) for task in tasks]
        rewards = len(tasks), Counter(passed)[1.0], Counter(idle)[1.0]
        assert rewards == (count, count, floor), (domain, split)
        of = f"/{len(tasks)}"
        line = f"{domain}/{split}: reference {rewards[1]}{of}, doing nothing {rewards[2]}{of}"
        record_property("figure", line)


async def test_a_task_is_drawn_if_none_is_chosen() -> None:
    """Each time anew, for any agent."""
    factory, agent = MINI.factory(), DoNothingAgent(Threads(1))
    results = [await agent.asolve(factory.make(scripted()), task_index=None) for _ in range(30)]
    infos = [result.info for result in results]
    played = [info["task_index"] for info in infos]
    tasks = factory.tasks("test")
    assert [info["task"] for info in infos] == [dict(tasks[index].data) for index in played]
    assert len(set(played)) > 1
    chosen = await agent.asolve(factory.make(scripted()), task_index=3)
    assert "task_index" not in chosen.info and chosen.info["task"] == dict(tasks[3].data)


def _spoilt(actions: Sequence[Action], rng: random.Random) -> list[Action]:
    """`actions` with one left out, one done twice, or one with its arguments changed."""
    kind, place = rng.choice(["drop", "twice", "change", "type"]), rng.randrange(len(actions))
    before, after = actions[:place], actions[place + 1 :]
    if kind == "drop" or not actions[place].tool_calls:
        return [*before, *after]
    if kind == "twice":
        return [*actions[: place + 1], *actions[place:]]
    spoilt = actions[place].tool_calls[0]
    arguments = dict(spoilt.arguments or {})
    if arguments:
        name = rng.choice(sorted(arguments))
        value = arguments[name]
        if kind == "type" and isinstance(value, int):
            arguments[name] = float(value)
        else:
            arguments[name] = value[:-1] if isinstance(value, str | list) else 99
    return [*before, Action("", (ToolCall(spoilt.name, arguments, ""),)), *after]


async def test_reward_infos_are_those_of_the_package(tau: TauBench) -> None:
    rng, seen = random.Random(7), set()
    for (domain, split), (count, _) in tau.counts.items():
        factory = tau.factory(domain)
        tasks = factory.tasks(split)
        # the package's own reward takes up to a second
        for task in rng.sample(tasks, min(count, 8)):
            reference = factory.reference(task)
            for actions in (reference, [BYE], [*_spoilt(reference, rng), BYE]):
                ours = await play(factory.make(scripted()), task, actions)
                theirs = _stock(tau, domain, task, actions)
                assert ours.info["reward_info"] == theirs, (task, actions)
                seen.add(ours.reward)
    assert seen == {0.0, 1.0}


def _stock(tau: TauBench, domain: str, task: Task, actions: Sequence[Action]) -> dict[str, Any]:
    """The package's own reward info for the same actions."""
    env = tau.stock_env(domain, task.split, task.index)
    env.reset(task.index)
    for action in actions:
        name, arguments = "respond", {"content": action.content}
        for tool_call in action.tool_calls[:1]:
            name, arguments = tool_call.name, json.loads(json.dumps(tool_call.arguments))
        response = env.step(tau.stock_action(name, arguments))
        if response.done:
            break
    info: dict[str, Any] = response.info.reward_info.model_dump()  # pyright: ignore[reportPossiblyUnboundVariable]
    return info


@pytest.mark.peers
async def test_recorded_conversations_replay_to_their_rewards(record_property: Figures) -> None:
    needed(REAL)
    recorded = recorded_trials()
    factory = REAL.factory("airline")
    tasks = factory.tasks("test")
    assert len(recorded) == 40
    for entry in recorded:
        messages = entry["traj"]
        lines = [message["content"] for message in messages if message["role"] == "user"]
        replies = [message for message in messages if message["role"] == "assistant"]
        env, task = factory.make(scripted(*lines, default=None)), tasks[entry["task_id"]]
        result = await play(env, task, [_recorded_action(message) for message in replies])
        reward = result.reward if result.done else 0.0  # some ran out of their 30 steps
        assert reward == entry["reward"], entry["task_id"]
    passed = sum(entry["reward"] for entry in recorded)
    record_property("figure", f"{len(recorded)} recorded conversations: {passed:.0f} of reward 1.0")


def _recorded_action(message: dict[str, Any]) -> Action:
    calls = message.get("tool_calls")
    if not calls:
        return Action(message["content"])
    function = calls[0]["function"]  # the recorded agent executed the first call only
    return Action("", (ToolCall(function["name"], json.loads(function["arguments"]), ""),))


async def test_episodes_at_once_share_no_database(tau: TauBench, record_property: Figures) -> None:
    factory = tau.factory()
    tasks = factory.tasks("test")
    plans = [
        (task, factory.reference(task) if number % 2 else [BYE])
        for number, task in enumerate((tasks * 64)[:64])  # type: ignore[index, operator]
    ]

    async def slow(task: Task, actions: Sequence[Action]) -> float | None:
        env = factory.make(scripted())
        await env.reset(task, 0)
        for action in actions:
            await asyncio.sleep(0)  # the others go on between any two steps
            result = await env.step(action)
        return result.reward  # pyright: ignore[reportPossiblyUnboundVariable]

    alone = [await reward_of(factory, task, actions) for task, actions in plans]
    assert await asyncio.gather(*(slow(*plan) for plan in plans)) == alone
    assert set(alone) == {0.0, 1.0}
    passed = Counter(alone)[1.0]
    record_property("figure", f"{len(plans)} episodes at once, rewards as alone: {passed} of 1.0")


async def test_the_event_loop_goes_on_between_steps(tau: TauBench) -> None:
    factory = tau.factory()
    envs = [factory.make(scripted()) for _ in range(32)]
    for env in envs:
        await env.reset(factory.tasks("test")[0], 0)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await asyncio.gather(*(env.step(call(tau.read[0], **tau.read[1])) for env in envs))
    ticking.cancel()
    assert ticks >= len(envs)


async def test_nothing_is_executed_after_the_end(tau: TauBench) -> None:
    transfer = ToolCall("transfer_to_human_agents", {"summary": "no"}, "", id="a")
    read = ToolCall(tau.read[0], tau.read[1], "", id="b")
    env, _ = await begin(tau)
    result = await env.step(Action("", (transfer, read)))
    with pytest.raises(EnvironmentFailure, match="after the episode ended"):
        await env.step(BYE)
    assert (result.done, result.reward) == (True, 0.0)
    assert [message["tool_call_id"] for message in result.messages] == ["a", "b"]
    assert result.messages[1]["content"].startswith("Not executed")
    env, _ = await begin(tau)
    wrong = await env.step(call("transfer_to_human_agents", wrong=1))
    assert wrong.done and wrong.messages[0]["content"].startswith("Error: ")
    # The package itself gives 1.0 for one more step: that is what the latch is for.
    stock = tau.stock_env("retail", "test", 0)
    stock.reset(0)
    assert stock.step(tau.stock_action("transfer_to_human_agents", {"summary": "no"})).reward == 0.0
    assert stock.step(tau.stock_action("respond", {"content": "bye"})).reward == 1.0


async def test_wrong_calls_are_observations_in_the_package_s_words(tau: TauBench) -> None:
    stock = tau.stock_env("retail", "test", 0)
    stock.reset(0)
    name, arguments = tau.read
    more: dict[str, Any] = {**arguments, "more": 1}
    wrong_calls: Any = [(name, {}), (name, more), (name, {"data": {}})]
    wrong_calls += [("no_such_tool", {}), ("calculate", {}), ("calculate", {"expression": 5})]
    env, _ = await begin(tau)
    for wrong, given in wrong_calls:
        ours = (await env.step(call(wrong, **given))).messages[0]["content"]
        assert ours == stock.step(tau.stock_action(wrong, given)).observation, (wrong, given)
    assert env.metrics()["tool_errors"] == 6.0


@pytest.mark.parametrize(
    "action",
    [
        Action("  \n"),
        call("respond", content="hello"),
        Action("", (ToolCall("calculate", [1], "[1]"),)),  # type: ignore[arg-type]
    ],
)
async def test_what_the_model_did_wrong_goes_back_to_it(tau: TauBench, action: Action) -> None:
    user = ScriptedUser(["Hi"])
    env, _ = await begin(tau, options=EnvironmentOptions(user=lambda seed: user))
    with pytest.raises(ActionError):
        await env.step(action)
    assert user.metrics() == {"user_calls": 1.0}, "the user heard of it"


async def test_missing_tasks_splits_and_packages_are_refused(tau: TauBench) -> None:
    for (domain, split), (count, _) in tau.counts.items():
        factory = tau.factory(domain)
        for index in (-1, count, count + 1):
            with pytest.raises(UsageError, match=f"tasks 0 to {count - 1}, not {index}"):
                await factory.make(scripted()).reset(Task("x", index, split), 0)
    with pytest.raises(UsageError, match="no split 'trian'"):
        tau.factory().tasks("trian")
    factory = TauBenchFactory("retail", ("test",), "", package="json")
    assert "git+https://github.com/sierra-research/tau-bench@" in str(factory.missing())
    with pytest.raises(UsageError, match="tau-bench is not installed: pip install"):
        factory.tasks("test")


async def test_first_observation_and_tasks_are_the_packages_own(tau: TauBench) -> None:
    factory = tau.factory()
    before = json.dumps([dict(task.data) for task in factory.tasks("test")])
    for task in factory.tasks("test"):
        await play(factory.make(scripted()), task, factory.reference(task))
    assert json.dumps([dict(task.data) for task in factory.tasks("test")]) == before
    stock = tau.stock_env("retail", "test", 0)
    assert json.dumps([task.model_dump() for task in stock.tasks]) == before
    assert [task.id for task in factory.tasks("test")][:2] == ["test-0", "test-1"]
    stock = tau.stock_env("retail", "test", 1)
    _, first = await begin(tau, 1, scripted("I want something."))
    system, user = first.messages
    assert system == {"role": "system", "content": stock.wiki}
    assert user == {"role": "user", "content": "I want something."}
    assert first.tools == stock.tools_info
    assert first.info["task"] == stock.task.model_dump()


async def test_a_user_who_is_silent_or_missing_is_named(tau: TauBench) -> None:
    env, _ = await begin(tau, options=scripted("Hi", default="  "))
    with pytest.raises(UserSimulatorError, match="a blank line or no text"):
        await env.step(BYE)
    with pytest.raises(UsageError, match="--user-model"):
        tau.factory().make(EnvironmentOptions())
    with pytest.raises(UsageError, match="colour"):
        tau.factory().make(EnvironmentOptions(settings={"colour": 1}))


@pytest.mark.parametrize("own_action", [True, False])
def test_the_raw_environment_plays_as_it_is(tau: TauBench, own_action: bool) -> None:
    raw = tau.stock_env("retail", "test", 0)
    given: dict[str, Any] = {"make_action": tau.stock_action} if own_action else {}
    env = TauStyleEnvironment(raw, **given)
    first = env.reset(Task("0", 0), 0)
    assert first.messages[1] == {"role": "user", "content": SyncUser().reset()}
    assert env.step(call(tau.read[0], **tau.read[1])).messages[0]["role"] == "tool"
    ended = env.step(BYE)
    assert (ended.messages[0]["content"], ended.done, ended.reward) == (STOP, True, 0.0)


def _user(request: PolicyRequest) -> str:
    """Speaks once, and is content with whatever it then hears."""
    return STOP if request.text.count("<|turn|>assistant") > 1 else "I need help."


async def _played(factory: TauBenchFactory, task: Task, model: Model, users: OpenAIUsers) -> Any:
    sampling = {"max_new_tokens": 2048, "temperature": 0.0}
    args = {"verify": "off"}
    agent = TrainableToolCallingAgent(model=model, rollout_args=args, sampling_params=sampling)
    env, name = factory.make(EnvironmentOptions(user=users.make)), f"{factory.name}/{task.id}#0"
    return await agent.asolve(env, task=task, session_id=name, max_num_steps=40)


@pytest.mark.parametrize("domain", ["retail", "airline"])
async def test_references_pass_as_tokens(
    tau: TauBench, tokenizer: Any, domain: str, record_property: Figures
) -> None:
    """The model's texts are read as the calls that are meant, each token as served."""
    factory = tau.factory(domain)
    tasks = factory.tasks("test")
    policy = reference_policy(play_references(factory, tasks, samples=1))
    async with (
        EmbeddedEngine(tokenizer, _user) as user,
        serving(tokenizer, policy) as (engine, model),
        OpenAIUsers(UserConfig(base_url=f"{user.url}/v1", model="u")) as users,
    ):
        results = await asyncio.gather(*(_played(factory, task, model, users) for task in tasks))
    for task, result in zip(tasks, results, strict=True):
        assert result.reward == 1.0, (task.id, result.stop_reason, result.metrics)
        judge(result, engine, f"{factory.name}/{task.id}#0")
        # the last word of the user's is sampled from by nobody
        assert STOP not in tokenizer.decode(result.tokens)
    record_property("figure", f"{domain}/test: reference as tokens {len(results)}/{len(tasks)}")
