"""Long texts: too long is a failure, none is encoded on the event loop, and errors are short."""

import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from support.episodes import agent, call, judge, serving
from support.listed_environment import ListedWorld
from support.scripted_runs import Scripted, ScriptedFactory, play
from support.toy_environment import PondFactory, look

from toolroll import Action, ActionError, Episode, InteractionResult, Observation, Runner, Status
from toolroll.agents.loop.environment_runner import EnvironmentRunner
from toolroll.agents.text_agent import make_do_nothing
from toolroll.agents.tool_calling import TrainableToolCallingAgent, make_agent
from toolroll.evaluation.do_nothing import play_floor
from toolroll.evaluation.openai_baseline import make_baseline
from toolroll.evaluation.run_config import RunConfig
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import StepResult, Task
from toolroll.rollout.errors import EngineError, EnvironmentFailure, RolloutError, capped, describe
from toolroll.rollout.runs.episode_file import to_line
from toolroll.rollout.runs.registry import load_environment
from toolroll.rollout.runtime.threads import Threads
from toolroll.rollout.settings import RunSettings
from toolroll.rollout.types import StopReason
from toolroll.testing import Fault, PolicyRequest, fault_at

LONG = 100_000
TEXT = "a frog, a fish " * 8_000
assert len(TEXT) > LONG


def watched(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], set[str]]:
    """What is called with long texts on the event loop's thread, and what in another one."""
    loop, on_loop, elsewhere = threading.get_ident(), set[str](), set[str]()
    template = model.template
    content = lambda messages, *_, **__: sum(len(m.get("content") or "") for m in messages)

    def watch(owner: Any, name: str, size: Callable[..., int]) -> None:
        function = getattr(owner, name)

        def noting(*args: Any, **named: Any) -> Any:
            if size(*args, **named) > LONG:
                (on_loop if threading.get_ident() == loop else elsewhere).add(name)
            return function(*args, **named)

        monkeypatch.setattr(owner, name, noting)

    watch(template.encoder, "encode", lambda text, *_, **__: len(text))
    watch(template.encoder, "decode", lambda ids: 2 * len(ids))
    watch(template.renderer, "render_prepared", content)
    watch(model.parser, "parse", lambda text, **_: len(text))
    return on_loop, elsewhere


def says(request: PolicyRequest) -> str:
    turns = request.text.count("<tool_call>")
    return "Done." if turns > 1 else call(at="x")


talks = lambda request: TEXT
PROMPT = {"encode", "render_prepared"}


@pytest.mark.parametrize(
    ("world", "policy", "elsewhere"),
    [
        (ListedWorld(system=TEXT, tool_texts=["a frog"]), says, PROMPT),
        (ListedWorld(user_texts=[TEXT], tool_texts=["a frog"]), says, PROMPT),
        (ListedWorld(tool_texts=[TEXT]), says, PROMPT),
        (ListedWorld(), talks, {"parse"}),
    ],
    ids=["system prompt", "user text", "tool result", "reply"],
)
async def test_no_long_text_is_handled_on_the_event_loop(
    tokenizer: Any,
    world: ListedWorld,
    policy: Any,
    elsewhere: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(tokenizer, policy, context_length=1_000_000) as (engine, model):
        on_loop, threads = watched(model, monkeypatch)
        player = agent(model, verify="off")
        player.sampling_params = {"max_new_tokens": 200_000}
        result = await player.asolve(world, task=Task("t", 0), session_id="s")
        judge(result, engine, "s")
    assert result.status is Status.COMPLETED
    assert (result.response == TEXT.strip()) is (policy is talks)
    assert result.metrics["turns"] == (1 if policy is talks else 2)
    assert on_loop == set()
    assert threads >= elsewhere


async def test_threads_give_equal_tokens(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for limit in (0, 10**9):
        monkeypatch.setattr("toolroll.rollout.model.conversation.LONG", limit)
        monkeypatch.setattr("toolroll.rollout.model.conversation.LONG_REPLY", limit)
        async with serving(tokenizer, says) as (_, model):
            world = ListedWorld(tool_texts=["a frog", "a fish"], user_texts=["Hello.", "And?"])
            result = await agent(model).asolve(world, task=Task("t", 0), session_id="s")
            outcomes.append([result.tokens, result.loss_mask, result.messages])
    assert outcomes[0] == outcomes[1]


LIMIT = 1_000_000


@pytest.mark.parametrize("content", ["x" * LIMIT, "é" * (LIMIT // 2)])
@pytest.mark.parametrize(("where", "make"), [("reset", Observation), ("step", StepResult)])
async def test_observations_may_have_a_million_bytes(where: str, make: Any, content: str) -> None:
    fits = await returned(where, make([{"role": "user", "content": content}]))
    assert fits.stop_reason is StopReason.MAX_TURNS
    result = await returned(where, make([{"role": "user", "content": content + content[0]}]))
    assert (result.status, result.stop_reason) == (Status.ABORTED, StopReason.ENVIRONMENT_ERROR)
    message = result.info["error"]["message"]
    assert f"Scripted.{where} returned 1000" in message
    assert "max_observation_bytes (1000000)" in message
    assert len(message) < 300


HALF = {"content": "x" * (LIMIT // 2)}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "y", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize(
    "more",
    [
        {"role": "tool", "tool_call_id": "none", "content": [{"type": "text", "text": "y"}]},
        {"role": "assistant", "content": "", "reasoning_content": "y"},
        TOOL,
    ],
)
@pytest.mark.parametrize(("where", "make"), [("reset", Observation), ("step", StepResult)])
async def test_a_call_returns_one_observation(where: str, make: Any, more: dict[str, Any]) -> None:
    halves = [{"role": "user", **HALF}, {"role": "tool", "tool_call_id": "none", **HALF}]
    fits = await returned(where, make(halves))
    assert fits.stop_reason is StopReason.MAX_TURNS
    longer = make(halves, tools=[more]) if more is TOOL else make([*halves, more])
    message = (await returned(where, longer)).info["error"]["message"]
    count = 2 if more is TOOL else 3
    assert f"{where} returned 1000001 bytes of text (500000 in the longest of {count} " in message


async def test_an_action_error_counts_for_each_call_that_it_answers() -> None:
    class Refuses(Scripted):
        def step(self, action: Action) -> StepResult:
            raise ActionError("x" * (LIMIT // 2))

    env = Refuses(lambda name, task: None)
    world = EnvironmentRunner(env, Task("t", 0), 0, Threads(1).run_in_thread)
    call = ToolCall("look", {}, "{}", id="c")
    with pytest.raises(ActionError):
        await world.step(Action("", (call, call)))
    words = r"Refuses\.step raised an ActionError and returned 1500000 bytes"
    with pytest.raises(EnvironmentFailure, match=words):
        await world.step(Action("", (call, call, call)))


async def returned(where: str, value: Any) -> InteractionResult:
    """Return the result of one turn in which the method `where` returned `value`."""
    act = lambda name, task: value if name == where else None
    [episode] = await play(ScriptedFactory(lambda: Scripted(act), count=1), max_turns=1)
    return episode.result


async def test_the_limit_is_a_setting_of_every_agent(tokenizer: Any) -> None:
    config = RunConfig(env="e", model="m", max_observation_bytes=10)
    world = ListedWorld(user_texts=["x" * 11])
    threads = Threads(1)
    async with serving(tokenizer, says) as (_, model):
        settings = config.agent_settings
        baseline = settings | {"endpoint": "http://127.0.0.1:1/v1", "model": "m"}
        del baseline["on_length"], baseline["verify"]
        given = {"max_observation_bytes": 10}
        for player in (
            make_agent(model, settings),
            make_do_nothing(threads, settings),
            make_baseline(threads, baseline),
            TrainableToolCallingAgent(model=model, rollout_args=given),
        ):
            result = await player.asolve(world, task=Task("t", 0))
            assert "max_observation_bytes (10)" in result.info["error"]["message"]
    desk = load_environment("desk")
    floor = await play_floor(desk, desk.tasks(desk.splits[0])[:1], config.model_dump())
    assert floor.stop_reasons == {StopReason.ENVIRONMENT_ERROR: 1}


# --- errors that quote megabytes ------------------------------------------------------------------


MEGABYTES = "x" * 2_000_000


def test_long_errors_are_cut_and_say_how_much() -> None:
    assert capped("x" * 2200) == "x" * 2200
    assert capped("x" * 3234) == "x" * 2000 + "... (1,234 more characters)"
    twice = capped(f"the engine at http://host says: {capped('x' * 3234, 1500)}")
    assert twice.endswith("(1,734 more characters)")
    engine = EngineError(MEGABYTES, status=500, body=MEGABYTES)
    for error in (RolloutError(MEGABYTES), engine, ValueError(MEGABYTES)):
        assert len(orjson.dumps(describe(error))) < 7000
    assert len(str(engine)) < 2300 and len(engine.body) < 2300
    assert str(ActionError(MEGABYTES)) == MEGABYTES, "the model's observation is not cut"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: {**answer, "meta_info": {**answer["meta_info"], "id": MEGABYTES}},
        lambda answer: {**answer, "output_ids": [MEGABYTES]},
    ],
)
async def test_long_contradictions_are_short_lines(tokenizer: Any, spoil: Any, caplog: Any) -> None:
    episodes: list[Episode] = []
    factory, faults = PondFactory(1), fault_at({0: Fault(garble=spoil)})
    settings = RunSettings(sampling_params={"max_new_tokens": 64})
    async with serving(tokenizer, look, config={"retries": 0}, faults=faults) as (_, model):
        runner = Runner(factory, lambda: agent(model), settings)
        await runner.run(factory.tasks("test"), episodes.append)
    [episode] = episodes
    assert episode.result.status is Status.ABORTED
    assert len(to_line(episode)) < 20_000
    assert len(caplog.text) < 20_000
