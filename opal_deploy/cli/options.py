"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from opal_deploy.errors import UsageError
from opal_deploy.options import Option, Options, default_of, describe, option_fields
from opal_deploy.runtime.devices import CPU_BATCH as CPU_BATCH
from opal_deploy.runtime.devices import GPU_BATCH as GPU_BATCH
from opal_deploy.runtime.devices import default_batch as default_batch
from opal_deploy.runtime.devices import default_workers as default_workers
from opal_deploy.storage.urls import redact

# the models of commands that open one
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Exported model or checkpoint. Default: the one in this folder, or of the newest run in runs/.",
        show_default=False,
    ),
]

# how a data set is read, of the commands that measure models on one
DatasetName = Annotated[
    str | None,
    typer.Option(help="The data set's name, as `train` takes it. Default: told by its files.", show_default=False),
]
Partition = Annotated[int, typer.Option(min=1, max=10, help="Partition of the data set (DTD, SUN-397).")]
SkipMissing = Annotated[bool, typer.Option("--skip-missing", help="Leave out images that are not there.")]
CropToBoxes = Annotated[bool, typer.Option("--boxes/--no-boxes", help="Crop to the data set's boxes.")]


def refuse_urls(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes no URL for a path: `Path` drops one of its slashes, and no file is called so."""

    @functools.wraps(command)
    def checked(*arguments: Any, **options: Any) -> None:
        for name, value in options.items():
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path) and (match := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/(?=[^/])", str(path))):
                    url = redact(f"{match[1]}://{str(path)[match.end() :]}")
                    raise UsageError(
                        f"{name.replace('_', '-')} {url}: a URL is not read here, only as images, and as --out of "
                        "infer; download it, and give its path"
                    )
        command(*arguments, **options)

    return checked


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of its options classes as options of the command line.

    Each parameter of `command` whose type is a subclass of `Options` is replaced by one option per field with an
    `Option`; the object is built from their values before `command` is called. All other parameters stay.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    classes: dict[str, type[Options]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and issubclass(kind, Options):
            classes[parameter.name] = kind
            parameters += [
                _to_parameter(field, annotation, option)
                for field, annotation, option in option_fields(kind)
                if option is not None
            ]
        else:
            parameters.append(parameter.replace(annotation=kind))
    # typer wants parameters without a default first
    parameters.sort(key=lambda parameter: parameter.default is not parameter.empty)

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        for name, kind in classes.items():
            taken = {field.name: (option, values.pop(field.name)) for field, _, option in option_fields(kind) if option}
            given = {
                # without a value the field's own default counts
                field: _parse(field, option, value) if option.parse and isinstance(value, str) else value
                for field, (option, value) in taken.items()
                if value is not None
            }
            values[name] = kind(**given)
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
        flag = option.flag.partition("/")[0] or f"--{field.replace('_', '-')}"
        raise UsageError(f"{flag} {text!r}: {error}") from None


def _to_parameter(field: Field[Any], annotation: Any, option: Option) -> inspect.Parameter:
    default = default_of(field)
    if isinstance(default, tuple):
        # several values in one text are shown as they are written
        default = (",".join(map(str, default)) if option.parse else list(default)) or None
    # a switch has no --no-... unless its flag names one
    flag = option.flag or (f"--{field.name.replace('_', '-')}" if annotation is bool else "")
    declared = typer.Option(
        *([flag] if flag else []),
        help=describe(option),
        min=option.min,
        max=option.max,
        rich_help_panel=option.panel or None,
        hidden=option.hidden,
        # None is not worth showing, and `default` says what it stands for
        show_default=default is not None and not option.default and default is not False,
    )
    kind = option.cli or annotation
    if default is None and option.cli is not None:
        kind = option.cli | None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )
