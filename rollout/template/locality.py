"""Whether a chat template looks at history one message at a time: read off its syntax tree, never guessed.

Such a template (Qwen2.5's, Qwen3-Instruct's, Llama 3's) renders each message from the message itself, its two neighbours, the
first message, and whether it is the first or the last. Jinja's loops carry no variable from one round to the next, so what such a
template appends cannot depend on anything further back. A template in which anything else is seen (a namespace, a counter, the
number of messages, a search through them) is not local: that says nothing against it, only that history must be kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import nodes

_MESSAGES = "messages"
_HARMLESS = frozenset(("first", "last", "previtem", "nextitem"))
_STATEFUL = (nodes.NSRef, nodes.ExprStmt, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Break, nodes.Block)
_KEEPERS = frozenset(("namespace", "cycler", "joiner"))
_MUTATING = frozenset("append extend insert pop remove clear update setdefault popitem sort reverse add discard".split())


def is_local(tree: nodes.Template) -> bool:
    """Whether the template with this syntax tree is local in the sense above."""
    if any(True for _ in tree.find_all(_STATEFUL)):
        return False
    return _Reader(_aliases(tree)).reads(tree)


def _aliases(tree: nodes.Template) -> frozenset[str]:
    """`messages`, and the names that are given to it or to it without its first one."""
    names = {_MESSAGES}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_messages(assign.node, names):
            names.add(assign.target.name)
    return frozenset(names)


def _is_messages(node: nodes.Node, names: frozenset[str] | set[str]) -> bool:
    """A name for the messages, or `messages[1:]`."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        cut = node.arg
        behind_first = isinstance(cut.start, nodes.Const) and cut.start.value == 1
        return behind_first and cut.stop is None and cut.step is None and _is_messages(node.node, names)
    return isinstance(node, nodes.Name) and node.name in names


@dataclass
class _Reader:
    """Walks the tree with what it is allowed to see. `over_messages`: whether `loop` is that of a loop over the messages."""

    names: frozenset[str]
    over_messages: bool = False

    def reads(self, node: nodes.Node) -> bool:
        """Whether all of `node` is allowed."""
        if isinstance(node, nodes.For):
            return self._loop(node)
        if isinstance(node, nodes.Assign) and _is_messages(node.node, self.names):
            return isinstance(node.target, nodes.Name)
        if isinstance(node, nodes.Getitem) and _is_messages(node.node, self.names):
            return self._item(node)
        if isinstance(node, nodes.Compare) and (self._is_emptiness(node) or self._is_first(node)):
            return True
        if isinstance(node, nodes.Getattr) and _is_name(node.node, "loop"):
            return not self.over_messages or node.attr in _HARMLESS
        if isinstance(node, nodes.Call) and _keeps(node.node):
            return False
        if isinstance(node, nodes.Name) and node.name in (*self.names, "loop"):
            return False
        return all(self.reads(child) for child in node.iter_child_nodes())

    def _loop(self, node: nodes.For) -> bool:
        """A loop over the messages, not inside another one, plain; or a loop over something else."""
        ours = _is_messages(node.iter, self.names)
        if ours and (self.over_messages or node.test is not None or node.recursive or not isinstance(node.target, nodes.Name)):
            return False
        if not ours and not self.reads(node.iter):
            return False
        before, self.over_messages = self.over_messages, ours
        inside = all(self.reads(child) for child in node.body)
        self.over_messages = before
        return inside and all(self.reads(child) for child in node.else_)

    def _item(self, node: nodes.Getitem) -> bool:
        """`messages[0]`, or the neighbour of the message in hand."""
        if isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == 0)
        near = isinstance(node.arg, nodes.Add | nodes.Sub) and isinstance(node.arg.right, nodes.Const) and node.arg.right.value == 1
        return near and self.over_messages and len(self.names) == 1 and _is_index(node.arg.left)  # type: ignore[attr-defined]

    def _is_emptiness(self, node: nodes.Compare) -> bool:
        """`messages | length != 0`."""
        counted = isinstance(node.expr, nodes.Filter) and node.expr.name in ("length", "count") and node.expr.node is not None
        if not counted or not _is_messages(node.expr.node, self.names):  # type: ignore[attr-defined]
            return False
        return all(isinstance(each.expr, nodes.Const) and each.expr.value == 0 for each in node.ops)

    def _is_first(self, node: nodes.Compare) -> bool:
        """`loop.index0 == 0`."""
        zero = len(node.ops) == 1 and isinstance(node.ops[0].expr, nodes.Const) and node.ops[0].expr.value == 0
        return self.over_messages and zero and node.ops[0].op in ("eq", "ne", "gt") and _is_index(node.expr)


def _is_index(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getattr) and node.attr == "index0" and _is_name(node.node, "loop")


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _keeps(node: nodes.Node) -> bool:
    """Whether a call of this makes or changes something that outlives a round of the loop."""
    if isinstance(node, nodes.Name):
        return node.name in _KEEPERS
    return isinstance(node, nodes.Getattr) and node.attr in _MUTATING
