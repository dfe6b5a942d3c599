"""`opal-deploy demo`: training, evaluation, export, explanation and verification on generated images."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from opal_deploy.cli.console import print_message
from opal_deploy.cli.demo.steps import Demo, Training, print_own_folder
from opal_deploy.errors import UsageError

# evidence that hits less than twice as often as random cells is weak; a test requires this accuracy
_GOOD_RATIO, _GOOD_ACCURACY = 2, 0.95
# Little training from random weights, which reached that accuracy with seeds 0 to 7 (docs/tutorial.md); after 8 epochs
# seeds 6 and 7 had 58 and 86 %. At stride 8 a cell of timm's smallest ResNet, one block per stage, sees little more
# than a part of a creature. Batches are small because steps are few. With two slots per species, seed 3 stayed at 81 %.
SPECIES, VAL_PER_CLASS, TEST_PER_CLASS = 5, 16, 24
WHOLE = Training("timm:test_resnet", size=128, prototypes=3, batch_size=16, lr=5e-3, epochs=12, train_per_class=200)


def show_whole_job(demo: Demo, training: Training) -> None:
    """Train, evaluate, export, infer and verify, and print how good the evidence is."""
    import torch

    # in so small a network, a second thread mostly waits: next to other work, two took 159 s where one took 74 to 88
    torch.set_num_threads(1)
    data, run, evaluation = demo.out / "data", demo.out / "run", demo.out / "evaluation"
    demo.draw(
        data, num_species=SPECIES, train_per_class=training.train_per_class, val_per_class=VAL_PER_CLASS,
        test_per_class=TEST_PER_CLASS, size=(training.size, training.size), seed=training.seed,
    )  # fmt: skip
    demo.run("train", data, *training.to_arguments(), "--out", run, "--resume")
    # before the export, so that the exported file says what its evidence is worth
    demo.run(
        "evaluate", data, "--model", run / "best.pt", "--record", "--device", "cpu", "--out", evaluation,
        replaces=[evaluation],
    )  # fmt: skip
    demo.run("export", run / "best.pt")
    explanations = demo.out / "explanations"
    demo.run(
        "infer", data / "test", "--model", run / "best.onnx", "--explain", "--labels", "folders", "--device", "cpu",
        "--out", explanations,
    )  # fmt: skip
    # every record, once more from the files
    demo.run(
        "verify", explanations / "results.jsonl", "--model", run / "best.onnx", "--all",
        "--device", "cpu",
    )  # fmt: skip
    _report(demo, evaluation / "evaluation.json")


def _report(demo: Demo, evaluation: Path) -> None:
    """Print the demo's results and the next commands, and keep the figures in demo.json.

    Raises:
        UsageError: no image was classified correctly, so there is no evidence to speak of.
    """
    out, figures = demo.out, json.loads(evaluation.read_text(encoding="utf-8"))
    accuracy, pointing = figures["test_accuracy"], figures.get("pointing_game")
    demo.save(test_accuracy=accuracy, pointing_game=pointing)
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
            f"That is low: with most seeds, {WHOLE.epochs} epochs on {WHOLE.train_per_class} images per species reach "
            f"{_GOOD_ACCURACY:.0%}. This model does not show what the method can do; train longer (--epochs), on more "
            "images (--train-per-class), or with another --seed."
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
    print_message(
        f"Done in {demo.seconds:.0f} s. Open {out / 'explanations' / 'report.html'}. Then try, on these files:"
    )
    model = out / "run" / "best.onnx"
    image = min((out / "data" / "test").glob("*/*"))
    for command in (
        ("explain", image, "--model", model, "--out", out / "sheet.png"),
        ("atlas", out / "data", "--model", model, "--out", out / "atlas"),
        ("evaluate", out / "data", "--model", model, "--faithfulness"),
        ("export", out / "run" / "best.pt", "--trt"),
    ):
        print_message(f"  opal-deploy {shlex.join(map(str, command))}")
    print_own_folder()
