"""`opal-deploy demo --quick`: new creatures, explained by a trained model that ships with the package.

`make quick-model` trains the model again.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from opal_deploy.cli.console import print_message
from opal_deploy.cli.demo.steps import Demo, print_own_folder, read_marker
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.records.record import Answered

MODEL = "creatures.onnx"
_PER_CLASS, _SHEETS = 10, 3


def show_quick(context: typer.Context, out: Path, seed: int, ort_web: Path | None) -> None:
    """Draw creatures, explain and verify, and say how often answers and evidence are right."""
    from opal_deploy.artifact import onnx_file

    demo = Demo.open(context, out, {"quick": True, "seed": seed}, overwrite=_is_quick(out))
    model, data, explanations = out / MODEL, out / "data", out / "explanations"
    with as_file(files(__package__) / MODEL) as shipped:
        shutil.copyfile(shipped, model)
    metadata = onnx_file.read_metadata(model)
    demo.draw(
        data, num_species=metadata.num_classes, train_per_class=0, val_per_class=0, test_per_class=_PER_CLASS,
        size=metadata.input_size, seed=seed,
    )  # fmt: skip
    demo.run("verify", model, "--device", "cpu")
    demo.run(
        "infer", data / "test", "--model", model, "--explain", "--labels", "folders", "--device", "cpu",
        "--out", explanations,
    )  # fmt: skip
    images = sorted((data / "test").glob("*/0000.png"))[:_SHEETS]
    demo.run("explain", *images, "--model", model, "--labels", "folders", "--device", "cpu", "--out", out / "sheets")
    page = _write_page(demo, model, ort_web)
    print_message()
    _report(demo, data, explanations / "results.jsonl", metadata)
    print_message(f"\nDone in {demo.seconds:.0f} s. Open:")
    print_message(f"  {explanations / 'report.html'}  every image with the evidence for its answer")
    print_message(f"  {out / 'sheets'}  evidence sheets: the answer next to the runner-up")
    print_message(f"  {page}")
    print_own_folder()


def _is_quick(out: Path) -> bool:
    """Return whether a folder holds an earlier quick demo, which the next one replaces."""
    marker = read_marker(out)
    return marker is not None and "quick" in marker.get("options", {})


def _write_page(demo: Demo, model: Path, ort_web: Path | None) -> str:
    """Write the page that runs the model in a browser, and return how to open it, or how to get what it needs."""
    from opal_deploy.web.site import ORT_WEB, Site

    page = demo.out / "web"
    try:
        Site(page, ort_web).check()
    except UsageError:
        if ort_web is not None:
            raise
        return f"For a page that runs the model in the browser: npm install {ORT_WEB}, then the same command again"
    demo.run("export", model, "--web", page, *([] if ort_web is None else ["--ort-web", ort_web]))
    return f"http://localhost:8000  the model in your browser, after: python -m http.server --directory {page}"


def _report(demo: Demo, data: Path, results: Path, metadata: Metadata) -> None:
    """Print how often answers and evidence are right, and how often they would be by chance."""
    from opal_deploy.records.record import Answered
    from opal_deploy.run.directory import read_records

    records = [record for record in read_records(results) if isinstance(record, Answered)]
    answers, labels = [record.prediction.label for record in records], [record.label for record in records]
    correct = sum(answer == label for answer, label in zip(answers, labels, strict=True))
    # how often answers and labels agree if answers are shuffled among the images
    counts = Counter(answers)
    chance = sum(counts[label or ""] for label in labels) / len(records) ** 2
    demo.save(accuracy=correct / len(records), chance=chance)
    print_message(
        f"Accuracy: {correct} of {len(records)} images ({correct / len(records):.1%}); the same answers in random "
        f"order: {chance:.1%}"
    )
    shares = _find_shares(records, data, metadata)
    if not shares:
        return
    hits, random = (sum(column) / len(shares) for column in zip(*shares, strict=True))
    demo.save(pointing_game={"distinguishing_part": {"mean": hits, "count": len(shares), "random": random}})
    print_message(
        f"Evidence: {hits:.1%} on a part that distinguishes the species; random cells of the creature: {random:.1%}"
    )


def _find_shares(records: Sequence[Answered], data: Path, metadata: Metadata) -> list[tuple[float, float]]:
    """Return, per correct prediction, the shares of its evidence and of random cells on distinguishing parts."""
    import numpy as np

    from opal_deploy.evaluation.inputs import annotate_creatures
    from opal_deploy.evaluation.pointing import count_hits
    from opal_deploy.preprocess.geometry import Geometry
    from opal_deploy.synthetic import read_annotations

    creatures = read_annotations(data)
    images = annotate_creatures(creatures).images
    by_name = {data / creature.image: image for creature, image in zip(creatures, images, strict=True)}
    shares = []
    for record in records:
        if record.prediction.label == record.label:
            corners = np.array([slot.box for slot in record.evidence])
            geometry = Geometry.whole(record.width, record.height)
            centres = (corners[:, :2] + corners[:, 2:]) / 2
            hits = count_hits(by_name[Path(record.image or "")], centres, geometry, metadata.grid)
            shares.append(hits.share(distinguishing=True))
    return shares
