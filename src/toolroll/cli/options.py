"""Make a command's options from the fields of settings.

A field determines an option's name, type, choices (`Literal`) and default. The field's description
is the option's help. The settings check an option's value, with the same errors as for a line in a
YAML file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from toolroll.evaluation.run_config import RunConfig, json_object
from toolroll.rollout.settings import Settings


def option_parameters(
    fields: Mapping[str, FieldInfo], panels: Mapping[str, str]
) -> list[inspect.Parameter]:
    """Return one keyword parameter for each field that `panels` names, in this order.

    `panels` maps the title of each panel of `--help` to the names of its fields, separated by
    spaces. Every parameter has the default None, which means that the option was not used, and its
    help names the default. Pass the values that the command received to `used_options`.
    """
    return [
        _parameter(name, fields[name], title)
        for title, names in panels.items()
        for name in names.split()
    ]


def used_options(settings: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in `values` that were used and that `settings` have. JSON is decoded.

    Raise `UsageError` if an option that takes JSON is not a JSON object.
    """
    return {
        name: _value(_kind(field), values[name], flag_of(name))
        for name, field in settings.model_fields.items()
        if values.get(name) not in (None, [])
    }


def _value(kind: Any, value: Any, flag: str) -> Any:
    if kind is dict:
        return json_object(value, flag)
    if kind in (int, float):
        with suppress(ValueError):  # the settings quote a number as one, and refuse other texts
            return kind(value)
    return value


def help_of(name: str) -> str:
    """Return the help of the setting `name` of `toolroll run`, for other commands."""
    return RunConfig.model_fields[name].description or ""


def flag_of(name: str) -> str:
    """Return the flag of the setting `name`."""
    return f"--{name.replace('_', '-')}"


def with_parameters(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Return `command`, which takes only keyword arguments, with `parameters` as signature."""

    def wrapped(**values: Any) -> None:
        command(**values)

    wrapped.__name__ = command.__name__
    wrapped.__doc__ = command.__doc__
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapped


def _parameter(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    choices = _choices(field.annotation)
    kind = _kind(field)
    flag = flag_of(name)
    if kind is bool and field.default is True:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    metavar = {dict: "JSON", int: "<int>", float: "<float>"}.get(kind)
    option = typer.Option(
        flag,
        help=_help(field),
        metavar=f"[{'|'.join(choices)}]" if choices else metavar,
        show_default=False,
        rich_help_panel=panel,
        autocompletion=(lambda: list(choices)) if choices else None,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[(str if metavar else kind) | None, option],
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
        return next((values for part in get_args(annotation) if (values := _choices(part))), ())
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
