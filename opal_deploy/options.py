"""Options that are declared once: dataclass fields that become keywords of a function and options of a command.

    @dataclass(frozen=True, kw_only=True)
    class ResizeOptions(Options):
        size: Annotated[int, Option("Longest side in pixels.", min=1)] = 224
        log: Log = log_line  # without an Option: a keyword of the function, not an option of the command

    @keywords(ResizeOptions)
    def resize(image: Path, options: ResizeOptions) -> Path: ...

    resize("bird.jpg", size=64)

`opal_deploy.cli.options.expand_options` makes the same fields options of a command.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from opal_deploy.errors import UsageError
from opal_deploy.logs import show_progress

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
O = TypeVar("O", bound="Options")  # noqa: E741
StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Option:
    """The text and limits of an option, for the command and the reference page.

    Attributes:
        help: a noun phrase or an imperative, with the unit; one sentence or two.
        flag: the spelling on the command line, such as `--input` or `--isolate/--no-isolate`, perhaps with another
            one after a space; empty: from the name.
        min, max: smallest and largest value of a number.
        default: the default in words, appended to the help, where None stands for something else.
        panel: title of the group in `--help`, see `opal_deploy.cli.console`; empty: the main group.
        cli: type on the command line where it differs from the field's, such as Path or str.
        parse: turns the text of the command line into the field's value; raises UsageError or ValueError.
    """

    help: str
    flag: str = ""
    min: float | None = None
    max: float | None = None
    default: str = ""
    panel: str = ""
    cli: Any = None
    parse: Callable[[str], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all options classes; checks ranges and choices, and turns sequences into tuples."""

    def __post_init__(self) -> None:
        for field, annotation, option in option_fields(type(self)):
            value = getattr(self, field.name)
            of_many = get_origin(annotation) in (tuple, Sequence)
            if of_many or isinstance(value, list):
                value = (value,) if isinstance(value, str | os.PathLike) else tuple(value)
                object.__setattr__(self, field.name, value)
            if value is not None and option is not None:
                for item in value if of_many else [value]:
                    _check(field.name, item, get_args(annotation)[0] if of_many else annotation, option)

    def keywords(self) -> dict[str, Any]:
        """Return the fields by name: the keywords with which `keywords` makes the same options again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def changed(
        self, declared_by: type[Options] | None = None, *, names: Sequence[str] | None = None, but: Sequence[str] = ()
    ) -> str:
        """Return the flags of options that do not have their default values: all, a base class's, or those named."""
        return ", ".join(
            _spell(field.name, option, getattr(self, field.name))
            for field, _, option in option_fields(declared_by or type(self))
            if option is not None and field.name not in but and (names is None or field.name in names)
            if getattr(self, field.name) != default_of(field)
        )


def option_fields(options: type[Any]) -> Iterator[tuple[Field[Any], Any, Option | None]]:
    """Yield each field of an options class with its type and its Option; None for a field that is only a keyword."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        annotation, option = hints[field.name], None
        if get_origin(annotation) is Annotated:
            annotation, *metadata = get_args(annotation)
            option = next((item for item in metadata if isinstance(item, Option)), None)
        yield field, annotation, option


def default_of(field: Field[Any], option: Option | None = None) -> Any:
    """Return a field's default, or `inspect.Parameter.empty` where it has none."""
    return inspect.Parameter.empty if field.default is MISSING else field.default


def default_if_not_given(field: Field[Any], option: Option | None) -> Any:
    """Return the default of an option whose real default stands elsewhere: None, or False for a mere switch."""
    default = default_of(field)
    is_switch = default is False and option is not None and "/" not in option.flag
    return default if option is None or is_switch else None


def _check(name: str, value: Any, annotation: Any, option: Option) -> None:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    kinds = [kind for kind in (get_args(annotation) if is_union else (annotation,)) if kind is not type(None)]
    choices = get_args(kinds[0]) if len(kinds) == 1 and get_origin(kinds[0]) is Literal else ()
    if choices and value not in choices:
        raise UsageError(f"{name} {value!r}: expected one of {', '.join(map(str, choices))}")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    too_small = option.min is not None and not value >= option.min
    if too_small or (option.max is not None and not value <= option.max):
        limits = {"at least": option.min, "at most": option.max}
        expected = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
        raise UsageError(f"{name} {value!r}: expected {expected}")


class keywords(Generic[P, O]):  # used as a decorator
    """Decorator: a function whose last parameter is an options object takes the options as keywords instead."""

    def __init__(self, options: Callable[P, O], *, given_only: bool = False) -> None:
        """Declare the keywords; with `given_only` the function takes a mapping of those that the caller gave."""
        self._options, self._given_only = options, given_only

    @overload
    def __call__(self, function: Callable[[A, Mapping[str, Any]], R]) -> Callable[Concatenate[A, P], R]: ...

    @overload
    def __call__(self, function: Callable[[A, O], R]) -> Callable[Concatenate[A, P], R]: ...

    @overload
    def __call__(self, function: Callable[[A, B, O], R]) -> Callable[Concatenate[A, B, P], R]: ...

    def __call__(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return the function that builds the options from its keywords."""
        options: Any = self._options
        *positional, last = inspect.signature(function).parameters.values()
        declared = list(option_fields(options))
        by_keyword = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation,
                default=default_if_not_given(field, option) if self._given_only else default_of(field),
            )
            for field, annotation, option in declared
        ]  # fmt: skip
        signature = inspect.Signature([*positional, *by_keyword], return_annotation=last.empty)

        @functools.wraps(function)
        def call(*arguments: Any, **values: Any) -> R:
            bound = signature.bind(*arguments, **values).arguments
            leading = [bound.pop(parameter.name, parameter.default) for parameter in positional]
            make = dict if self._given_only else options
            if bound.get("progress") is not True:
                return function(*leading, make(**bound))
            with show_progress(function.__name__.replace("_", " ")) as progress:
                return function(*leading, make(**{**bound, "progress": progress}))

        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            return_annotation=inspect.signature(function).return_annotation
        )
        lines = [f"    {field.name}: {describe(option)}" for field, _, option in declared if option is not None]
        before, heading, after = (inspect.getdoc(function) or "").partition("\n\nReturns:")
        call.__doc__ = (
            "\n".join([before, "", f"    Keywords, the fields of {options.__name__}:", *lines]) + heading + after
        )
        return call


def describe(option: Option) -> str:
    """Return an option's help with its default in words."""
    return f"{option.help} Default: {option.default}." if option.default else option.help


RuntimeName = Literal["auto", "onnxruntime", "openvino", "tensorrt", "torch"]

# options of several commands
Device = Annotated[str, Option("auto, cpu, cuda or cuda:N.")]
Devices = Annotated[str, Option("auto, cpu, cuda, cuda:N, or GPU numbers such as 0,1.", flag="--device")]
Threads = Annotated[int | None, Option("CPU threads of the runtime.", min=1, default="all cores")]
RuntimeChoice = Annotated[RuntimeName, Option("Runtime; auto: by the model's file.", flag="--runtime")]
Batch = Annotated[int | None, Option("Batch size.", min=1, default="8, on a GPU 64")]
Workers = Annotated[int | None, Option("Parallel decode and draw workers.", min=1, default="all cores but two")]
MaxPixels = Annotated[int, Option("Refuse images with more pixels than this.", min=1)]
Decode = Annotated[
    Literal["default", "exact", "fast"],
    Option("JPEG decoding: within 1 count of Pillow (default), exactly as Pillow, or scaled down (fast)."),
]
ExpectSha256 = Annotated[str | None, Option("Expected SHA-256 of the model file; any other is refused.")]
Top = Annotated[int, Option("Classes listed in each record.", min=1)]
CropFile = Annotated[
    StrPath | None,
    Option(
        "Crop to these boxes: CSV (image,x0,y0,x1,y1 or image,x,y,width,height), COCO JSON, MegaDetector's results, "
        "or CUB's bounding_boxes.txt.",
        cli=Path,
    ),
]
# of a detector's boxes
DEFAULT_CONFIDENCE = 0.2
BoxConfidence = Annotated[
    float, Option("MegaDetector: classify animals detected with at least this confidence.", min=0, max=1)
]
LabelSource = Annotated[
    str | None, Option("True labels: `folders` (the name of each image's folder), or a CSV file (image,label).")
]
SigningKey = Annotated[
    StrPath | None, Option("Sign each record with this Ed25519 private key (PEM, PKCS#8).", cli=Path)
]
DatasetName = Annotated[str | None, Option("Name of the data set, as for `train`.", default="recognised by its files")]
CropToBoxes = Annotated[bool, Option("Crop to the data set's boxes.", flag="--boxes/--no-boxes")]
SlotNameFile = Annotated[StrPath | None, Option("TOML file that names slots, for records and sheets.", cli=Path)]


def flag_of(name: str, option: Option | None = None) -> str:
    """Return how an option is spelled on the command line, such as `--min-margin` for `min_margin`."""
    return (re.split("[/ ]", option.flag)[0] if option else "") or "--" + name.replace("_", "-")


def _spell(name: str, option: Option, value: Any) -> str:
    """Return the flag that gives an option this value: of a switch that is off, the one that turns it off."""
    on = flag_of(name, option)
    return option.flag.partition("/")[2] or "--no-" + on.removeprefix("--") if value is False else on


def to_arguments(options: Options, *, folders: bool = True) -> list[str]:
    """Return the command-line arguments that give options these values; defaults are left out.

    Args:
        options: the options.
        folders: whether paths keep their folders; not in a file that may be passed on.
    """
    arguments = []
    for field, _, option in option_fields(type(options)):
        value = getattr(options, field.name)
        if option is None or value == default_of(field):
            continue
        on = _spell(field.name, option, value)
        if isinstance(value, bool):
            arguments.append(on)
        else:
            for item in value if isinstance(value, tuple) else (value,):
                arguments += [on, str(item) if folders or option.cli is not Path else Path(item).name]
    return arguments


def parse_rate(option: str, text: str) -> float:
    """Return a percentage such as `5%` or `0.5 %` as a rate; raise UsageError that names `option` for anything else."""
    percent = parse_number(text.strip().removesuffix("%")) if text.strip().endswith("%") else None
    if percent is None or not 0 < percent < 100:
        raise UsageError(f"{option} {text!r}: expected a percentage between 0 and 100, such as 5%")
    return percent / 100


def parse_number(text: str) -> float | None:
    """Return a finite number written in ASCII digits, such as `0.05` or `5e-2`; None for anything else."""
    match = re.fullmatch(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?\s*", text, re.ASCII | re.IGNORECASE)
    return float(text) if match and math.isfinite(float(text)) else None


def parse_size(text: str) -> tuple[int, int]:
    """Parse `--size`: `224` or `224x448` (height x width) as (H0, W0); raise UsageError for anything else."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--size {text!r}: expected a number of pixels such as 224, or height x width such as 224x448")
    return int(parts[0]), int(parts[-1])
