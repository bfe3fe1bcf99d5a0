"""`Session`, the single writer of ids, mask and logprobs, against a plain model."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from toolroll.rollout.errors import TokenError
from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import CONTEXT, Session
from toolroll.rollout.session.tree import Node
from toolroll.rollout.types import Completion, Trajectory, WeightVersion

pytestmark = pytest.mark.tokens


def sampled(ids: list[int], **fields: Any) -> Completion:
    """A completion of `ids`: each id has another logprob, and the first one other weights."""
    logprobs = np.array([-0.25 * (n + 1) for n in range(len(ids))], dtype=np.float32)
    versions = (WeightVersion("a", 0, 1), WeightVersion("b", 1, len(ids)))[: len(ids)]
    output_ids = np.array(ids, dtype=np.int32)
    return Completion(output_ids, logprobs, "stop", weight_versions=versions, **fields)


def path_of(*steps: tuple[str, list[int]]) -> SessionPath:
    path = SessionPath(Session("s"))
    for kind, ids in steps:
        if kind == "observe":
            path.observe(ids)
        else:
            path.sample(sampled(ids), {"temperature": 1.0})
    return path


# --- several paths and writers of one session, against a model ------------------------------------

IDS = st.one_of(
    st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 2**31 - 1), max_size=6)
)


@dataclass
class Step:
    """A node: its ids, who wrote them, and why it is not trained, or the reason of a fork."""

    before: tuple[int, ...]
    ids: list[int]
    sampled: bool = False
    excluded: str | None = None
    fork_reason: str | None = None


@dataclass
class Tree:
    """The model of a session: each node has a number, and knows the numbers before it."""

    steps: list[Step] = field(default_factory=list)

    def ids(self, route: tuple[int, ...]) -> list[int]:
        return [index for number in route for index in self.steps[number].ids]

    def routes(self) -> list[tuple[int, ...]]:
        """Return the numbers of the nodes of each trajectory."""
        inner = {number for step in self.steps for number in step.before}
        leaves = [number for number in range(len(self.steps)) if number not in inner]
        ends = [(*self.steps[leaf].before, leaf) for leaf in leaves]
        routes = [route for route in map(self._trimmed, ends) if route]
        whole = [
            route
            for place, route in enumerate(routes)
            if route not in routes[place + 1 :]
            and not any(other != route and other[: len(route)] == route for other in routes)
        ]
        return whole or ends[:1]

    def _trimmed(self, route: tuple[int, ...]) -> tuple[int, ...]:
        while route and not (self.steps[route[-1]].sampled and self.steps[route[-1]].ids):
            route = route[:-1]
        return route

    def trajectories(self) -> list[dict[str, Any]]:
        """Return what each trajectory is expected to hold."""
        trained: set[int] = set()
        expected = []
        for route in self.routes():
            whole: dict[str, Any] = {"ids": [], "mask": [], "logprobs": [], "turns": []}
            for number in route:
                step, start = self.steps[number], len(whole["ids"])
                turn = step.sampled and bool(step.ids)
                excluded = CONTEXT if number in trained else step.excluded
                whole["ids"] += step.ids
                whole["mask"] += [int(turn and excluded is None)] * len(step.ids)
                logprobs = sampled(step.ids).logprobs if turn else np.full(len(step.ids), np.nan)
                whole["logprobs"] += list(logprobs)  # type: ignore[arg-type]
                if turn:
                    trained.add(number)
                    versions = tuple(
                        replace(each, start=each.start + start, stop=each.stop + start)
                        for each in sampled(step.ids).weight_versions
                    )
                    whole["turns"].append((start, start + len(step.ids), excluded, versions))
            own = [start for start, _, excluded, _ in whole["turns"] if excluded != CONTEXT]
            starts = [*own, *(start for start, *_ in whole["turns"]), len(whole["ids"])]
            reasons = [self.steps[number].fork_reason for number in route[::-1]]
            whole |= {"prompt": starts[0], "reason": next(filter(None, reasons), None)}
            expected.append(whole)
        return expected


def content_of(trajectory: Trajectory) -> dict[str, Any]:
    assert trajectory.input_ids.dtype == trajectory.loss_mask.dtype == np.int32  # no mask wraps
    assert trajectory.logprobs.dtype == np.float32
    return {
        "ids": trajectory.input_ids.tolist(),
        "mask": trajectory.loss_mask.tolist(),
        "logprobs": list(trajectory.logprobs),
        "turns": [
            (turn.start, turn.stop, turn.excluded, turn.weight_versions)
            for turn in trajectory.turns
        ],
        "prompt": trajectory.prompt_length,
        "reason": trajectory.fork_reason,
    }


class SharedSession(RuleBasedStateMachine):
    """One session, written by two paths that fork and by whoever writes at any node."""

    nodes = Bundle("nodes")

    def __init__(self) -> None:
        super().__init__()
        self.session, self.tree = Session("s"), Tree()
        self.paths = [SessionPath(self.session), SessionPath(self.session)]
        self.routes: list[tuple[int, ...]] = [(), ()]
        self.known: dict[Node | None, tuple[int, ...]] = {None: ()}
        self.handed: list[tuple[Any, list[int]]] = []

    def added(self, node: Node, step: Step) -> tuple[int, ...]:
        """Return the route to `node`: that of an earlier node if the same ids were observed there
        before."""
        for number, earlier in enumerate(self.tree.steps):
            same = (earlier.before, earlier.ids) == (step.before, step.ids)
            if same and not earlier.sampled and not step.sampled:
                assert self.known[node] == (*step.before, number)
                return self.known[node]
        assert node not in self.known
        self.tree.steps.append(step)
        self.known[node] = (*step.before, len(self.tree.steps) - 1)
        start = len(self.tree.ids(step.before))
        assert (node.start, node.stop) == (start, start + len(step.ids))
        return self.known[node]

    @rule(target=nodes, which=st.integers(0, 1), ids=IDS)
    def observe_on_a_path(self, which: int, ids: list[int]) -> Node:
        node = self.paths[which].observe(ids)
        self.routes[which] = self.added(node, Step(self.routes[which], ids))
        return node

    @rule(target=nodes, which=st.integers(0, 1), ids=IDS)
    def sample_on_a_path(self, which: int, ids: list[int]) -> Any:
        path = self.paths[which]
        if path.head is None:
            with pytest.raises(TokenError, match="observe its prompt first"):
                path.sample(sampled(ids), {})
            return multiple()
        node = path.sample(sampled(ids), {})
        self.routes[which] = self.added(node, Step(self.routes[which], ids, sampled=True))
        return node

    @rule(target=nodes, which=st.integers(0, 1), to=st.one_of(st.none(), nodes), rest=IDS)
    def fork(self, which: int, to: Node | None, rest: list[int]) -> Node:
        prompt, route = [*self.tree.ids(self.known[to]), *rest], self.routes[which]
        shared = max(
            n for n in range(len(route) + 1) if self._starts_with(prompt, self.tree.ids(route[:n]))
        )
        node = self.paths[which].fork(prompt, "rewritten")
        new = prompt[len(self.tree.ids(route[:shared])) :]
        step = Step(route[:shared], new, fork_reason="rewritten")
        self.routes[which] = self.added(node, step)
        return node

    def _starts_with(self, prompt: list[int], ids: list[int]) -> bool:
        return prompt[: len(ids)] == ids

    @rule(target=nodes, after=st.one_of(st.none(), nodes), ids=IDS)
    def observe_anywhere(self, after: Node | None, ids: list[int]) -> Node:
        node = self.session.observe(ids, after=after)
        self.added(node, Step(self.known[after], ids))
        return node

    @rule(target=nodes, after=nodes, ids=IDS)
    def sample_anywhere(self, after: Node, ids: list[int]) -> Node:
        node = self.session.sample(sampled(ids), {}, after=after)
        self.added(node, Step(self.known[after], ids, sampled=True))
        return node

    @rule(some=st.lists(nodes, max_size=2), everything=st.booleans())
    def exclude(self, some: list[Node], *, everything: bool) -> None:
        """A later reason does not replace an earlier one."""
        reason = f"reason {len(self.tree.steps)}"
        self.session.exclude(reason, None if everything else some)
        numbers = {self.known[node][-1] for node in some}
        for number, step in enumerate(self.tree.steps):
            if step.sampled and (everything or number in numbers):
                step.excluded = step.excluded or reason

    @invariant()
    def the_paths_agree(self) -> None:
        for path, route in zip(self.paths, self.routes, strict=True):
            ids = self.tree.ids(route)
            assert path.input_ids.tolist() == ids and len(path) == len(ids)
            assert orjson.loads(b"[" + path.input_ids_json + b"]") == ids
            assert self.session.path_ids(path.head).tolist() == ids
            assert self.known[path.head] == route
            self.handed.append((path.input_ids, ids))
        assert [handed.tolist() for handed, _ in self.handed] == [ids for _, ids in self.handed]
        tokens = sum(len(step.ids) for step in self.tree.steps)
        assert (self.session.nodes, self.session.tokens) == (len(self.tree.steps), tokens)

    @invariant()
    def the_trajectories_agree(self) -> None:
        contents = [content_of(trajectory) for trajectory in self.session.trajectories()]
        np.testing.assert_equal(contents, self.tree.trajectories())


TestSharedSession = SharedSession.TestCase
TestSharedSession.settings = settings(stateful_step_count=20)


# --- one path -------------------------------------------------------------------------------------


def test_sampled_tokens_without_logprobs_are_trained() -> None:
    path = path_of(("observe", [1]))
    path.sample(replace(sampled([2, 3]), logprobs=None), {})
    [trajectory] = path.session.trajectories()
    assert trajectory.loss_mask.tolist() == [0, 1, 1] and np.isnan(trajectory.logprobs).all()


def test_ids_of_any_integer_type_never_change_once_handed_out() -> None:
    """Also while the array that holds them grows."""
    path = SessionPath(Session("s"))
    path.observe(np.array([1, 2], dtype=np.int64))  # pyright: ignore[reportArgumentType]
    path.observe(np.array([3, 9, 4, 9], dtype=np.int32)[::2])
    handed = path.input_ids
    assert path.input_ids_json == b"1,2,3,4"
    for token in range(5, 2000):
        path.observe([token])
    with pytest.raises(ValueError, match="read-only"):
        handed[0] = 99
    assert handed.tolist() == [1, 2, 3, 4]


def test_a_node_and_its_turn_tell_what_was_sampled() -> None:
    path = path_of(("observe", [1]))
    answer = sampled([2, 3], rid="r", latency=0.5, attempts=2, cached_tokens=7, prompt_tokens=1)
    answer = replace(answer, matched=3, finish_reason="length")
    params = {"temperature": 0.5}
    node = path.sample(answer, params)
    params["temperature"] = 9.0
    [turn] = path.session.trajectories()[0].turns
    names = ("finish_reason", "prompt_tokens", "cached_tokens", "latency")
    assert [getattr(turn, name) for name in names] == [getattr(answer, name) for name in names]
    assert turn.sampling_params == {"temperature": 0.5}, "the session has a copy of its own"
    completion: Any = node.completion
    np.testing.assert_array_equal(completion.output_ids, answer.output_ids)
    np.testing.assert_array_equal(completion.logprobs, answer.logprobs)
    arrays: Any = {"output_ids": answer.output_ids, "logprobs": None}
    assert replace(completion, **arrays) == replace(answer, **arrays)
    assert node.ids.tolist() == [2, 3] and (node.children, node.excluded) == (0, None)
    parent = node.parent
    assert parent is not None and parent.parent is None and parent.children == 1
    assert parent.completion is None
    assert node.path() == [parent, node] and path.head == node
    assert hash(node) == hash(path.session.node(node.index))


# --- routed experts -------------------------------------------------------------------------------


def rows(start: int, stop: int, expert: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The rows of the tokens [start, stop), all of them with `expert`."""
    return np.full((stop - start, 1), expert, dtype=np.uint8)


def experts(session: Session) -> list[list[int] | None]:
    routed = [trajectory.routed_experts for trajectory in session.trajectories()]
    return [part if part is None else part.ravel().tolist() for part in routed]


def test_experts_are_those_of_the_turn_that_sampled() -> None:
    """The prefix is evicted and prefilled again with expert 9. A turn without experts, or one that
    was aborted in the queue, does not put a later prefill in place of what is not known."""
    path = path_of(("observe", [1, 2, 3, 4]))
    path.sample(sampled([5, 6, 7], routed_experts=rows(0, 6, 7)), {})
    path.sample(sampled([], routed_experts=rows(0, 6, 9)), {})
    path.observe([8, 9])
    path.sample(sampled([10, 11], routed_experts=rows(0, 10, 9)), {})
    assert experts(path.session) == [[7] * 6 + [9] * 4]
    path.sample(sampled([12]), {})
    path.sample(sampled([13], routed_experts=rows(0, 12, 9)), {})
    assert experts(path.session) == [None]


def test_branches_share_the_experts_of_their_common_nodes() -> None:
    """The branch that processed a token first has made its row. Another branch asks only for the
    rows after the common nodes, and its rows for earlier tokens are not taken."""
    path = path_of(("observe", [1, 2, 3]))
    assert path.experts_end == 0
    path.sample(sampled([4, 5], routed_experts=rows(0, 4, 1)), {})
    assert path.experts_end == 4
    path.observe([6])
    path.sample(sampled([7], routed_experts=rows(4, 6, 2)), {})
    assert path.experts_end == 6
    for reply, rewritten in (([8], [1, 2, 3, 4, 5, 9]), ([8, 8], [1, 2, 3, 9])):
        path.fork(rewritten, "rewritten")
        assert path.experts_end == len(rewritten) - 2
        total = len(rewritten) + len(reply)
        path.sample(sampled(reply, routed_experts=rows(1, total - 1, 3)), {})
    path.fork([9, 9], "rewritten")
    assert path.experts_end == 0
    path.sample(sampled([8], routed_experts=rows(0, 2, 44).astype(np.uint16) * 300), {})
    branches = [[1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 3, 3], [1, 1, 3, 3, 3], [44 * 300] * 2]
    assert experts(path.session) == branches


def test_answers_to_one_prompt_share_its_experts() -> None:
    session = Session("s")
    prompt = session.observe([1, 2, 3], after=None)
    for reply in (4, 5):
        session.sample(sampled([reply], routed_experts=rows(0, 3, reply)), {}, after=prompt)
    assert experts(session) == [[4, 4, 4], [4, 4, 5]]


def test_experts_that_leave_a_gap_are_refused() -> None:
    path = path_of(("observe", [1, 2, 3]))
    for gap in (rows(1, 4, 1), rows(0, 5, 1)):
        with pytest.raises(TokenError, match=r"expected those of the tokens from 0 to 4"):
            path.sample(sampled([4, 5], routed_experts=gap), {})
    assert path.session.nodes == 1
    path.sample(sampled([4, 5], routed_experts=rows(0, 4, 1)), {})
    assert experts(path.session) == [[1] * 4]


# --- what is refused ------------------------------------------------------------------------------

FLAT: list[Any] = [[5, None], [5, 2**31], [5, 2**64], [-(2**31) - 1], ["5"], [5.5], [True]]
NO_IDS = [5, [[5]], [[5], [5, 6]], np.array([[5, 6]]), np.array([5.0]), *FLAT]


@pytest.mark.parametrize("bad", NO_IDS, ids=repr)
@pytest.mark.parametrize("how", ["observe", "sample", "fork"])
def test_what_is_no_list_of_ids_leaves_nothing_behind(how: str, bad: Any) -> None:
    path = path_of(("observe", [1]), ("sample", [2]))
    head: Any = path.head
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


@pytest.mark.parametrize(
    ("shape", "words"),
    [(3, "1 sampled ids came with 3 logprobs"), ((1, 2), r"1 logprobs of the shape \(1, 2\)")],
)
def test_logprobs_of_another_shape_are_refused(shape: Any, words: str) -> None:
    path = path_of(("observe", [1]))
    with pytest.raises(TokenError, match=words):
        path.sample(replace(sampled([2]), logprobs=np.zeros(shape, dtype=np.float32)), {})
    assert path.session.nodes == 1


def test_nodes_of_another_session_are_refused() -> None:
    path, other = (path_of(("observe", [n]), ("sample", [n + 1])) for n in (1, 7))
    node: Any = other.head
    for use in (
        lambda: path.session.observe([3], after=node),
        lambda: path.session.sample(sampled([3]), {}, after=node),
        lambda: path.session.path_ids(node),
        lambda: path.session.shared_prefix(np.array([7, 8]), node),
        lambda: path.session.exclude("why", [node]),
    ):
        with pytest.raises(TokenError, match="another session, not to 's'"):
            use()
    assert path.session.nodes == 2 and path.session.trajectories()[0].trained_tokens == 1
