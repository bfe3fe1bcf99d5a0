"""`Signature`: describes a function's parameters as a JSON schema, and checks arguments against
it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaError

from toolroll.rollout.errors import UsageError
from toolroll.rollout.runtime.complaints import did_you_mean

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SECTION = re.compile(r"^(Args|Arguments|Parameters):\s*$")
_ENTRY = re.compile(r"^\s+\**(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class Signature:
    """The named parameters of `function` (or of a class's constructor), except the ones in `skip`.

    Arguments are JSON values, and their types are checked strictly: "3" is not an integer. Raise
    `UsageError` if an annotation cannot be resolved, or if a parameter is positional-only.
    """

    def __init__(self, function: Callable[..., Any], *, skip: Collection[str] = ()) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._skip = frozenset(skip)
        self.open = False
        """True if the function has **kwargs, and so accepts any name."""
        parameters = [p for p in _parameters(function, self.name) if p.name not in skip]
        self.parameters: list[inspect.Parameter] = []
        for parameter in parameters:
            if parameter.kind in _NAMED:
                self.parameters.append(parameter)
            elif parameter.kind is parameter.VAR_KEYWORD:
                self.open = True
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                raise UsageError(
                    f"{self.name}: {parameter.name!r} must be a named parameter, not positional"
                )
        self.summary, notes = read_docstring(function)
        self._model = self._make_model(notes)

    @property
    def names(self) -> list[str]:
        """The parameters' names, in order."""
        return [parameter.name for parameter in self.parameters]

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments, with the descriptions from the docstring.

        Raise `UsageError` if a parameter's type has no JSON schema.
        """
        try:
            described = self._model.model_json_schema(schema_generator=_Untitled)
        except (PydanticUserError, SchemaError) as error:
            raise UsageError(f"{self.name}: a parameter has no JSON schema: {error}") from error
        described.pop("title", None)
        return {"type": "object", "properties": {}, **described}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return `arguments` as values of the annotated types, such as enums and pydantic models.

        Raise `UsageError` if an argument is unknown, missing, or of the wrong type.
        """
        unknown = [name for name in arguments if name not in self.names]
        refused = [name for name in unknown if not self.open or name in self._skip]
        if refused:
            there = f"; there are {', '.join(self.names) or 'none'}"
            hint = did_you_mean(refused[0], self.names, there)
            raise UsageError(f"there is no argument {refused[0]!r}{hint}")
        named = {name: value for name, value in arguments.items() if name not in unknown}
        try:
            model = self._model.model_validate_json(json.dumps(named))
        except ValidationError as error:
            raise UsageError("; ".join(_message(item) for item in error.errors())) from error
        except (TypeError, ValueError) as error:
            raise UsageError(f"the arguments are not JSON: {error}") from error
        checked = {
            name: getattr(model, _field(index))
            for index, name in enumerate(self.names)
            if name in arguments
        }
        return checked | {name: arguments[name] for name in unknown}

    def _make_model(self, notes: Mapping[str, str]) -> type[BaseModel]:
        fields: dict[str, Any] = {}
        for index, parameter in enumerate(self.parameters):
            kind = Any if parameter.annotation is parameter.empty else parameter.annotation
            required = parameter.default is parameter.empty
            fields[_field(index)] = (
                kind,
                Field(
                    ... if required else parameter.default,
                    alias=parameter.name,
                    description=notes.get(parameter.name),
                ),
            )
        extra: Literal["allow", "forbid"] = "allow" if self.open else "forbid"
        config = ConfigDict(strict=True, extra=extra, arbitrary_types_allowed=True)
        try:
            return create_model(self.name, __config__=config, **fields)
        except (PydanticUserError, SchemaError) as error:
            raise UsageError(f"{self.name}: {error}") from error


class _Untitled(GenerateJsonSchema):
    """Omits the titles, because they only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the text before the first section of a docstring, and the description of each
    parameter in its `Args:` section (Google style).
    """
    lines = (inspect.getdoc(function) or "").splitlines()
    heads = [number for number, line in enumerate(lines) if re.fullmatch(r"[A-Z]\w+:\s*", line)]
    summary = " ".join(" ".join(lines[: heads[0] if heads else len(lines)]).split())
    notes: dict[str, str] = {}
    inside, name, depth = False, "", 0
    for line in lines:
        if line and not line[0].isspace():
            inside = bool(_SECTION.match(line))
            name, depth = "", 0
        elif inside and line.strip():
            indent = len(line) - len(line.lstrip())
            depth = depth or indent
            entry = _ENTRY.match(line) if indent == depth else None
            if entry is not None:
                name = entry[1]
                notes[name] = entry[2].strip()
            elif name:
                notes[name] = f"{notes[name]} {line.strip()}".strip()
    return summary, notes


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function, eval_str=True).parameters.values())
    except NameError as error:
        raise UsageError(
            f"{name}: an annotation cannot be resolved: {error} (import it outside of "
            f"`if TYPE_CHECKING`)"
        ) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} has no signature that can be read: {error}") from error


def _field(index: int) -> str:
    """Return a field name, because a parameter's own name may clash with a model's attribute."""
    return f"argument_{index}"


def _message(error: Any) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"the argument {name!r} is missing"
    text = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if text == error["msg"]:
        return f"the argument {name!r}: {text}"
    received = json.dumps(error["input"], default=str, ensure_ascii=False)
    return f"the argument {name!r} must be {text}, not {received[:80]}"
