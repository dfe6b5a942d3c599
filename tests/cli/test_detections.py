"""MegaDetector's results: a record per animal, exactly one each, and classifications in the same file."""

import json
import shutil

import pytest

import opal_deploy
from tests.cli.calls import check, one_line, read_results
from tests.conftest import CLASSES, INPUT_SIZE
from tests.runs import Infer

# [x, y, width, height] in shares, and the pixels of 96 x 96 that they are
BOXES = [[0.0, 0.25, 0.5, 0.5], [0.1, 0.1, 0.8, 0.9], [0.5, 0.0, 0.5, 0.3333]]
PIXELS = [(0, 24, 48, 72), (10, 10, 86, 96), (48, 0, 96, 32)]


def detection(box, conf=0.9, category="1"):
    return {"category": category, "conf": conf, "bbox": box}


def write(path, images, **keys):
    categories = {"1": "animal", "2": "person"}
    document = {"info": {"format_version": "1.6"}, "detection_categories": categories, "images": images, **keys}
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def trap(tmp_path, make_pictures):
    """Four photographs of a camera trap in `in/`: with animals and a person, empty, not detected, not listed."""
    assert INPUT_SIZE == (96, 96)
    make_pictures(tmp_path / "in", 4)
    first = [detection(BOXES[0]), detection(BOXES[1], category="2"), detection(BOXES[1], 0.5), detection(BOXES[2], 0.1)]
    images = [
        {"file": "000.png", "detections": first, "exif": {"kept": True}},
        {"file": "001.png", "detections": [detection(BOXES[2], 0.19)]},
        {"file": "002.png", "failure": "Failure image access", "detections": None},
    ]
    return write(tmp_path / "found.json", images)


def test_each_animal_is_a_record_and_a_classification_of_its_detection(tmp_path, exact_model, trap, opal):
    fixed = ["in", "--boxes", trap, "--threads", "1", "--no-isolate", "--model", exact_model]
    done = check(opal("infer", *fixed, "--out", "out", cwd=tmp_path), 3)
    assert "2 animals with a confidence of at least 0.2, one record each; " in done.stderr
    records = read_results(tmp_path / "out")
    numbers = [(record["image"], record["image_index"], record.get("detection")) for record in records]
    assert numbers == [("in/000.png", 0, 0), ("in/000.png", 1, 2), ("in/002.png", 2, None), ("in/003.png", 3, None)]
    # the detector failed on one, and did not see the other
    assert [record["error"]["code"] for record in records[2:]] == ["no_box", "no_box"]
    model = opal_deploy.load(exact_model, threads=1)
    for record, box in zip(records, (PIXELS[0], PIXELS[1]), strict=False):
        answer = model.predict(tmp_path / "in/000.png", boxes=box)
        assert record["prediction"]["logit"] == pytest.approx(answer.record.prediction.logit, abs=1e-5)
        assert [slot["box"] for slot in record["evidence"]] == [list(slot.box) for slot in answer.slots]
    checked = check(opal("verify", "out", "--model", exact_model, "--boxes", trap, "--all", cwd=tmp_path))
    assert "4 of 4 records match the model" in checked.stderr

    back = ["convert", "out", "--to", "megadetector", "--out", "classified.json"]
    check(opal(*back, "--boxes", trap, cwd=tmp_path))
    before, after = (json.loads((tmp_path / name).read_text()) for name in ("found.json", "classified.json"))
    assert set(after["classification_categories"].values()) == set(CLASSES)
    for record, number in ((records[0], 0), (records[1], 2)):
        found = after["images"][0]["detections"][number].pop("classifications")
        assert after["classification_categories"][found[0][0]] == record["prediction"]["label"]
        # the model has no temperature
        assert [value for _, value in found] == sorted(
            (round(each["cosine"], 5) for each in record["top"]), reverse=True
        )
    assert after["images"][:2] == before["images"][:2]
    assert [image["detections"] for image in after["images"][2:]] == [None, None]
    assert after["images"][2]["failure"].startswith("no_box: ")
    assert after["images"][3]["file"] == "in/003.png"

    over = [*back[:-1], "out/run.json", "--overwrite", "--boxes", trap]
    assert "out/run.json: this call reads that file" in one_line(opal(*over, cwd=tmp_path))
    other = write(tmp_path / "other.json", before["images"], more=1)
    refused = one_line(opal(*back[:-1], "other.out.json", "--boxes", other, cwd=tmp_path))
    assert "other.json: not the boxes of this run" in refused
    check(opal("infer", *fixed, "--box-confidence", "0.6", "--out", "sure", cwd=tmp_path), 3)
    assert [record.get("detection") for record in read_results(tmp_path / "sure")] == [0, None, None]


def test_ended_within_an_image_it_goes_on_with_its_next_animal(tmp_path, exact_model, make_pictures):
    make_pictures(tmp_path / "pictures", 20)
    images = [{"file": f"{number:03}.png", "detections": list(map(detection, BOXES))} for number in range(20)]
    found = write(tmp_path / "found.json", images)
    infer = Infer(tmp_path, exact_model, tmp_path / "pictures")
    infer.fixed += ["--boxes", str(found)]
    check(infer("whole"))
    # as if killed after the second animal of an image
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    (tmp_path / "out/summary.json").unlink()
    results = tmp_path / "out/results.jsonl"
    results.write_bytes(b"".join(results.read_bytes().splitlines(keepends=True)[:20]))
    assert "20 records are there already" in check(infer("out")).stderr
    records = read_results(tmp_path / "out")
    assert [record["detection"] for record in records] == [0, 1, 2] * 20
    assert infer.files("out") == infer.files("whole")
    # shards share images, and number all animals when they are joined
    check(infer("half", "--shard", "2/2"))
    half = read_results(tmp_path / "half/shards/2-of-2")
    assert [record["image_index"] for record in half] == list(range(30, 60))
    check(infer("half", "--shards", "2"))
    assert infer.files("half") == infer.files("whole")
