"""The runs that a table needs, their directories, and an estimate of their GPU hours.

A run's directory is named after data set, backbone, head and seed, so tables share their runs: full OPAL on
ConvNeXt-Tiny is a row of five tables and is trained once per seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opal_deploy.errors import UsageError
from opal_deploy.model.config import HeadConfig
from opal_deploy.train.recipe import MACHINE_OPTIONS, Sections, TrainOptions, load_recipe, resolve_recipe
from opal_deploy.train.reproduce.paper import Column, DatasetSize, PaperRow, PaperTable, dataset_sizes
from opal_deploy.train.resume import complete_options, read_config
from opal_deploy.train.run_directory import TrainRunDirectory

# assumed to be sustained while training, where no finished run of the same backbone gives a measured rate: half of what
# an A100 does at most in float32 without TF32
ASSUMED_TFLOPS = 10.0
# the forward pass, and the backward passes for inputs and for weights
_PASSES = 3


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        dataset: name of the data set.
        row: the table's row.
        seed: seed of everything random.
        options: the resolved options.
        folder: the run directory.
    """

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
        """Whether the run came to its end."""
        return self.files.is_finished

    def read_stored_config(self) -> dict[str, Any]:
        """Return the configuration that the run was started with; empty where none is stored.

        Raises:
            CheckpointError: the stored configuration is damaged.
        """
        config = read_config(self.files) or {}
        return config if isinstance(config.get("options"), dict) else {}


@dataclass(frozen=True)
class TrainingPlan:
    """All runs of a table.

    Attributes:
        table: the paper's table, with the chosen rows.
        columns: the columns of the available data sets, in the order of the table, then those of other data sets.
        runs: seed by seed, so that the whole table of one seed is finished first.
    """

    table: PaperTable
    columns: tuple[Column, ...]
    runs: tuple[Run, ...]

    @property
    def deviations(self) -> tuple[str, ...]:
        """Deviations from the paper's protocol, a line each, of finished runs as trained and of others as planned."""
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
        datasets: names of the available data sets; a data set that the table lacks becomes columns of its own.
        seeds: at least one seed.
        base: a recipe.
        overrides: values that replace the recipe's in every run; a row's own values come last.
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
    if conflicts := varied & fixed:
        raise UsageError(f"{', '.join(sorted(conflicts))} is what the table {table.name} varies; leave it out")
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
    """Return whether `part` selects a row: by its whole name or last word (m=1, not m=10), or else as any part."""
    exact = [row.name for row in table.rows if part.lower() in (row.name.lower(), row.name.lower().split()[-1])]
    return name in exact if exact else part.lower() in name.lower()


def run_folder_name(options: TrainOptions) -> str:
    """Return the name of a run's directory: backbone, stride where it is not the network's own, head and seed."""
    cut = "" if options.stride is None else f"-stride{options.stride}{'-all-layers' if options.keep_layers else ''}"
    return f"{_backbone_folder_name(options)}{cut}-{head_name(options.head)}-seed{options.seed}"


def _backbone_folder_name(options: TrainOptions) -> str:
    # Windows forbids the colon of `timm:resnet18`, and rsync and scp take what is before it for a host
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
        hours: hours of one GPU.
        measured: whether the estimate uses the images per second of a finished run of the same backbone and size.
    """

    hours: float
    measured: bool


def estimate_hours(run: Run, out: Path, size: DatasetSize | None, tflops: float = ASSUMED_TFLOPS) -> Estimate | None:
    """Return an estimate of a run's duration; None where the size of the data set is unknown.

    The estimate uses the measured rate of a finished run in `out`, or else the backbone's multiply-accumulates at an
    assumed rate.

    Args:
        run: the run.
        out: the folder of all runs.
        size: size of the data set.
        tflops: assumed rate in 1e12 floating-point operations per second.
    """
    if size is None:
        return None
    val = size.val or size.train // 5
    train = size.train if size.val else size.train - val
    options = run.options
    if (rate := _measured_rate(out, options)) is not None:
        return Estimate(options.epochs * (train + val / _PASSES) / rate / 3600, measured=True)
    from opal_deploy.model.backbones import backbone_macs

    flops = 2.0 * backbone_macs(options.backbone, options.input_size, options.stride, options.keep_layers)
    num_images = options.epochs * (_PASSES * train + val) + size.test
    return Estimate(flops * num_images / (tflops * 1e12) / 3600, measured=False)


def official_size(name: str) -> DatasetSize | None:
    """Return a data set's official size; None for a data set that the paper does not use."""
    return dataset_sizes().get(name)


def _measured_rate(out: Path, options: TrainOptions) -> float | None:
    """Return the training images per second of a finished GPU run with the same backbone, input and precision."""
    for path in sorted(out.glob(f"*/{_backbone_folder_name(options)}-*/summary.json")):
        try:
            rate = float(json.loads(path.read_text(encoding="utf-8"))["images_per_second"])
            stored = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
            same = stored["options"]["input_size"] == list(options.input_size)
            for name in ("stride", "keep_layers", "precision", "batch_size"):
                same &= stored["options"][name] == getattr(options, name)
            # a run on a CPU says nothing about GPU hours
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


def _find_deviations(run: Run) -> list[str]:
    """Return where a run differs from the paper's run of the same row and seed."""
    stored = run.read_stored_config() if run.is_finished else {}
    ours = complete_options(stored.get("options") or json.loads(json.dumps(asdict(run.options))))
    # of a finished run it is known what `auto` stood for
    ours["precision"] = stored.get("precision", ours["precision"])
    recipe = resolve_recipe(load_recipe("paper"), _merge_sections(run.row.run or {}, {"training": {"seed": run.seed}}))
    paper = complete_options(json.loads(json.dumps(asdict(recipe.options))))
    # of the head, only what is not the row's is named
    pairs = [(key, ours[key], paper[key]) for key in paper if key not in (*MACHINE_OPTIONS, "head")]
    pairs += [(key, ours["head"][key], paper["head"][key]) for key in paper["head"]]
    lines = [f"{key} {found} instead of {expected}" for key, found, expected in pairs if found != expected]
    size, data = official_size(run.dataset), stored.get("data")
    if size is not None and isinstance(data, dict):
        classes, train, test = data.get("classes"), data.get("train", 0) + data.get("val", 0), data.get("test")
        if (classes, train, test) != (size.classes, size.train + size.val, size.test):
            lines.append(
                f"{run.dataset} is {classes} classes, {train:,} images to train and validate on and {test:,} "
                f"to test instead of {size.classes}, {size.train + size.val:,} and {size.test:,}"
            )
    return lines
