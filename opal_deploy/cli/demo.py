"""`opal-deploy demo`: training, export and explanation on generated images, in minutes on a CPU."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import print_message, progress
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.evaluation.pointing import PointingGame
    from opal_deploy.inference.run.summary import Summary

MARKER = "demo.json"


@dataclass(frozen=True)
class DemoSettings:
    """Settings that fit into four minutes on two cores, from random weights."""

    backbone: str = "resnet18"
    prototypes: int = 2
    species: int = 8
    # many images seen a few times, instead of few images seen often and augmented
    train_per_class: int = 250
    val_per_class: int = 15
    test_per_class: int = 15
    size: int = 128
    epochs: int = 4
    batch_size: int = 32
    lr: float = 5e-4


SETTINGS = DemoSettings()


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, model and explanations.")] = Path("opal-demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo there.")] = False,
    epochs: Annotated[int, typer.Option(min=1)] = SETTINGS.epochs,
    train_per_class: Annotated[int, typer.Option(min=4)] = SETTINGS.train_per_class,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    weights: Annotated[
        Path | None, typer.Option(help=f"ImageNet weights of {SETTINGS.backbone} as a file; default: random weights.")
    ] = None,
) -> None:
    """Draw creatures whose species differ in a few parts; train, export and explain; see if the boxes are right."""
    for package in ("torch", "torchvision", "matplotlib"):
        require(package, "all-cpu", "opal-deploy demo")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "all-cpu", "opal-deploy demo")
    started = time.perf_counter()
    _make_empty_dir(out, overwrite=overwrite)
    _generate_data(out / "data", train_per_class, seed)
    accuracy = _train(out, epochs, seed, weights)
    model = _export(out / "run" / "best.pt")
    summary = _explain(out, model)
    evidence = measure_evidence(out / "data", out / "explanations" / "results.jsonl")
    _report(out, model, accuracy, summary, evidence, time.perf_counter() - started)


def _make_empty_dir(out: Path, *, overwrite: bool) -> None:
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise UsageError(f"{out}: it is not empty; choose another --out, or give --overwrite")
        if not (out / MARKER).is_file():
            raise UsageError(f"{out}: no earlier demo is in it, so nothing there is removed; choose another --out")
        shutil.rmtree(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).write_text("{}\n")
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from None


def _generate_data(folder: Path, train_per_class: int, seed: int) -> None:
    from opal_deploy.synthetic import generate_dataset

    with progress("drawing") as advance:
        dataset = generate_dataset(
            folder,
            num_species=SETTINGS.species,
            train_per_class=train_per_class,
            val_per_class=SETTINGS.val_per_class,
            test_per_class=SETTINGS.test_per_class,
            size=(SETTINGS.size, SETTINGS.size),
            seed=seed,
            progress=advance,
        )
    print_message(f"Drew {sum(dataset.images.values())} images of {len(dataset.classes)} species in {folder}")


def _train(out: Path, epochs: int, seed: int, weights: Path | None) -> float:
    from opal_deploy.datasets.registry import read_dataset
    from opal_deploy.model.config import HeadConfig
    from opal_deploy.train.loop import fit
    from opal_deploy.train.recipe import TrainOptions

    options = TrainOptions(
        backbone=SETTINGS.backbone,
        head=HeadConfig(prototypes_per_class=SETTINGS.prototypes),
        weights=None if weights is None else str(weights),
        epochs=epochs,
        batch_size=SETTINGS.batch_size,
        lr=SETTINGS.lr,
        input_size=(SETTINGS.size, SETTINGS.size),
        augment="none",
        seed=seed,
        device="cpu",
    )
    with progress("training") as advance:
        result = fit(read_dataset(out / "data"), options, out / "run", report=advance, log=print_message)
    if result.test is None:
        raise RuntimeError("the demo's data set has test images, but none were evaluated")
    return result.test.accuracy


def _export(checkpoint: Path) -> Path:
    from opal_deploy.export.checkpoint_source import CheckpointSource
    from opal_deploy.export.exporter import export
    from opal_deploy.export.options import plan_targets
    from opal_deploy.model.checkpoint import load

    source = CheckpointSource(load(checkpoint), checkpoint)
    return export(source, plan_targets(source), report=print_message).onnx[0].path


def _explain(out: Path, model: Path) -> Summary:
    from opal_deploy.inference.run.drawing import ReportOptions
    from opal_deploy.inference.run.run import RunOptions, run
    from opal_deploy.inference.sources.discovery import discover
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.inference.types import InferenceOptions, build_requests
    from opal_deploy.runtime.select import open_sessions

    sessions = open_sessions(model, device="cpu")
    folder = out / "explanations"
    folder.mkdir(exist_ok=True)
    facts = (
        ("Model", f"{model}: {SETTINGS.backbone}, {SETTINGS.prototypes} slots a class, from random weights"),
        ("Runtime", sessions[0].description),
        ("Images", "generated creatures; the classes differ in two of five parts each"),
    )
    options = RunOptions(
        folder, InferenceOptions(batch=16), report=ReportOptions(facts, field=sessions[0].metadata.effective_field)
    )
    requests = build_requests(discover([str(out / "data" / "test")], Skipped()))
    with progress("explaining") as advance:
        return run(requests, sessions, options, report_progress=lambda done: advance(done.total))


def measure_evidence(data: Path, results: Path) -> PointingGame:
    """Return the pointing game of correctly classified test images.

    Args:
        data: a generated data set.
        results: the records of its test images.

    Raises:
        UsageError: no image was classified correctly, so there is no evidence to measure.
    """
    from opal_deploy.evaluation.pointing import play_with_records
    from opal_deploy.inference.run.results import read_records
    from opal_deploy.synthetic import read_annotations

    creatures = {str(data / creature.image): creature for creature in read_annotations(data)}
    game = play_with_records(read_records(results), creatures, (SETTINGS.size // 32, SETTINGS.size // 32))
    if game is None:
        raise UsageError(
            "no test image was classified correctly, so no evidence can be measured; train longer (--epochs)"
        )
    return game


def _report(out: Path, model: Path, accuracy: float, summary: Summary, game: PointingGame, seconds: float) -> None:
    from opal_deploy.evaluation.pointing import POINTING, format_game

    chance = 1 / SETTINGS.species
    document = {"test_accuracy": accuracy, POINTING: game.to_dict(), "seconds": seconds}
    (out / MARKER).write_text(json.dumps(document, indent=2) + "\n")
    print_message()
    print_message(f"Test accuracy {accuracy:.1%} on {summary.total} images (chance {chance:.1%})")
    for line in format_game(game):
        print_message(line)
    deciding = game.deciding_part
    if deciding is not None and deciding.hits.value <= deciding.random:
        print_message(
            "The evidence lies on deciding parts no more often than random cells: the network was trained for minutes"
        )
        print_message(
            "from random weights, and any of its cells can hold the answer. Accuracy alone does not show this."
        )
    print_message(f"Model:   {model}")
    print_message(f"Records: {out / 'explanations' / 'results.jsonl'}")
    print_message(f"Report:  {out / 'explanations' / 'report.html'}")
    print_message(f"All in {seconds:.0f} s")
