"""`opal-deploy evaluate`: accuracy and explanation metrics of models, in the runtime that will run them.

The command checks everything that can be checked first (`inputs`), then measures one model after the other (`measure`)
and prints the results (`output`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.cli.evaluate.inputs import (
    EvaluateOptions,
    check_classes,
    check_evidence,
    check_split,
    check_validation,
    open_model,
    parse_baselines,
    read_model_metadata,
    select_inputs,
    warn_crop_mismatch,
    warn_trained_images,
)
from opal_deploy.cli.evaluate.measure import add_agreements, measure_model
from opal_deploy.cli.evaluate.output import print_table
from opal_deploy.cli.options import CropToBoxes, DatasetName, Partition, SkipMissing, parse_rate
from opal_deploy.errors import UsageError, require


def evaluate(
    data: Annotated[Path, typer.Argument(help="A data set as `train` takes it.")],
    model: Annotated[
        list[Path], typer.Option(help="An exported model, or a checkpoint. Several are compared: give it again.")
    ],
    dataset: DatasetName = None,
    partition: Partition = 1,
    skip_missing: SkipMissing = False,
    split: Annotated[
        Literal["test", "val", "train", "all"],
        typer.Option(help="Which images; `all` for a folder of images that were kept from training as a whole."),
    ] = "test",
    boxes: CropToBoxes = True,
    parts: Annotated[
        bool | None,
        typer.Option(
            "--parts/--no-parts",
            help="Prototype consistency, stability and part purity, and the pointing game on parts. "
            "Default: where the data set has parts.",
            show_default=False,
        ),
    ] = None,
    annotations: Annotated[
        Path | None,
        typer.Option(
            help="COCO file with the boxes of the objects that evidence should lie in (pointing game). "
            "Default: the data set's own boxes or masks.",
            show_default=False,
        ),
    ] = None,
    target_error: Annotated[
        str | None,
        typer.Option(
            help="Choose a --min-margin for `infer` with which at most so many predictions are wrong, such as 5%.",
            show_default=False,
        ),
    ] = None,
    faithfulness: Annotated[
        bool,
        typer.Option(
            "--faithfulness",
            help="Remove the evidence cells, and others as controls, and measure how the prediction changes; "
            "stability of cells; agreement of several models.",
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
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Keep what was measured of the evidence in the model's own file: `infer --explain` and `inspect` show "
            "it, exports of a checkpoint carry it. The file's digest changes.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the figures to stdout as JSON.")] = False,
) -> None:
    """Measure accuracy and, for models with prototypes, the quality of their explanations on a data set.

    Takes checkpoints and exported models alike; several are compared, which shows what deployment costs.
    """
    for package in ("torch", "sklearn", "matplotlib"):
        require(package, "train", "opal-deploy evaluate", pip_name={"sklearn": "scikit-learn"}.get(package))
    from opal_deploy.datasets.registry import read_dataset
    from opal_deploy.datasets.samples import recorded_validation
    from opal_deploy.evaluation import report
    from opal_deploy.evaluation.record import build_evaluation, check_recordable, record_evaluation

    for path in model:
        if not path.is_file():
            raise UsageError(f"{path}: no such model; expected a file of `opal-deploy export`, or a checkpoint")
    if out is not None:
        report.check_folder(out, data, overwrite=overwrite)
    baselines = parse_baselines(fill)
    rate = None if target_error is None else parse_rate("--target-error", target_error)
    options = EvaluateOptions(
        split, boxes, parts, annotations, seed, device, threads, batch, faithfulness, limit, baselines, rate
    )  # fmt: skip
    # a list to pop from, so that the session of a measured model is freed
    sessions = [open_model(model[0], device, threads)]
    metadata = {path: read_model_metadata(path) for path in model[1:]} | {model[0]: sessions[0].metadata}
    for path in model:
        check_evidence(path, metadata[path], options)
        if record:
            check_recordable(path, metadata[path])
    with progress("reading") as advance:
        data_set = read_dataset(
            data,
            dataset,
            partition=partition,
            skip_missing=skip_missing,
            # a few images a class, all to be measured, need not suffice for a split
            validation=recorded_validation(sessions[0].metadata.training) if split in ("train", "val") else None,
            report=advance,
        )
    print_message(one_line(f"read as {data_set.describe()}"))
    for line in data_set.warnings:
        print_message(one_line(f"warning: {line}"))
    check_split(data_set, split)
    for path in model:
        check_validation(path, metadata[path].training, data_set, split)
        warn_trained_images(path, metadata[path].training, data_set, split)
        check_classes(path, list(metadata[path].class_names), data_set)
        warn_crop_mismatch(path, metadata[path].crop, data_set, boxes=boxes)
    inputs = select_inputs(data_set, options)
    folders: list[Path | None] = [None] * len(model)
    if out is not None:
        report.create_folder(out)
        folders = [*report.model_folders(out, model)]

    results = []
    for path, folder in zip(model, folders, strict=True):
        session = sessions.pop() if sessions else open_model(path, device, threads)
        results.append(measure_model(path, session, inputs, options, folder))
        del session
    if len(results) > 1:
        if faithfulness:
            add_agreements(results)
        print_table(results)
    documents = [result.to_dict(options) for result in results]
    if record:
        for path, measured in zip(model, documents, strict=True):
            evaluation = build_evaluation(measured, data_set, split)
            print_message(one_line(record_evaluation(path, evaluation, measured.get("receptive_field"))))
    document = documents[0] if len(documents) == 1 else documents
    if out is not None:
        report.write_evaluation(out, document)
        print_message(str(out))
    if as_json:
        print_json(document)
