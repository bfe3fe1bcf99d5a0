"""The tau-bench adapter's bounded `calculate`, copies of the database, and users in threads."""

import asyncio
import copy
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat import UNFINISHED
from support.memory import peak
from support.standins import stand_in, stands_for
from support.tau import MINI

from toolroll.agents.environments.tau_bench import TauBenchUsers
from toolroll.agents.environments.tau_bench.database import Database, Stored, Table
from toolroll.agents.environments.tau_bench.grading import Bench, Calculate
from toolroll.agents.environments.tau_bench.package import TauBenchDomain, import_module
from toolroll.rollout.errors import UsageError, UserSimulatorError

shop: Any = import_module(f"{MINI.package}.envs.shop")
consistent_hash = import_module(f"{MINI.package}.envs.base").consistent_hash
to_hashable = import_module(f"{MINI.package}.envs.base").to_hashable

# --- calculate ------------------------------------------------------------------------------------

CASES = (
    "2 + 2|1/3|(1.5 - 2) * -4|1 / 0|1.0 / "
    "0|2**10|2**-1|7//2|7.5//2|-7//2|--3|+(2)|1.|.5|1..2|007|()|...|2(3)|(1)(2)|* 2|1 +|((1)|"
    "(-8)**0.5|0**-1|10**400/10**399|10**400|1.0*10**400|10.0**400|  5 |0.1+0.2|1e5|abc|1_0|2 "
    "3|()+1|()*3|-()|.||-|1 if 1|0(*0)|0(**0)|0(*())|1.5(*1/0)|0(1)(*2)"
)


@pytest.mark.parametrize("expression", [*CASES.split("|"), ["1"]])
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_calculate_answers_as_the_original(expression: Any) -> None:
    assert Calculate.invoke({}, expression) == shop.Calculate.invoke({}, expression)


@given(st.text(alphabet="0123456789+-*/(). ", max_size=12))
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_calculate_answers_as_the_original_for_any_text(text: str) -> None:
    exponents = text.replace("**", "^").split("^")[1:]
    if text.count("**") > 1 or any(len(part) > 4 for part in exponents):
        return  # the original may not end
    assert Calculate.invoke({}, text) == shop.Calculate.invoke({}, text)


POWERS = "9**9**9|9**9**7|(9**9**9)(1)|-(2**99999999)|2**-9**9**9|(2**60000)*(2**60000)"


@pytest.mark.parametrize(
    "expression", [*POWERS.split("|"), "1+" * 4000 + "1", "(" * 900, "-" * 1999 + "1"]
)
def test_calculate_is_bounded(expression: str) -> None:
    assert Calculate.invoke({}, expression).startswith("Error: ")
    assert peak(lambda: Calculate.invoke({}, expression)) < 1_500_000


# --- the database ---------------------------------------------------------------------------------

ATOMS = st.one_of(
    st.integers(0, 2), st.booleans(), st.floats(0, 2, width=16), st.text(max_size=2), st.none()
)
FIELDS = st.one_of(
    ATOMS,
    st.lists(ATOMS, max_size=2),
    st.dictionaries(st.sampled_from("xyz"), st.lists(ATOMS, max_size=2), max_size=2),
)
RECORDS = st.dictionaries(st.sampled_from("abcdef"), FIELDS, max_size=3)
DATA = st.fixed_dictionaries(
    {
        "rows": st.dictionaries(st.sampled_from("klmnop"), RECORDS, max_size=5),
        "list": st.lists(RECORDS, max_size=3),
    }
)


def _database(data: dict[str, Any]) -> Database:
    return Database(data, to_hashable, consistent_hash)


def _retype(record: Any) -> None:
    record.update({name: float(field) for name, field in record.items() if isinstance(field, int)})


RECORD_EDITS: dict[str, Callable[[Any, str, Any], object]] = {
    "edit": lambda rows, key, value: rows[key].update(new=value),
    "undo": lambda rows, key, value: rows[key].pop("new", None),
    "reorder": lambda rows, key, value: rows.update({key: dict(reversed(rows[key].items()))}),
    "read": lambda rows, key, value: json.dumps(rows[key]),
    "retype": lambda rows, key, value: _retype(rows[key]),
    "swap": lambda rows, key, value: rows.update(
        {key: {name: rows[key].pop(name) for name in sorted(rows[key])}}
    ),
}


def _change(data: dict[str, Any], edits: list[tuple[str, str, Any]]) -> None:
    for kind, key, value in edits:
        rows = data["rows"]
        if kind == "set":
            rows[key] = value
        elif kind == "drop":
            rows.pop(key, None)
        elif kind == "deep":
            _append_within([field for record in rows.values() for field in record.values()])
        elif kind == "list":
            data["list"].append({"a": 1})
        elif key in rows:
            RECORD_EDITS[kind](rows, key, value)


def _append_within(fields: list[Any]) -> None:
    for field in fields:
        if isinstance(field, dict):
            _append_within(list(field.values()))
        elif isinstance(field, list):
            field.append(1)


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "drop", "deep", "list", *RECORD_EDITS]),
        st.sampled_from("klmq"),
        RECORDS,
    ),
    max_size=5,
)


@given(DATA, EDITS, EDITS)
def test_changes_decide_as_the_hash_does(data: dict[str, Any], first: Any, second: Any) -> None:
    database = _database(data)
    changes, hashes = [], []
    for edits in (first, second):
        mine, theirs = database.copy(), copy.deepcopy(data)
        _change(mine, copy.deepcopy(edits))
        _change(theirs, copy.deepcopy(edits))
        changes.append(database.changes(mine))
        hashes.append(consistent_hash(to_hashable(theirs)))
        assert database.hash(mine) == hashes[-1]
        assert mine == theirs and json.dumps(mine) == json.dumps(theirs)
    assert (changes[0] == changes[1]) == (hashes[0] == hashes[1])


@pytest.mark.parametrize(
    "edit",
    [
        lambda record: (record.pop("n"), record.update(new=None)),
        lambda record: record.update(n=1.0),
        lambda record: record.update(n=True),
        lambda record: record.update(many=(1, 2)),
        lambda record: record["many"].append(3),
        lambda record: (record["many"].append(3), record["many"].pop()),
        lambda record: record.update(n=record.pop("n")),
        lambda record: record.clear(),
    ],
)
def test_a_record_is_changed_exactly_where_its_hash_is(edit: Callable[[Any], object]) -> None:
    data: dict[str, Any] = {"rows": {"k": {"n": 1, "many": [1, 2]}}}
    database, theirs = _database(data), copy.deepcopy(data)
    mine = database.copy()
    edit(mine["rows"]["k"])
    edit(theirs["rows"]["k"])
    changed = consistent_hash(to_hashable(theirs)) != consistent_hash(to_hashable(data))
    changes = database.changes(mine)
    assert bool(changes) == changed and database.hash(mine) == consistent_hash(to_hashable(theirs))


READS = [
    lambda table: table["k"]["n"],
    lambda table: [record["n"] for record in table.values()],
    lambda table: {key: record["n"] for key, record in table.items()},
    lambda table: table.get("k", {}).get("n"),
    lambda table: table.get("zz", 3),
    lambda table: dict(table)["k"]["n"],
    lambda table: {name: dict.__getitem__(value, "n") for name, value in ({} | table).items()},
    lambda table: (table | {"x": 1})["k"]["n"],
    lambda table: copy.deepcopy(table)["k"]["n"],
    lambda table: table.copy()["k"]["n"],
    lambda table: table.pop("k")["n"],
    lambda table: table.popitem()[1]["n"],
    lambda table: table.setdefault("k", {})["n"],
    lambda table: json.dumps(table, sort_keys=True),
    lambda table: repr(table),
    lambda table: table == {"k": {"n": 1}, "l": {"n": 2}},
    lambda table: table != {"k": {"n": 1}, "l": {"n": 2}},
]


@pytest.mark.parametrize("read", READS)
def test_every_way_of_reading_gives_the_records_and_their_fields(read: Any) -> None:
    """Of a table, and of a record whose fields are such records."""
    rows = {"k": {"n": 1}, "l": {"n": 2}}
    assert read(_database({"rows": rows}).copy()["rows"]) == read(copy.deepcopy(rows))
    assert read(_database({"rows": {"r": rows}}).copy()["rows"]["r"]) == read(copy.deepcopy(rows))


def test_a_record_and_its_fields_are_made_at_the_first_read() -> None:
    calls: list[Any] = []
    named = enumerate("klm")
    rows = {name: {"n": i, "named": {"first": name}, "many": [i]} for i, name in named}

    def hashable(value: Any) -> Any:
        calls.append(value)
        return to_hashable(value)

    database = Database({"rows": rows}, hashable, consistent_hash)
    mine: Any = database.copy()
    rows = mine["rows"]
    assert rows["l"]["n"] == 1 and rows.get("l") and "k" in rows and len(rows) == 3
    assert _unread(rows) == ["k", "m"]
    assert sum(record["n"] for record in rows.values()) == 3
    # a search made no field
    assert [_unread(record) for record in rows.values()] == [["named", "many"]] * 3
    assert rows["m"]["named"] == {"first": "m"} and _unread(rows["m"]) == ["many"]
    # what was only read is not compared by its text
    assert not database.changes(mine) and not calls
    assert _unread(rows["m"]) == ["many"]  # nor made to be compared
    rows["l"]["named"]["first"] = "other"
    assert list(database.changes(mine)) == [("rows", "l")]


def _unread(table: Table) -> list[str]:
    return [key for key, value in table.raw() if type(value) in (bytes, Stored)]


def test_copies_share_no_record_and_keep_what_was_read() -> None:
    mine: Any = _database({"rows": {"k": {"n": [1], "m": {"x": [2]}}, "l": {"n": [3]}}}).copy()
    mine["rows"]["k"]["n"].append(4)
    copied = copy.deepcopy(mine["rows"])
    assert copied == mine["rows"] == {"k": {"n": [1, 4], "m": {"x": [2]}}, "l": {"n": [3]}}
    assert {type(copied["k"]), type(copied["l"]), type(copied["k"]["m"])} == {dict}
    copied["k"]["n"].append(5)
    assert mine["rows"]["k"]["n"] == [1, 4]
    database = _database({"rows": {"k": {"n": 1}}})
    mine, other = database.copy(), database.copy()
    rows = mine["rows"]
    record = rows["k"]
    record["n"] = 2
    assert rows["k"] is rows.get("k") is next(iter(rows.values())) is record
    assert other["rows"]["k"] == {"n": 1} and database.copy()["rows"]["k"] == {"n": 1}


def _bench(task: Any, tools: dict[str, Any], data: dict[str, Any]) -> Bench:
    hashes = (to_hashable, consistent_hash)
    domain = TauBenchDomain("d", "test", [task], {}, tools, [], frozenset(), "", "", *hashes)
    return Bench(domain, _database(data))


def test_a_tool_that_changes_its_arguments_changes_no_task() -> None:
    def keep(data: dict[str, Any], things: list[str]) -> str:
        things.append("changed")
        data["rows"]["k"]["things"] = things
        return "kept"

    action = SimpleNamespace(name="keep", kwargs={"things": ["a"]}, model_dump=dict)
    task = SimpleNamespace(actions=[action], outputs=[])
    data: dict[str, Any] = {"rows": {"k": {}}}
    bench = _bench(task, {"keep": keep}, data)
    assert bench.compute_expected(0) == bench.compute_expected(0)
    assert action.kwargs == {"things": ["a"]}


async def test_the_expected_outcome_is_computed_once_in_its_own_thread() -> None:
    threads: list[threading.Thread] = []

    def look(data: dict[str, Any]) -> str:
        threads.append(threading.current_thread())
        return "seen"

    task = SimpleNamespace(actions=[SimpleNamespace(name="look", kwargs={})], outputs=[])
    bench = _bench(task, {"look": look}, {"rows": {"k": {}}})
    first, second = await asyncio.gather(bench.expected(0), bench.expected(0))
    assert first is second is await bench.expected(0)
    [thread] = threads
    assert thread is not threading.current_thread() and thread.daemon


# --- tau-bench's own users ------------------------------------------------------------------------


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A litellm that answers what `replies` holds."""
    state = SimpleNamespace(replies=[], finishes=[], threads=set(), gate=None, calls=[])

    @stands_for("litellm.main:completion", own="custom_llm_provider")  # as tau-bench calls it
    def completion(*, model: str, custom_llm_provider: str, messages: list[Any]) -> Any:
        state.threads.add(threading.get_ident())
        state.calls.append((model, custom_llm_provider, [dict(message) for message in messages]))
        if state.gate is not None:
            state.gate.wait(60)
        reply = state.replies.pop(0) if state.replies else "Something."
        if isinstance(reply, Exception):
            raise reply
        finish = state.finishes.pop(0) if state.finishes else "stop"
        message = SimpleNamespace(content=reply)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=finish)])

    stand_in(monkeypatch, {"litellm": {"completion": completion}})
    return state


def _users(**given: Any) -> TauBenchUsers:
    return TauBenchUsers("gpt", "openai", package=MINI.package, **given)


async def test_litellm_users_play_off_the_loop(litellm: SimpleNamespace) -> None:
    async with _users(concurrency=3) as users:
        user, *others = (users.make(seed) for seed in range(3))
        litellm.gate = threading.Barrier(3)  # passes only where three wait at once
        lines = await asyncio.gather(*(each.reset("Order a cup.") for each in (user, *others)))
        litellm.gate = None
        assert lines == ["Something."] * 3
        litellm.replies += ["<think>###STOP###</think>Not yet.", "###STOP###"]
        assert await user.step("Which one?") == "Not yet."
        assert await user.step("Done.") == "###STOP###"
        assert threading.get_ident() not in litellm.threads
        model, provider, messages = litellm.calls[-1]
        assert (model, provider) == ("gpt", "openai")
        assert messages[-1] == {"role": "user", "content": "Done."}
        assert "Order a cup." in messages[0]["content"]
        assert user.metrics()["user_calls"] == 3.0 and user.metrics()["user_cost"] > 0
    with pytest.raises(UsageError, match="llm, verify"):
        _users(strategy="human")


@pytest.mark.parametrize("finish", UNFINISHED)
async def test_an_unfinished_reply_is_no_line(litellm: SimpleNamespace, finish: str | None) -> None:
    """A truncated one is not sampled again: the same request has the same token limit."""
    async with _users() as users:
        user = users.make()
        await user.reset("Order a cup.")
        litellm.finishes += [finish, "stop"]
        if finish == "length":
            with pytest.raises(UserSimulatorError, match="token limit truncated"):
                await user.step("Which one?")
            assert litellm.finishes == ["stop"]
            return
        assert await user.step("Which one?") == "Something."
        litellm.finishes += [finish] * 3
        with pytest.raises(UserSimulatorError, match=f"were unfinished .*{finish!r}"):
            await user.step("Which one?")


@pytest.mark.parametrize("reply", [RuntimeError("rate limit"), None, "", "<think>hm"])
async def test_a_failing_litellm_user_is_a_user_error(litellm: SimpleNamespace, reply: Any) -> None:
    async with _users() as users:
        user = users.make()
        await user.reset("x")
        litellm.replies.append(reply)
        with pytest.raises(UserSimulatorError, match=r"rate limit|without visible text"):
            await user.step("y")
        assert user.metrics()["user_errors"] == 1.0
