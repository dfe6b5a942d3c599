"""`opal-deploy reproduce`: a table of the paper, with our metrics next to the paper's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from opal_deploy.cli.console import print_json, print_message, print_output, progress
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.options import Option, Options

_TABLES = "methods, backbones, ablation, prototypes, distances, beyond, collapse, parts, or components."
_DATA = (
    "NAME=FOLDER, repeatable: the paper's cub, cars, pets, dogs, flowers, imagenet, caltech101, dtd, sun397, or any "
    "other name for a data set of your own."
)


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(Options):
    """The options of `reproduce`."""

    data: Annotated[tuple[str, ...], Option(_DATA, cli=list[str])] = ()
    row: Annotated[tuple[str, ...], Option("Only rows whose name contains this text, repeatable.", cli=list[str])] = ()
    seeds: Annotated[str, Option("Seeds, separated by commas.")] = "0,1,2"
    recipe: Annotated[str, Option("paper, or a .toml file.")] = "paper"
    out: Annotated[Path, Option("Folder of all runs; tables share it.")] = Path("runs/reproduce")
    dry_run: Annotated[bool, Option("List the runs and their folders.")] = False
    show: Annotated[bool, Option("Train nothing; print the table of finished runs.")] = False
    output: Annotated[Literal["text", "json"], Option("Format of the table on stdout.", flag="--format")] = "text"


def reproduce(table: Annotated[str, typer.Argument(help=_TABLES)], options: ReproduceOptions) -> None:
    """Train the runs that a table of the paper still needs, and print our results next to the paper's.

    Repeat the command to continue: finished runs are kept, an interrupted run is resumed, and tables share runs.
    """
    from opal_deploy.train.api import is_main_process
    from opal_deploy.train.reproduce import make_plan, render, tabulate, train_runs

    folders, seeds = _parse_data(options.data), [part.strip() for part in options.seeds.split(",")]
    if not all(part.isascii() and part.isdigit() for part in seeds) or len(set(map(int, seeds))) < len(seeds):
        raise UsageError(f"--seeds {options.seeds!r}: expected different whole numbers with commas, such as 0,1,2")
    plan = make_plan(table, list(folders), list(map(int, seeds)), options.recipe, options.out, options.row)
    if options.dry_run:
        for run in plan.runs:
            print_output(f"{run}  {'finished' if run.is_finished else 'to do'}  {run.folder}")
        print_message(f"{len(plan.runs)} runs, {sum(not run.is_finished for run in plan.runs)} to do")
        return
    failures = []
    if not options.show:
        if not folders:
            names = ", ".join(plan.table["datasets"])
            raise UsageError(f"no data set: give --data NAME=FOLDER, of {names} or of your own; --dry-run needs none")
        # torchrun runs this command in every process; one of them prints
        log = print_message if is_main_process() else lambda line: None
        with progress("reproducing") as advance:
            failures = train_runs(plan, folders, options.recipe, advance, log)
    if not is_main_process():
        return
    document = tabulate(plan)
    if options.output == "json":
        print_json(document)
    else:
        print_output(render(plan, document).rstrip("\n"))
    if failures:
        kind = UsageError if any(isinstance(error, UsageError) for error in failures) else StoppedEarly
        raise kind(f"{len(failures)} of the runs failed: {'; '.join(map(str, failures))}")


def _parse_data(texts: tuple[str, ...]) -> dict[str, Path]:
    """Return the data sets' folders by name."""
    folders: dict[str, Path] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not folder or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name in folders:
            raise UsageError(f"--data {text!r}: expected NAME=FOLDER, each NAME once, such as cub=data/CUB_200_2011")
        if not Path(folder).is_dir():
            raise UsageError(f"--data {text}: no such folder; give the data set's folder as it was unpacked")
        folders[name] = Path(folder)
    return folders
