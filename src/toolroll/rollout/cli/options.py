"""Make a command's options from the fields of a pydantic model.

A field determines an option's name, type, choices (`Literal`) and default. The field's description
is the option's help. typer checks only the type of an option's value. The pydantic model checks
everything else, with the same errors for an option and for a line in a YAML file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from toolroll.rollout.runs.config import json_object


def option_parameters(
    fields: Mapping[str, FieldInfo],
    panels: Mapping[str, str],
    *,
    flags: Mapping[str, str] = {},
    defaults: bool = False,
) -> list[inspect.Parameter]:
    """Return one keyword parameter for each field that `panels` names, in this order.

    `panels` maps the title of each panel of `--help` to the names of its fields, separated by
    spaces.
    `flags` maps fields to their flags if the names differ.
    The help of an option names its default, and every parameter has the default None, which means
    "not given". If `defaults` is True, the parameters have the defaults of the fields instead, and
    typer shows them. Pass the values that the command received to `given_values`.
    """
    return [
        _parameter(name, flag_of(name, flags), fields[name], title, defaults=defaults)
        for title, names in panels.items()
        for name in names.split()
    ]


def given_values(
    model: type[BaseModel],
    values: Mapping[str, Any],
    *,
    flags: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Return the options in `values` that were given, by field name of `model`. JSON is decoded.

    Raise `UsageError` if an option that takes JSON is not a JSON object.
    """
    given = {}
    for name, field in model.model_fields.items():
        value = values.get(name)
        if value is None or value == []:
            continue
        if _kind(field) is dict:
            value = json_object(value, flag_of(name, flags))
        given[name] = value
    return given


def flag_of(name: str, flags: Mapping[str, str] = {}) -> str:
    """Return the flag of the field `name`. `flags` maps fields to their flags if the names
    differ.
    """
    return flags.get(name) or f"--{name.replace('_', '-')}"


def with_parameters(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Return `command` with `parameters` as its signature. `command` takes only keyword
    arguments.
    """

    def made(**values: Any) -> None:
        command(**values)

    made.__name__ = command.__name__
    made.__doc__ = command.__doc__
    made.__annotations__ = {found.name: found.annotation for found in parameters}
    made.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return made


def _parameter(
    name: str, flag: str, field: FieldInfo, panel: str, *, defaults: bool = False
) -> inspect.Parameter:
    """Return the parameter of an option."""
    choices = _choices(field.annotation)
    kind = _kind(field)
    if kind is bool and field.default is True:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    option = typer.Option(
        flag,
        help=field.description if defaults else _help(field),
        metavar=f"[{'|'.join(choices)}]" if choices else "JSON" if kind is dict else None,
        show_default=defaults,
        rich_help_panel=panel,
        autocompletion=(lambda: list(choices)) if choices else None,
    )
    default = field.default if defaults and kind is not dict else None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is PydanticUndefined else default,
        annotation=Annotated[(str if kind is dict else kind) | None, option],
    )


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required():
        return f"{text} Required."
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or default == {}:
        return text
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, float):
        default = f"{default:g}"
    return f"{text} Default: {default}."


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the values of a `Literal` or an optional `Literal`. Return () for any other type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return next((found for part in get_args(annotation) if (found := _choices(part))), ())
    return ()


def _kind(field: FieldInfo) -> Any:
    """Return the type of an option's value: str, int, float, bool, Path, list[str] or dict."""
    annotation = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return str
    if get_origin(annotation) is dict:
        return dict
    if annotation in (str, int, float, bool, Path) or get_origin(annotation) is list:
        return annotation
    raise TypeError(f"no option can be made of {field.annotation}")
