"""A run from images to a folder: what is in it at the end, and after what can go wrong in the middle."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.inference.run.drawing import ReportOptions
from opal_deploy.inference.run.run import RunOptions, run
from opal_deploy.inference.run.summary import Summary
from opal_deploy.inference.sources.annotations import Boxes, read_boxes
from opal_deploy.inference.sources.discovery import discover
from opal_deploy.inference.sources.items import Skipped
from opal_deploy.inference.types import InferenceOptions, Request, build_requests
from opal_deploy.records.names import unescape_name


def save(path: Path, size: tuple[int, int] = (60, 40)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 160, 70)).save(path, "PNG")
    return path


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def images(*paths: Path, boxes: Boxes | None = None) -> Iterator[Request]:
    return build_requests(discover(map(str, paths), Skipped()), boxes)


def job(out: Path, **settings: Any) -> RunOptions:
    out.mkdir(exist_ok=True)
    report = ReportOptions() if settings.pop("explain", False) else None
    return RunOptions(out, InferenceOptions(batch=4), report, **settings)


def test_the_summary_counts_what_was_written(tmp_path: Path, bright_session: Callable) -> None:
    for number in range(9):
        save(tmp_path / f"in/{number}.png")
    (tmp_path / "in/5.png").write_bytes(b"")
    seen: list[int] = []

    def note(summary: Summary) -> None:
        seen.append(summary.total)
        # the record is in the file before anybody is told of it
        assert len(results(tmp_path / "out")) == summary.total

    summary = run(images(tmp_path / "in"), [bright_session()], job(tmp_path / "out"), report_progress=note)
    assert summary.statuses == Counter(ok=8, error=1)
    assert summary.errors == Counter(empty_file=1)
    assert seen == list(range(1, 10))
    assert summary.seconds_to_first_record is not None
    assert 0 < summary.seconds_to_first_record <= summary.seconds


def test_without_explain_there_are_records_only(tmp_path: Path, bright_session: Callable) -> None:
    save(tmp_path / "a.png")
    run(images(tmp_path / "a.png"), [bright_session()], job(tmp_path / "out"))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["results.jsonl"]


def test_explaining_adds_an_overlay_an_answer_and_one_report(tmp_path: Path, bright_session: Callable) -> None:
    for name in ("a.png", "b.png"):
        save(tmp_path / "in" / name, (300, 200))
    (tmp_path / "in/bad.png").write_bytes(b"no")
    out = tmp_path / "out"
    run(images(tmp_path / "in"), [bright_session()], job(out, explain=True))
    found = results(out)
    assert [record.get("overlay") for record in found] == [
        "overlays/000000-a.png.jpg",
        "overlays/000001-b.png.jpg",
        None,
    ]
    assert sorted(p.name for p in out.iterdir()) == ["overlays", "report.html", "results.jsonl"]
    assert len(list((out / "overlays").iterdir())) == 2
    with Image.open(out / found[0]["overlay"]) as overlay:
        # the photograph at its own resolution, and a legend
        assert overlay.width >= 300
        assert overlay.height >= 200
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "bad.png" in page
    assert "not_an_image" in page


def test_explaining_changes_nothing_else_in_the_records(tmp_path: Path, bright_session: Callable) -> None:
    for number in range(6):
        save(tmp_path / f"in/{number}.png")
    for explain in (False, True):
        requests = images(tmp_path / "in")
        run(requests, [bright_session()], job(tmp_path / str(explain), explain=explain))
    with_overlays = results(tmp_path / "True")
    assert all(record.pop("overlay") for record in with_overlays)
    assert with_overlays == results(tmp_path / "False")


def test_large_pictures_have_overlays_too(tmp_path: Path, bright_session: Callable) -> None:
    # beyond what is kept in memory until it is drawn
    save(tmp_path / "a.png", (1500, 1400))
    run(images(tmp_path / "a.png"), [bright_session()], job(tmp_path / "out", explain=True))
    with Image.open(tmp_path / "out" / results(tmp_path / "out")[0]["overlay"]) as overlay:
        assert overlay.width >= 1500


def test_a_large_picture_that_vanishes_before_it_is_drawn_keeps_its_answer(
    tmp_path: Path, bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opal_deploy.inference.run import drawing

    def gone(*_: object, **__: object) -> Image.Image:
        raise ImageError("not_found", "no such file")

    monkeypatch.setattr(drawing, "decode", gone)
    save(tmp_path / "in/a.png", (1500, 1400))
    save(tmp_path / "in/b.png")
    out = tmp_path / "out"
    run(images(tmp_path / "in"), [bright_session()], job(out, explain=True))
    assert [(r["status"], "overlay" in r) for r in results(out)] == [("ok", False), ("ok", True)]


ODD_NAMES = [
    b"a b.png",
    b"a\nb.png",
    b"a\"b'.png",
    b"<script>alert(1)<_script>.png",
    b"a\xff\xfeb.png",
    b"a\\b.png",
    b"a\\xff.png",
    b"-a.png",
    "für\u202e.png".encode(),
]


def test_odd_names_come_back_from_their_records(tmp_path: Path, bright_session: Callable) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    good = save(tmp_path / "good.png").read_bytes()
    for name in ODD_NAMES:
        (folder / os.fsdecode(name)).write_bytes(good)
    out = tmp_path / "out"
    run(images(folder), [bright_session()], job(out, explain=True))
    found = results(out)
    assert [os.fsencode(Path(unescape_name(record["image"])).name) for record in found] == sorted(ODD_NAMES)
    assert all((out / record["overlay"]).is_file() for record in found)
    assert all(Path(unescape_name(record["image"])).is_file() for record in found)
    assert b"<script>alert" not in (out / "report.html").read_bytes()


def test_an_image_without_a_box_has_an_error_record(tmp_path: Path, bright_session: Callable) -> None:
    save(tmp_path / "in/a.png")
    save(tmp_path / "in/b.png")
    (tmp_path / "boxes.csv").write_text("image,x0,y0,x1,y1\nb.png,20,10,60,40\n")
    out = tmp_path / "out"
    run(images(tmp_path / "in", boxes=read_boxes(tmp_path / "boxes.csv")), [bright_session()], job(out))
    first, second = results(out)
    assert first["error"]["code"] == "no_box"
    # the first of equal cells: the crop's upper left corner, 40/4 x 30/4 pixels
    assert second["evidence"][0]["box"] == [20, 10, 30, 17.5]


def test_a_folder_without_images_has_an_error_record_beside_the_others(
    tmp_path: Path, bright_session: Callable
) -> None:
    save(tmp_path / "one/a.png")
    (tmp_path / "two").mkdir()
    save(tmp_path / "three/b.png")
    out = tmp_path / "out"
    requests = images(*(tmp_path / name for name in ("one", "two", "three")))
    run(requests, [bright_session()], job(out))
    assert [record["status"] for record in results(out)] == ["ok", "error", "ok"]
    assert results(out)[1]["error"]["code"] == "no_images"


@pytest.mark.parametrize("explain", [False, True])
def test_a_lost_device_leaves_the_records_before_it(tmp_path: Path, bright_session: Callable, explain: bool) -> None:
    for number in range(30):
        save(tmp_path / f"in/{number:02}.png")
    out = tmp_path / "out"
    requests = images(tmp_path / "in")
    with pytest.raises(StoppedEarly):
        run(requests, [bright_session(fails_at=3)], job(out, explain=explain))
    assert [Path(record["image"]).name for record in results(out)] == [f"{number:02}.png" for number in range(12)]
    assert not list(out.glob("*.tmp"))


def test_overlays_that_cannot_be_written_stop_the_run_with_the_reason(
    tmp_path: Path, bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    save(tmp_path / "a.png")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StoppedEarly, match="No space left on device"):
        run(images(tmp_path / "a.png"), [bright_session()], job(tmp_path / "out", explain=True))


def test_a_report_that_cannot_be_finished_stops_the_run_with_the_reason(
    tmp_path: Path, bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opal_deploy.visualization.report import ReportWriter

    def full(report: ReportWriter) -> None:
        report.discard()
        raise OSError(28, "No space left on device")

    save(tmp_path / "a.png")
    monkeypatch.setattr(ReportWriter, "close", full)
    out = tmp_path / "out"
    with pytest.raises(StoppedEarly, match=r"report cannot be written \(No space left on device\)"):
        run(images(tmp_path / "a.png"), [bright_session()], job(out, explain=True))
    assert len(results(out)) == 1


def test_a_place_where_overlays_cannot_go_is_a_wrong_call(tmp_path: Path, bright_session: Callable) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "overlays").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot be written .*choose another --out"):
        run(images(save(tmp_path / "a.png")), [bright_session()], job(out, explain=True))
