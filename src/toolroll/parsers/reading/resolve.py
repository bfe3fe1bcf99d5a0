"""`Schema`: what a tool's JSON schema says about the type of a value, and about its parts.

References are followed, and so are `allOf`, `anyOf` and `oneOf`. Invariants: nothing is fetched, no
pattern is evaluated, no schema raises an error, and a question ends after `MOST_PARTS` parts of the
schema. If the schema does not answer the question, every type is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

# One check for each JSON type. A boolean is not a number. For an integer, both "integer" and
# "number" are true.
TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_SPELLED = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number",
    "double": "number", "bool": "boolean",
    "dict": "object", "map": "object", "list": "array", "tuple": "array",
}  # fmt: skip
MOST_PARTS = 2000
"""The maximum number of parts of a schema that one question looks at."""
_MOST_DEEP = 50

_Step = Callable[[Mapping[str, Any]], Any]
NOT_A_SCHEMA = (Unresolvable, ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""What `referencing` raises for an unknown reference, and for a schema that is not valid."""


class _TooMany(Exception):
    """The question looks at too many parts of the schema."""


class Allowed(NamedTuple):
    """What a schema allows. `kinds`: the JSON types, or None if every type is possible; "number"
    includes "integer". `strings`: the strings that `enum` and `const` allow, or None if they do not
    restrict strings.
    """

    kinds: frozenset[str] | None = None
    strings: frozenset[str] | None = None


@dataclass(frozen=True, eq=False)
class Schema:
    """A JSON schema: a document, or a part of one.

    `node` is the schema as JSON. In `allOf` and `anyOf`, it may also contain objects of this class.
    `resolver` looks up the references of `node`.
    """

    node: Any
    resolver: Any = None

    @classmethod
    def of(cls, document: Any, *, valid: bool) -> Schema:
        """Return the schema of a whole document. If it is not `valid`, or too large to be checked,
        only its references of the form `#/...` are followed.
        """
        resource = DRAFT202012.create_resource(document)
        if valid:
            try:
                uri = resource.id() or ""
                registry = Registry[Any]().with_resource(uri, resource).crawl()
                return cls(document, registry.resolver(uri))
            except NOT_A_SCHEMA:
                pass  # a "$id" is not a URI
        crawled: Registry[Any] = Registry({"": resource})  # type: ignore[call-arg]
        return cls(document, crawled.resolver())

    @cached_property
    def allowed(self) -> Allowed:
        """The types and strings that the schema allows."""
        try:
            return _Question().allowed(self, 0)
        except _TooMany:
            return Allowed()

    @cached_property
    def default(self) -> tuple[()] | tuple[Any]:
        """The default of a value, or () if there is none. A default in a branch of `anyOf` or
        `oneOf` is none, because the value may fit another branch.
        """
        try:
            return _Question().default(self, 0)
        except _TooMany:
            return ()

    def member(self, key: str) -> Schema | None:
        """Return the schema of the property `key`, or None if there is none.

        A property that `properties` does not name may have any schema of `patternProperties` or
        `additionalProperties`.
        """
        return _part(self, _property, key)

    def item(self, index: int) -> Schema | None:
        """Return the schema of the item at `index` of an array, or None if there is none."""
        return _part(self, _item, index)

    def within(self, node: Any) -> Schema:
        """Return the schema of `node`, which is a part of this schema."""
        if isinstance(node, Schema):
            return node
        if isinstance(node, Mapping) and "$id" in node:
            try:
                resource = DRAFT202012.create_resource(node)
                return Schema(node, self.resolver.in_subresource(resource))
            except NOT_A_SCHEMA:
                pass  # the "$id" is not a URI
        return Schema(node, self.resolver)

    def everything(self) -> Iterator[Schema]:
        """Yield the schemas that apply together with the keywords of this one."""
        for reference in self.references():
            try:
                target = self.target(reference)
            except NOT_A_SCHEMA:
                continue
            yield target
        yield from self.branches("allOf")

    def references(self) -> list[str]:
        """Return the references of this schema."""
        references = (self.node.get(word) for word in ("$ref", "$dynamicRef"))
        return [reference for reference in references if isinstance(reference, str)]

    def target(self, reference: str) -> Schema:
        """Return the schema that `reference` names. Raises one of `NOT_A_SCHEMA`."""
        target = self.resolver.lookup(reference)
        return Schema(None, target.resolver).within(target.contents)

    def branches(self, word: str) -> Iterator[Schema]:
        """Yield the schemas in the list of the keyword `word`."""
        listed = self.node.get(word)
        yield from map(self.within, listed if isinstance(listed, list) else ())


class _Question:
    """One question about a schema. It counts the parts that it looks at."""

    def __init__(self) -> None:
        self._parts = 0

    def _count(self, depth: int) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS or depth > _MOST_DEEP:
            raise _TooMany

    def allowed(self, schema: Schema, depth: int) -> Allowed:
        """Return what `schema` allows. Raises `_TooMany`."""
        self._count(depth)
        node = schema.node
        if not isinstance(node, Mapping):
            return Allowed(frozenset() if node is False else None)
        allowed = Allowed(_named(node.get("type")))
        if "enum" in node:
            values = node["enum"]
            allowed = _both(allowed, _listed(values if isinstance(values, list) else [values]))
        if "const" in node:
            allowed = _both(allowed, _listed([node["const"]]))
        for part in schema.everything():
            allowed = _both(allowed, self.allowed(part, depth + 1))
        for word in ("anyOf", "oneOf"):
            branches = [self.allowed(part, depth + 1) for part in schema.branches(word)]
            if branches:
                allowed = _both(allowed, _either(branches))
        return allowed

    def default(self, schema: Schema, depth: int) -> tuple[()] | tuple[Any]:
        """Return the default of `schema`, or of the first schema that applies together with it.
        Raises `_TooMany`.
        """
        self._count(depth)
        if not isinstance(schema.node, Mapping):
            return ()
        if "default" in schema.node:
            return (schema.node["default"],)
        defaults = (self.default(part, depth + 1) for part in schema.everything())
        return next(filter(None, defaults), ())

    def part(self, schema: Schema, step: _Step, depth: int) -> Schema | None:
        """Return the schema that `step` finds in `schema` and in what it refers to. Raises
        `_TooMany`.
        """
        self._count(depth)
        if not isinstance(schema.node, Mapping):
            return None
        child = step(schema.node)
        parts = [None if child is None else schema.within(child)]
        parts += [self.part(part, step, depth + 1) for part in schema.everything()]
        for word in ("anyOf", "oneOf"):
            branches = [self.part(part, step, depth + 1) for part in schema.branches(word)]
            parts.append(_combined("anyOf", branches))
        return _combined("allOf", parts)


@lru_cache(maxsize=1 << 14)  # bounded, because a model may write any number of keys
def _part(schema: Schema, find: Callable[[Any, Any], Any], key: str | int) -> Schema | None:
    try:
        return _Question().part(schema, lambda node: find(node, key), 0)
    except _TooMany:
        return None


def _combined(word: str, parts: Iterable[Schema | None]) -> Schema | None:
    schemas = [part for part in parts if part is not None]
    return Schema({word: schemas}) if len(schemas) > 1 else schemas[0] if schemas else None


def _property(node: Mapping[str, Any], key: str) -> Any:
    properties = node.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    patterns = node.get("patternProperties")
    choices = [*patterns.values()] if isinstance(patterns, Mapping) else []
    choices = [schema for schema in (*choices, node.get("additionalProperties")) if schema]
    return {"anyOf": choices} if choices and choices != [True] else None


def _item(node: Mapping[str, Any], index: int) -> Any:
    first = node.get("prefixItems")
    return first[index] if isinstance(first, list) and index < len(first) else node.get("items")


def kind_of(value: Any) -> str:
    """Return the most specific JSON type of `value`."""
    return next((name for name, fits in TYPES.items() if fits(value)), "")


def _named(kind: Any) -> frozenset[str] | None:
    """Return the types that the value of the keyword `type` names."""
    names = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    kinds = [
        _SPELLED.get(name.lower(), name.lower()) if isinstance(name, str) else "" for name in names
    ]
    if not kinds or not all(name in TYPES for name in kinds):
        return None
    return _with_integers(frozenset(kinds))


def _with_integers(kinds: frozenset[str]) -> frozenset[str]:
    """Return `kinds` and, if a number is among them, an integer: it is a number too."""
    return kinds | {"integer"} if "number" in kinds else kinds


def _listed(values: list[Any]) -> Allowed:
    return Allowed(
        _with_integers(frozenset(map(kind_of, values))),
        frozenset(value for value in values if isinstance(value, str)),
    )


def _both(first: Allowed, second: Allowed) -> Allowed:
    kinds = first.kinds if second.kinds is None else second.kinds
    strings = first.strings if second.strings is None else second.strings
    if first.kinds is not None and second.kinds is not None:
        kinds = first.kinds & second.kinds
    if first.strings is not None and second.strings is not None:
        strings = first.strings & second.strings
    return Allowed(kinds, strings)


def _either(branches: list[Allowed]) -> Allowed:
    kinds: set[str] = set()
    strings: set[str] = set()
    restricted = True
    for branch in branches:
        if branch.kinds is None:
            return Allowed()
        kinds |= branch.kinds
        if "string" in branch.kinds:
            strings |= branch.strings or set()
            restricted = restricted and branch.strings is not None
    return Allowed(frozenset(kinds), frozenset(strings) if restricted else None)
