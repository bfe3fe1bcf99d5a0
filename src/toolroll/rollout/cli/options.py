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

from toolroll.rollout.runs.config import json_object


def option_parameters(
    model: type[BaseModel],
    *,
    skip: Sequence[str] = (),
    panels: Mapping[str, str],
    old_names: Mapping[str, str],
) -> list[inspect.Parameter]:
    """Return one keyword parameter for each field of `model` except those in `skip`.

    `panels` maps the title of each panel of `--help` to the names of its fields, separated by
    spaces.
    `old_names` maps old names to new ones. The old names are accepted too, but are not listed in
    the help. Every default is None, which means "not given". Pass the values that the command
    received to `given_values`.
    """
    fields = model.model_fields
    panel_of = {name: title for title, names in panels.items() for name in names.split()}
    annotations = {
        name: _annotation(name, field, panel_of[name])
        for name, field in fields.items()
        if name not in skip
    }
    for old, name in old_names.items():
        annotations[old] = _annotation(old, fields[name], hidden=True)
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]


def given_values(
    model: type[BaseModel],
    values: Mapping[str, Any],
    *,
    old_names: Mapping[str, str],
) -> dict[str, Any]:
    """Return the options in `values` that were given, by field name of `model`. JSON is decoded. A
    value under an old name is returned under its new name.

    Raise `UsageError` if an option that takes JSON is not a JSON object.
    """
    new = {name: old for old, name in old_names.items()}
    given = {}
    for name, field in model.model_fields.items():
        value = values.get(name)
        if value is None:
            value = values.get(new.get(name, name))
        if value is None or value == []:
            continue
        if _kind(field) is dict:
            value = json_object(value, _flag(name))
        given[name] = value
    return given


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


def _annotation(
    name: str, field: FieldInfo, panel: str | None = None, *, hidden: bool = False
) -> Any:
    choices = _choices(field.annotation)
    flags = [_flag(name)]
    kind = _kind(field)
    if kind is bool and field.default is True:
        flags = [f"{_flag(name)}/--no-{name.replace('_', '-')}"]
    metavar = f"[{'|'.join(choices)}]" if choices else "JSON" if kind is dict else None
    option = typer.Option(
        *flags,
        help=_help(field),
        metavar=metavar,
        show_default=False,
        hidden=hidden,
        rich_help_panel=panel,
        autocompletion=(lambda: list(choices)) if choices else None,
    )
    return Annotated[(str if kind is dict else kind) | None, option]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
