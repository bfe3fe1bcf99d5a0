"""`CallPolicy`: each attempted call gets one answer, and nothing unreadable is executed. The rule
for several calls in one turn is the environment's, as is the prompt that says so.
"""

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.episodes import call, serving
from support.listed_environment import ListedWorld

from toolroll import Action, Environment, Task, TrainableAgentMixin, UsageError
from toolroll.agents.environments.tau_bench.environment import TauBenchEnvironment
from toolroll.agents.loop.adapt import TauStyleEnvironment
from toolroll.agents.loop.call_policy import (
    NO_PARALLEL,
    ONE_CALL,
    CallPolicy,
    Decision,
    order_by_call,
    policy_of,
    reject_action,
    tool_message,
)
from toolroll.agents.text_agent import TextAgent
from toolroll.agents.tool_calling import TrainableToolCallingAgent, make_agent
from toolroll.environments.bfcl.environment import BfclEnvironment
from toolroll.parsers.types import CallStatus, ParsedReply, ToolCall
from toolroll.rollout.model.turn import AssistantTurn
from toolroll.rollout.runtime.threads import Threads


def good(number: int) -> ToolCall:
    return ToolCall("look", {"at": str(number)}, "", id=f"c{number}")


def bad(number: int, error: str = "not JSON") -> ToolCall:
    return ToolCall("look", None, "{", CallStatus.INVALID_JSON, error, id=f"c{number}")


def answer(number: int, content: str) -> Any:
    return tool_message(good(number), content)


def reply(*calls: ToolCall, content: str = "", **fields: Any) -> ParsedReply:
    return ParsedReply(content=content, tool_calls=calls, **fields)


POLICIES = st.builds(
    CallPolicy,
    on_invalid_call=st.sampled_from(["feedback", "respond", "stop"]),
    max_invalid_in_a_row=st.integers(1, 3),
    parallel_calls=st.sampled_from(["all", "first", "refuse"]),
)
CALLS = st.lists(st.booleans(), max_size=4).map(
    lambda kinds: [good(number) if ok else bad(number) for number, ok in enumerate(kinds)]
)


@given(POLICIES, CALLS, st.sampled_from(["", " ", "Hello."]), st.integers(0, 3))
def test_each_call_is_executed_or_answered_never_both(
    policy: CallPolicy, calls: list[ToolCall], content: str, before: int
) -> None:
    decision = policy.decide(reply(*calls, content=content), invalid_before=before)
    if decision.stop:
        assert decision.action is None
        return
    tool_calls = decision.action.tool_calls if decision.action else ()
    executed, answered = {calls.index(call) for call in tool_calls}, set(decision.answers)
    assert not executed & answered
    assert all(call.ok for call in tool_calls)
    spoken = decision.action is not None and not decision.action.tool_calls
    if spoken and decision.invalid:
        assert policy.on_invalid_call == "respond"
    else:
        assert executed | answered == set(range(len(calls)))
    assert decision.invalid == any(not call.ok for call in calls)


def decided(parsed: ParsedReply, before: int = 0, **policy: Any) -> Decision:
    return CallPolicy(**policy).decide(parsed, invalid_before=before)


def test_an_invalid_call_is_answered_by_the_policy() -> None:
    """Text is speech under "respond", but never a blank one. The limit ends any episode."""
    answers = {0: answer(0, "Error: not JSON")}
    both = decided(reply(bad(0), good(1)))
    assert both == Decision(Action("", (good(1),)), answers, invalid=True)
    spoken = decided(reply(bad(0), content="Hi."), on_invalid_call="respond")
    assert spoken == Decision(Action("Hi."), {0: answer(0, "not JSON")}, invalid=True)
    blank = decided(reply(bad(0), content=" \n"), on_invalid_call="respond")
    assert blank == Decision(None, answers, invalid=True)
    assert decided(reply(bad(0)), on_invalid_call="stop").stop
    assert not decided(reply(bad(0)), 1).stop and decided(reply(bad(0)), 2).stop


def test_text_that_looks_like_a_call_is_text_by_default() -> None:
    look = ToolCall("look", None, "<look>", CallStatus.LOOKS_LIKE_A_CALL, "no call of look")
    text = reply(content="<look>", lookalikes=(look,))
    assert decided(text) == Decision(Action("<look>"))
    feedback = {"role": "user", "content": "Error: no call of look"}
    for on_invalid_call in ("feedback", "respond"):
        strict = decided(text, on_lookalike="invalid", on_invalid_call=on_invalid_call)
        assert strict == Decision(None, invalid=True, messages=[feedback])
    assert decided(text, 2, on_lookalike="invalid").stop
    assert not decided(reply(good(0), lookalikes=(look,)), on_lookalike="invalid").invalid


def test_of_several_calls_first_executes_one_and_refuse_none() -> None:
    calls = reply(good(0), good(1), good(2))
    others = {number: answer(number, ONE_CALL) for number in (1, 2)}
    assert decided(calls, parallel_calls="first") == Decision(Action("", (good(0),)), others)
    refused = {number: answer(number, NO_PARALLEL) for number in range(3)}
    assert decided(calls, parallel_calls="refuse") == Decision(None, refused)


def test_each_call_gets_its_answer_in_its_place() -> None:
    """A model may write its ids itself, and one of them two or three times."""

    def contents(calls: list[ToolCall], *messages: Any) -> list[Any]:
        answers = decided(reply(*calls)).answers
        return [message["content"] for message in order_by_call(calls, answers, messages)]

    well = {"role": "user", "content": "Well?"}
    ordered = contents([good(0), bad(1), good(2)], answer(2, "two"), well, answer(0, "zero"))
    assert ordered == ["zero", "Error: not JSON", "two", "Well?"]
    assert contents([bad(0, "a"), bad(0, "b")]) == ["Error: a", "Error: b"]
    calls = [bad(0, "a"), good(0), good(1), bad(0, "b")]
    ordered = contents(calls, answer(1, "good 1"), answer(0, "good 0"))
    assert ordered == ["Error: a", "good 0", "good 1", "Error: b"]


def test_an_action_at_fault_is_told_so() -> None:
    messages = reject_action(Action("", (good(0), good(1))), "No.")
    assert [message["role"] for message in messages] == ["tool", "tool"]
    assert reject_action(Action("Hi."), "No.") == [{"role": "user", "content": "No."}]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_invalid_in_a_row": 0}, "max_invalid_in_a_row"),
        ({"invalid_penalty": 0.5}, "invalid_penalty"),
        ({"on_lookalike": "call"}, "on_lookalike"),
        ({"command": "codex"}, "this agent has no setting 'command'"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    assert policy_of({"parallel_calls": "first"}) == CallPolicy(parallel_calls="first")
    with pytest.raises(UsageError, match=words):
        policy_of(settings)


# --- several calls in a turn ----------------------------------------------------------------------


class OneCall(ListedWorld):
    """Allows one call in each turn."""

    parallel_calls = "first"


class TwoCalls(TextAgent):
    """Makes two calls, then says that it is done."""

    async def reply(self, messages: Any, *args: Any) -> AssistantTurn:  # pyright: ignore[reportIncompatibleMethodOverride]
        parsed = reply(content="Done.") if len(messages) > 2 else reply(good(0), good(1))
        return AssistantTurn(parsed, {"role": "assistant", "content": parsed.content})


@pytest.mark.parametrize("world", [ListedWorld, OneCall])
@pytest.mark.parametrize("given", [None, "all", "first", "refuse"])
async def test_training_and_evaluation_share_a_rule(tokenizer: Any, world: Any, given: Any) -> None:
    """The environment's, unless the user gives another one, which then holds for both."""
    settings = {} if given is None else {"parallel_calls": given}
    rule = given or world.parallel_calls
    worlds = [world(tool_texts=["1", "2", "3"]) for _ in range(2)]
    replies = call("look", at="a") + call("look", at="b"), "Done."
    async with serving(tokenizer, lambda request: replies[request.call]) as (_, model):
        agent = make_agent(model, settings)
        result = await agent.asolve(worlds[0], task=Task("t", 0), session_id="s")
        template = agent._template(model.template, agent.policy.under(worlds[0]))
    assert result.info.get("error") is None
    await TwoCalls(Threads(1), policy=CallPolicy(**settings)).asolve(worlds[1], task=Task("t", 0))
    executed = [sum(len(action.tool_calls) for action in world.seen) for world in worlds]
    assert executed == [{"all": 2, "first": 1, "refuse": 0}[rule]] * 2
    assert (template is None) is (rule == "all")  # else the prompt asks for one call


def test_what_environments_and_published_agents_declare() -> None:
    kinds = (Environment, BfclEnvironment, TauBenchEnvironment, TauStyleEnvironment)
    assert [kind.parallel_calls for kind in kinds] == ["all", "all", "first", "first"]
    for policy in (TrainableAgentMixin.policy, TrainableToolCallingAgent().policy):
        assert policy.under(ListedWorld()).parallel_calls == "first"


@pytest.mark.parametrize("rule", ["First", None, ["all"]])
def test_a_rule_that_is_none_of_the_three_is_refused(rule: Any) -> None:
    class Misspelled(ListedWorld):
        parallel_calls = rule

    with pytest.raises(UsageError, match=r"Misspelled\.parallel_calls must be one of"):
        CallPolicy().under(Misspelled())
    if rule is not None:
        with pytest.raises(UsageError, match="parallel_calls must be one of"):
            CallPolicy(parallel_calls=rule)


class Polite(TrainableToolCallingAgent):
    """Rewrites the head in its own way."""

    def _reformulate_tool_call(self, text: str) -> str:
        return text.replace("Be helpful.", f"Be polite, {self.provider or 'please'}.")


@pytest.mark.tokens
async def test_agents_share_the_template_for_one_call_a_turn(tokenizer: Any) -> None:
    """One of its own for each episode would encode everything again. An overridden rewriting goes
    with its agent.
    """
    async with serving(tokenizer, lambda request: "Goodbye.") as (engine, model):

        async def solved(kind: type[TrainableToolCallingAgent], **fields: Any) -> tuple[Any, Any]:
            agent = kind(model=model, sampling_params={"max_new_tokens": 64})
            vars(agent).update(fields)
            return agent, await agent.asolve(ListedWorld(), task=Task("t", 0))

        agents = [(await solved(TrainableToolCallingAgent))[0] for _ in range(3)]
        templates = [agent._template(model.template, agent.policy) for agent in agents]
        template = templates[0]
        assert all(each is template for each in templates) and template is not model.template
        assert template is not None and template.encoder is model.template.encoder
        agent, result = await solved(Polite, provider="you")
        _, other = await solved(Polite)
        assert "Be polite, you." in result.prompt and "Be polite, please." in other.prompt
        assert "Be polite, you." in tokenizer.decode(engine.log[3].input_ids)
        gone = weakref.ref(agent)
        del agent
        gc.collect()
        assert gone() is None, "an episode's agent is kept for ever"
