"""Which runs a table needs, where they are kept, and how long they may take.

A run's folder is named for what it is (data set, backbone, head, seed), so tables share their runs: full OPAL on
ConvNeXt-Tiny stands in five of them and is trained once a seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from opal_deploy.errors import UsageError
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.train import recipe as recipes
from opal_deploy.train import resume as resuming
from opal_deploy.train.recipe import Sections, TrainOptions
from opal_deploy.train.reproduce.paper import Column, DatasetSize, Row, Table, dataset_sizes
from opal_deploy.train.run_directory import TrainRunDirectory

# sustained while training, where no run of this backbone is finished here yet: an assumption, to be overridden
ASSUMED_TFLOPS = 40.0
# forward, and backward for inputs and weights
_PASSES = 3


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        dataset: the column's.
        row: of the table.
        seed: of everything random.
        options: resolved.
        folder: where it is kept.
    """

    dataset: str
    row: Row
    seed: int
    options: TrainOptions
    folder: Path

    @property
    def files(self) -> TrainRunDirectory:
        """What is in its folder."""
        return TrainRunDirectory(self.folder)

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end in its folder."""
        return self.files.is_finished

    def stored(self) -> dict[str, Any]:
        """What it was begun with; empty where there is no record of it.

        Raises:
            CheckpointError: a damaged record.
        """
        found = resuming.read_config(self.files) or {}
        return found if isinstance(found.get("options"), dict) else {}


@dataclass(frozen=True)
class Plan:
    """Everything a table needs.

    Attributes:
        table: the paper's.
        columns: those to be filled: of the data sets at hand; in the order of the table, then others'.
        runs: seed by seed, so that a whole table of one seed is there first.
    """

    table: Table
    columns: tuple[Column, ...]
    runs: tuple[Run, ...]

    @property
    def departures(self) -> tuple[str, ...]:
        """Where the runs are not the paper's protocol, a line each: as they were done, or else as they are planned."""
        return tuple(dict.fromkeys(line for run in self.runs for line in _find_departures(run)))


def make_plan(
    table: Table,
    datasets: Sequence[str],
    seeds: Sequence[int],
    base: Sections,
    overrides: Sections,
    out: Path,
    *,
    only: Sequence[str] = (),
) -> Plan:
    """The runs of a table.

    Args:
        datasets: names of those at hand; one that the table does not have becomes columns of its own.
        seeds: at least one.
        base: a recipe.
        overrides: of the recipe, for every run; what a row says comes last.
        out: the folder of all runs.
        only: parts of row names; none takes all rows.

    Raises:
        UsageError: no such row, or options that contradict each other.
    """
    rows = [row for row in table.rows if not only or any(_matches_row(part, row.name, table) for part in only)]
    if not rows:
        raise UsageError(
            f"no row of {table.name} is named like {' or '.join(only)}: it has {'; '.join(r.name for r in table.rows)}"
        )
    varied = {key for row in rows if row.run for key in row.run.get("model", {})}
    fixed = {key for key, value in overrides.get("model", {}).items() if value is not None}
    if clash := varied & fixed:
        raise UsageError(f"{', '.join(sorted(clash))} is what the table {table.name} varies; leave it out")
    figures = list(dict.fromkeys(column.figure for column in table.columns))
    columns = [column for column in table.columns if column.dataset in datasets]
    own = [name for name in datasets if name not in {column.dataset for column in table.columns}]
    columns += [Column(name, figure) for name in own for figure in figures]
    runs = []
    for seed in seeds:
        for row in rows:
            if row.run is None:
                continue
            options = recipes.resolve_recipe(
                base, _merge_sections(overrides, row.run, {"training": {"seed": seed}})
            ).options
            for name in dict.fromkeys(column.dataset for column in columns):
                runs.append(Run(name, row, seed, options, out / name / run_folder_name(options)))
    shown = replace(table, rows=tuple(rows))
    return Plan(shown, tuple(columns), tuple(runs))


def _matches_row(part: str, name: str, table: Table) -> bool:
    """A whole name, or its last word, means that row alone (m=1, not m=10); anything else each that holds it."""
    exact = [row.name for row in table.rows if part.lower() in (row.name.lower(), row.name.lower().split()[-1])]
    return name in exact if exact else part.lower() in name.lower()


def run_folder_name(options: TrainOptions) -> str:
    """Of a run: backbone, head and seed."""
    return f"{options.backbone}-{head_name(options.head)}-seed{options.seed}"


def head_name(head: HeadConfig) -> str:
    """`opal-m5-l2`, `linear`, or the parts that are on."""
    if head == LINEAR_BASELINE:
        return "linear"
    parts = {"proj": head.projection, "gmp": head.pooling == "max", "cws": head.cws, "orth": head.anchors}
    on = "opal" if all(parts.values()) else "+".join(name for name, is_on in parts.items() if is_on)
    size = f"-m{head.prototypes_per_class}" if head.projection else ""
    return f"{on}{size}{f'-{head.distance}' if head.anchors else ''}"


@dataclass(frozen=True)
class Estimate:
    """How long a run may take.

    Attributes:
        hours: of one GPU.
        measured: whether from images per second of a finished run of the same backbone and size, in the same folder.
    """

    hours: float
    measured: bool


def estimate_hours(run: Run, out: Path, size: DatasetSize | None, tflops: float = ASSUMED_TFLOPS) -> Estimate | None:
    """From the pictures of the data set and the multiply-accumulates of the backbone; None if its size is not known."""
    if size is None:
        return None
    val = size.val or size.train // 5
    train = size.train if size.val else size.train - val
    options = run.options
    if (rate := _measured_rate(out, options)) is not None:
        return Estimate(options.epochs * (train + val / _PASSES) / rate / 3600, measured=True)
    from opal_deploy.model.backbones import backbone_macs

    flops = 2.0 * backbone_macs(options.backbone, options.input_size)
    pictures = options.epochs * (_PASSES * train + val) + size.test
    return Estimate(flops * pictures / (tflops * 1e12) / 3600, measured=False)


def official_size(name: str) -> DatasetSize | None:
    """The official one; None for a data set of somebody's own."""
    return dataset_sizes().get(name)


def _measured_rate(out: Path, options: TrainOptions) -> float | None:
    """Training pictures a second of a finished run in `out` with the same backbone, input and precision."""
    for path in sorted(out.glob(f"*/{options.backbone}-*/summary.json")):
        try:
            rate = float(json.loads(path.read_text(encoding="utf-8"))["images_per_second"])
            stored = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
            same = stored["options"]["input_size"] == list(options.input_size)
            same &= stored["options"]["precision"] == options.precision
            same &= stored["options"]["batch_size"] == options.batch_size
            # hours of a GPU are what is asked for
            same &= stored["device"].startswith("cuda")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if same and rate > 0:
            return rate
    return None


def _merge_sections(*layers: Sections) -> Sections:
    merged: Sections = {}
    for layer in layers:
        for section, keys in layer.items():
            merged.setdefault(section, {}).update({k: v for k, v in keys.items() if v is not None})
    return merged


@cache
def _paper_options(backbone: str | None) -> TrainOptions:
    """Of the paper's protocol, on its reference or on another backbone."""
    return recipes.resolve_recipe(recipes.load_recipe("paper"), {"model": {"backbone": backbone}}).options


def _find_departures(run: Run) -> list[str]:
    """Where a run is another than the paper's, head and seed apart, which the row and its folder's name say."""
    stored = run.stored() if run.is_finished else {}
    ours = stored.get("options") or json.loads(json.dumps(asdict(run.options)))
    papers = _paper_options((run.row.run or {}).get("model", {}).get("backbone"))
    lines = []
    for key in ("backbone", "weights", "epochs", "batch_size", "lr", "input_size", "augment", "tf32"):
        expected = json.loads(json.dumps(getattr(papers, key)))
        if ours.get(key) != expected:
            lines.append(f"{key} {ours.get(key)} instead of {expected}")
    size, data = official_size(run.dataset), stored.get("data")
    if size is not None and isinstance(data, dict):
        found = (data.get("classes"), data.get("train", 0) + data.get("val", 0), data.get("test"))
        if found != (size.classes, size.train + size.val, size.test):
            lines.append(
                f"{run.dataset} is {found[0]} classes, {found[1]:,} pictures to train and validate on and {found[2]:,} "
                f"to test instead of {size.classes}, {size.train + size.val:,} and {size.test:,}"
            )
    return lines
