"""The command: checks everything that can be checked first, then evaluates one model after the other."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opal_deploy.cli.console import Advance, one_line, print_json, print_message, progress
from opal_deploy.cli.evaluate.faithfulness import print_agreements, run_faithfulness
from opal_deploy.cli.evaluate.inputs import (
    check_classes,
    open_model,
    read_model_metadata,
    select_samples,
    warn_crop_mismatch,
)
from opal_deploy.cli.evaluate.output import Run, print_figures, print_table
from opal_deploy.cli.options import parse_rate
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.datasets.cub import PartLocations
    from opal_deploy.datasets.samples import Sample
    from opal_deploy.runtime.session import Session
    from opal_deploy.synthetic import Annotation

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
    partition: Annotated[int, typer.Option(min=1, max=10, help="Partition of the data set (DTD, SUN-397).")] = 1,
    skip_missing: Annotated[bool, typer.Option("--skip-missing", help="Leave out images that are not there.")] = False,
    split: Annotated[Literal["test", "val", "train"], typer.Option(help="Which images.")] = "test",
    boxes: Annotated[bool, typer.Option("--boxes/--no-boxes", help="Crop to the data set's boxes.")] = True,
    parts: Annotated[
        bool | None,
        typer.Option(
            "--parts/--no-parts",
            help="Prototype consistency, stability and part purity; on the generated set, which parts the boxes cover. "
            "Default: where the data set has part locations.",
            show_default=False,
        ),
    ] = None,
    target_error: Annotated[
        str | None,
        typer.Option(
            help="Choose a --min-margin for `infer` with which at most so many answers are wrong, such as 5%.",
            show_default=False,
        ),
    ] = None,
    faithfulness: Annotated[
        bool,
        typer.Option(
            "--faithfulness",
            help="Take the evidence cells away, and others, and see what becomes of the answer; stability of cells; "
            "agreement of several models.",
        ),
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, help="Images that faithfulness is measured on, evenly over classes.")
    ] = 100,
    fill: Annotated[
        list[str] | None,
        typer.Option(
            help="Baseline of removed cells: blur, mean or noise. Repeatable. Default: all.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise and the random cells.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the runtime.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images a forward pass.")] = 16,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for evaluation.json, tables and images: confusion, predictions, risk_coverage, faithfulness.",
            show_default=False,
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
    from opal_deploy.datasets import cub
    from opal_deploy.datasets.registry import read_dataset
    from opal_deploy.evaluation import pointing, report
    from opal_deploy.evaluation.risk import check_support

    for path in model:
        if not path.is_file():
            raise UsageError(f"{path}: no such model; expected a file of `opal-deploy export`, or a checkpoint")
    if out is not None:
        report.check_folder(out, data, overwrite=overwrite)
    options = _options(split, boxes, seed, device, threads, batch, faithfulness, limit, fill, target_error)
    # a list, so that nothing holds on to a model that was measured
    opened = [open_model(model[0], device, threads)]
    known = [opened[0].metadata, *(read_model_metadata(path) for path in model[1:])]
    for path, theirs in zip(model, known, strict=True):
        _check_wanted(path, theirs, options)
    with progress("reading") as advance:
        data_set = read_dataset(data, dataset, partition=partition, skip_missing=skip_missing, report=advance)
    print_message(one_line(f"read as {data_set.describe()}"))
    for line in data_set.warnings:
        print_message(one_line(f"warning: {line}"))
    samples = select_samples(data_set, split)
    for path, theirs in zip(model, known, strict=True):
        check_classes(path, list(theirs.class_names), data_set)
        warn_crop_mismatch(path, theirs.crop, data_set, boxes=boxes)
    if options.target is not None:
        check_support(len(samples), options.target)
    generated = pointing.has_annotations(data_set)
    if parts and not cub.has_parts(data_set) and not generated:
        raise UsageError(
            f"{data}: it has no part locations (parts/part_locs.txt of CUB, parts.jsonl of the generated set); "
            "leave --parts out"
        )
    located, annotations = None, None
    if parts is not False and cub.has_parts(data_set):
        located = cub.read_parts(data_set.root, samples)
    if parts is not False and generated:
        annotations = pointing.match_annotations(data_set, samples)
    if out is not None:
        report.create_folder(out)
    folders = [None] * len(model) if out is None else report.model_folders(out, model)
    runs = []
    for path, folder in zip(model, folders, strict=True):
        session = opened.pop() if opened else open_model(path, device, threads)
        run = _evaluate(path, session, samples, located, options)
        if folder is not None:
            report.write_model(folder, run.measured, run.metadata, samples, data_set.root)
        print_figures(run, split, boxes=boxes)
        _add_risk(run, options, folder)
        _add_parts(run, annotations, folder)
        if faithfulness:
            _add_faithfulness(run, session, samples, annotations, options, folder)
        del session
        runs.append(run)
    if len(runs) > 1:
        if faithfulness:
            for run, found in zip(runs, print_agreements(runs), strict=True):
                run.further["agreement"] = found
        print_table(runs)
    documents = [run.to_dict(split, boxes=boxes) for run in runs]
    document = documents[0] if len(documents) == 1 else documents
    if out is not None:
        report.write_evaluation(out, document)
        print_message(str(out))
    if as_json:
        print_json(document)


@dataclass(frozen=True)
class _Options:
    split: str
    boxes: bool
    seed: int
    device: str
    threads: int | None
    batch: int
    faithfulness: bool
    limit: int
    baselines: tuple[Any, ...]
    target: float | None


def _options(
    split: str, boxes: bool, seed: int, device: str, threads: int | None, batch: int, faithfulness: bool, limit: int,
    fill: list[str] | None, target_error: str | None,
) -> _Options:  # fmt: skip
    from opal_deploy.evaluation.faithfulness.perturbation import BASELINES

    baselines = tuple(dict.fromkeys(fill or BASELINES))
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise UsageError(f"--fill {unknown[0]!r}: expected {', '.join(BASELINES)}")
    target = None if target_error is None else parse_rate("--target-error", target_error)
    return _Options(split, boxes, seed, device, threads, batch, faithfulness, limit, baselines, target)


def _check_wanted(path: Path, theirs: Metadata, options: _Options) -> None:
    """Raise UsageError for metrics that a model or data set does not support, before anything is read."""
    from opal_deploy.evaluation.faithfulness.measure import check_evidence

    if options.faithfulness:
        check_evidence(theirs, str(path))
    if options.target is not None and theirs.evidence == "none":
        raise UsageError(f"{path}: it has no prototypes (evidence none), so no margins; leave --target-error out")


def _evaluate(
    path: Path, session: Session, samples: list[Sample], located: PartLocations | None, options: _Options
) -> Run:
    from opal_deploy.evaluation.session import evaluate_session

    with progress("evaluating") as advance:
        measured = evaluate_session(
            session,
            samples,
            boxes=options.boxes,
            batch=options.batch,
            parts=located,
            seed=options.seed,
            report=_with_estimate(advance, "--no-parts needs about half of that" if located is not None else None),
            model=str(path),
        )
    return Run(path, session.description, session.metadata, measured)


def _add_risk(run: Run, options: _Options, folder: Path | None) -> None:
    from opal_deploy.evaluation import report, risk
    from opal_deploy.statistics.risk import choose_threshold

    curve = risk.compute_margin_curve(run.measured)
    if curve is None:
        return
    threshold = None if options.target is None else choose_threshold(curve.summary(), options.target)
    for line in (*risk.format_curve(curve), *(risk.format_threshold(threshold) if threshold else ())):
        print_message(line)
    if threshold is not None:
        run.further["threshold"] = threshold.to_dict()
    if folder is not None:
        report.write_risk(folder, curve, threshold)


def _add_parts(run: Run, annotations: list[Annotation] | None, folder: Path | None) -> None:
    """Add the coverage of parts on the generated data set."""
    from opal_deploy.evaluation import pointing, report

    if annotations is None:
        return
    summary = pointing.evaluate_part_coverage(run.measured, annotations, run.metadata)
    if summary is None:
        print_message("boxes on parts: not measured, no right answer has boxes of single cells")
        return
    for line in pointing.format_part_coverage(summary):
        print_message(one_line(line))
    run.further[pointing.PARTS] = pointing.part_coverage_document(summary)
    if folder is not None:
        report.write_slot_parts(folder, summary)


def _add_faithfulness(
    run: Run,
    session: Session,
    samples: list[Sample],
    annotations: list[Annotation] | None,
    options: _Options,
    folder: Path | None,
) -> None:
    from opal_deploy.evaluation import report
    from opal_deploy.evaluation.faithfulness import tables

    with progress("faithfulness") as advance:
        found = run_faithfulness(
            run.path,
            session,
            samples,
            annotations,
            boxes=options.boxes,
            limit=options.limit,
            baselines=options.baselines,
            batch=options.batch,
            device=options.device,
            seed=options.seed,
            report=_with_estimate(advance, "fewer with --limit or --fill"),
        )
    for line in tables.format_lines(found):
        print_message(line)
    run.further["faithfulness"] = found.to_dict()
    if folder is not None:
        report.write_faithfulness(folder, found, one_line(run.path.name))


def _with_estimate(advance: Advance, advice: str | None) -> Advance:
    """Return an `advance` that once prints how long a slow measurement will take, with `advice` to shorten it."""
    started: list[float] = []

    def report(done: int, total: int | None = None, note: str = "") -> None:
        advance(done, total, note)
        now = time.monotonic()
        # the first batch also pays for loading and warming up
        if len(started) == 1 and total is not None:
            left = (now - started[0]) * (total - done) / max(done - first[0], 1)
            if advice and left > _PATIENCE:
                print_message(f"about {left / 60:.0f} more minutes; {advice}")
        if len(started) < 2:
            started.append(now)
            first.append(done)

    first: list[int] = []
    return report
