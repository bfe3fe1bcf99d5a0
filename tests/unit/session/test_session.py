"""`Session`: the single writer of ids, mask and logprobs, against a plain model of what it
should hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from support.results import trajectory as a_trajectory

from toolroll.rollout.errors import TokenError
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import CONTEXT, Session
from toolroll.rollout.session.trajectory_json import from_json, to_json
from toolroll.rollout.session.tree import Node
from toolroll.rollout.template import ChatTemplate
from toolroll.rollout.template.transcript import tokenize_conversation
from toolroll.rollout.types import Completion, Trajectory, WeightVersion
from toolroll.testing import load_embedded_tokenizer

pytestmark = pytest.mark.tokens

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


def said(ids: list[int], *, logprobs: bool = True, version: str = "v", **fields: Any) -> Completion:
    """A completion of `ids`, the logprob of each its own."""
    values = (
        np.array([-0.25 * (at + 1) for at in range(len(ids))], dtype=np.float32)
        if logprobs
        else None
    )
    spans = (WeightVersion(version, 0, len(ids)),) if ids else ()
    return Completion(
        np.array(ids, dtype=np.int32),
        values,
        fields.pop("finish_reason", "stop"),
        weight_versions=spans,
        **fields,
    )


def played(*steps: tuple[str, list[int]]) -> SessionPath:
    path = SessionPath(Session("s"))
    for kind, ids in steps:
        if kind == "observe":
            path.observe(ids)
        else:
            path.sample(said(ids), {"temperature": 1.0})
    return path


# --- one path -------------------------------------------------------------------------------------


@given(
    first=IDS.filter(bool),
    steps=st.lists(st.tuples(st.sampled_from(["observe", "sample"]), IDS), max_size=12),
)
def test_a_path_is_the_concatenation_of_its_steps(
    first: list[int], steps: list[tuple[str, list[int]]]
) -> None:
    path = SessionPath(Session("s"))
    whole: list[int] = []
    sampled: list[tuple[int, int]] = []
    for kind, ids in [("observe", first), *steps]:
        before = path.input_ids.tolist()
        if kind == "observe":
            path.observe(ids)
        else:
            node = path.sample(said(ids), {})
            assert (node.start, node.stop) == (len(whole), len(whole) + len(ids))
            sampled += [(len(whole), len(ids))] if ids else []
        whole += ids
        assert path.input_ids.tolist() == whole and len(path) == len(whole)
        assert path.input_ids.tolist()[: len(before)] == before  # I1
        assert orjson.loads(b"[" + path.input_ids_json + b"]") == whole
    [trajectory] = path.session.trajectories()
    stop = sampled[-1][0] + sampled[-1][1] if sampled else None
    mask, logprobs = (
        np.zeros(len(whole), dtype=np.int32),
        np.full(len(whole), np.nan, dtype=np.float32),
    )
    for start, length in sampled:
        mask[start : start + length] = 1
        logprobs[start : start + length] = said([0] * length).logprobs
    if stop is None:  # nothing was sampled: the prompt as it is, without the turns' ends
        assert not trajectory.loss_mask.any() and trajectory.turns == ()
        assert trajectory.prompt_length == len(trajectory)
        return
    assert trajectory.input_ids.tolist() == whole[:stop]
    assert np.array_equal(trajectory.loss_mask, mask[:stop])
    assert np.array_equal(trajectory.logprobs, logprobs[:stop], equal_nan=True)
    assert [(turn.start, turn.length) for turn in trajectory.turns] == sampled
    assert trajectory.prompt_length == sampled[0][0]
    assert trajectory.input_ids.dtype == np.int32 and trajectory.logprobs.dtype == np.float32


def test_the_weight_versions_are_moved_to_their_place() -> None:
    path = SessionPath(Session("s"))
    path.observe([1, 2, 3])
    spans = (WeightVersion("a", 0, 1), WeightVersion("b", 1, 2))
    path.sample(
        Completion(np.array([4, 5], dtype=np.int32), None, "stop", weight_versions=spans), {}
    )
    path.observe([6])
    path.sample(said([7], version="c"), {})
    [trajectory] = path.session.trajectories()
    assert trajectory.weight_versions == (
        WeightVersion("a", 3, 4),
        WeightVersion("b", 4, 5),
        WeightVersion("c", 6, 7),
    )


def test_a_turn_says_how_it_was_sampled() -> None:
    path = SessionPath(Session("s"))
    path.observe([1])
    params = {"temperature": 0.5}
    completion = said(
        [2], finish_reason="length", matched=None, prompt_tokens=1, cached_tokens=7, latency=0.5
    )
    path.sample(completion, params)
    params["temperature"] = 9.0
    [turn] = path.session.trajectories()[0].turns
    assert (turn.finish_reason, turn.prompt_tokens, turn.cached_tokens, turn.latency) == (
        "length",
        1,
        7,
        0.5,
    )
    assert turn.sampling_params == {"temperature": 0.5}, (
        "the recorded parameters are the session's own"
    )


def test_sampled_tokens_without_logprobs_are_trained_and_have_none() -> None:
    path = SessionPath(Session("s"))
    path.observe([1])
    path.sample(said([2, 3], logprobs=False), {})
    [trajectory] = path.session.trajectories()
    assert trajectory.loss_mask.tolist() == [0, 1, 1] and np.isnan(trajectory.logprobs).all()


def test_what_does_not_belong_together_is_refused() -> None:
    path = SessionPath(Session("s"))
    with pytest.raises(TokenError, match="observe its prompt first"):
        path.sample(said([1]), {})
    path.observe([1])
    wrong = Completion(np.array([1, 2], dtype=np.int32), np.zeros(3, dtype=np.float32), "stop")
    with pytest.raises(TokenError, match="2 sampled ids came with 3 logprobs"):
        path.sample(wrong, {})
    assert path.input_ids.tolist() == [1]


def test_the_ids_that_are_handed_out_never_change() -> None:
    path = played(("observe", [1, 2]))
    handed = path.input_ids
    for token in range(3, 2000):
        path.observe([token])
    with pytest.raises(ValueError, match="read-only"):
        handed[0] = 99
    path.fork([1, 7], "another way")
    assert handed.tolist() == [1, 2]
    assert path.input_ids.tolist() == [1, 7]


def test_the_json_is_kept_for_any_integer_type() -> None:
    path = SessionPath(Session("s"))
    path.observe(np.array([1, 2], dtype=np.int64))  # pyright: ignore[reportArgumentType]
    path.observe(np.array([3, 9, 4, 9], dtype=np.int32)[::2])
    assert path.input_ids_json == b"1,2,3,4"


# --- excluding ------------------------------------------------------------------------------------


def test_an_excluded_turn_stays_where_it_is_untrained_and_says_why() -> None:
    path = SessionPath(Session("s"))
    path.observe([1])
    bad = path.sample(said([2]), {})
    path.observe([3])
    path.sample(said([4]), {})
    path.session.exclude("invalid call", [bad])
    path.session.exclude("a later reason", [bad])
    [trajectory] = path.session.trajectories()
    assert trajectory.loss_mask.tolist() == [0, 0, 0, 1]
    assert not np.isnan(trajectory.logprobs[1])
    assert [turn.excluded for turn in trajectory.turns] == ["invalid call", None]
    assert trajectory.prompt_length == 1
    path.session.exclude("verification: delta")
    assert path.session.trajectories()[0].trained_tokens == 0


# --- forks ----------------------------------------------------------------------------------------


def test_a_fork_trains_only_what_it_adds() -> None:
    path = played(("observe", [1, 2]), ("sample", [3]), ("observe", [4]), ("sample", [5]))
    path.fork([1, 2, 3, 9, 9], "reasoning is stripped")
    path.sample(said([6]), {})
    first, second = path.session.trajectories()
    assert first.input_ids.tolist() == [1, 2, 3, 4, 5] and first.loss_mask.tolist() == [
        0,
        0,
        1,
        0,
        1,
    ]
    assert second.input_ids.tolist() == [1, 2, 3, 9, 9, 6] and second.loss_mask.tolist() == [
        0,
        0,
        0,
        0,
        0,
        1,
    ]
    assert [turn.excluded for turn in second.turns] == [CONTEXT, None]
    assert (first.fork_reason, second.fork_reason) == (None, "reasoning is stripped")
    assert second.prompt_length == 5
    assert second.logprobs[2] == first.logprobs[2], "the context keeps its logprobs"


def test_a_fork_on_which_nothing_was_sampled_is_no_trajectory() -> None:
    path = played(("observe", [1]), ("sample", [2]))
    path.fork([7], "rewritten")
    assert [trajectory.input_ids.tolist() for trajectory in path.session.trajectories()] == [[1, 2]]
    bare = SessionPath(Session("s"))
    bare.observe([1, 2])
    [only] = bare.session.trajectories()
    assert only.input_ids.tolist() == [1, 2] and only.prompt_length == 2 and only.turns == ()
    assert Session("s").trajectories() == ()


SMALL_OR_NONE = st.lists(st.integers(0, 3), max_size=3)
# --- routed experts -------------------------------------------------------------------------------


def test_experts_are_those_of_the_turn_that_sampled_and_not_of_a_later_prefill() -> None:
    """The prefix is evicted and prefilled again with expert 9. A turn without experts, or one that
    was aborted in the queue, does not put a later prefill in place of what is not known.
    """

    def by(expert: int, rows: int, ids: list[int]) -> Completion:
        return said(ids, routed_experts=np.full((rows, 1), expert, dtype=np.int32))

    path = SessionPath(Session("s"))
    path.observe([1, 2, 3, 4])
    path.sample(by(7, 6, [5, 6, 7]), {})
    path.sample(by(9, 6, []), {})
    path.observe([8, 9])
    path.sample(by(9, 10, [10, 11]), {})
    [trajectory] = path.session.trajectories()
    assert trajectory.routed_experts is not None
    assert trajectory.routed_experts.ravel().tolist() == [7] * 6 + [9] * 4
    path.sample(said([12]), {})
    path.sample(by(9, 12, [13]), {})
    [trajectory] = path.session.trajectories()
    assert trajectory.routed_experts is None


def rows(start: int, stop: int, expert: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The rows of the tokens [start, stop), all of them with `expert`."""
    return np.full((stop - start, 1), expert, dtype=np.uint8)


def test_branches_share_the_experts_of_their_common_nodes() -> None:
    """The branch that processed a token first has made its row. Another branch asks only for the
    rows after the common nodes, and its rows for earlier tokens are not taken.
    """
    path = SessionPath(Session("s"))
    path.observe([1, 2, 3])
    assert path.experts_end == 0
    path.sample(said([4, 5], routed_experts=rows(0, 4, 1)), {})
    assert path.experts_end == 4
    path.observe([6])
    path.sample(said([7], routed_experts=rows(4, 6, 2)), {})
    assert path.experts_end == 6
    for reply, rewritten in (([8], [1, 2, 3, 4, 5, 9]), ([8, 8], [1, 2, 3, 9])):
        path.fork(rewritten, "rewritten")
        assert path.experts_end == len(rewritten) - 2
        total = len(rewritten) + len(reply)
        path.sample(said(reply, routed_experts=rows(1, total - 1, 3)), {})
    path.fork([9, 9], "rewritten")
    assert path.experts_end == 0
    path.sample(said([8], routed_experts=rows(0, 2, 44).astype(np.uint16) * 300), {})
    found = [trajectory.routed_experts for trajectory in path.session.trajectories()]
    assert [part.ravel().tolist() for part in found if part is not None] == [
        [1, 1, 1, 1, 2, 2],
        [1, 1, 1, 1, 3, 3],
        [1, 1, 3, 3, 3],
        [44 * 300] * 2,
    ]


def test_answers_to_one_prompt_share_its_experts() -> None:
    session = Session("s")
    prompt = session.observe([1, 2, 3], after=None)
    for reply in (4, 5):
        session.sample(said([reply], routed_experts=rows(0, 3, reply)), {}, after=prompt)
    found = [trajectory.routed_experts for trajectory in session.trajectories()]
    assert [part.ravel().tolist() for part in found if part is not None] == [[4, 4, 4], [4, 4, 5]]


def test_experts_that_leave_a_gap_are_refused_and_nothing_is_written() -> None:
    path = SessionPath(Session("s"))
    path.observe([1, 2, 3])
    for gap in (rows(1, 4, 1), rows(0, 5, 1)):
        with pytest.raises(TokenError, match=r"expected those of the tokens from 0 to 4"):
            path.sample(said([4, 5], routed_experts=gap), {})
    assert path.session.nodes == 1
    path.sample(said([4, 5], routed_experts=rows(0, 4, 1)), {})
    [trajectory] = path.session.trajectories()
    assert trajectory.routed_experts is not None


# --- arrays ---------------------------------------------------------------------------------------


def _from_text() -> Trajectory:
    message = {"role": "assistant", "content": "A long answer. " * 99}
    template = ChatTemplate(load_embedded_tokenizer())
    return tokenize_conversation(template, [{"role": "user", "content": "Hi"}, message])


@pytest.mark.parametrize(
    "made",
    [
        lambda: played(("observe", [1]), ("sample", [2] * 408)).session.trajectories()[0],
        lambda: from_json(to_json(a_trajectory(500, ((4, 412),)))),
        _from_text,
    ],
)
def test_arithmetic_with_a_loss_mask_does_not_wrap(made: Callable[[], Trajectory]) -> None:
    mask = made().loss_mask
    ones = mask.tolist()
    assert sum(mask) == sum(ones) > 256 and mask.dtype == np.int32
    assert (mask * 300).tolist() == [300 * value for value in ones]
    assert (1 - mask).tolist() == [1 - value for value in ones]
    assert (-mask).tolist() == [-value for value in ones]


# --- a path beside a tree -------------------------------------------------------------------------


def test_the_current_path_stays_what_it_is_where_the_tree_grows_elsewhere() -> None:
    path = played(("observe", [1, 2]), ("sample", [3]))
    handed, before = path.input_ids, path.head
    assert before is not None
    aside = path.session.observe([70, 71], after=before)
    again = path.session.observe([70, 71], after=before)
    assert again == aside and hash(again) == hash(aside)
    assert path.session.observe([70, 72], after=before) != aside
    path.session.sample(said([8]), {}, after=aside)
    assert path.input_ids.tolist() == [1, 2, 3] and path.head == before
    path.observe([4])
    path.sample(said([5]), {})
    assert path.input_ids.tolist() == [1, 2, 3, 4, 5] and handed.tolist() == [1, 2, 3]
    assert orjson.loads(b"[" + path.input_ids_json + b"]") == [1, 2, 3, 4, 5]
    assert path.session.path_ids(aside).tolist() == [1, 2, 3, 70, 71]
    assert [trajectory.input_ids.tolist() for trajectory in path.session.trajectories()] == [
        [1, 2, 3, 70, 71, 8],
        [1, 2, 3, 4, 5],
    ]
    assert (path.session.nodes, path.session.tokens) == (7, 10)


def test_a_node_tells_what_was_said_there() -> None:
    path = played(("observe", [1]))
    answer = said(
        [2, 3], rid="r", latency=0.5, attempts=2, cached_tokens=1, prompt_tokens=1, matched=3
    )
    node = path.sample(answer, {"temperature": 0.5})
    completion = node.completion
    assert (
        completion is not None and completion.logprobs is not None and answer.logprobs is not None
    )
    assert completion.output_ids.tolist() == node.ids.tolist() == [2, 3]
    assert completion.logprobs.tolist() == answer.logprobs.tolist()
    fields = (
        "finish_reason",
        "matched",
        "weight_versions",
        "prompt_tokens",
        "cached_tokens",
        "latency",
        "attempts",
        "rid",
    )
    assert [getattr(completion, name) for name in fields] == [
        getattr(answer, name) for name in fields
    ]
    assert (node.children, node.excluded) == (0, None)
    parent = node.parent
    assert parent is not None and parent.parent is None and parent.children == 1
    assert parent.completion is None
    assert node.path() == [parent, node] and path.head == node


# --- what is refused ------------------------------------------------------------------------------

NO_IDS = [
    5,
    [[5]],
    np.array([[5, 6]]),
    [5, None],
    [5, 2**31],
    [5, 2**64],
    [-(2**31) - 1],
    ["5"],
    [5.5],
    np.array([5.0]),
    [[5], [5, 6]],
    [True],
]


@pytest.mark.parametrize("bad", NO_IDS, ids=repr)
@pytest.mark.parametrize("how", ["observe", "sample", "fork"])
def test_what_is_no_list_of_ids_leaves_nothing_behind(how: str, bad: Any) -> None:
    path = played(("observe", [1]), ("sample", [2]))
    head = path.head
    assert head is not None
    writes: dict[str, Any] = {
        "observe": lambda: path.observe(bad),
        "sample": lambda: path.sample(Completion(bad, None, "stop"), {}),
        "fork": lambda: path.fork(bad, "rewritten"),
    }
    with pytest.raises(TokenError, match="token ids must"):
        writes[how]()
    assert (path.head, head.children, path.session.nodes, path.session.tokens) == (head, 0, 2, 2)
    assert path.input_ids.tolist() == [1, 2] and path.input_ids_json == b"1,2"
    [trajectory] = path.session.trajectories()
    assert trajectory.input_ids.tolist() == [1, 2] and trajectory.loss_mask.tolist() == [0, 1]


def test_logprobs_of_another_shape_are_refused() -> None:
    path = played(("observe", [1]))
    with pytest.raises(
        TokenError, match=r"1 sampled ids came with 1 logprobs of the shape \(1, 2\)"
    ):
        path.sample(
            Completion(np.array([2], dtype=np.int32), np.zeros((1, 2), dtype=np.float32), "stop"),
            {},
        )
    assert path.session.nodes == 1


def test_nodes_of_another_session_are_refused() -> None:
    path, other = (
        played(("observe", [1]), ("sample", [2])),
        played(("observe", [7]), ("sample", [8])),
    )
    node = other.head
    assert node is not None
    for use in (
        lambda: path.session.observe([3], after=node),
        lambda: path.session.sample(said([3]), {}, after=node),
        lambda: path.session.path_ids(node),
        lambda: path.session.shared_prefix(np.array([7, 8]), node),
        lambda: path.session.exclude("why", [node]),
    ):
        with pytest.raises(TokenError, match="another session, not to 's'"):
            use()
    assert path.session.nodes == 2 and path.session.trajectories()[0].trained_tokens == 1


# --- several paths and writers of one session -----------------------------------------------------


Step = tuple[int, str, tuple[int, ...]]
"""A number, who wrote it (`observe` or `sample`), its ids."""


class SharedSession(RuleBasedStateMachine):
    """One session, written by two paths that fork and by whoever writes at any node, against lists
    of steps.
    """

    nodes = Bundle("nodes")

    def __init__(self) -> None:
        super().__init__()
        self.session = Session("s")
        self.paths = [SessionPath(self.session), SessionPath(self.session)]
        self.routes: list[tuple[Step, ...]] = [(), ()]
        self.known: dict[Node | None, tuple[Step, ...]] = {None: ()}

    def observed(self, before: tuple[Step, ...], node: Node, ids: list[int]) -> tuple[Step, ...]:
        """Return the steps to `node`: the same node if the same ids were observed there before."""
        route = self.known.setdefault(node, (*before, (len(self.known), "observe", tuple(ids))))
        assert route[:-1] == before and route[-1][1:] == ("observe", tuple(ids))
        return route

    def sampled(self, before: tuple[Step, ...], node: Node, ids: list[int]) -> tuple[Step, ...]:
        """Return the steps to `node`, which no earlier answer is."""
        assert node not in self.known
        self.known[node] = (*before, (len(self.known), "sample", tuple(ids)))
        return self.known[node]

    @rule(target=nodes, at=st.integers(0, 1), ids=SMALL_OR_NONE)
    def observe_on_a_path(self, at: int, ids: list[int]) -> Node:
        node = self.paths[at].observe(ids)
        self.routes[at] = self.observed(self.routes[at], node, ids)
        return node

    @rule(target=nodes, at=st.integers(0, 1), ids=SMALL_OR_NONE)
    def sample_on_a_path(self, at: int, ids: list[int]) -> Any:
        path = self.paths[at]
        if path.head is None:
            with pytest.raises(TokenError, match="observe its prompt first"):
                path.sample(said(ids), {})
            return multiple()
        node = path.sample(said(ids), {})
        self.routes[at] = self.sampled(self.routes[at], node, ids)
        return node

    @rule(target=nodes, at=st.integers(0, 1), to=st.one_of(st.none(), nodes), rest=SMALL_OR_NONE)
    def fork(self, at: int, to: Node | None, rest: list[int]) -> Node:
        prompt = [*ids_of(self.known[to]), *rest]
        shared: tuple[Step, ...] = ()
        for step in self.routes[at]:
            if prompt[: len(ids_of((*shared, step)))] != ids_of((*shared, step)):
                break
            shared = (*shared, step)
        node = self.paths[at].fork(prompt, "rewritten")
        self.routes[at] = self.observed(shared, node, prompt[len(ids_of(shared)) :])
        return node

    @rule(target=nodes, after=st.one_of(st.none(), nodes), ids=SMALL_OR_NONE)
    def observe_anywhere(self, after: Node | None, ids: list[int]) -> Node:
        node = self.session.observe(ids, after=after)
        self.observed(self.known[after], node, ids)
        return node

    @rule(target=nodes, after=nodes, ids=SMALL_OR_NONE)
    def sample_anywhere(self, after: Node, ids: list[int]) -> Node:
        node = self.session.sample(said(ids), {}, after=after)
        self.sampled(self.known[after], node, ids)
        return node

    @invariant()
    def the_paths_agree(self) -> None:
        for path, route in zip(self.paths, self.routes, strict=True):
            ids = ids_of(route)
            assert path.input_ids.tolist() == ids and len(path) == len(ids)
            assert orjson.loads(b"[" + path.input_ids_json + b"]") == ids
            assert self.session.path_ids(path.head).tolist() == ids
            assert self.known[path.head] == route

    @invariant()
    def every_sampled_token_is_trained_once(self) -> None:
        trajectories = list(self.session.trajectories())
        routes = [route for route in self.known.values() if route]
        answers = {step[0]: step[2] for *_, step in routes if step[1] == "sample" and step[2]}
        by_ids = [route for route in routes if route[-1][0] in answers]
        trained = [
            (
                tuple(each.input_ids[: turn.start].tolist()),
                tuple(each.input_ids[turn.start : turn.stop].tolist()),
            )
            for each in trajectories
            for turn in each.turns
            if turn.excluded is None
        ]
        expected = [(tuple(ids_of(route[:-1])), route[-1][2]) for route in by_ids]
        assert sorted(trained) == sorted(expected)
        for each in trajectories:
            spans = [(turn.start, turn.stop) for turn in each.turns if turn.excluded is None]
            mask = np.zeros(len(each), dtype=np.int32)
            for start, stop in spans:
                mask[start:stop] = 1
            assert each.loss_mask.tolist() == mask.tolist()
            assert not np.isnan(each.logprobs[mask == 1]).any()


def ids_of(route: tuple[Step, ...]) -> list[int]:
    return [index for _, _, ids in route for index in ids]


TestSharedSession = SharedSession.TestCase
TestSharedSession.settings = settings(stateful_step_count=20)
