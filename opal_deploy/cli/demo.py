"""`opal-deploy demo`: training, export, explanation and evaluation on generated images, in minutes on a CPU."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.cli.console import print_message, progress
from opal_deploy.errors import UsageError, require

MARKER = "demo.json"
# evidence that hits less than twice as often as random cells is weak; the accuracy is that which a test requires
_GOOD_RATIO, _GOOD_ACCURACY = 2, 0.95
# Settings that fit into three minutes on two cores, from random weights. At stride 8 a cell sees little more than a
# part of a creature. The backbone halves its feature maps by windows that do not overlap, so that what a cell sees is
# centred in its box; in a ResNet trained from random weights it lies up to half a cell off.
BACKBONE, STRIDE, PROTOTYPES, SPECIES, SIZE = "timm:inception_next_atto", 8, 2, 8, 128
# many images seen a few times, instead of few images seen often and augmented
TRAIN_PER_CLASS, VAL_PER_CLASS, TEST_PER_CLASS = 250, 15, 15
EPOCHS, BATCH_SIZE, LEARNING_RATE, SCHEDULE = 18, 32, 2e-3, "cosine"


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for data, model and explanations.")] = Path("opal-demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo there.")] = False,
    epochs: Annotated[int, typer.Option(min=1)] = EPOCHS,
    train_per_class: Annotated[int, typer.Option(min=4)] = TRAIN_PER_CLASS,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    weights: Annotated[
        Path | None, typer.Option(help=f"ImageNet weights of {BACKBONE} as a file; default: random weights.")
    ] = None,
) -> None:
    """Train, export, explain and verify a model on generated creatures, and check that its boxes are right.

    Each step is a command, printed as one would type it.
    """
    for package in ("torch", "torchvision", "timm", "matplotlib", "onnx", "onnxscript", "onnxruntime"):
        require(package, "all-cpu", "opal-deploy demo")
    started = time.perf_counter()
    _make_empty_dir(out, overwrite=overwrite)
    data, run, evaluation = out / "data", out / "run", out / "evaluation"
    _generate_data(data, train_per_class, seed)
    _run_command(
        context, "train", data, "--backbone", BACKBONE, "--weights", weights or "none",
        "--stride", STRIDE, "--prototypes", PROTOTYPES, "--size", SIZE, "--epochs", epochs,
        "--batch-size", BATCH_SIZE, "--lr", f"{LEARNING_RATE:g}", "--schedule", SCHEDULE,
        "--augment", "none", "--seed", seed, "--device", "cpu", "--out", run,
    )  # fmt: skip
    # before the export, so that the exported file says what its evidence is worth
    _run_command(
        context, "evaluate", data, "--model", run / "best.pt", "--record", "--device", "cpu", "--out", evaluation
    )
    _run_command(context, "export", run / "best.pt")
    _run_command(
        context, "infer", data / "test", "--model", run / "best.onnx", "--explain", "--labels", "folders",
        "--device", "cpu", "--out", out / "explanations",
    )  # fmt: skip
    # every record and its label, once more from the files
    _run_command(
        context, "verify", out / "explanations" / "results.jsonl", "--model", run / "best.onnx", "--labels", "folders",
        "--all", "--device", "cpu",
    )  # fmt: skip
    _report(out, evaluation / "evaluation.json", time.perf_counter() - started)


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
            num_species=SPECIES,
            train_per_class=train_per_class,
            val_per_class=VAL_PER_CLASS,
            test_per_class=TEST_PER_CLASS,
            size=(SIZE, SIZE),
            seed=seed,
            progress=advance,
        )
    print_message(f"Drew {sum(dataset.images.values())} images of {len(dataset.classes)} species in {folder}")


def _run_command(context: typer.Context, *arguments: object) -> None:
    """Print a command as one would type it, and run it in this process.

    Raises:
        typer.Exit: the command ended with an exit code other than 0.
    """
    name, *rest = map(str, arguments)
    print_message(f"\n$ opal-deploy {shlex.join([name, *rest])}")
    # the root of the call that is running: its commands parse as they do when typed
    command = context.find_root().command.commands[name]  # type: ignore[attr-defined]
    code = command.main(rest, prog_name=f"opal-deploy {name}", standalone_mode=False)
    if code:
        raise typer.Exit(code)


def _report(out: Path, evaluation: Path, seconds: float) -> None:
    """Print what the demo showed and what to type next, and keep the figures in demo.json.

    Raises:
        UsageError: no image was classified correctly, so there is no evidence to speak of.
    """
    figures = json.loads(evaluation.read_text(encoding="utf-8"))
    accuracy, pointing = figures["test_accuracy"], figures.get("pointing_game")
    document = {"test_accuracy": accuracy, "pointing_game": pointing, "seconds": seconds}
    (out / MARKER).write_text(json.dumps(document, indent=2) + "\n")
    if pointing is None:
        raise UsageError(
            "no test image was classified correctly, so its evidence shows nothing; train longer (--epochs)"
        )
    distinguishing = pointing["distinguishing_part"]
    ratio = distinguishing["mean"] / distinguishing["random"]
    print_message()
    print_message(f"Accuracy: {accuracy:.1%} of {figures['test_images']} test images.")
    if accuracy < _GOOD_ACCURACY:
        print_message(
            f"That is low: {EPOCHS} epochs on {TRAIN_PER_CLASS} images per species reach {_GOOD_ACCURACY:.0%}. This "
            "model does not show what the method can do; train longer (--epochs), on more images (--train-per-class), "
            "or with another --seed."
        )
    print_message(
        f"Evidence: {distinguishing['mean']:.1%} on a part that distinguishes the species, {ratio:.1f} times the rate "
        f"of random cells of the creature ({distinguishing['random']:.1%})."
    )
    if ratio < _GOOD_RATIO:
        print_message(
            "That is hardly better than chance, even if the predictions are correct: train longer (--epochs)."
        )
    print_message()
    print_message(f"Open {out / 'explanations' / 'report.html'}. Then try, on these files:")
    model = out / "run" / "best.onnx"
    image = min((out / "data" / "test").glob("*/*"))
    for command in (
        ("explain", image, "--model", model, "--out", out / "sheet.png"),
        ("atlas", out / "data", "--model", model, "--out", out / "atlas"),
        ("evaluate", out / "data", "--model", model, "--faithfulness"),
        ("export", out / "run" / "best.pt", "--trt"),
    ):
        print_message(f"  opal-deploy {shlex.join(map(str, command))}")
    print_message(f"Done in {seconds:.0f} s")
