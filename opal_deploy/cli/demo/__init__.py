"""`opal-deploy demo`: the job on generated creatures, with training or with the model that ships.

`make quick-model` trains the model that ships, `creatures.onnx`, again.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import sys
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opal_deploy.artifact.files import write_json
from opal_deploy.cli.console import print_message, progress
from opal_deploy.errors import UsageError, install_command, is_installed, require

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata

MODEL, MARKER = "creatures.onnx", "demo.json"
# Little training from random weights, which reached an accuracy of 95 % with seeds 0 to 7 (docs/tutorial.md); after 8
# epochs seeds 6 and 7 had 58 and 86 %. At stride 8 a cell of timm's smallest ResNet, one block per stage, sees little
# more than a part of a creature. Batches are small because steps are few. With two slots per species, seed 3 stayed at
# 81 %.
_TRAINING = (
    "--backbone", "timm:test_resnet", "--weights", "none", "--stride", 8, "--prototypes", 3, "--size", 128,
    "--batch-size", 16, "--lr", 0.005, "--schedule", "cosine", "--augment", "none", "--device", "cpu",
)  # fmt: skip
_SIDE, _EPOCHS, _TRAIN_PER_CLASS = 128, 12, 200
_SPECIES, _VAL_PER_CLASS, _TEST_PER_CLASS = 5, 16, 24
# of the quick demo
_PER_CLASS, _SHEETS = 10, 3


def demo(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Explain new creatures with a trained model: seconds, without PyTorch.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for data, model and explanations. Default: opal-demo, with --quick opal-demo-quick."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs.")] = _EPOCHS,
    train_per_class: Annotated[int, typer.Option(min=4, help="Images per species to train on.")] = _TRAIN_PER_CLASS,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed. Default: 0, with --quick a new one each time.")] = None,
) -> None:
    """Train, export, explain and verify a model on generated creatures, and check that its boxes are right.

    Each step is a command, printed as typed in a shell. An earlier demo in the folder is replaced. With --quick,
    nothing is trained.
    """
    if quick:
        require("onnxruntime", "cpu", "opal-deploy demo --quick")
        seed = secrets.randbelow(1 << 31) if seed is None else seed
        _show_quick(_Demo(context, out or Path("opal-demo-quick")), seed)
    else:
        for package in ("torch", "torchvision", "timm", "onnx", "onnxscript", "onnxruntime"):
            require(package, "all-cpu", "opal-deploy demo")
        _show_whole_job(_Demo(context, out or Path("opal-demo")), epochs, train_per_class, seed or 0)
    needs = "" if is_installed("torch") else f" (training needs: {install_command('all-cpu')})"
    print_message(f"\nNow your own folder, photos/<class>/*.jpg{needs}:")
    print_message("  opal-deploy train photos/ --out runs/mine")


class _Demo:
    """A demo's folder, and the call that its commands run in."""

    def __init__(self, context: typer.Context, out: Path) -> None:
        """Empty the folder of an earlier demo; raise UsageError if it holds something else."""
        self.context, self.out, self.started = context, out, time.perf_counter()
        if out.is_dir() and any(out.iterdir()):
            if not (out / MARKER).is_file():
                raise UsageError(f"{out}: holds other files, so nothing there is removed; choose another --out")
            shutil.rmtree(out)
        self.save()

    def save(self, **figures: Any) -> None:
        """Write demo.json with what was measured."""
        write_json(self.out / MARKER, {"figures": figures, "seconds": time.perf_counter() - self.started})

    def draw(self, **settings: Any) -> Path:
        """Draw a data set, with the settings of `generate_dataset`, and return its folder."""
        from opal_deploy.synthetic import generate_dataset

        folder = self.out / "data"
        print_message(f"Drawing creatures into {folder}")
        with progress("drawing") as advance:
            species = generate_dataset(folder, **settings, progress=advance)
        print_message(f"{len([*folder.glob('*/*/*.png')])} images of {len(species)} species")
        return folder

    def run(self, *arguments: object) -> None:
        """Print a command as typed in a shell, and run it in this process; raise typer.Exit if it fails."""
        name, *rest = map(str, arguments)
        print_message(f"\n$ opal-deploy {shlex.join([name, *rest])}")
        # the root of the call that is running: its commands parse as they do when typed
        command = self.context.find_root().command.commands[name]  # type: ignore[attr-defined]
        argv = sys.argv
        # a command's hint how to resume it repeats what was typed
        sys.argv = [argv[0], name, *rest]
        try:
            code = command.main(rest, prog_name=f"opal-deploy {name}", standalone_mode=False)
        finally:
            sys.argv = argv
        if code:
            raise typer.Exit(code)

    def infer(self, data: Path, model: Path) -> Path:
        """Explain the test images of a data set, and return the run's folder."""
        out = self.out / "explanations"
        self.run(
            "infer", data / "test", "--model", model, "--explain", "--labels", "folders", "--device", "cpu",
            "--out", out,
        )  # fmt: skip
        return out

    def report(self, accuracy: str, game: dict[str, Any] | None) -> None:
        """Print how good answers and evidence are; raise UsageError if no answer was right, so without a game."""
        if game is None:
            raise UsageError("no test image was classified correctly, so there is no evidence; train longer (--epochs)")
        part = game["distinguishing_part"]
        print_message(
            f"\nEvidence: {part['mean']:.0%} of the boxes lie on a part that tells the species from the others; by "
            f"chance {part['random']:.0%}.\nAccuracy: {accuracy}"
        )
        seconds = time.perf_counter() - self.started
        print_message(f"\nDone in {seconds:.0f} s. Open {self.out / 'explanations' / 'report.html'}.")


def _show_whole_job(demo: _Demo, epochs: int, train_per_class: int, seed: int) -> None:
    """Train, evaluate, export, infer and verify, and print how good the evidence is."""
    import torch

    from opal_deploy.artifact import onnx_file

    # in so small a network, a second thread mostly waits: next to other work, two took 159 s where one took 74 to 88
    torch.set_num_threads(1)
    data = demo.draw(
        num_species=_SPECIES, train_per_class=train_per_class, val_per_class=_VAL_PER_CLASS,
        test_per_class=_TEST_PER_CLASS, size=(_SIDE, _SIDE), seed=seed,
    )  # fmt: skip
    run = demo.out / "run"
    demo.run("train", data, *_TRAINING, "--epochs", epochs, "--seed", seed, "--out", run)
    # before the export, so that the exported file says what its evidence is worth
    demo.run("evaluate", data, "--model", run / "best.pt", "--record", "--device", "cpu")
    demo.run("export", run / "best.pt")
    model = run / "best.onnx"
    explanations = demo.infer(data, model)
    # every record and its label, once more from the files
    demo.run("verify", explanations / "results.jsonl", "--model", model, "--all", "--device", "cpu")
    figures = onnx_file.read_metadata(model).evaluation
    game = figures.get("pointing_game")
    demo.save(test_accuracy=figures["accuracy"], pointing_game=game)
    demo.report(f"{figures['accuracy']:.1%} of {figures['images']} test images.", game)
    print_message("Then try, on these files:")
    for command in (
        ("explain", min((data / "test").glob("*/*")), "--model", model, "--out", demo.out / "sheet.png"),
        ("atlas", "--model", model, "--out", demo.out / "atlas.html"),
        ("evaluate", data, "--model", model, "--faithfulness"),
        ("export", model.with_suffix(".pt"), "--trt"),
    ):
        print_message(f"  opal-deploy {shlex.join(map(str, command))}")


def _show_quick(demo: _Demo, seed: int) -> None:
    """Draw creatures, explain and verify, and say how often answers and evidence are right."""
    from opal_deploy.artifact import onnx_file

    model = demo.out / MODEL
    with as_file(files(__package__) / MODEL) as shipped:
        shutil.copyfile(shipped, model)
    metadata = onnx_file.read_metadata(model)
    data = demo.draw(
        num_species=metadata.num_classes, train_per_class=0, val_per_class=0, test_per_class=_PER_CLASS,
        size=metadata.input_size, seed=seed,
    )  # fmt: skip
    demo.run("verify", model, "--device", "cpu")
    explanations = demo.infer(data, model)
    images, sheets = sorted((data / "test").glob("*/0000.png"))[:_SHEETS], demo.out / "sheets"
    demo.run("explain", *images, "--model", model, "--labels", "folders", "--device", "cpu", "--out", sheets)
    correct, total, game = _measure(explanations / "results.jsonl", data, metadata)
    # every class has the same number of images
    chance = 1 / metadata.num_classes
    demo.save(accuracy=correct / total, chance=chance, pointing_game=game)
    demo.report(f"{correct} of {total} images ({correct / total:.0%}); by chance {chance:.0%}.", game)
    print_message(f"Evidence sheets, with the answer and the runner-up: {sheets}")


def _measure(results: Path, data: Path, metadata: Metadata) -> tuple[int, int, dict[str, Any] | None]:
    """Return the numbers of correct answers and of answers, and the pointing game of the correct ones."""
    import numpy as np

    from opal_deploy.evaluation.inputs import annotate_creatures
    from opal_deploy.evaluation.pointing import count_hits
    from opal_deploy.preprocess.geometry import Geometry
    from opal_deploy.records.record import Answered
    from opal_deploy.run.directory import read_records
    from opal_deploy.synthetic import read_annotations

    creatures = read_annotations(data)
    images = annotate_creatures(creatures).images
    by_name = {data / creature.image: image for creature, image in zip(creatures, images, strict=True)}
    records = [record for record in read_records(results) if isinstance(record, Answered)]
    shares = []
    for record in records:
        if record.prediction.label == record.label:
            corners = np.array([slot.box for slot in record.evidence])
            centres = (corners[:, :2] + corners[:, 2:]) / 2
            geometry = Geometry.whole(record.width, record.height)
            hits = count_hits(by_name[Path(record.image or "")], centres, geometry, metadata.cells)
            shares.append(hits["distinguishing_part"])
    if not shares:
        return 0, len(records), None
    mean, random = np.mean(shares, axis=0).tolist()
    game = {"distinguishing_part": {"mean": mean, "count": len(shares), "random": random}}
    return len(shares), len(records), game
