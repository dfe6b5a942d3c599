"""`opal-deploy demo`: training, export, explanation and evaluation on generated images, in minutes on a CPU."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.cli.console import print_message, progress
from opal_deploy.errors import UsageError, require

MARKER = "demo.json"
# evidence that hits less than twice as often as random cells is called weak, and so are answers under the accuracy that
# a test holds the settings below to
_GOOD_RATIO, _GOOD_ACCURACY = 2, 0.95


@dataclass(frozen=True)
class DemoSettings:
    """Settings that fit into three minutes on two cores, from random weights.

    At stride 8 a cell sees little more than a part of a creature; at the paper's stride of 32 it sees all of it, and
    its place says nothing. The backbone halves its feature maps by windows that do not overlap, so that what a cell
    sees is centred in its box; in a ResNet trained from random weights it lies up to half a cell off.
    """

    backbone: str = "timm:inception_next_atto"
    stride: int = 8
    prototypes: int = 2
    species: int = 8
    # many images seen a few times, instead of few images seen often and augmented
    train_per_class: int = 250
    val_per_class: int = 15
    test_per_class: int = 15
    size: int = 128
    epochs: int = 18
    batch_size: int = 32
    lr: float = 2e-3
    schedule: str = "cosine"


SETTINGS = DemoSettings()


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for data, model and explanations.")] = Path("opal-demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo there.")] = False,
    epochs: Annotated[int, typer.Option(min=1)] = SETTINGS.epochs,
    train_per_class: Annotated[int, typer.Option(min=4)] = SETTINGS.train_per_class,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    weights: Annotated[
        Path | None, typer.Option(help=f"ImageNet weights of {SETTINGS.backbone} as a file; default: random weights.")
    ] = None,
) -> None:
    """Draw creatures whose species differ in a few parts; train, export, explain and verify; see if boxes are right.

    Every step is a command of its own, printed as a person would type it.
    """
    for package in ("torch", "torchvision", "timm", "matplotlib", "onnx", "onnxscript", "onnxruntime"):
        require(package, "all-cpu", "opal-deploy demo")
    started = time.perf_counter()
    _make_empty_dir(out, overwrite=overwrite)
    data, run, evaluation = out / "data", out / "run", out / "evaluation"
    _generate_data(data, train_per_class, seed)
    _run_command(
        context, "train", data, "--backbone", SETTINGS.backbone, "--weights", weights or "none",
        "--stride", SETTINGS.stride, "--prototypes", SETTINGS.prototypes, "--size", SETTINGS.size, "--epochs", epochs,
        "--batch-size", SETTINGS.batch_size, "--lr", f"{SETTINGS.lr:g}", "--schedule", SETTINGS.schedule,
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
            num_species=SETTINGS.species,
            train_per_class=train_per_class,
            val_per_class=SETTINGS.val_per_class,
            test_per_class=SETTINGS.test_per_class,
            size=(SETTINGS.size, SETTINGS.size),
            seed=seed,
            progress=advance,
        )
    print_message(f"Drew {sum(dataset.images.values())} images of {len(dataset.classes)} species in {folder}")


def _run_command(context: typer.Context, *arguments: object) -> None:
    """Print a command as a person would type it, and run it in this process.

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
            f"That is low, {_GOOD_ACCURACY:.0%} is expected of {SETTINGS.epochs} epochs on {SETTINGS.train_per_class} "
            "images a species: this model does not show what the method can do, in its evidence neither; train longer "
            "(--epochs), on more images (--train-per-class), or from another --seed."
        )
    print_message(
        f"Evidence: {distinguishing['mean']:.1%} on a part that distinguishes the species, {ratio:.1f} times the rate "
        f"of random cells of the creature ({distinguishing['random']:.1%})."
    )
    if ratio < _GOOD_RATIO:
        print_message("That is hardly better than chance, although the answers may be right: train longer (--epochs).")
    print_message()
    print_message(f"Open {out / 'explanations' / 'report.html'}. Then, on these very files:")
    model = out / "run" / "best.onnx"
    image = min((out / "data" / "test").glob("*/*"))
    for command in (
        ("explain", image, "--model", model, "--out", out / "sheet.png"),
        ("atlas", out / "data", "--model", model, "--out", out / "atlas"),
        ("evaluate", out / "data", "--model", model, "--faithfulness"),
        ("export", out / "run" / "best.pt", "--trt"),
    ):
        print_message(f"  opal-deploy {shlex.join(map(str, command))}")
    print_message(f"All in {seconds:.0f} s")
