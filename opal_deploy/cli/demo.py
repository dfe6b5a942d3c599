"""`opal-deploy demo`: training, export, explanation and evaluation on generated images, in minutes on a CPU."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Collection
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
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
# With --shortcut, fewer species for two trainings, and so few images that the stamp is learned before the creatures;
# four slots per class, so that some read the stamp and some do not.
SHORTCUT_SPECIES, SHORTCUT_PROTOTYPES, SHORTCUT_EPOCHS = 4, 4, 8
SHORTCUT_TRAIN, SHORTCUT_VAL, SHORTCUT_TEST = 150, 25, 50
# at a weight of 1 slots read the stamp again, with a third of the score
KEEP_OFF_WEIGHT = 5
# the test images, stamped as in training, without stamps, and with the stamps on the other species
_VARIANTS = ("stamped", "clean", "swapped")


@dataclass(frozen=True)
class _Demo:
    """The options of a demo, and the call that its commands run in."""

    context: typer.Context
    out: Path
    epochs: int
    train_per_class: int
    seed: int
    weights: Path | None


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for data, model and explanations.")] = Path("opal-demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo there.")] = False,
    shortcut: Annotated[
        bool, typer.Option("--shortcut", help="Plant a shortcut, find it, remove it and train again.")
    ] = False,
    epochs: Annotated[
        int | None, typer.Option(min=1, help=f"Default: {EPOCHS}, with --shortcut {SHORTCUT_EPOCHS}.")
    ] = None,
    train_per_class: Annotated[
        int | None, typer.Option(min=4, help=f"Default: {TRAIN_PER_CLASS}, with --shortcut {SHORTCUT_TRAIN}.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    weights: Annotated[
        Path | None, typer.Option(help=f"ImageNet weights of {BACKBONE} as a file; default: random weights.")
    ] = None,
) -> None:
    """Train, export, explain and verify a model on generated creatures, and check that its boxes are right.

    Each step is a command, printed as one would type it. With --shortcut, half of the species carry a stamp in a
    corner, and the demo finds the slots that read it.
    """
    for package in ("torch", "torchvision", "timm", "matplotlib", "onnx", "onnxscript", "onnxruntime"):
        require(package, "all-cpu", "opal-deploy demo")
    started = time.perf_counter()
    _make_empty_dir(out, overwrite=overwrite)
    defaults = (SHORTCUT_EPOCHS, SHORTCUT_TRAIN) if shortcut else (EPOCHS, TRAIN_PER_CLASS)
    options = _Demo(context, out, epochs or defaults[0], train_per_class or defaults[1], seed, weights)
    show = _show_shortcut if shortcut else _show_whole_job
    show(options, started)


def _show_whole_job(demo: _Demo, started: float) -> None:
    context, out = demo.context, demo.out
    data, run, evaluation = out / "data", out / "run", out / "evaluation"
    _generate_data(data, demo, species=SPECIES, val_per_class=VAL_PER_CLASS, test_per_class=TEST_PER_CLASS)
    _train(demo, data, run, PROTOTYPES)
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


def _show_shortcut(demo: _Demo, started: float) -> None:
    """Find, drop and unlearn a stamp that half of the species carry in training and validation images."""
    from opal_deploy.synthetic.dataset import STAMPS_FILE

    out, model, edited = demo.out, demo.out / "run" / "best.pt", demo.out / "edited.pt"
    stamps = {"stamped": range(0, SHORTCUT_SPECIES, 2), "clean": (), "swapped": range(1, SHORTCUT_SPECIES, 2)}
    for variant in _VARIANTS:
        # of the others only the test images are used, but a data set has training images
        part = demo if variant == "stamped" else replace(demo, train_per_class=1)
        _generate_data(
            out / variant, part, species=SHORTCUT_SPECIES, val_per_class=min(SHORTCUT_VAL, part.train_per_class),
            test_per_class=SHORTCUT_TEST, stamped=stamps[variant],
        )  # fmt: skip
    _train(demo, out / "stamped", out / "run", SHORTCUT_PROTOTYPES)
    accuracies = {"trained on stamped images": _evaluate_variants(demo, model, "trained")}
    dropped = _suggest(demo, model)
    drops = [argument for name in dropped for argument in ("--drop", name)]
    _run_command(
        demo.context, "edit", model, *drops, "--data", out / "stamped", "--reason", "the stamp", "--device", "cpu",
        "--page", out / "changes.html", "--out", edited,
    )  # fmt: skip
    accuracies["without the suggested slots"] = _evaluate_variants(demo, edited, "dropped")
    _run_command(
        demo.context, "train", out / "stamped", "--recipe", out / "run" / "recipe.toml", "--start-from", edited,
        "--reset-dropped", "--keep-off", out / "stamped" / STAMPS_FILE, "--keep-off-weight", KEEP_OFF_WEIGHT,
        "--out", out / "cured",
    )  # fmt: skip
    accuracies["trained on, off the stamps"] = _evaluate_variants(demo, out / "cured" / "best.pt", "cured")
    _report_shortcut(demo, dropped, accuracies, time.perf_counter() - started)


def _train(demo: _Demo, data: Path, run: Path, prototypes: int, *more: object) -> None:
    _run_command(
        demo.context, "train", data, "--backbone", BACKBONE, "--weights", demo.weights or "none",
        "--stride", STRIDE, "--prototypes", prototypes, "--size", SIZE, "--epochs", demo.epochs,
        "--batch-size", BATCH_SIZE, "--lr", f"{LEARNING_RATE:g}", "--schedule", SCHEDULE,
        "--augment", "none", "--seed", demo.seed, "--device", "cpu", *more, "--out", run,
    )  # fmt: skip


def _evaluate_variants(demo: _Demo, model: Path, name: str) -> list[float]:
    """Measure a model on stamped, clean and swapped test images; return the accuracies."""
    accuracies = []
    for variant in _VARIANTS:
        out = demo.out / "evaluations" / f"{name}-{variant}"
        _run_command(demo.context, "evaluate", demo.out / variant, "--model", model, "--device", "cpu", "--out", out)
        accuracies.append(json.loads((out / "evaluation.json").read_text(encoding="utf-8"))["test_accuracy"])
    return accuracies


def _suggest(demo: _Demo, model: Path) -> list[str]:
    """Return the names of the slots that `edit --suggest` would drop.

    Raises:
        UsageError: there are none.
    """
    file = demo.out / "suggestions.json"
    _run_command(
        demo.context, "edit", model, "--data", demo.out / "stamped", "--suggest", "--page", demo.out / "slots.html",
        "--device", "cpu", "--json", stdout=file,
    )  # fmt: skip
    names: list[str] = json.loads(file.read_text(encoding="utf-8"))["suggested"]
    if not names:
        raise UsageError("no slot is suspected, so there is nothing to drop; train longer (--epochs), or change --seed")
    return names


def _report_shortcut(demo: _Demo, dropped: list[str], accuracies: dict[str, list[float]], seconds: float) -> None:
    document = {"dropped": dropped, "accuracies": accuracies, "seconds": seconds}
    (demo.out / MARKER).write_text(json.dumps(document, indent=2) + "\n")
    images = SHORTCUT_SPECIES * SHORTCUT_TEST
    print_message(f"\n{f'accuracy on {images} test images':<32}" + "".join(f"{name:>9}" for name in _VARIANTS))
    for name, row in accuracies.items():
        print_message(f"{name:<32}" + "".join(f"{value:>9.1%}" for value in row))
    print_message(f"Open {demo.out / 'slots.html'} to see what the slots look at. Done in {seconds:.0f} s")


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


def _generate_data(
    folder: Path,
    demo: _Demo,
    *,
    species: int,
    val_per_class: int,
    test_per_class: int,
    stamped: Collection[int] = (),
) -> None:
    from opal_deploy.synthetic import generate_dataset

    with progress("drawing") as advance:
        dataset = generate_dataset(
            folder,
            num_species=species,
            train_per_class=demo.train_per_class,
            val_per_class=val_per_class,
            test_per_class=test_per_class,
            size=(SIZE, SIZE),
            seed=demo.seed,
            stamped=stamped,
            progress=advance,
        )
    print_message(f"Drew {sum(dataset.images.values())} images of {len(dataset.classes)} species in {folder}")


def _run_command(context: typer.Context, *arguments: object, stdout: Path | None = None) -> None:
    """Print a command as one would type it, and run it in this process.

    Args:
        stdout: file to write what the command prints on stdout to.

    Raises:
        typer.Exit: the command ended with an exit code other than 0.
    """
    name, *rest = map(str, arguments)
    redirection = "" if stdout is None else f" > {shlex.quote(str(stdout))}"
    print_message(f"\n$ opal-deploy {shlex.join([name, *rest])}{redirection}")
    # the root of the call that is running: its commands parse as they do when typed
    command = context.find_root().command.commands[name]  # type: ignore[attr-defined]
    with ExitStack() as stack:
        if stdout is not None:
            stack.enter_context(redirect_stdout(stack.enter_context(stdout.open("w", encoding="utf-8"))))
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
