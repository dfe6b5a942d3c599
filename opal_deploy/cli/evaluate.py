"""`opal-deploy evaluate`: accuracy and explanation metrics of models, in the runtime that will run them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from opal_deploy.cli.console import print_json, print_line, progress
from opal_deploy.cli.options import CropToBoxes, DatasetName, Partition, SkipMissing, parse_rate


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
            "it, exports of a checkpoint carry it. With --split val also a temperature, for calibrated probabilities, "
            "where the model has none. The file's digest changes.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the figures to stdout as JSON.")] = False,
) -> None:
    """Measure accuracy and, for models with prototypes, the quality of their explanations on a data set.

    Takes checkpoints and exported models alike; several are compared, which shows what deployment costs.
    """
    from opal_deploy.evaluation.api import evaluate_model

    with progress("evaluating") as advance:
        results = evaluate_model(
            model,
            data,
            dataset=dataset,
            partition=partition,
            skip_missing=skip_missing,
            split=split,
            boxes=boxes,
            parts=parts,
            annotations=annotations,
            target_error=None if target_error is None else parse_rate("--target-error", target_error),
            faithfulness=faithfulness,
            limit=limit,
            fill=fill,
            seed=seed,
            device=device,
            threads=threads,
            batch=batch,
            out=out,
            overwrite=overwrite,
            record=record,
            log=print_line,
            progress=advance,
        )
    if as_json:
        documents = [result.to_dict() for result in results]
        print_json(documents[0] if len(documents) == 1 else documents)
