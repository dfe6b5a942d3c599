"""`opal-deploy demo`: the whole job, and a count of boxes that can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opal_deploy.cli.demo import MARKER, demo, measure_evidence
from opal_deploy.errors import UsageError
from opal_deploy.synthetic import generate_dataset, read_annotations


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "data"
    generate_dataset(folder, num_species=8, train_per_class=1, val_per_class=1, test_per_class=1, size=(128, 128))
    return folder


def _write_records(data: Path, results: Path, box_of: str | None, label: str | None = None) -> None:
    """Write one record per test image, whose one box is the named part's, or nearly nothing."""
    with results.open("w") as stream:
        for annotation in read_annotations(data):
            if not annotation.image.startswith("test/"):
                continue
            box = [0, 0, 0.1, 0.1] if box_of is None else list(annotation.parts[box_of].box)
            record = {
                "image": str(data / annotation.image),
                "status": "ok",
                "prediction": {"label": label or annotation.species},
                "evidence": [{"box": box}],
            }
            stream.write(json.dumps(record) + "\n")


def test_boxes_on_a_part_count_where_it_distinguishes_the_species(drawn: Path, tmp_path: Path) -> None:
    _write_records(drawn, tmp_path / "results.jsonl", "crest")
    found = measure_evidence(drawn, tmp_path / "results.jsonl")
    tests = [a for a in read_annotations(drawn) if a.image.startswith("test/")]
    assert found.any_part == 1.0
    assert found.distinguishing == sum(a.parts["crest"].distinguishing for a in tests) / len(tests)

    _write_records(drawn, tmp_path / "results.jsonl", None)
    found = measure_evidence(drawn, tmp_path / "results.jsonl")
    assert (found.any_part, found.distinguishing) == (0.0, 0.0)
    assert 0 < found.control_distinguishing < found.control_any < 1


def test_wrong_answers_are_not_measured(drawn: Path, tmp_path: Path) -> None:
    _write_records(drawn, tmp_path / "results.jsonl", "crest", label="no such species")
    with pytest.raises(UsageError, match="no test image was classified correctly"):
        measure_evidence(drawn, tmp_path / "results.jsonl")


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
