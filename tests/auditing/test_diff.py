"""Changes between two sets of records, on examples that can be worked out by hand."""

import copy
import html
import json
import re

import pytest
from PIL import Image

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.auditing.diff import KINDS, compare_results, write_diff
from opal_deploy.auditing.results import group_records
from opal_deploy.errors import UsageError
from opal_deploy.records.build import error_record
from opal_deploy.records.lines import to_document

HOSTILE = "</title><script>alert(1)</script>\"'<img src=x onerror=alert(1)>"


def record(name, label="ash", margin=0.5, **changes):
    answer = {"class_id": 0, "label": label, "logit": -0.5, "cosine": 0.75}
    slots = [
        {"slot": s, "channel": s, "cell": [0, s], "score": 0.5, "contribution": 0.375,
         "box": [10.0 * s, 0.0, 10.0 * s + 10, 10.0]}
        for s in range(2)
    ]  # fmt: skip
    made = {"schema": 1, "image": name, "status": "ok", "image_sha256": "0" * 64, "width": 40, "height": 40,
            "prediction": answer, "margin": margin, "top": [answer], "evidence": slots}  # fmt: skip
    return copy.deepcopy({**made, **changes})


def moved(name, slots=1):
    made = record(name)
    for slot in made["evidence"][:slots]:
        slot.update(cell=[3, slot["slot"]], box=[slot["box"][0], 30.0, slot["box"][2], 40.0])
    return made


def compare(folder, before, after, keep=20):
    for name, entries in (("before", before), ("after", after)):
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return compare_results(group_records(folder / "before"), group_records(folder / "after"), 0.01, keep)


def kinds(report):
    return {kind: count for kind, count in report.kinds.items() if count}


def test_every_kind_is_told_apart_and_the_worst_comes_first(tmp_path):
    contribution = record("contribution")
    contribution["evidence"][1]["contribution"] += 0.02
    pairs = [
        (record("same"), record("same", margin=0.505)),
        (record("margin"), record("margin", margin=0.45)),
        (record("abstained"), record("abstained", status="abstained")),
        (record("contribution"), contribution),
        (record("one cell"), moved("one cell")),
        (record("two cells"), moved("two cells", 2)),
        (record("unsure", margin=0.01), record("unsure", "birch")),
        (record("sure", margin=0.4), record("sure", "birch")),
        (record("gone"), to_document(error_record("gone", "truncated_image", ""))),
        (to_document(error_record("back", "not_found", "")), record("back")),
    ]
    report = compare(tmp_path, [old for old, _ in pairs], [new for _, new in pairs])
    assert kinds(report) == {"error": 2, "class": 2, "cell": 2, "contribution": 1, "margin": 2, "same": 1}
    assert [change.image for change, _, _ in report.worst][2:] == [
        "sure", "unsure", "two cells", "one cell", "contribution", "margin", "abstained",
    ]  # fmt: skip
    assert {change.image for change, _, _ in report.worst[:2]} == {"gone", "back"}
    assert "ok -> abstained" in str(report.worst[-1][0])
    assert (report.slots, report.slots_moved) == (12, 3)
    assert report.largest_contribution_change == pytest.approx(0.02)
    assert (report.worst[2][0].before, report.worst[2][0].after) == ("ash", "birch")
    assert report.worst[4][0].moved == (0, 1)
    assert len(compare(tmp_path, [old for old, _ in pairs], [new for _, new in pairs], keep=3).worst) == 3


def test_images_are_paired_by_name_and_classes_by_label(tmp_path):
    before = [record("a"), record("b"), record("b"), record(None)]
    after = [record("c"), record("a"), record("a"), record("d"), record(None)]
    report = compare(tmp_path, before, after)
    assert (report.paired, report.only_before, report.only_after, report.unpaired) == (1, 2, 3, 2)
    # a missing image closes every gate
    assert report.has("error")
    other = record("a")
    other["prediction"]["class_id"] = 7
    for slot in other["evidence"]:
        slot["channel"] += 14
    assert kinds(compare(tmp_path, [record("a")], [other])) == {"same": 1}
    # another file under the same name
    report = compare(tmp_path, [record("a")], [record("a", "birch", image_sha256="1" * 64)])
    assert report.image_changed == 1
    assert "the image file differs" in str(report.worst[0][0])


def test_images_of_one_name_are_paired_by_their_places(tmp_path):
    labels = ["ash", "birch", "cedar"]
    before = [record("a", label, image_index=number) for number, label in enumerate(labels)]
    # shards that were put together, in which the second is another
    after = [before[2], before[0], record("a", "oak", image_index=1)]
    report = compare(tmp_path, before, after)
    assert (kinds(report), report.only_before, report.only_after) == ({"class": 1, "same": 2}, 0, 0)
    (change, _, _) = report.worst[0]
    assert (change.image_index, change.before, change.after) == (1, "birch", "oak")


def test_a_finer_grid_moves_no_slot_that_stays_in_its_old_box(tmp_path):
    finer = record("a")
    finer["evidence"][0].update(cell=[1, 1], box=[5.0, 5.0, 10.0, 10.0])
    finer["evidence"][1].update(cell=[0, 7], box=[35.0, 0.0, 40.0, 5.0])
    assert compare(tmp_path, [record("a")], [finer]).worst[0][0].moved == (1,)


def test_a_gate_closes_for_its_kind_and_for_worse(tmp_path):
    gates = [*KINDS[:-1], "any"]
    for after, closed in ((record("a"), 0), (record("a", margin=0.3), 2), (moved("a"), 4), (record("a", "birch"), 5)):
        report = compare(tmp_path, [record("a")], [after])
        assert [kind for kind in gates if report.has(kind)] == gates[len(gates) - closed :]


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(record("a")) + '\n{"schema": 1')
    with pytest.raises(UsageError, match="line 2"):
        group_records(tmp_path / "a.jsonl")


def test_the_page_tells_no_folders_and_nothing_from_outside_becomes_markup(tmp_path):
    image = tmp_path / "in" / HOSTILE.replace("/", "_")
    image.parent.mkdir()
    Image.new("RGB", (40, 40)).save(image, "png")
    digest = {"image_sha256": compute_sha256(image)}
    old, new = (record(str(image), HOSTILE + end, **digest) for end in ("", "2"))
    names, page = (f"{tmp_path}/old/out", f"{tmp_path}/new/out"), tmp_path / "page.html"
    write_diff(page, compare(tmp_path, [old], [new]), names, tmp_path, overwrite=False)
    text = page.read_text("utf-8")
    assert str(tmp_path) not in text
    assert "Before: old/out<br>After: new/out" in text
    assert "<script" not in text
    assert re.findall(r"<img[^>]* src=\W*([\w:/]+)", text) == ["data:image/jpeg"] * 2
    assert "default-src 'none'; img-src data:; style-src 'sha256-" in html.unescape(text)
