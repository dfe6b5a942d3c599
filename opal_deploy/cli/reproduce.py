"""`opal-deploy reproduce`: a table of the paper, with our metrics next to the paper's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.errors import OpalError, StoppedEarly, UsageError, require
from opal_deploy.train.options import ReproduceOptions

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
    options: ReproduceOptions,
) -> None:
    """Train the runs that a table of the paper still needs, and print our results next to the paper's.

    Repeat the command to continue: finished runs are kept, an interrupted run is resumed, and tables share runs.
    """
    for package in ("torch", "torchvision", "matplotlib"):
        require(package, "train", "opal-deploy reproduce")
    from opal_deploy.train.reproduce.render import check_chart
    from opal_deploy.train.reproduce.results import run_plan

    sources = _parse_sources(list(options.data))
    plan = _make_plan(table, options, sources)
    if options.chart is not None:
        check_chart(plan, options.chart)
    if options.dry_run:
        _print_runs(plan, options.out, options.tflops)
        return
    failures: list[OpalError] = []
    # torchrun runs this command in every process; one of them prints
    from opal_deploy.train.machine import is_main_process

    is_main = is_main_process()
    if not options.show:
        with progress("reproducing") as advance:
            log = print_message if is_main else lambda line: None
            failures = run_plan(plan, sources, progress=advance, log=log)
    if is_main:
        _print_table(plan, options)
        if failures:
            is_usage = any(isinstance(failure, UsageError) for failure in failures)
            raise (UsageError if is_usage else StoppedEarly)(
                f"{len(failures)} of the runs failed: {'; '.join(map(str, failures))}"
            )


def _make_plan(table: str, options: ReproduceOptions, sources: Mapping[str, DatasetSource]) -> TrainingPlan:
    from opal_deploy.train.recipe import load_recipe
    from opal_deploy.train.reproduce.plan import load_table, make_plan

    paper_table = load_table(table)
    datasets = list(sources)
    if not datasets and (options.dry_run or options.show):
        datasets = [column.dataset for column in paper_table.columns]
    if not datasets:
        names = ", ".join(dict.fromkeys(column.dataset for column in paper_table.columns))
        raise UsageError(f"no data set: give --data NAME=FOLDER, of {names} or of your own; --dry-run needs none")
    return make_plan(
        paper_table, list(dict.fromkeys(datasets)), _parse_seeds(options.seeds), load_recipe(options.recipe),
        options.to_sections(), options.out, only=options.row,
    )  # fmt: skip


def _print_table(plan: TrainingPlan, options: ReproduceOptions) -> None:
    from opal_deploy.train.reproduce import render

    if options.output == "json":
        print_json(render.to_json(plan))
    else:
        print(render.to_text(plan) if options.output == "text" else render.to_markdown(plan), end="", flush=True)
    if options.chart is not None:
        render.draw_prototypes(plan, options.chart)
        print_message(f"{options.chart}: written")


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
    from opal_deploy.train.reproduce.plan import estimate_hours

    hours, unknown, measured = 0.0, 0, 0
    for run in plan.runs:
        duration = estimate_hours(run, out, tflops)
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
