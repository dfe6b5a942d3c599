"""Options declared once: the same fields as keywords of a function and as options of a command."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from opal_deploy.cli.options import expand_options
from opal_deploy.errors import UsageError
from opal_deploy.options import Option, Options, keywords, parse_rate, to_arguments


def parse_percent(text: str) -> float:
    return float(text.removesuffix("%")) / 100


@dataclass(frozen=True, kw_only=True)
class DrawOptions(Options):
    size: Annotated[int, Option("Longest side in pixels.", min=1, max=4096)] = 224
    mode: Annotated[Literal["boxes", "heatmap"] | None, Option("What is drawn.", default="by the model")] = None
    target: Annotated[tuple[str, ...], Option("Repeatable.", cli=list[str])] = ()
    sides: Annotated[tuple[Literal["left", "right"], ...], Option("Repeatable.", cli=list[str])] = ()
    out: Annotated[str | Path | None, Option("Output folder.", flag="--folder", cli=Path)] = None
    margin: Annotated[float | None, Option("Smallest margin.", cli=str, parse=lambda text: float(text[:-1]) / 100)] = (
        None
    )
    fast: Annotated[bool, Option("Skip smoothing.")] = False
    scale: float = 1.0


@keywords(DrawOptions)
def draw(image: str, options: DrawOptions) -> tuple[str, DrawOptions]:
    """Draw an image."""
    return image, options


def test_keywords_build_the_options() -> None:
    assert draw("a.jpg", size=8, scale=2.0) == ("a.jpg", DrawOptions(size=8, scale=2.0))
    assert list(inspect.signature(draw).parameters) == ["image", *(field for field in DrawOptions().keywords())]
    assert "size: Longest side in pixels." in (draw.__doc__ or "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "size 0: expected at least 1 and at most 4096"),
        ({"size": 5000}, "size 5000: expected at least 1"),
        ({"mode": "lines"}, "mode 'lines': expected one of boxes, heatmap"),
        ({"sides": ["left", "top"]}, "sides 'top': expected one of left, right"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DrawOptions(**values)  # type: ignore[arg-type]


def test_a_command_takes_the_fields_as_options() -> None:
    seen: list[tuple[str, DrawOptions, bool]] = []

    def command(
        image: Annotated[str, typer.Argument()],
        options: DrawOptions,
        as_json: Annotated[bool, typer.Option("--json")] = False,
    ) -> None:
        """Draw."""
        seen.append((image, options, as_json))

    app = typer.Typer()
    app.command()(expand_options(command))
    call = ["a.jpg", "--size", "9", "--target", "x", "--target", "y", "--folder", "here", "--margin", "5%", "--json"]
    assert CliRunner().invoke(app, call).exit_code == 0
    assert seen == [("a.jpg", DrawOptions(size=9, target=("x", "y"), out=Path("here"), margin=0.05), True)]
    seen.clear()
    assert CliRunner().invoke(app, ["a.jpg"]).exit_code == 0
    assert seen == [("a.jpg", DrawOptions(), False)]
    wrong = CliRunner().invoke(app, ["a.jpg", "--margin", "x%"])
    assert isinstance(wrong.exception, UsageError)
    assert str(wrong.exception).startswith("--margin 'x%': could not convert")
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert "Default: by the model." in text
    assert "--fast" in text
    assert "--no-fast" not in text
    assert "--scale" not in text


def test_options_become_the_arguments_that_give_them() -> None:
    options = DrawOptions(size=9, target=("x", "y"), out=Path("here"), scale=2.0)
    assert to_arguments(options) == ["--size", "9", "--target", "x", "--target", "y", "--folder", "here"]
    assert to_arguments(DrawOptions()) == []


def test_rates_are_percentages() -> None:
    assert [parse_rate("--x", text) for text in ("5%", " 0.5 %", "99%")] == [0.05, 0.005, 0.99]
    for text in ("5", "0%", "100%", "-1%", "nan%", "many%", ""):
        with pytest.raises(UsageError, match="percentage"):
            parse_rate("--x", text)
