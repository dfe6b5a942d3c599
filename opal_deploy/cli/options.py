"""Options that several commands share, and the expansion of options classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from opal_deploy.errors import UsageError
from opal_deploy.options import Option, Options, default_if_not_given, default_of, describe, flag_of, option_fields

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Exported model or checkpoint. Default: the one in this folder, or of the newest run in runs/.",
        show_default=False,
    ),
]


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of its options classes as command-line options.

    Each parameter of type `Options` becomes one option per field with an `Option`; the object is built from their
    values. A parameter of type `Annotated[Mapping[str, Any], ItsOptions]` receives the values that were given. All
    other parameters stay.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    classes: dict[str, type[Options]] = {}
    makers: dict[str, Callable[..., Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        candidates = getattr(kind, "__metadata__", (kind,))
        declared = next((item for item in candidates if isinstance(item, type) and issubclass(item, Options)), None)
        if declared is not None:
            classes[parameter.name], makers[parameter.name] = declared, declared if kind is declared else dict
            find_default = default_of if kind is declared else default_if_not_given
            parameters += [
                _to_parameter(field, annotation, option, find_default)
                for field, annotation, option in option_fields(declared)
                if option is not None
            ]
        else:
            parameters.append(parameter.replace(annotation=kind))
    # typer requires parameters without a default first
    parameters.sort(key=lambda parameter: parameter.default is not parameter.empty)

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        for name, kind in classes.items():
            taken = {field.name: (option, values.pop(field.name)) for field, _, option in option_fields(kind) if option}
            keywords = {
                # without a value the field keeps its default
                field: _parse(field, option, value) if option.parse and isinstance(value, str) else value
                for field, (option, value) in taken.items()
                if value is not None
            }
            values[name] = makers[name](**keywords)
        command(**values)

    del expanded.__wrapped__  # typer would read the command's own parameters
    expanded.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _parse(field: str, option: Option, text: str) -> Any:
    assert option.parse is not None
    try:
        return option.parse(text)
    except ValueError as error:
        raise UsageError(f"{flag_of(field, option)} {text!r}: {error}") from None


def _to_parameter(
    field: Field[Any], annotation: Any, option: Option, find_default: Callable[..., Any]
) -> inspect.Parameter:
    default = find_default(field, option)
    if isinstance(default, tuple):
        # shown as they are typed
        default = (",".join(map(str, default)) if option.parse else list(default)) or None
    # a switch has a --no-... only if its flag names it
    flag = option.flag or (flag_of(field.name) if annotation is bool else "")
    declared = typer.Option(
        *flag.split(),
        help=describe(option),
        min=option.min,
        max=option.max,
        rich_help_panel=option.panel or None,
        # None is not shown: `default` says what it stands for
        show_default=default is not None and not option.default and default is not False,
    )
    kind = option.cli or annotation
    if default is None:
        kind = kind | None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )
