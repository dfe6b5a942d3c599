"""Boxes that come back from Label Studio."""

import json

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.records.converters import to_label_studio
from opal_deploy.records.names import escape_name
from opal_deploy.sources.annotations import read_objects

ANSWER = {"class_id": 1, "label": "birch", "logit": -0.3, "cosine": 0.875}
SLOT = {"cell": [0, 1], "score": 0.5, "contribution": None}
PREFIX = "/data/local-files/?d="


def record(image, *boxes):
    evidence = [{"slot": slot, "channel": 2 + slot, "box": box, **SLOT} for slot, box in enumerate(boxes)]
    known = {"schema": 1, "status": "ok", "image_sha256": "0" * 64, "width": 333, "height": 70, "margin": 0.25}
    return {**known, "image": escape_name(image), "prediction": ANSWER, "top": [ANSWER], "evidence": evidence}


def accept(task):
    """Submit a task's prediction as it is, as a person does in Label Studio."""
    return {"data": task["data"], "annotations": [{"result": entry["result"]} for entry in task["predictions"]]}


def task(image="a.jpg", *, cancelled=False, created="2026", **changes):
    """Return a task with a rectangle of 50 x 20 pixels at (20, 5), as in an export."""
    value = {"x": 10, "y": 5, "width": 25, "height": 20, "rotation": 0, "rectanglelabels": ["stamp"]}
    region = {"type": "rectanglelabels", "original_width": 200, "original_height": 100, "value": value}
    region |= {key: change for key, change in changes.items() if key not in value}
    value |= {key: change for key, change in changes.items() if key in value}
    return {"data": {"image": image}, "annotations": [submission([region], cancelled, created)]}


def submission(result, cancelled=False, created="2026"):
    return {"result": result, "was_cancelled": cancelled, "created_at": created}


def read(folder, *tasks):
    path = folder / "export.json"
    path.write_text(json.dumps(tasks))
    return read_objects(path)


@pytest.mark.parametrize("prefix", ["", PREFIX, "http://localhost:8080" + PREFIX])
def test_accepted_predictions_are_the_boxes_of_the_records(tmp_path, prefix):
    boxes = {
        "x/a.jpg": [(0.0, 0.0, 333.0, 70.0), (111.0, 10.0, 122.1, 33.3)],
        "x/é + 50%25#&.jpg": [(1.0, 2.0, 3.0, 4.0)],
    }
    records = [record(image, *found) for image, found in boxes.items()]
    objects = read(tmp_path, *map(accept, to_label_studio(records, prefix)))
    assert len(objects) == len(boxes)
    for image, expected in boxes.items():
        (name,) = objects.matches(f"/photos/{image}")
        assert [thing.category for thing in objects[name]] == [f"slot {slot}" for slot in range(len(expected))]
        for thing, box in zip(objects[name], expected, strict=True):
            assert thing.box == pytest.approx(box, abs=1e-6)
            assert thing.size == (70, 333)


@pytest.mark.parametrize(
    ("address", "image"),
    [
        ("/data/upload/1/0123abcd-my%20bird.jpg", "birds/my bird.jpg"),
        ("https://labels.example/data/upload/0123abcd-a.jpg", "a.jpg"),
        (PREFIX + "birds/0123abcd-a.jpg", "birds/0123abcd-a.jpg"),
    ],
)
def test_an_image_is_found_by_its_own_name(tmp_path, address, image):
    objects = read(tmp_path, task(address))
    assert [objects[name][0].box for name in objects.matches(image)] == [(20, 5, 70, 25)]


def test_the_newest_annotation_counts_that_was_not_skipped(tmp_path):
    edited = task(created="2026-02", x=0)
    edited["annotations"] += (
        task(created="2026-01")["annotations"] + task(cancelled=True, created="2026-03")["annotations"]
    )
    objects = read(tmp_path, edited, task("b.jpg", cancelled=True), task("c.jpg", type="choices"))
    assert (len(objects), [thing.box for thing in objects["a.jpg"]]) == (1, [(0, 5, 50, 25)])


def test_labels_are_categories_and_tasks_of_one_image_add_up(tmp_path):
    objects = read(tmp_path, task(rectanglelabels=["stamp", "date"]), task(type="rectangle", rectanglelabels=[]))
    assert [thing.category for thing in objects["a.jpg"]] == ["stamp", "date", ""]


def test_a_turned_rectangle_is_a_polygon_in_its_bounding_box(tmp_path):
    (thing,) = read(tmp_path, task(rotation=90))["a.jpg"]
    assert thing.box == pytest.approx((0, 5, 20, 55))
    assert thing.segmentation == [pytest.approx([20, 5, 20, 55, 0, 55, 0, 5])]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "0 tasks, none with an annotation"),
        (
            to_label_studio([record("a.jpg", (0, 0, 9, 9))]),
            "1 tasks, none with an annotation; predictions do not count: submit them",
        ),
        ([task(), {"image": "a.jpg", "slots": []}], r"task 2 is not Label Studio's \(KeyError\('data'\)\); expected"),
        ([task(x=None)], r"task 1 is not Label Studio's \(TypeError"),
        ([7], "task 1 is not Label Studio's .* expected Label Studio's export format JSON"),
        (
            [task(type="polygonlabels")],
            "a region of type polygonlabels; expected rectanglelabels: remove it, or export as",
        ),
        ([{"id": 17} | task(image_rotation=90)], "task 17: its image is turned by 90 degrees; expected 0"),
        ([task(type="choices")], "no boxes in it"),
        (
            [task("/data/upload/1/00000000-a.jpg"), task("/data/upload/1/11111111-a.jpg", cancelled=True)],
            r"two images named a\.jpg .*00000000-a.jpg, .*11111111-a.jpg\); expected one: rename a file",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, tasks, message):
    with pytest.raises(UsageError, match=message) as refused:
        read(tmp_path, *tasks)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["[", "[" * 200_000, "[{]"])
def test_a_damaged_file_is_one_line(tmp_path, text):
    (tmp_path / "export.json").write_text(text)
    with pytest.raises(UsageError, match=r"export\.json: not JSON .*; expected Label Studio's export format JSON"):
        read_objects(tmp_path / "export.json")
