"""Bare values under schemas with references and alternatives: what pydantic writes is read back."""

from __future__ import annotations

import enum
import json
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field, create_model
from support.calls import same
from support.formats import written
from support.parsing import in_pieces

from toolroll.parsers.reading.schema import Offered
from toolroll.parsers.registry import get_parser
from toolroll.parsers.types import CallStatus

NAMES = ("qwen3_coder", "glm45", "minimax-m2", "minimax-m3", "deepseekv4", "beam", "k2_horizon")


def read(name: str, schema: Any, value: str) -> Any:
    """The call of `f` with the parameter `k`, under the schema of all parameters."""
    offered = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = written(name, k=value).replace(' string="true"', "")  # of any type
    parser = get_parser(name)
    reply = parser.parse(text, tools=offered, in_reasoning=False)
    assert in_pieces(parser, text, tools=offered, in_reasoning=False)[0] == reply
    (call,) = reply.tool_calls
    return call


STRING = {"type": "string"}
NULL = {"type": "null"}
YEARS = {"type": "string", "enum": ["2024", "2025"]}


def k(schema: Any, **more: Any) -> Any:
    return {"properties": {"k": schema}, **more}


def under(definition: Any, reference: str = "#/$defs/T", **more: Any) -> Any:
    return k({"$ref": reference}, **{"$defs": {"T": definition}}, **more)


ARGUMENTS = {"type": "object", **k(STRING)}
OWN = {"$id": "urn:own", "$ref": "#/$defs/T", "$defs": {"T": STRING}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (under(STRING), "90210", "90210"),
        (under({"enum": ["true", "auto"]}), "true", "true"),
        (under({"type": ["string", "number"], "enum": [1.0, "a"]}), "1", 1),
        (under({"const": "1"}), "1", "1"),
        (under(STRING), '{"a": 1}', '{"a": 1}'),
        (k({"anyOf": [YEARS, NULL]}), "2025", "2025"),
        (k({"anyOf": [YEARS, NULL]}), "null", None),
        (k({"anyOf": [{"$ref": "#/x/Y"}, NULL]}, x={"Y": YEARS}), "2025", "2025"),
        (k({"allOf": [{"$ref": "#/x/Y"}]}, x={"Y": YEARS}), "2025", "2025"),
        ({"$ref": "#/$defs/Args", "$defs": {"Args": ARGUMENTS}}, "7", "7"),
        ({"allOf": [{"properties": {"j": {}}}, {"oneOf": [k(STRING), NULL]}]}, "7", "7"),
        ({"type": "object", "additionalProperties": STRING}, "7", "7"),
        ({"patternProperties": {"^k": STRING}, "additionalProperties": False}, "7", "7"),
        ({"additionalProperties": True}, "7", 7),
        (k(True, additionalProperties=STRING), "7", 7),
        # two steps, names with escapes, the older keyword, a name of its own, an anchor
        (under(STRING, "#/x/y", x={"y": {"$ref": "#/$defs/T"}}), "7", "7"),
        (k({"$ref": "#/x/a~1b~0c%20d"}, x={"a/b~c d": STRING}), "7", "7"),
        (k({"$ref": "#/definitions/T"}, definitions={"T": STRING}), "7", "7"),
        (under({"$id": "urn:text", **STRING}, "urn:text"), "7", "7"),
        (under({"$anchor": "text", **STRING}, "#text"), "7", "7"),
        (under({"properties": {"j": {"$ref": "#/$defs/T"}}, **OWN}, "urn:own"), "7", "7"),
        # loops and references to nowhere say nothing about the type
        (k({"$ref": "#/properties/k"}), "7", 7),
        (under({"anyOf": [{"$ref": "#/$defs/T"}, STRING]}), "7", 7),
        (k({"$ref": "http://127.0.0.1:9/x"}), "7", 7),
        (k({"$ref": "#/nowhere"}), "7", 7),
        (k({"$ref": "http://["}), "7", 7),
        (k({"$ref": "#/x/no_number"}, x=[STRING]), "7", 7),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_reference_gives_a_values_type(name: str, schema: Any, text: str, value: Any) -> None:
    call = read(name, schema, text)
    assert call.status is CallStatus.OK, call.error
    assert same(call.arguments, {"k": value})


def test_elements_of_elements_are_read_by_their_references() -> None:
    next_node = {"anyOf": [{"$ref": "#/$defs/Node"}, NULL]}
    node = {"type": "object", "properties": {"id": STRING, "next": next_node}}
    codes = {"type": "array", "items": {"$ref": "#/$defs/Node/properties/id"}}
    properties = {"k": {"$ref": "#/$defs/Node"}, "codes": codes}
    schema = {"properties": properties, "$defs": {"Node": node}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    arguments = {"k": {"id": "1", "next": {"id": "2"}}, "codes": ["007"]}
    text = written("minimax-m3", **arguments)
    (call,) = get_parser("minimax-m3").parse(text, tools=tools).tool_calls
    assert call.arguments == arguments


def test_a_schema_that_is_changed_in_place_is_read_again() -> None:
    schema = k({"type": "string"})
    assert read("glm45", schema, "7").arguments == {"k": "7"}
    schema["properties"]["k"]["type"] = "integer"
    assert read("glm45", schema, "7").arguments == {"k": 7}


def test_a_schema_without_an_end_has_an_answer() -> None:
    """Every part of a schema that doubles 60 times would be 10 ** 18 steps."""
    doubled = {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}
    for last in (STRING, k(STRING)):
        schema: Any = {"$ref": "#/$defs/0", "$defs": {**doubled, "60": last}}
        function = {"name": "f", "parameters": schema}
        parameters = Offered([{"type": "function", "function": function}]).parameters("f")
        assert parameters is not None
        assert parameters.schema.allowed.kinds is None
        assert parameters.schema.member("k") is None


class Color(enum.Enum):
    RED = "1"
    BLUE = "true"


class Level(enum.IntEnum):
    LOW = 1


class Mixed(enum.Enum):
    WORD = "a"
    NUMBER = 1


class Point(BaseModel):
    x: int
    y: int = 0


class Node(BaseModel):
    name: str
    child: Node | None = None


Zip = Annotated[str, Field(pattern=r"^\d+$", min_length=3)]
VALUES: list[tuple[Any, ...]] = [
    (str, "90210", "null"),
    (int, 3),
    (float, 1.5, 2.0),
    (bool, True),
    (Color, Color.RED),
    (Color | None, Color.BLUE, None),
    (Level, Level.LOW),
    (Mixed, Mixed.NUMBER, Mixed.WORD),
    (Literal["1", "2"], "1"),
    (Literal[1, "a"], 1),
    (str | None, "12", None),
    (int | None, 4, None),
    (int | str, "5"),
    (int | str | None, None),
    (Point | Color, Color.RED),
    (Point, Point(x=1)),
    (Node, Node(name="1", child=Node(name="2"))),
    (list[Point], [Point(x=1)]),
    (list[str], ["1", "true"]),
    (dict[str, str], {"a": "1"}),
    (tuple[int, str], (1, "2")),
    (datetime, datetime(2026, 1, 2, 3, 4, 5)),
    (Decimal, Decimal("1.10")),
    (Decimal | None, Decimal("0.1")),
    (Zip, "007"),
    (Optional[Zip], "007"),  # noqa: UP045 - pyright: `Zip` is no class
    (bytes, b"12"),
    (Any, 5),
]
FIELDS = [(field, value) for field, *values in VALUES for value in values]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "minimax-m3"])
@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda it: str(it)[:40])
def test_what_pydantic_describes_and_writes_is_read_back(name: str, field: Any, value: Any) -> None:
    model = create_model("Args", k=(field, ...))
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    whole = {"$ref": "#/$defs/Args", "$defs": {"Args": schema, **definitions}}
    written = model(k=value).model_dump(mode="json")["k"]
    bare = written if isinstance(written, str) else json.dumps(written)
    for parameters in ({**schema, "$defs": definitions}, whole):
        call = read(name, parameters, bare)
        assert call.status is CallStatus.OK, call.error
        assert model.model_validate(call.arguments) == model(k=value)
