"""A run from requests to a run directory: its content at the end, and after what can go wrong in the middle."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.predict import prepare
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.records.names import unescape_name
from opal_deploy.run.drawing import ReportOptions
from opal_deploy.run.run import LocalBackend, RunOptions, run
from opal_deploy.run.sheets import SheetBuilder
from opal_deploy.sources.annotations import FolderLabels, annotate, read_boxes
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.items import Skipped
from tests.bright import BrightSession, code, read_results, save


def run_in(out, images, *, explain=False, **how):
    out.mkdir(exist_ok=True)
    session = BrightSession()
    options = RunOptions(
        out,
        InferenceOptions(batch=4),
        ReportOptions() if explain else None,
        SheetBuilder(session.metadata) if how.pop("sheets", False) else None,
    )
    requests = discover([str(images)], Skipped()) if isinstance(images, Path) else images
    return run(requests, LocalBackend([session]), options, **how)


def test_the_summary_counts_what_was_written(tmp_path):
    for number in range(9):
        save(tmp_path / f"in/{number}.png")
    (tmp_path / "in/5.png").write_bytes(b"")
    totals = []
    out = tmp_path / "out"

    def report_progress(summary):
        totals.append(summary.total)
        # records are in the file before their progress is reported
        assert len(read_results(out)) == summary.total

    summary = run_in(out, tmp_path / "in", report=report_progress)
    assert (summary.statuses, summary.errors) == (Counter(ok=8, error=1), Counter(empty_file=1))
    assert totals == [4, 8, 9]
    assert 0 < summary.seconds_to_first_record <= summary.seconds
    assert [path.name for path in out.iterdir()] == ["results.jsonl"]


def test_an_image_that_memory_cannot_hold_until_it_is_drawn_keeps_its_record(tmp_path, monkeypatch):
    def keep(image):
        if image.width > 1000:
            raise MemoryError
        return image

    monkeypatch.setattr(prepare, "to_display", keep)
    save(tmp_path / "in/a.png", (1500, 1400))
    save(tmp_path / "in/b.png")
    run_in(tmp_path / "out", tmp_path / "in", explain=True)
    records = read_results(tmp_path / "out")
    found = [(r["status"], "overlay" in r, "drawing_error" in r) for r in records]
    assert found == [("ok", False, True), ("ok", True, False)]


def rename(path):
    path.rename(path.with_name(f"{path.name}-old"))


def replace_file(path):
    path.unlink()
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "remove", "message"),
    [
        pytest.param("results.jsonl", Path.unlink, "results.jsonl: removed or replaced", id="records deleted"),
        pytest.param("results.jsonl", replace_file, "results.jsonl: removed or replaced", id="records replaced"),
        pytest.param("", shutil.rmtree, "results.jsonl: removed or replaced", id="folder deleted"),
        pytest.param("", rename, "results.jsonl: removed or replaced", id="folder renamed"),
        pytest.param("overlays/000000-0.jpg", Path.unlink, "drawing of record 1, .*in/0.png", id="overlay deleted"),
    ],
)
def test_what_is_removed_during_a_run_is_no_success(tmp_path, name, remove, message):
    for number in range(12):
        save(tmp_path / f"in/{number}.png")
    out, explain = tmp_path / "out", name.startswith("overlays")

    removed = []

    def remove_once(summary):
        if not removed:
            removed.append(summary.total)
            remove(out / name)

    with pytest.raises(StoppedEarly, match=message):
        run_in(out, tmp_path / "in", explain=explain, report=remove_once)
    # the next run misses nothing
    resumed = RunOptions(out, InferenceOptions(batch=4), ReportOptions() if explain else None, resume=True)
    out.mkdir(exist_ok=True)
    summary = run(discover([str(tmp_path / "in")], Skipped()), LocalBackend([BrightSession()]), resumed)
    assert summary.total == len(read_results(out)) == 12
    assert all((out / record["overlay"]).exists() for record in read_results(out) if explain)


ODD_NAMES = [
    b"a b.png", b"a\nb.png", b"a\"b'.png", b"<script>alert(1)<_script>.png", b"a\xff\xfeb.png", b"a\\b.png",
    b"a\\xff.png", b"-a.png", "für\u202e.png".encode(),
]  # fmt: skip


def test_odd_names_come_back_from_their_records(tmp_path):
    out = tmp_path / "out"
    for name in ODD_NAMES:
        save(tmp_path / "in" / os.fsdecode(name))
    run_in(out, tmp_path / "in", explain=True)
    records = read_results(out)
    assert [os.fsencode(Path(unescape_name(record["image"])).name) for record in records] == sorted(ODD_NAMES)
    assert all((out / record["overlay"]).is_file() for record in records)
    assert all(Path(unescape_name(record["image"])).is_file() for record in records)
    assert b"<script>alert" not in (out / "report.html").read_bytes()


def test_a_request_has_the_box_and_the_label_of_its_image(tmp_path):
    for name in ("oak\xfc/a.png", "oak\xfc/b.png"):
        save(tmp_path / "in" / name)
    (tmp_path / "in/none").mkdir()
    (tmp_path / "boxes.csv").write_text("image,x0,y0,x1,y1\nb.png,20,10,60,40\n")
    items = discover([str(tmp_path / "in/oak\xfc"), str(tmp_path / "in/none")], Skipped())
    requests = list(annotate(items, read_boxes(tmp_path / "boxes.csv"), FolderLabels()))
    assert [request.label for request in requests] == ["oak\xfc", "oak\xfc", "in"]
    assert [request.error and request.error.code for request in requests] == ["no_box", None, "no_images"]
    run_in(tmp_path / "out", iter(requests))
    records = read_results(tmp_path / "out")
    assert [list(record)[-1] for record in records] == ["label"] * 3
    assert [code(record) for record in records] == ["no_box", None, "no_images"]
    # the first of equal cells: the crop's upper left corner, 40/4 x 30/4 pixels
    assert records[1]["evidence"][0]["box"] == [20, 10, 30, 17.5]


@pytest.mark.parametrize(("folder", "how"), [("overlays", {"explain": True}), ("sheets", {"sheets": True})])
def test_a_place_where_drawings_cannot_go_is_a_wrong_call(tmp_path, folder, how):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / folder).write_text("a file")
    with pytest.raises(UsageError, match=r"cannot be written .*choose another --out"):
        run_in(tmp_path / "out", save(tmp_path / "a.png"), **how)
