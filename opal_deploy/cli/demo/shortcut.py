"""`opal-deploy demo --shortcut`: a planted stamp is found, dropped and trained away."""

from __future__ import annotations

import json
from pathlib import Path

from opal_deploy.cli.console import print_message
from opal_deploy.cli.demo.steps import Demo, Training
from opal_deploy.errors import UsageError

# Fewer species than in the whole demo, for two trainings, and so few images that the stamp is learned before the
# creatures; four slots per class, so that some read the stamp and some do not. The backbone halves its feature maps by
# windows that do not overlap, so that what a cell sees is centred in its box.
SPECIES, VAL_PER_CLASS, TEST_PER_CLASS = 4, 25, 50
SHORTCUT = Training(
    "timm:inception_next_atto", size=128, prototypes=4, batch_size=32, lr=2e-3, epochs=8, train_per_class=150
)
# at a weight of 1 slots read the stamp again, with a third of the score
KEEP_OFF_WEIGHT = 5
# the test images, stamped as in training, without stamps, and with the stamps on the other species
_VARIANTS = ("stamped", "clean", "swapped")


def show_shortcut(demo: Demo, training: Training) -> None:
    """Find, drop and unlearn a stamp that half of the species carry in training and validation images."""
    from opal_deploy.synthetic.dataset import STAMPS_FILE

    out, model, edited = demo.out, demo.out / "run" / "best.pt", demo.out / "edited.pt"
    stamps = {"stamped": range(0, SPECIES, 2), "clean": (), "swapped": range(1, SPECIES, 2)}
    for variant in _VARIANTS:
        # of the others only the test images are used, but a data set has training images
        per_class = training.train_per_class if variant == "stamped" else 1
        demo.draw(
            out / variant, num_species=SPECIES, train_per_class=per_class, val_per_class=min(VAL_PER_CLASS, per_class),
            test_per_class=TEST_PER_CLASS, size=(training.size, training.size), seed=training.seed,
            stamped=stamps[variant],
        )  # fmt: skip
    demo.run("train", out / "stamped", *training.to_arguments(), "--out", out / "run", "--resume")
    accuracies = {"trained on stamped images": _evaluate_variants(demo, model, "trained")}
    dropped = _suggest(demo, model)
    drops = [argument for name in dropped for argument in ("--drop", name)]
    demo.run(
        "edit", model, *drops, "--data", out / "stamped", "--reason", "the stamp", "--device", "cpu",
        "--page", out / "changes.html", "--out", edited, replaces=[out / "changes.html", edited],
    )  # fmt: skip
    accuracies["without the suggested slots"] = _evaluate_variants(demo, edited, "dropped")
    demo.run(
        "train", out / "stamped", "--recipe", out / "run" / "recipe.toml", "--start-from", edited, "--reset-dropped",
        "--keep-off", out / "stamped" / STAMPS_FILE, "--keep-off-weight", KEEP_OFF_WEIGHT, "--out", out / "cured",
        "--resume",
    )  # fmt: skip
    accuracies["trained on, off the stamps"] = _evaluate_variants(demo, out / "cured" / "best.pt", "cured")
    _report(demo, dropped, accuracies)


def _evaluate_variants(demo: Demo, model: Path, name: str) -> list[float]:
    """Measure a model on stamped, clean and swapped test images; return the accuracies."""
    accuracies = []
    for variant in _VARIANTS:
        out = demo.out / "evaluations" / f"{name}-{variant}"
        demo.run("evaluate", demo.out / variant, "--model", model, "--device", "cpu", "--out", out, replaces=[out])
        accuracies.append(json.loads((out / "evaluation.json").read_text(encoding="utf-8"))["test_accuracy"])
    return accuracies


def _suggest(demo: Demo, model: Path) -> list[str]:
    """Return the names of the slots that `edit --suggest` suspects.

    Raises:
        UsageError: there are none.
    """
    file, page = demo.out / "suggestions.json", demo.out / "slots.html"
    demo.run(
        "edit", model, "--data", demo.out / "stamped", "--suggest", "--page", page, "--device", "cpu", "--json",
        stdout=file, replaces=[page],
    )  # fmt: skip
    names: list[str] = json.loads(file.read_text(encoding="utf-8"))["suspected"]
    if not names:
        raise UsageError("no slot is suspected, so there is nothing to drop; train longer (--epochs), or change --seed")
    return names


def _report(demo: Demo, dropped: list[str], accuracies: dict[str, list[float]]) -> None:
    demo.save(dropped=dropped, accuracies=accuracies)
    images = SPECIES * TEST_PER_CLASS
    print_message(f"\n{f'accuracy on {images} test images':<32}" + "".join(f"{name:>9}" for name in _VARIANTS))
    for name, row in accuracies.items():
        print_message(f"{name:<32}" + "".join(f"{value:>9.1%}" for value in row))
    print_message(f"Open {demo.out / 'slots.html'} to see what the slots look at. Done in {demo.seconds:.0f} s")
