"""`opal-deploy evaluate`: how good is a model, in the engine that will run it?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opal_deploy.cli.console import Advance, emit_json, one_line, progress, say
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.runtime.session import Session
    from opal_deploy.train.data.cub_parts import PartLocations
    from opal_deploy.train.data.samples import DataSet, Sample
    from opal_deploy.train.evaluation.session import Measured

# seconds that a person waits without being told how long
_PATIENCE = 60.0


def evaluate(
    data: Annotated[Path, typer.Argument(help="A data set as `train` takes it.")],
    model: Annotated[
        list[Path], typer.Option(help="An exported model, or a checkpoint. Several are compared: give it again.")
    ],
    dataset: Annotated[
        str | None,
        typer.Option(help="The data set's name, as `train` takes it. Default: told by its files.", show_default=False),
    ] = None,
    partition: Annotated[int, typer.Option(min=1, max=10, help="Of DTD and SUN-397.")] = 1,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out pictures that are not there.")
    ] = False,
    split: Annotated[Literal["test", "val", "train"], typer.Option(help="Which pictures.")] = "test",
    boxes: Annotated[bool, typer.Option("--boxes/--no-boxes", help="Crop to the data set's boxes.")] = True,
    parts: Annotated[
        bool | None,
        typer.Option(
            "--parts/--no-parts",
            help="Prototype consistency, stability and part purity. Default: where the data set has part locations.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise that stability is measured with.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Of the runtime on the CPU.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures a forward pass.")] = 16,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for confusion.csv, confusion.png, predictions.csv and evaluation.json.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier evaluation in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the figures to stdout as JSON.")] = False,
) -> None:
    """Accuracy and, for models with prototypes, what their explanations are worth, on a data set.

    Works on checkpoints and on exported models alike, and compares several, so one sees what deployment costs.
    """
    for package in ("torch", "sklearn", "matplotlib"):
        require(package, "train", "opal-deploy evaluate", pip_name={"sklearn": "scikit-learn"}.get(package))
    from opal_deploy.train.data import cub_parts
    from opal_deploy.train.data.catalogue import read
    from opal_deploy.train.evaluation import report

    for path in model:
        if not path.is_file():
            raise UsageError(f"{path}: no such model; expected a file of `opal-deploy export`, or a checkpoint")
    if out is not None:
        report.check_folder(out, data, overwrite=overwrite)
    options = _Options(split, boxes, seed, device, threads, batch)
    # a list, so that nothing holds on to a model that was measured
    opened = [_open(model[0], options)]
    known = [opened[0].metadata, *(_metadata(path) for path in model[1:])]
    with progress("reading") as advance:
        pictures = read(data, dataset, partition=partition, skip_missing=skip_missing, report=advance)
    say(one_line(f"read as {pictures.describe()}"))
    for line in pictures.warnings:
        say(one_line(f"warning: {line}"))
    samples = _samples(pictures, split)
    for path, metadata in zip(model, known, strict=True):
        _check_classes(path, list(metadata.class_names), pictures)
        _warn_of_crop(path, metadata.crop, pictures, boxes=boxes)
    if parts and not cub_parts.has_parts(pictures):
        raise UsageError(f"{data}: it has no part locations (parts/part_locs.txt of CUB); leave --parts out")
    located = None
    if parts is not False and cub_parts.has_parts(pictures):
        located = cub_parts.read(pictures.root, samples)
    if out is not None:
        report.new_folder(out)
    folders = [None] * len(model) if out is None else report.model_folders(out, model)
    runs = []
    for path, folder in zip(model, folders, strict=True):
        run = _evaluate(path, opened.pop() if opened else _open(path, options), samples, located, options)
        if folder is not None:
            report.write_model(folder, run.measured, run.metadata, samples, pictures.root)
        _say_figures(run, split, boxes=boxes)
        runs.append(run)
    if len(runs) > 1:
        _say_table(runs)
    documents = [run.to_dict(split, boxes=boxes) for run in runs]
    document = documents[0] if len(documents) == 1 else documents
    if out is not None:
        report.write_evaluation(out, document)
        say(str(out))
    if as_json:
        emit_json(document)


@dataclass(frozen=True)
class _Options:
    split: str
    boxes: bool
    seed: int
    device: str
    threads: int | None
    batch: int


@dataclass(frozen=True)
class _Run:
    """One model's figures, and in what it ran."""

    path: Path
    session: str
    metadata: Metadata
    measured: Measured

    def to_dict(self, split: str, *, boxes: bool) -> dict[str, Any]:
        """For JSON."""
        head = {"model": str(self.path), "session": self.session, "boxes": boxes}
        return {**head, **self.measured.to_dict(split)}


def _open(path: Path, options: _Options) -> Session:
    from opal_deploy.runtime.select import open_sessions

    return open_sessions(path, device=options.device, threads=options.threads)[0]


def _metadata(path: Path) -> Metadata:
    """What a model says of itself, without an engine: a second one's mistake is found before the first one runs.

    Raises:
        UsageError: not one of ours, or damaged.
    """
    from opal_deploy.artifact import engine_file, onnx_file
    from opal_deploy.model import checkpoint
    from opal_deploy.runtime.select import CHECKPOINT_SUFFIXES, ONNX_SUFFIX

    if path.suffix in CHECKPOINT_SUFFIXES:
        return checkpoint.describe(checkpoint.load(path))
    if path.suffix == engine_file.ENGINE_SUFFIX:
        return engine_file.read_sidecar(path).metadata
    if path.suffix == ONNX_SUFFIX:
        return onnx_file.read_metadata(path)
    raise UsageError(f"{path}: not a model that this version runs; expected .onnx, .engine, .pt or .pth")


def _check_classes(path: Path, names: list[str], pictures: DataSet) -> None:
    from opal_deploy.train.data.samples import counted

    theirs = pictures.class_names
    if names == theirs:
        return
    expected = "they must be the same, in the same order; give the data set that the model was trained on"
    if len(names) != len(theirs):
        raise UsageError(
            f"{path} knows {counted(len(names), 'class', 'classes')} ({names[0]}, ...), "
            f"{pictures.root} has {len(theirs)} ({theirs[0]}, ...); {expected}"
        )
    number, (ours, other) = next(
        (i, pair) for i, pair in enumerate(zip(names, theirs, strict=True), 1) if len({*pair}) > 1
    )
    raise UsageError(
        f"{path} and {pictures.root} have {len(names)} classes each, but number {number} is {ours!r} to the model and "
        f"{other!r} in the data set; {expected}"
    )


def _warn_of_crop(path: Path, trained: str | None, pictures: DataSet, *, boxes: bool) -> None:
    measured = pictures.crop if boxes else None
    if trained == measured:
        return
    if measured is not None:
        words = (
            "says it was trained on whole pictures and is measured on pictures cropped to their boxes; see --no-boxes"
        )
    else:
        why = "see --boxes" if pictures.crop else "the data set has no boxes"
        words = f"says it was trained on pictures cropped to their boxes and is measured on whole ones; {why}"
    say(f"warning: {one_line(str(path))} {words}")


def _evaluate(
    path: Path, session: Session, samples: list[Sample], located: PartLocations | None, options: _Options
) -> _Run:
    from opal_deploy.train.evaluation.session import evaluate_session

    with progress("evaluating") as advance:
        measured = evaluate_session(
            session,
            samples,
            boxes=options.boxes,
            batch=options.batch,
            parts=located,
            seed=options.seed,
            report=_with_estimate(advance, parts=located is not None),
            model=str(path),
        )
    return _Run(path, session.description, session.metadata, measured)


def _with_estimate(advance: Advance, *, parts: bool) -> Advance:
    """`advance` that says once how long a slow measurement of parts will take."""
    started: list[float] = []

    def report(done: int, total: int | None = None, note: str = "") -> None:
        advance(done, total, note)
        now = time.monotonic()
        # the first batch also pays for loading and warming up
        if len(started) == 1 and total is not None:
            left = (now - started[0]) * (total - done) / max(done - first[0], 1)
            if parts and left > _PATIENCE:
                say(f"about {left / 60:.0f} more minutes; --no-parts needs about half of that")
        if len(started) < 2:
            started.append(now)
            first.append(done)

    first: list[int] = []
    return report


def _samples(pictures: DataSet, split: str) -> list[Sample]:
    samples: list[Sample] = getattr(pictures, split)
    if not samples:
        raise UsageError(f"{pictures.root}: it has no {split} pictures; choose another --split")
    return samples


def _say_figures(run: _Run, split: str, *, boxes: bool) -> None:
    from opal_deploy.train.data.samples import counted

    found, parts = run.measured.evaluation, run.measured.parts
    without = "" if boxes else ", boxes left out"
    pictures = counted(found.images, f"{split} picture", f"{split} pictures")
    say(f"{one_line(str(run.path))} in {run.session}, {pictures}{without}")
    top5 = "" if found.top5 is None else f", top-5 {found.top5:.2%}"
    say(f"accuracy {found.accuracy:.2%}{top5}, macro F1 {found.macro_f1:.2%}, cross-entropy {found.loss:.4f}")
    if found.spatial_prototype_collapse is not None:
        spread = _figure(100 * found.spatial_prototype_collapse, 100 * (found.spatial_prototype_collapse_std or 0))
        say(f"spatial prototype collapse {spread} % (mean and standard deviation over pictures)")
    if parts is None:
        return
    names = {
        "prototype_consistency": ("prototype consistency", _figure(parts.consistency)),
        "prototype_stability": ("prototype stability", _figure(parts.stability)),
        "part_purity": ("part purity", _figure(parts.purity, parts.purity_std)),
    }
    measured = [f"{title} {text} %" for key, (title, text) in names.items() if key not in parts.unavailable]
    if measured:
        say(", ".join(measured))
    if len(set(parts.unavailable.values())) == 1 and not measured:
        say(f"prototype consistency, stability and part purity: not measured, {next(iter(parts.unavailable.values()))}")
        return
    for key, reason in parts.unavailable.items():
        say(f"{names[key][0]}: not measured, {reason}")


def _say_table(runs: list[_Run]) -> None:
    """One line a model, all figures in percent but the cross-entropy."""
    rows = [["model", "top-1", "top-5", "macro F1", "loss", "collapse", "consistency", "stability", "purity"]]
    for run in runs:
        found, parts = run.measured.evaluation, run.measured.parts
        collapse, spread = found.spatial_prototype_collapse, found.spatial_prototype_collapse_std
        rows.append(
            [
                one_line(str(run.path)),
                f"{100 * found.accuracy:.2f}",
                _figure(None if found.top5 is None else 100 * found.top5, digits=2),
                _figure(None if found.macro_f1 is None else 100 * found.macro_f1, digits=2),
                f"{found.loss:.4f}",
                _figure(None if collapse is None else 100 * collapse, None if spread is None else 100 * spread),
            ]
        )
        if parts is None:
            rows[-1] += ["-", "-", "-"]
        else:
            rows[-1] += [
                _figure(parts.consistency),
                _figure(parts.stability),
                _figure(parts.purity, parts.purity_std),
            ]
    columns = [column for column in zip(*rows, strict=True) if any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in columns]
    say()
    for row in zip(*columns, strict=True):
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        say("  ".join([row[0].ljust(widths[0]), *numbers]))


def _figure(value: float | None, spread: float | None = None, *, digits: int = 1) -> str:
    """A percentage with its standard deviation; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if spread is None else f"{value:.{digits}f}±{spread:.{digits}f}"
