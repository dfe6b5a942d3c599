"""`opal-deploy demo`: the whole job, and a count of boxes that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from opal_deploy.cli.demo import MARKER, demo, measure_evidence
from opal_deploy.errors import UsageError
from opal_deploy.synthetic import Annotation, generate_dataset, read_annotations


@pytest.fixture
def annotations(tmp_path: Path) -> list[Annotation]:
    """The test images of a data set in `data`."""
    data = tmp_path / "data"
    generate_dataset(data, num_species=8, train_per_class=1, val_per_class=1, test_per_class=1, size=(64, 64))
    return [annotation for annotation in read_annotations(data) if annotation.image.startswith("test/")]


def write_records(root: Path, images: list[Annotation], part: str | None, label: str | None = None) -> list[Path]:
    """Write one record per test image, whose one box is the part's, or nearly nothing."""
    with (root / "results.jsonl").open("w") as stream:
        for annotation in images:
            box = [0, 0, 0.1, 0.1] if part is None else list(annotation.parts[part].box)
            record = {"image": str(root / "data" / annotation.image), "status": "ok", "evidence": [{"box": box}]}
            record |= {"schema": 1, "width": annotation.width, "height": annotation.height}
            record["prediction"] = {"label": label or annotation.species}
            stream.write(json.dumps(record) + "\n")
    return [root / "data", root / "results.jsonl"]


def test_evidence_on_a_part_counts_where_it_decides(tmp_path: Path, annotations: list[Annotation]) -> None:
    found = measure_evidence(*write_records(tmp_path, annotations, "crest"))
    crests = {name: part for name, parts in found.classes.items() for part in parts if part.part == "crest"}
    assert all(crest.evidence == 1.0 for crest in crests.values())
    assert {each.species: each.parts["crest"].distinguishing for each in annotations} == {
        name: crest.deciding for name, crest in crests.items()
    }
    # other parts' boxes overlap the crest's
    assert found.deciding_part is not None
    assert found.deciding_part.hits.value >= np.mean([crest.deciding for crest in crests.values()])


def test_wrong_answers_are_not_measured(tmp_path: Path, annotations: list[Annotation]) -> None:
    with pytest.raises(UsageError, match="no test image was classified correctly"):
        measure_evidence(*write_records(tmp_path, annotations, "crest", label="no such species"))


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="nothing there is removed"):
        demo(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_its_species_and_leaves_what_it_names(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    demo(out, overwrite=False, epochs=4, train_per_class=250, seed=0, weights=None)
    figures = json.loads((out / MARKER).read_text())
    assert figures["test_accuracy"] > 0.6
    records = [json.loads(line) for line in (out / "explanations" / "results.jsonl").read_text().splitlines()]
    assert len(records) == 8 * 15
    assert all(record["status"] == "ok" and len(record["evidence"]) == 2 for record in records)
    assert (out / "explanations" / "report.html").stat().st_size > 100_000
    assert (out / "run" / "best.onnx").is_file()
