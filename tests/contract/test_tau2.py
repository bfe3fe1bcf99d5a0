"""tau2 from the inspect-evals wheel: rewards, tools, and a user with tools."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionFunctionToolParam
from pydantic import TypeAdapter
from support.chat import completion, endpoint
from support.tau2_user import Scripted, play, reference_user

from toolroll.agents.users import OpenAIUsers, ScriptedUser, UserConfig
from toolroll.environments.tau2 import Tau2Factory, telecom
from toolroll.environments.tau2.domain import digest
from toolroll.environments.tau2.environment import grade, scenario
from toolroll.environments.tau2.package import WHEEL_COMMIT, data_folder
from toolroll.evaluation.do_nothing import LeavingUser, play_floor
from toolroll.parsers.reading.schema import Offered, check_call
from toolroll.parsers.types import ToolCall
from toolroll.rollout.environment import Action, EnvironmentOptions, Task
from toolroll.rollout.errors import ActionError, EnvironmentFailure, UsageError, UserSimulatorError
from toolroll.rollout.runs.provenance import benchmark_packages, checkout_commit

AIRLINE, RETAIL, TELECOM = map(Tau2Factory, ("airline", "retail", "telecom"))
BYE = Action("Goodbye.")


def act(name: str, /, **arguments: Any) -> Action:
    return Action("", (ToolCall(name, arguments, "", id="c"),))


# --- rewards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "count", "step"),
    [(AIRLINE, 50, 1), (TELECOM, 114, 1), (RETAIL, 114, 12)],
    ids=["airline", "telecom", "retail"],
)
async def test_reference_actions_pass(factory: Tau2Factory, count: int, step: int) -> None:
    """All of airline and telecom; of retail, whose every twelfth is played here, all 114 did."""
    tasks = factory.tasks("base")
    assert len(tasks) == count
    failed = {}
    for task in tasks[::step]:
        result = await play(factory, task, factory.reference(task))
        if not result.done or result.reward != 1.0:
            failed[task.id] = result.info
    assert failed == {}


async def test_telecoms_floor() -> None:
    """In 20 of 114 tasks the assertions hold from the start; those ask for actions, so that
    doing nothing earns nothing.
    """
    floor = await play_floor(TELECOM, TELECOM.tasks("base"), {"max_turns": 5})
    assert (floor.graded, floor.passed) == (114, 0)
    idle = Counter[tuple[bool, bool | None]]()
    for task in TELECOM.tasks("base"):
        part = (await play(TELECOM, task, [BYE], LeavingUser())).info["reward_info"]
        idle[part["assertions"], part["actions"]] += 1
    assert idle == {(False, None): 94, (True, False): 20}


def first_task(factory: Tau2Factory, fits: Callable[[Task], bool]) -> Task:
    return next(task for task in factory.tasks("base") if fits(task))


def cancels(action: Action) -> bool:
    return any(call.name == "cancel_reservation" for call in action.tool_calls)


def with_criteria(task: Task, **criteria: Any) -> dict[str, Any]:
    changed = {**task.data["evaluation_criteria"], **criteria}
    return {**task.data, "evaluation_criteria": changed}


def required_texts(task: Task) -> list[str]:
    """The texts that the agent must give."""
    return task.data["evaluation_criteria"].get("communicate_info") or []


@cache
def cancelling() -> Task:
    """A task in which something is to be canceled."""
    return first_task(AIRLINE, lambda task: any(map(cancels, AIRLINE.reference(task))))


@cache
def communicating() -> Task:
    """A task whose first required text has several digits."""
    return first_task(AIRLINE, lambda task: len((required_texts(task) or [""])[0]) > 1)


async def test_what_is_left_out_or_done_wrong_earns_nothing() -> None:
    task = first_task(AIRLINE, lambda task: bool(required_texts(task)))
    silent = [*AIRLINE.reference(task)[:-1], BYE]
    assert (await play(AIRLINE, task, silent)).info["reward_info"]["communicated"] is False
    without = [action for action in AIRLINE.reference(cancelling()) if not cancels(action)]
    missed = (await play(AIRLINE, cancelling(), without)).info["reward_info"]
    assert (missed["reward"], missed["database"]) == (0.0, False)
    speaks = lambda task: any(not each.tool_calls for each in TELECOM.reference(task)[:-1])
    task = first_task(TELECOM, speaks)
    calls_only = [action for action in TELECOM.reference(task) if action.tool_calls]
    assert (await play(TELECOM, task, [*calls_only, BYE], LeavingUser())).reward == 0.0


async def test_episodes_do_not_meet() -> None:
    """Six at once of one task, one of which does nothing."""
    whole = AIRLINE.reference(cancelling())
    results = await asyncio.gather(
        *(play(AIRLINE, cancelling(), [BYE] if number == 3 else whole) for number in range(6))
    )
    assert [found.reward for found in results] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]


WRITING = ("book_reservation", "update_reservation_flights")


async def test_the_digest_is_tau2s_hash_and_shared_data_never_change() -> None:
    """Over the states on the way through reference actions that book and change flights."""
    domain = AIRLINE.domain
    untouched = domain.begin({"id": "none"})
    seen: dict[str, str] = {digest(untouched.database): untouched.database.get_hash()}
    for task in AIRLINE.tasks("base"):
        calls = [call for action in AIRLINE.reference(task) for call in action.tool_calls]
        writing = [call for call in calls if call.name in WRITING]
        if not writing or len(seen) > 3:
            continue
        state = domain.begin(task.data)
        for call in calls:
            state.call("assistant", call.name, call.arguments or {})
            if call in writing:
                hashed = state.database.get_hash()
                assert seen.setdefault(digest(state.database), hashed) == hashed
        assert domain.is_expected(task.data, state.database)
        users = state.database.users
        state.database.users = {name: users[name] for name in reversed(users)}
        assert domain.is_expected(task.data, state.database), "the order of keys does not count"
        users.popitem()[1].email = "somebody.else@example.com"
        assert not domain.is_expected(task.data, state.database)
    assert len(seen) == len(set(seen.values())) > 3
    assert digest(domain.begin({"id": "none"}).database) == next(iter(seen))


async def test_only_the_reward_basis_counts() -> None:
    """All reference actions, but none of the required texts."""
    task = communicating()
    bases: list[tuple[dict[str, Any], float]] = [
        ({}, 0.0),  # tau2's default: DB and COMMUNICATE
        ({"reward_basis": ["DB", "COMMUNICATE"]}, 0.0),
        ({"reward_basis": ["DB"]}, 1.0),
        ({"reward_basis": ["DB", "NL_ASSERTION"]}, 1.0),  # without a judge, this part is left out
        ({"reward_basis": ["COMMUNICATE"]}, 0.0),
        ({"reward_basis": ["ACTION"]}, 1.0),
        ({"reward_basis": []}, 1.0),
    ]
    for given, reward in bases:
        changed = replace(task, data=with_criteria(task, **given))
        result = await play(AIRLINE, changed, [*AIRLINE.reference(task)[:-1], BYE])
        assert result.reward == reward, given
    without = replace(task, data={**task.data, "evaluation_criteria": None})
    assert (await play(AIRLINE, without, [BYE])).reward == 1.0


async def test_required_texts_may_be_in_any_message_but_not_in_two() -> None:
    *calls, last = AIRLINE.reference(communicating())
    text = last.content
    half = text.index(required_texts(communicating())[0]) + 1
    beside = Action(text, act("list_all_airports").tool_calls)
    user = lambda *lines: ScriptedUser(["Hello.", *lines, "###STOP###"])
    for said, lines, reward in (
        ([beside, BYE], [], 1.0),
        ([Action(text[:half]), Action(text[half:])], ["Hm?"], 0.0),
        ([Action(text), BYE], ["Hm?"], 1.0),
        ([Action(text.replace("1", "1,"))], [], 1.0),
    ):
        result = await play(AIRLINE, communicating(), [*calls, *said], user(*lines))
        assert (result.reward, result.done) == (reward, True), said


async def test_what_ends_an_episode() -> None:
    """The user, also with its first line, and ten errors."""
    task, actions = cancelling(), AIRLINE.reference(cancelling())
    result = await play(AIRLINE, task, actions, ScriptedUser(["###STOP###"]))
    assert (result.done, result.reward, result.messages) == (True, 0.0, [])
    for line in ("###STOP###", "Thanks. ###TRANSFER###", "###OUT-OF-SCOPE###"):
        user = ScriptedUser(["Hello.", line])
        result = await play(AIRLINE, AIRLINE.tasks("base")[0], [BYE], user)
        assert result.done and result.reward is not None
    for errors, reward in ((9, 1.0), (10, 0.0)):
        result = await play(AIRLINE, task, [*[act("no_such_tool")] * errors, *actions])
        assert (result.done, result.reward) == (True, reward)


def test_actions_are_compared_as_tau2_does() -> None:
    """It compares the arguments that the call has."""
    compared: list[tuple[dict[str, Any], list[str] | None, bool]] = [
        ({"a": [1, 2], "b": 1.0}, None, True),
        ({"a": [2, 1], "b": 1}, None, False),
        ({"b": 1}, None, True),
        ({"b": 1, "c": None}, None, False),
        ({"a": [], "b": 1}, ["b"], True),
        ({"a": [1, 2]}, ["b"], False),
        ({}, [], True),
    ]
    for arguments, names, done in compared:
        expected = {"name": "f", "arguments": {"a": [1, 2], "b": 1}, "compare_args": names}
        criteria = {"actions": [expected], "reward_basis": ["ACTION"]}
        state = AIRLINE.domain.begin({})
        state.call("user", "g", expected["arguments"])  # type: ignore[arg-type]
        task = {"id": "t", "evaluation_criteria": criteria}
        assert grade(AIRLINE.domain, task, state, ())["actions"] is False
        state.call("user", "f", arguments)
        assert grade(AIRLINE.domain, task, state, ())["actions"] is done, arguments


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "count", "user"),
    [(AIRLINE, 14, 0), (RETAIL, 15, 0), (TELECOM, 13, 30)],
    ids=["airline", "retail", "telecom"],
)
def test_tools_have_openais_form_and_fit_calls(factory: Tau2Factory, count: int, user: int) -> None:
    domain = factory.domain
    assert (len(domain.tools), len(domain.user_tools)) == (count, user)
    for tool in [*domain.tools, *domain.user_tools]:
        TypeAdapter(ChatCompletionFunctionToolParam).validate_python(tool)
        function = tool["function"]
        assert len(function["description"]) > 15
        for name, value in function["parameters"]["properties"].items():
            assert value.get("description"), (function["name"], name)
    offered = Offered(domain.tools)
    calls = [
        call
        for task in factory.tasks("base")
        for action in factory.reference(task)
        for call in action.tool_calls
    ]
    assert [call for call in calls if not check_call(call, offered).ok] == []


async def test_mistakes_are_answers() -> None:
    user = lambda seed: ScriptedUser(["Hello."], default="Hm.")
    env = AIRLINE.make(EnvironmentOptions(user=user))
    first = await env.reset(AIRLINE.tasks("base")[0], 0)
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert "<policy>" in first.messages[0]["content"]
    for action, words in (
        (act("get_user_details", user_id="nobody"), "Error: User nobody not found"),
        (act("get_user_details"), "Error: "),
        (act("no_such_tool"), "Error: there is no tool named 'no_such_tool'"),
        (act("calculate", expression="9**9**9"), "Error: "),
        (act("calculate", expression="2 * 21"), "42.0"),
        (act("get_user_details", user_id=["x"]), "Error: "),
    ):
        [message] = (await env.step(action)).messages
        assert message["content"].startswith(words), message
    assert env.metrics()["tool_errors"] == 5
    assert env.metrics()["tool_errors/get_user_details"] == 3
    with pytest.raises(ActionError, match="empty"):
        await env.step(Action("  "))
    await env.close()
    with pytest.raises(EnvironmentFailure):
        await env.step(BYE)


async def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="needs a user simulator"):
        AIRLINE.make(EnvironmentOptions())
    env = TELECOM.make(EnvironmentOptions(user=lambda seed: ScriptedUser(["Hello."])))
    with pytest.raises(UsageError, match=r"tau2/telecom needs a user .*with tools"):
        await env.reset(TELECOM.tasks("base")[0], 0)
    env = AIRLINE.make(EnvironmentOptions(user=lambda seed: ScriptedUser([" "])))
    with pytest.raises(UserSimulatorError, match="a blank line or no text"):
        await env.reset(AIRLINE.tasks("base")[0], 0)


def test_splits_and_what_is_left_of_the_import() -> None:
    assert [len(TELECOM.tasks(split)) for split in TELECOM.splits] == [114, 74, 40, 20, 2285]
    assert [len(AIRLINE.tasks(split)) for split in AIRLINE.splits] == [50, 30, 20]
    assert [len(RETAIL.tasks(split)) for split in RETAIL.splits] == [114, 74, 40]
    assert not [name for name in sys.modules if name.startswith(("inspect_ai", "inspect_evals"))]


# --- data from a checkout -------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of tau2-bench with the wheel's telecom data, of which it has two tasks."""
    wheel, data = data_folder(), tmp_path / "data" / "tau2"
    assert wheel is not None
    telecom_data = data / "domains" / "telecom"
    telecom_data.mkdir(parents=True)
    for name in ("db.toml", "user_db.toml"):
        shutil.copy(wheel / "domains" / "telecom" / name, telecom_data)
    for name in ("main_policy", "tech_support_manual"):
        (telecom_data / f"{name}.md").write_text(f"The {name} of the checkout.")
    (data / "user_simulator").mkdir()
    (data / "user_simulator" / "simulation_guidelines_tools.md").write_text("Be a user.")
    tasks = [dict(task.data) for task in TELECOM.tasks("base")[:2]]
    ids = [task["id"] for task in tasks]
    (telecom_data / "split_tasks.json").write_text(json.dumps({"base": ids}))
    write_tasks(tmp_path, tasks)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "data"]):
        subprocess.run([*git, *command], check=True)
    return tmp_path


def write_tasks(checkout: Path, tasks: Sequence[Mapping[str, Any]]) -> None:
    file = checkout / "data" / "tau2" / "domains" / "telecom" / "tasks.json"
    file.write_text(json.dumps(tasks))


async def test_a_checkout_s_commit_is_kept(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAU2_DATA_DIR", str(checkout / "data"))
    factory = telecom()
    commit = checkout_commit(checkout)
    assert commit is not None
    assert str(checkout) in factory.description
    task, _ = factory.tasks("base")
    assert (await play(factory, task, factory.reference(task))).reward == 1.0
    env = factory.make(EnvironmentOptions(user=lambda seed: Scripted(reference_user(task.data))))
    first = await env.reset(task, 0)
    assert "The main_policy of the checkout." in first.messages[0]["content"]
    assert first.info["data"] == f"tau2-bench {commit}"
    assert first.info["instruction"] == scenario(task.data)
    assert benchmark_packages(factory)["tau2-bench"] == commit
    write_tasks(checkout, [])
    assert Tau2Factory("telecom", str(checkout)).domain.revision == f"{commit}-dirty"
    shutil.rmtree(checkout / ".git")
    revision = Tau2Factory("telecom", str(checkout)).domain.revision
    assert revision == f"without a commit (SHA-256 of the tasks: {sha256(b'[]').hexdigest()})"
    monkeypatch.delenv("TAU2_DATA_DIR")
    wheels = benchmark_packages(telecom())
    assert wheels["tau2-bench"] == f"{WHEEL_COMMIT} (in inspect-evals {wheels['inspect-evals']})"


async def test_tasks_that_need_a_judge_are_refused_or_graded_partly(checkout: Path) -> None:
    judged = with_criteria(
        TELECOM.tasks("base")[0],
        reward_basis=["ENV_ASSERTION", "NL_ASSERTION"],
        nl_assertions=["The agent was polite."],
    )
    write_tasks(checkout, [judged])
    options = EnvironmentOptions(user=lambda seed: Scripted(reference_user(judged)))
    with pytest.raises(UsageError, match=r'1 of 1 tasks needs a judge .*nl_assertions="skip"'):
        telecom(str(checkout)).make(options)
    factory = telecom(str(checkout), nl_assertions="skip")
    [task] = factory.tasks("base")
    assert (await factory.make(options).reset(task, 0)).info["nl_assertions"] == "skipped"
    assert (await play(factory, task, factory.reference(task))).reward == 1.0


def test_data_that_cannot_be_graded_are_refused(checkout: Path, tmp_path: Path) -> None:
    task = TELECOM.tasks("base")[0]
    call = {"name": "new_tool", "arguments": {}}
    history = {**task.data, "initial_state": {"message_history": [{"role": "user"}]}}
    for data, what in (
        (with_criteria(task, actions=[call]), "new_tool"),
        (with_criteria(task, reward_basis=["DB"]), "DB"),
        (with_criteria(task, reward_basis=["SPEED"]), "SPEED"),
        (history, "message_history"),
    ):
        write_tasks(checkout, [data])
        with pytest.raises(UsageError, match=f"needs {what}, which toolroll does not support"):
            Tau2Factory("telecom", str(checkout)).tasks("base")
    with pytest.raises(UsageError, match="has no data of tau2-bench; name a checkout"):
        Tau2Factory("telecom", str(tmp_path / "nowhere")).tasks("base")
    with pytest.raises(UsageError, match=r"no file .*airline.tasks"):
        (checkout / "data" / "tau2" / "domains" / "airline").mkdir()
        Tau2Factory("airline", str(checkout)).tasks("base")


# --- a user with tools ----------------------------------------------------------------------------


async def test_a_model_plays_the_user_and_acts_on_its_phone() -> None:
    task = first_task(TELECOM, lambda task: "airplane_mode_on" in task.id)
    several = [("toggle_airplane_mode", "{}"), ("check_status_bar", "{"), ("fly", "{}")]
    says = [
        completion("My phone has no service."),
        completion(None, [("check_status_bar", "{}")]),
        completion(None, several),
        completion("It is off now."),
        completion("###STOP###"),
    ]
    async with (
        endpoint(*says) as server,
        OpenAIUsers(UserConfig(base_url=server.url, model="m")) as users,
    ):
        env = TELECOM.make(EnvironmentOptions(user=users.make))
        first = await env.reset(task, 0)
        step = await env.step(Action("Please turn airplane mode off."))
        last = await env.step(BYE)
        metrics = env.metrics()
    assert first.messages[1] == {"role": "user", "content": "My phone has no service."}
    # the agent hears only what it is told
    assert step.messages == [{"role": "user", "content": "It is off now."}] and last.done
    names = lambda tools: [tool["function"]["name"] for tool in tools]
    assert names(server.bodies[0]["tools"]) == names(TELECOM.domain.user_tools)
    system = server.bodies[0]["messages"][0]["content"]
    assert "User Simulation Guidelines" in system
    assert task.data["user_scenario"]["instructions"]["known_info"] in system
    messages = server.bodies[3]["messages"]
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    assert "Airplane Mode" in answers[0] and "Airplane Mode is now OFF" in answers[1]
    assert answers[2].startswith("Error: arguments must be a JSON object")
    assert answers[3] == "Error: there is no tool named 'fly'"
    for message in messages:
        for call in message.get("tool_calls", ()):
            json.loads(call["function"]["arguments"])
    expected = {"user_calls": 5, "user_tool_calls": 4, "user_tool_errors": 1}
    assert {name: metrics[name] for name in expected} == expected


async def test_a_user_who_only_acts_is_a_failure() -> None:
    task = TELECOM.tasks("base")[0]
    async with (
        endpoint(completion(None, [("check_status_bar", "{}")])) as server,
        OpenAIUsers(UserConfig(base_url=server.url, model="m")) as users,
    ):
        env = TELECOM.make(EnvironmentOptions(user=users.make))
        with pytest.raises(UserSimulatorError, match="30 times in a row"):
            await env.reset(task, 0)
        await env.close()
