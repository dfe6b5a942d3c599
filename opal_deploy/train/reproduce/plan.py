"""The paper's tables as data (`paper.toml`), and the runs that a table needs.

A run's directory is named after data set, backbone, head and seed, so tables share their runs: full OPAL on
ConvNeXt-Tiny is a row of five tables and is trained once per seed.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from opal_deploy.artifact.files import is_finite_number, read_json
from opal_deploy.errors import UsageError
from opal_deploy.model.config import HeadConfig
from opal_deploy.train.recipe import MACHINE_OPTIONS, Sections, TrainOptions, load_recipe, resolve_recipe
from opal_deploy.train.resume import read_config
from opal_deploy.train.run_directory import TrainRunDirectory

# the forward pass, and the backward passes for inputs and for weights
_PASSES = 3

MetricName = Literal["accuracy", "collapse", "consistency", "stability"]


@dataclass(frozen=True)
class DatasetSize:
    """Sizes of a data set's official splits; if `val` is 0, validation images are split off from `train`."""

    title: str
    classes: int
    train: int
    val: int
    test: int


@dataclass(frozen=True)
class Column:
    """A metric on a data set."""

    dataset: str
    metric: MetricName


@dataclass(frozen=True)
class PaperNumber:
    """A number of the paper, in per cent; `std` is None where the paper gives none."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class PaperRow:
    """A row of a table.

    Attributes:
        name: our name, close to the paper's.
        run: overrides of a recipe that train this row; None for methods that this package does not train.
        paper: one number per column of the table.
        baseline: the row that the paper compares this one with, if any.
    """

    name: str
    run: Sections | None
    paper: tuple[PaperNumber, ...]
    baseline: PaperRow | None = None


@dataclass(frozen=True)
class PaperAverage:
    """A mean difference in the paper's text, over pairs of rows (a row and its reference) and all columns."""

    name: str
    pairs: tuple[tuple[PaperRow, PaperRow], ...]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Attributes:
        name: the name on the command line.
        title: a title with the place in the paper.
        label: the label in the paper's source.
        spread: standard deviations are over the `seeds` or the `images` of the test split.
    """

    name: str
    title: str
    label: str
    spread: Literal["seeds", "images"]
    columns: tuple[Column, ...]
    rows: tuple[PaperRow, ...]
    averages: tuple[PaperAverage, ...] = ()

    def paper_number(self, row: PaperRow, column: Column) -> PaperNumber | None:
        """Return the paper's number; None for a column of another data set."""
        return row.paper[self.columns.index(column)] if column in self.columns else None


@cache
def _load_toml() -> dict[str, Any]:
    text = (resources.files("opal_deploy.train") / "reproduce" / "paper.toml").read_text("utf-8")
    return tomllib.loads(text)


def official_size(name: str) -> DatasetSize | None:
    """Return a data set's official size; None for a data set that the paper does not use."""
    sizes = _load_toml()["datasets"]
    return DatasetSize(**sizes[name]) if name in sizes else None


def table_names() -> list[str]:
    """Return the names of the tables, in the paper's order."""
    return [table["name"] for table in _load_toml()["table"]]


def load_table(name: str) -> PaperTable:
    """Return a table by name.

    Raises:
        UsageError: no such table.
    """
    for raw in _load_toml()["table"]:
        if raw["name"] == name:
            columns = tuple(Column(**column) for column in raw["columns"])
            rows = _load_rows(raw)
            averages = tuple(_load_average(average, rows) for average in raw.get("average", ()))
            return PaperTable(name, raw["title"], raw["label"], raw["spread"], columns, tuple(rows.values()), averages)
    raise UsageError(f"table {name!r}: expected one of {', '.join(table_names())}")


def _load_rows(table: dict[str, Any]) -> dict[str, PaperRow]:
    """Return a table's rows by name."""
    rows = {
        row["name"]: PaperRow(row["name"], row.get("run"), tuple(PaperNumber(*numbers) for numbers in row["paper"]))
        for row in table["row"]
    }
    baselines = {row["name"]: row.get("baseline", table.get("baseline")) for row in table["row"]}
    return {
        name: row if baselines[name] in (None, name) else replace(row, baseline=rows[baselines[name]])
        for name, row in rows.items()
    }


def _load_average(average: dict[str, Any], rows: dict[str, PaperRow]) -> PaperAverage:
    chosen = [rows[name] for name in average["rows"]]
    against: list[PaperRow | None] = [rows[name] for name in average.get("against", ())]
    against = against or [row.baseline for row in chosen]
    pairs = [(row, other) for row, other in zip(chosen, against, strict=True) if other is not None]
    return PaperAverage(average["name"], tuple(pairs))


@dataclass(frozen=True)
class Run:
    """One training run: a row of the table on a data set with a seed, and its directory."""

    dataset: str
    row: PaperRow
    seed: int
    options: TrainOptions
    folder: Path

    @property
    def files(self) -> TrainRunDirectory:
        """The files of the run directory."""
        return TrainRunDirectory(self.folder)

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return self.files.is_finished

    def read_stored_config(self) -> dict[str, Any]:
        """Return the configuration that the run was started with; empty if none is stored.

        Raises:
            CheckpointError: the stored configuration is damaged.
        """
        config = read_config(self.files) or {}
        options = config.get("options")
        return config if isinstance(options, dict) and isinstance(options.get("head"), dict) else {}


@dataclass(frozen=True)
class TrainingPlan:
    """All runs of a table.

    Attributes:
        table: the paper's table, with the chosen rows.
        columns: the columns of the available data sets, in the order of the table, then of other data sets.
        runs: seed by seed, so that the whole table of one seed finishes first.
    """

    table: PaperTable
    columns: tuple[Column, ...]
    runs: tuple[Run, ...]

    @property
    def deviations(self) -> tuple[str, ...]:
        """Deviations from the paper's protocol, one line each, of finished runs as trained and of others as planned."""
        return tuple(dict.fromkeys(line for run in self.runs for line in _find_deviations(run)))


def make_plan(
    table: PaperTable,
    datasets: Sequence[str],
    seeds: Sequence[int],
    base: Sections,
    overrides: Sections,
    out: Path,
    *,
    only: Sequence[str] = (),
) -> TrainingPlan:
    """Return the runs of a table.

    Args:
        table: the paper's table.
        datasets: names of the available data sets; a data set that the table lacks gets columns of its own.
        seeds: at least one seed.
        base: a recipe.
        overrides: replace the recipe's values in every run; a row's own values take precedence.
        out: the folder of all runs.
        only: parts of row names; empty takes all rows.

    Raises:
        UsageError: no such row, or options that contradict each other.
    """
    rows = [row for row in table.rows if not only or any(_matches_row(part, row.name, table) for part in only)]
    if not rows:
        raise UsageError(
            f"no row of {table.name} matches {' or '.join(only)}; expected one of "
            f"{'; '.join(row.name for row in table.rows)}"
        )
    varied = {key for row in rows if row.run for key in row.run.get("model", {})}
    fixed = {key for key, value in overrides.get("model", {}).items() if value is not None}
    if conflicts := varied & fixed:
        raise UsageError(f"the table {table.name} varies {', '.join(sorted(conflicts))}; leave it out")
    metrics = list(dict.fromkeys(column.metric for column in table.columns))
    columns = [column for column in table.columns if column.dataset in datasets]
    others = [name for name in datasets if name not in {column.dataset for column in table.columns}]
    columns += [Column(name, metric) for name in others for metric in metrics]
    runs = []
    for seed in seeds:
        for row in rows:
            if row.run is None:
                continue
            options = resolve_recipe(base, _merge_sections(overrides, row.run, {"training": {"seed": seed}})).options
            for name in dict.fromkeys(column.dataset for column in columns):
                runs.append(Run(name, row, seed, options, out / name / run_folder_name(options)))
    return TrainingPlan(replace(table, rows=tuple(rows)), tuple(columns), tuple(runs))


def _matches_row(part: str, name: str, table: PaperTable) -> bool:
    """Return whether `part` selects a row: as its name or last word (m=1, not m=10), else as a substring."""
    exact = [row.name for row in table.rows if part.lower() in (row.name.lower(), row.name.lower().split()[-1])]
    return name in exact if exact else part.lower() in name.lower()


def run_folder_name(options: TrainOptions) -> str:
    """Return the name of a run's directory: backbone, stride if the network is cut, head and seed."""
    cut = "" if options.stride is None else f"-stride{options.stride}{'-all-layers' if options.keep_layers else ''}"
    return f"{_backbone_folder_name(options)}{cut}-{head_name(options.head)}-seed{options.seed}"


def _backbone_folder_name(options: TrainOptions) -> str:
    # Windows forbids the colon of `timm:resnet18`; rsync and scp take it for a host's
    return options.backbone.replace(":", "-")


def head_name(head: HeadConfig) -> str:
    """Return `opal-m5-l2`, `linear`, `plain`, or the head's enabled parts, such as `proj+gmp-m5`."""
    if head.kind != "opal":
        return head.kind
    parts = {"proj": head.projection, "gmp": head.pooling == "max", "cws": head.cws, "orth": head.anchors}
    enabled = "opal" if all(parts.values()) else "+".join(name for name, is_enabled in parts.items() if is_enabled)
    size = f"-m{head.prototypes_per_class}" if head.projection else ""
    return f"{enabled}{size}{f'-{head.distance}' if head.anchors else ''}"


@dataclass(frozen=True)
class Estimate:
    """The estimated duration of a run.

    Attributes:
        hours: hours on one GPU.
        measured: whether a finished run with the same backbone and input size gave the rate.
    """

    hours: float
    measured: bool


def estimate_hours(run: Run, out: Path, tflops: float) -> Estimate | None:
    """Return an estimate of a run's duration; None for a data set that the paper does not use.

    Args:
        run: the run.
        out: the folder of all runs, where a finished run may give a measured rate.
        tflops: rate without a finished run, in 1e12 floating-point operations per second.
    """
    size = official_size(run.dataset)
    if size is None:
        return None
    val = size.val or size.train // 5
    train = size.train if size.val else size.train - val
    options = run.options
    _, epochs = options.plan_epochs(train)
    if (rate := _measured_rate(out, options)) is not None:
        return Estimate(epochs * (train + val / _PASSES) / rate / 3600, measured=True)
    from opal_deploy.model.backbones import backbone_macs

    flops = 2.0 * backbone_macs(options.backbone, options.input_size, options.stride, options.keep_layers)
    num_images = epochs * (_PASSES * train + val) + size.test
    return Estimate(flops * num_images / (tflops * 1e12) / 3600, measured=False)


def _measured_rate(out: Path, options: TrainOptions) -> float | None:
    """Return the training images per second of a finished GPU run with the same backbone and settings."""
    for path in sorted(out.glob(f"*/{_backbone_folder_name(options)}-*/summary.json")):
        try:
            rate = read_json(path)["images_per_second"]
            stored = read_json(path.parent / "config.json")
            same = stored["options"]["input_size"] == list(options.input_size)
            for name in ("stride", "keep_layers", "precision", "batch_size"):
                same &= stored["options"][name] == getattr(options, name)
            # a run on a CPU says nothing about GPU hours
            same &= stored["device"].startswith("cuda")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if same and is_finite_number(rate) and rate > 0:
            return float(rate)
    return None


def _merge_sections(*layers: Sections) -> Sections:
    merged: Sections = {}
    for layer in layers:
        for section, keys in layer.items():
            merged.setdefault(section, {}).update({k: v for k, v in keys.items() if v is not None})
    return merged


def _find_deviations(run: Run) -> list[str]:
    """Return the differences between a run and the paper's run of the same row and seed."""
    stored = run.read_stored_config() if run.is_finished else {}
    recipe = resolve_recipe(load_recipe("paper"), _merge_sections(run.row.run or {}, {"training": {"seed": run.seed}}))
    ours, paper = json.loads(json.dumps([stored.get("options") or asdict(run.options), asdict(recipe.options)]))
    # a finished run knows what `auto` stood for
    ours["precision"] = stored.get("precision", ours.get("precision"))
    pairs = [(key, ours.get(key), paper[key]) for key in paper if key not in (*MACHINE_OPTIONS, "head")]
    pairs += [(key, ours.get("head", {}).get(key), paper["head"][key]) for key in paper["head"]]
    lines = [f"{key} {found} instead of {expected}" for key, found, expected in pairs if found != expected]
    size, data = official_size(run.dataset), stored.get("data")
    counts = [data.get(name, 0) for name in ("classes", "train", "val", "test")] if isinstance(data, dict) else []
    if size is not None and counts and all(type(count) is int for count in counts):
        classes, train, test = counts[0], counts[1] + counts[2], counts[3]
        if (classes, train, test) != (size.classes, size.train + size.val, size.test):
            lines.append(
                f"{run.dataset} has {classes} classes, {train:,} training and validation images and {test:,} test "
                f"images instead of {size.classes}, {size.train + size.val:,} and {size.test:,}"
            )
    return lines
