"""The paper's tables: train the runs that a table needs, and compare our metrics with the paper's.

`paper.toml` holds the tables. A run's directory is named after data set, backbone, head and seed, so tables share their
runs. Metrics are in per cent, differences in percentage points. Imports no torch.
"""

from __future__ import annotations

import json
import os
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import read_json, write_json
from opal_deploy.datasets.cub import has_parts
from opal_deploy.datasets.registry import DATASET_NAMES, read_dataset
from opal_deploy.errors import OpalError, StoppedEarly, UsageError
from opal_deploy.evaluation.api import evaluate_model
from opal_deploy.evaluation.metrics import format_columns
from opal_deploy.logs import Log, Progress
from opal_deploy.train.api import is_main_process, train_model
from opal_deploy.train.options import CHANGEABLE_ON_RESUME, default_weights, load_recipe

PAPER: dict[str, Any] = tomllib.loads((resources.files("opal_deploy.train") / "paper.toml").read_text("utf-8"))
_SIDES = ("ours", "paper")
# files of a run: the trainer's two, the part metrics of `evaluate_model`, and the options that the run was asked for
_SUMMARY, _CONFIG, _PARTS, _REQUEST = "summary.json", "config.json", "parts.json", "reproduce.json"
_METRICS = {
    "accuracy": (_SUMMARY, "test_accuracy"),
    "collapse": (_SUMMARY, "spatial_prototype_collapse"),
    "consistency": (_PARTS, "prototype_consistency"),
    "stability": (_PARTS, "prototype_stability"),
}


@dataclass(frozen=True)
class Row:
    """A row of a table; `paper.toml` describes the attributes."""

    name: str
    paper: Sequence[Sequence[float]]
    head: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of `train_model` that train this row."""
        head = {"head": "linear"} if self.head == "linear" else {"head": "opal", **PAPER["heads"][self.head]}
        return {**head, **self.options}

    def folder(self, recipe: Mapping[str, Any]) -> str:
        """Return the name of the row's runs without the seed: backbone, stride if the network is cut, and head."""
        parts = {**PAPER["protocol"], **PAPER["heads"][self.head]}
        values = {**parts, **recipe, **self.options}
        # Windows forbids the colon of `timm:resnet18`; rsync and scp take it for a host's
        name = str(values["backbone"]).replace(":", "-")
        if self.head != "linear" and "stride" in values:
            name += f"-stride{values['stride']}{'-all-layers' if values.get('keep_layers') else ''}"
        name += f"-{self.head}"
        name += f"-m{values.get('prototypes', values['prototypes_per_class'])}" if parts["projection"] else ""
        return name + (f"-{values['distance']}" if parts["anchors"] else "")


@dataclass(frozen=True)
class Run:
    """A training run: a row on a data set with a seed, its directory, and all that decides what it computes."""

    dataset: str
    row: Row
    seed: int
    folder: Path
    request: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.dataset}, {self.row.name}, seed {self.seed}"

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return (self.folder / _SUMMARY).is_file()


@dataclass(frozen=True)
class Plan:
    """The runs of a table, one seed after another. Of all rows, by name, the `chosen` ones are trained and printed."""

    table: dict[str, Any]
    columns: list[tuple[str, str]]
    rows: dict[str, Row]
    chosen: list[Row]
    runs: list[Run]


def make_plan(
    name: str, datasets: Sequence[str], seeds: Sequence[int], recipe: str, out: Path, only: Sequence[str] = ()
) -> Plan:
    """Return the runs of a table, with the rows that one of `only` names, and the data sets named or the table's own.

    `recipe` is `paper` or a path. UsageError: no such table or row, or the recipe cannot be read.
    """
    table = next((table for table in PAPER["table"] if table["name"] == name), None)
    if table is None:
        raise UsageError(f"table {name!r}: expected one of {', '.join(table['name'] for table in PAPER['table'])}")
    rows = {raw["name"]: Row(**{"baseline": table.get("baseline"), **raw}) for raw in table["rows"]}
    chosen = list(rows.values()) if not only else []
    for part in map(str.lower, only):
        # by name or last word (m=1, not m=10), else by a part of the name
        exact = [row for row in rows.values() if part in (row.name.lower(), row.name.lower().split()[-1])]
        chosen += exact or [row for row in rows.values() if part in row.name.lower()]
    if not chosen:
        raise UsageError(f"no row of {name} matches {' or '.join(only)}; expected one of {'; '.join(rows)}")
    chosen = [row for row in rows.values() if row in chosen]
    # by its path, not as one of the package's other recipes; and as reproduce.json has it
    values = {} if recipe == "paper" else json.loads(json.dumps(load_recipe(os.path.abspath(recipe))))
    names = sorted(datasets or table["datasets"], key=[*table["datasets"], *datasets].index)
    runs = [Run(dataset, row, seed, out / dataset / f"{row.folder(values)}-seed{seed}",
                {"recipe": values, "options": row.keywords(), "seed": seed})
            for seed in seeds for row in chosen if row.head for dataset in names]  # fmt: skip
    return Plan(table, [(dataset, metric) for dataset in names for metric in table["metrics"]], rows, chosen, runs)


def train_runs(plan: Plan, folders: Mapping[str, Path], recipe: str, progress: Progress, log: Log) -> list[OpalError]:
    """Train the unfinished runs, measure the parts of finished ones, and return the errors of those that failed.

    UsageError: a data set is wrong, or has no parts for a table about parts only.
    """
    files = {_METRICS[metric][0] for metric in plan.table["metrics"]}
    todo = [run for run in plan.runs if not all((run.folder / file).is_file() for file in (_SUMMARY, *files))
            or _read(run.folder / _REQUEST) != run.request]  # fmt: skip
    located = {}
    # all data sets are checked before the first run, which takes hours
    for name in dict.fromkeys(run.dataset for run in todo):
        kind = name if name in DATASET_NAMES else None
        located[name] = has_parts(read_dataset(folders[name], kind, progress=progress))
        if files == {_PARTS} and not located[name]:
            raise UsageError(
                f"{name} ({folders[name]}): the table {plan.table['name']} needs part locations (CUB's "
                "parts/part_locs.txt), and there are none; give CUB's folder, or choose another table"
            )
    failures: list[OpalError] = []
    for number, run in enumerate(todo, 1):
        log(f"run {number} of {len(todo)}: {run} ({run.folder})")
        folder, dataset, out = folders[run.dataset], run.dataset if run.dataset in DATASET_NAMES else None, run.folder
        try:
            train_model(
                folder, recipe=recipe, dataset=dataset, seed=run.seed, out=out, resume=True,
                log=log, progress=progress, **run.row.keywords(),
            )  # fmt: skip
            if is_main_process():
                write_json(out / _REQUEST, run.request)
                if _PARTS in files and located[run.dataset] and not (out / _PARTS).is_file():
                    device = run.request["recipe"].get("device", "auto")
                    result = evaluate_model(out / "best.pt", folder, dataset=dataset, device=device, progress=progress)
                    write_json(out / _PARTS, result.parts.to_dict() if result.parts else {})
        except (StoppedEarly, UsageError) as error:
            failures.append(type(error)(f"{run}: {error}"))
            log(f"failed: {failures[-1]}")
    return failures


def _read(path: Path) -> dict[str, Any]:
    """Return the document of a run's file; empty without the file."""
    try:
        return read_json(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable ({error}); remove its folder and reproduce again") from None


def _measure(plan: Plan, row: Row, dataset: str, metric: str) -> dict[str, Any]:
    """Return our metric over the finished seeds, and the paper's, in per cent; None where unknown."""
    file, key = _METRICS[metric]
    runs = [run for run in plan.runs if (run.row, run.dataset) == (row, dataset) and run.is_finished]
    documents = [_read(run.folder / file) for run in runs]
    values, stds = (
        [100.0 * raw[name] for raw in documents if raw.get(name) is not None] for name in (key, f"{key}_std")
    )
    std = statistics.stdev(values) if len(values) > 1 else None
    if plan.table["spread"] == "images":
        std = statistics.fmean(stds) if stds else None
    ours = {"mean": statistics.fmean(values), "std": std, "values": values} if values else None
    paper = None
    if dataset in plan.table["datasets"]:
        numbers = row.paper[plan.table["datasets"].index(dataset) + plan.table["metrics"].index(metric)]
        paper = {"mean": numbers[0], "std": numbers[1] if len(numbers) > 1 else None}
    return {"ours": ours, "paper": paper}


def tabulate(plan: Plan) -> dict[str, Any]:
    """Return the table as plain values: each seed's metrics, the paper's, and differences to the row's baseline."""
    # the paper averages one metric over data sets, where rows have a baseline
    is_averaged = len(plan.table["metrics"]) == 1 and any(row.baseline for row in plan.rows.values())
    rows = []
    for row in plan.chosen:
        cells = []
        for dataset, metric in plan.columns:
            cell = _measure(plan, row, dataset, metric)
            base = _measure(plan, plan.rows[row.baseline], dataset, metric) if row.baseline else {}
            for side, number in cell.items():
                if number is not None:
                    known = base.get(side) if row.baseline != row.name else None
                    number["difference"] = number["mean"] - known["mean"] if known else None
            cells.append({"dataset": dataset, "metric": metric, **cell})
        # ours and the paper's are over the same data sets
        shared = [cell for cell in cells if cell["paper"] and is_averaged]
        rows.append({
            "row": row.name, "trained_here": row.head is not None, "cells": cells,
            "runs": [str(run.folder) for run in plan.runs if run.row == row],
            "average": {side: _average([cell[side] for cell in shared]) for side in _SIDES},
        })  # fmt: skip
    deviations = [line for run in plan.runs if run.is_finished for line in _find_deviations(run)]
    return {
        "table": plan.table["name"], "title": plan.table["title"], "seeds": sorted({run.seed for run in plan.runs}),
        "deviations": list(dict.fromkeys(deviations)), "rows": rows,
    }  # fmt: skip


def _average(numbers: Sequence[dict[str, Any] | None]) -> dict[str, float | None] | None:
    """Return the mean over several data sets, and its difference to the baseline; None where a number is unknown."""
    known = [number for number in numbers if number is not None]
    if len(numbers) < 2 or len(known) < len(numbers):
        return None
    differences = [number["difference"] for number in known]
    difference = None if None in differences else statistics.fmean(differences)
    return {"mean": statistics.fmean(number["mean"] for number in known), "difference": difference}


def _find_deviations(run: Run) -> list[str]:
    """Return the differences between a finished run and the paper's run of the same row and seed."""
    config = _read(run.folder / _CONFIG)
    expected = {**PAPER["protocol"], **PAPER["heads"][run.row.head], **run.row.options, "seed": run.seed}
    expected["prototypes_per_class"] = expected.pop("prototypes", expected["prototypes_per_class"])
    expected["weights"] = default_weights(expected["backbone"])
    options = config.get("options", {})
    options = {**options, **options.get("head", {})}
    # a finished run knows what `auto` stood for, and how many epochs were planned
    options |= {key: config[key] for key in ("precision", "epochs", "batch_size") if key in config}
    # these change how fast and where a run computes, not what
    ignored = CHANGEABLE_ON_RESUME - {"epochs"} | {"head"}
    lines = [
        f"{key} {value} instead of {expected.get(key)}"
        for key, value in options.items()
        if key not in ignored and (value or None) != (expected.get(key) or None)
    ]
    data, official = config.get("data"), PAPER["datasets"].get(run.dataset)
    if data and official and (counts := [data["classes"], data["train"] + data["val"], data["test"]]) != official:
        text = "{:,} classes, {:,} training and validation images and {:,} test images instead of {:,}, {:,} and {:,}"
        lines.append(f"{run.dataset} has {text.format(*counts, *official)}")
    return lines


def render(plan: Plan, document: dict[str, Any]) -> str:
    """Return a plan's table that `tabulate` made, with aligned columns."""
    rows, seeds, metrics = document["rows"], document["seeds"], plan.table["metrics"]
    is_averaged = any(row["average"]["paper"] for row in rows)
    titles = [cell["dataset"] + (f" {cell['metric']}" if len(metrics) > 1 else "") for cell in rows[0]["cells"]]
    lines = [["row", *(text for title in [*titles, *(["average"] * is_averaged)] for text in (title, "paper"))]]
    for row in rows:
        texts = [_format(cell[side], len(seeds)) for cell in row["cells"] for side in _SIDES]
        texts += [_format(row["average"][side], len(seeds), 2) for side in _SIDES if is_averaged]
        lines.append([row["row"], *texts])
    missing = [dataset for dataset in plan.table["datasets"] if dataset not in dict(plan.columns)]
    unfinished = sum(not run.is_finished for run in plan.runs)
    has_baseline = any(row.baseline for row in plan.rows.values())
    notes = [
        f"{', '.join(metrics)} on the test split in per cent: mean over seeds {', '.join(map(str, seeds))}, "
        f"± standard deviation over {plan.table['spread']}",
        "in brackets: difference to the baseline in percentage points" if has_baseline else "",
        f"left out, no folder given: {', '.join(missing)} (--data NAME=FOLDER)" if missing else "",
        f"not the paper's protocol: {'; '.join(document['deviations'])}" if document["deviations"] else "",
        f"unfinished: {unfinished} of {len(plan.runs)} runs" if unfinished else "",
    ]
    return "\n".join([document["title"], "", *format_columns(lines), "", *filter(None, notes), ""])


def _format(number: dict[str, Any] | None, seeds: int, digits: int = 1) -> str:
    """Return a mean, its spread and its difference to the baseline, such as `85.6 ± 0.2 (1 of 3) (+1.4)`."""
    if number is None:
        return "-"
    std, difference, done = number.get("std"), number["difference"], len(number.get("values", ())) or seeds
    spread = ("" if std is None else f" ± {std:.1f}") + (f" ({done} of {seeds})" if done < seeds else "")
    # `or 0.0`: no -0.0
    change = "" if difference is None else f" ({round(difference, digits) or 0.0:+.{digits}f})"
    return f"{number['mean']:.{digits}f}{spread}{change}"
