"""`opal-deploy reproduce`: a table of the paper, with our metrics beside the paper's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.console import discard_message, print_json, print_message, progress
from opal_deploy.errors import OpalError, StoppedEarly, UsageError, require
from opal_deploy.options import parse_size

if TYPE_CHECKING:
    from opal_deploy.train.reproduce.plan import TrainingPlan
    from opal_deploy.train.reproduce.results import DatasetSource


def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            help="methods, backbones, ablation, prototypes, distances, beyond, collapse, parts, or components."
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER, repeatable: the paper's cub, cars, pets, dogs, flowers, imagenet, caltech101, dtd, "
            "sun397, or any other name for a data set of your own.",
            show_default=False,
        ),
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(help="Only rows whose name holds this, repeatable.", show_default=False),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="The folder of all runs; tables share it.")] = Path("runs/reproduce"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and estimate their GPU hours.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Train nothing: the table of what is finished.")] = False,
    tflops: Annotated[
        float, typer.Option(min=0.001, help="Assumed to be sustained while training, for --dry-run.")
    ] = 10.0,
    output: Annotated[
        Literal["text", "json", "markdown"], typer.Option("--format", help="Format of the table on stdout.")
    ] = "text",
    chart: Annotated[
        Path | None,
        typer.Option(
            help="Of `prototypes`: draw accuracy over m (Fig. 4), ours and the paper's; .png or .svg.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[str, typer.Option(help="A .toml file, or `paper`.")] = "paper",
    backbone: Annotated[str | None, typer.Option(help="Instead of the paper's.", show_default=False)] = None,
    weights: Annotated[
        str | None, typer.Option(help="See `train`; 'none' for random ones.", show_default=False)
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Paper: 30.", show_default=False)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Paper: 64.", show_default=False)] = None,
    lr: Annotated[float | None, typer.Option(help="Paper: 1e-4.", show_default=False)] = None,
    size: Annotated[str | None, typer.Option(help="Paper: 224.", show_default=False)] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Input pixels per cell, see `train`. Paper: 32.", show_default=False)
    ] = None,
    keep_layers: Annotated[
        bool | None,
        typer.Option(
            "--keep-layers/--no-keep-layers", help="All layers at this stride, see `train`.", show_default=False
        ),
    ] = None,
    augment: Annotated[Literal["paper", "none"] | None, typer.Option(show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.", show_default=False)] = None,
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"] | None, typer.Option(help="Paper: fp32.", show_default=False)
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, show_default=False)] = None,
) -> None:
    """Train what a table of the paper needs and is not there yet, and print ours beside the paper's.

    Repeat the command to continue: finished runs are kept, the one under way is resumed, and tables share runs.
    """
    for package in ("torch", "torchvision", "matplotlib"):
        require(package, "train", "opal-deploy reproduce")
    from opal_deploy.train.distributed import is_main_process
    from opal_deploy.train.recipe import Sections, load_recipe
    from opal_deploy.train.reproduce import render
    from opal_deploy.train.reproduce.figure import check_chart, draw_prototypes
    from opal_deploy.train.reproduce.paper import load_table
    from opal_deploy.train.reproduce.plan import make_plan
    from opal_deploy.train.reproduce.results import run_plan

    paper_table = load_table(table)
    sources = _parse_sources(data or [])
    datasets = list(sources) or ([c.dataset for c in paper_table.columns] if dry_run or show else [])
    if not datasets:
        names = ", ".join(dict.fromkeys(column.dataset for column in paper_table.columns))
        raise UsageError(f"no data set: give --data NAME=FOLDER, of {names} or of your own; --dry-run needs none")
    overrides: Sections = {
        "model": {
            "backbone": backbone,
            "weights": weights,
            "input_size": None if size is None else list(parse_size(size)),
            "stride": stride,
            "keep_layers": keep_layers,
        },
        "training": {
            "epochs": epochs, "batch_size": batch_size, "lr": lr, "augment": augment, "precision": precision,
        },
        "machine": {"device": device, "workers": workers},
    }  # fmt: skip
    plan = make_plan(
        paper_table,
        list(dict.fromkeys(datasets)),
        _parse_seeds(seeds),
        load_recipe(recipe),
        overrides,
        out,
        only=row or (),
    )
    if chart is not None:
        check_chart(plan, chart)
    failures: list[OpalError] = []
    if dry_run:
        _print_runs(plan, out, tflops)
        return
    # under torchrun every process runs this command, and one prints
    is_main = is_main_process()
    if not show:
        with progress("reproducing") as advance:
            failures = run_plan(plan, sources, report=advance, log=print_message if is_main else discard_message)
    if not is_main:
        return
    if output == "json":
        print_json(render.to_json(plan))
    else:
        print(render.to_text(plan) if output == "text" else render.to_markdown(plan), end="", flush=True)
    if chart is not None:
        draw_prototypes(plan, chart)
        print_message(f"{chart}: written")
    if failures:
        is_usage = any(isinstance(failure, UsageError) for failure in failures)
        raise (UsageError if is_usage else StoppedEarly)(
            f"{len(failures)} of the runs failed: {'; '.join(map(str, failures))}"
        )


def _parse_sources(texts: list[str]) -> dict[str, DatasetSource]:
    from opal_deploy.datasets.registry import DATASET_NAMES
    from opal_deploy.train.reproduce.results import DatasetSource

    sources: dict[str, DatasetSource] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or not folder or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise UsageError(
                f"--data {text!r}: expected NAME=FOLDER, such as cub=data/CUB_200_2011, the name of letters, digits, "
                "'_', '-' and '.'"
            )
        if name in sources:
            raise UsageError(f"--data {name} is given twice; give each data set once")
        if not Path(folder).is_dir():
            raise UsageError(f"--data {text}: no such folder; give the data set's folder as it was unpacked")
        sources[name] = DatasetSource(Path(folder), name if name in DATASET_NAMES else None)
    return sources


def _parse_seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise UsageError(f"--seeds {text!r}: expected different whole numbers separated by commas, such as 0,1,2")
    return [int(part) for part in parts]


def _print_runs(plan: TrainingPlan, out: Path, tflops: float) -> None:
    from opal_deploy.train.reproduce.plan import estimate_hours, official_size

    hours, unknown, measured = 0.0, 0, 0
    for run in plan.runs:
        duration = estimate_hours(run, out, official_size(run.dataset), tflops)
        state = "finished" if run.is_finished else "to do"
        if duration is None:
            time = "hours unknown"
            unknown += not run.is_finished
        else:
            time = f"{duration.hours:.2f} GPU hours{' (rate measured here)' if duration.measured else ''}"
            measured += duration.measured
            hours += 0.0 if run.is_finished else duration.hours
        print(f"{run.dataset}  {run.row.name}  seed {run.seed}  {state}  {time}  {run.folder}")
    todo = sum(not run.is_finished for run in plan.runs)
    print_message(
        f"{len(plan.runs)} runs, {todo} to do, about {hours:.1f} GPU hours"
        + (f", {unknown} unknown" if unknown else "")
    )
    if measured < len(plan.runs) - unknown:
        print_message(
            f"estimated from the backbones' counted operations at an assumed {tflops:g} TFLOP/s (--tflops); "
            "a finished run in the same folder replaces the assumption"
        )
