"""`opal-deploy evaluate`: how good is a model, in the engine that will run it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.console import emit_json, progress, say
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.train.data.samples import DataSet, Sample


def evaluate(
    data: Annotated[Path, typer.Argument(help="A data set as `train` takes it: an ImageFolder, or CUB's folder.")],
    model: Annotated[Path, typer.Option(help="An exported model, or a checkpoint.")],
    split: Annotated[Literal["test", "val", "train"], typer.Option(help="Which pictures.")] = "test",
    boxes: Annotated[bool, typer.Option("--boxes/--no-boxes", help="Crop to the data set's boxes.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Of the runtime on the CPU.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures a forward pass.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Write the figures to stdout as JSON.")] = False,
) -> None:
    """Accuracy, cross-entropy and spatial prototype collapse of a model on a data set.

    Works on checkpoints and on exported models alike, so one sees what deployment costs.
    """
    require("torch", "train", "opal-deploy evaluate")
    from opal_deploy.runtime.select import open_sessions
    from opal_deploy.train.data.catalogue import read
    from opal_deploy.train.evaluation.session import evaluate_session

    pictures = read(data)
    for line in pictures.warnings:
        say(f"warning: {line}")
    session = open_sessions(model, device=device, threads=threads)[0]
    samples = _samples(pictures, split)
    names = list(session.metadata.class_names)
    if names != pictures.class_names:
        raise UsageError(
            f"{model} knows {len(names)} classes ({names[0]}, ...), {data} has {pictures.num_classes} "
            f"({pictures.class_names[0]}, ...); they must be the same, in the same order"
        )
    with progress("evaluating") as advance:
        found = evaluate_session(session, samples, boxes=boxes, batch=batch, report=advance)
    say(f"{model} in {session.description}, {found.images} {split} pictures{'' if boxes else ', boxes left out'}")
    say(f"accuracy {found.accuracy:.2%}, cross-entropy {found.loss:.4f}")
    if found.spatial_prototype_collapse is not None:
        say(f"spatial prototype collapse {found.spatial_prototype_collapse:.2%}")
    if as_json:
        emit_json({"model": str(model), "session": session.description, "boxes": boxes, **found.to_dict(split)})


def _samples(pictures: DataSet, split: str) -> list[Sample]:
    samples: list[Sample] = getattr(pictures, split)
    if not samples:
        raise UsageError(f"{pictures.root}: it has no {split} pictures; choose another --split")
    return samples
