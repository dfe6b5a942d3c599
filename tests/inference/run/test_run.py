"""A run from requests to a run directory: its content at the end, and after what can go wrong in the middle."""

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
from opal_deploy.inference.run import drawing
from opal_deploy.inference.run.drawing import ReportOptions
from opal_deploy.inference.run.run import RunOptions, run
from opal_deploy.inference.run.summary import Summary
from opal_deploy.inference.sources.annotations import Boxes, FolderLabels, read_boxes
from opal_deploy.inference.sources.discovery import discover
from opal_deploy.inference.sources.items import Skipped
from opal_deploy.inference.types import InferenceOptions, Request, build_requests
from opal_deploy.records.names import unescape_name
from opal_deploy.visualization.report import ReportWriter


def save(path: Path, size: tuple[int, int] = (60, 40)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (90, 160, 70)).save(path, "PNG")
    return path


def images(*paths: Path, boxes: Boxes | None = None) -> Iterator[Request]:
    return build_requests(discover(map(str, paths), Skipped()), boxes)


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def run_in(out: Path, requests: Iterator[Request], session: Any, *, explain: bool = False, **how: Any) -> Summary:
    out.mkdir(exist_ok=True)
    options = RunOptions(out, InferenceOptions(batch=4), ReportOptions() if explain else None)
    return run(requests, [session], options, **how)


def test_the_summary_counts_what_was_written(tmp_path: Path, bright_session: Callable) -> None:
    for number in range(9):
        save(tmp_path / f"in/{number}.png")
    (tmp_path / "in/5.png").write_bytes(b"")
    totals: list[int] = []
    out = tmp_path / "out"

    def report_progress(summary: Summary) -> None:
        totals.append(summary.total)
        # the record is in the file before its progress is reported
        assert len(results(out)) == summary.total

    summary = run_in(out, images(tmp_path / "in"), bright_session(), report_progress=report_progress)
    assert (summary.statuses, summary.errors) == (Counter(ok=8, error=1), Counter(empty_file=1))
    assert totals == list(range(1, 10))
    assert summary.seconds_to_first_record is not None
    assert 0 < summary.seconds_to_first_record <= summary.seconds
    assert [path.name for path in out.iterdir()] == ["results.jsonl"]


def test_explaining_adds_overlays_and_a_report_and_changes_nothing_else(
    tmp_path: Path, bright_session: Callable
) -> None:
    for name in ("a.png", "b.png"):
        save(tmp_path / "in" / name, (300, 200))
    (tmp_path / "in/bad.png").write_bytes(b"no")
    # beyond what is kept in memory until it is drawn
    save(tmp_path / "in/large.png", (1500, 1400))
    out = tmp_path / "out"
    run_in(out, images(tmp_path / "in"), bright_session(), explain=True)
    run_in(tmp_path / "plain", images(tmp_path / "in"), bright_session())
    records = results(out)
    overlays = [record.pop("overlay", None) for record in records]
    assert overlays == [
        "overlays/000000-a.png.jpg", "overlays/000001-b.png.jpg", None, "overlays/000003-large.png.jpg",
    ]  # fmt: skip
    assert records == results(tmp_path / "plain")
    assert sorted(path.name for path in out.iterdir()) == ["overlays", "report.html", "results.jsonl"]
    assert len(list((out / "overlays").iterdir())) == 3
    for name, (width, height) in (("000000-a", (300, 200)), ("000003-large", (1500, 1400))):
        with Image.open(out / f"overlays/{name}.png.jpg") as overlay:
            # the photograph at its own resolution, and a legend
            assert (overlay.width >= width, overlay.height >= height) == (True, True)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "bad.png" in page
    assert "not_an_image" in page


def test_a_large_image_that_vanishes_before_it_is_drawn_keeps_its_record(
    tmp_path: Path, bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(*_: object, **__: object) -> Image.Image:
        raise ImageError("not_found", "no such file")

    monkeypatch.setattr(drawing, "decode", vanished)
    save(tmp_path / "in/a.png", (1500, 1400))
    save(tmp_path / "in/b.png")
    run_in(tmp_path / "out", images(tmp_path / "in"), bright_session(), explain=True)
    assert [(r["status"], "overlay" in r) for r in results(tmp_path / "out")] == [("ok", False), ("ok", True)]


ODD_NAMES = [
    b"a b.png", b"a\nb.png", b"a\"b'.png", b"<script>alert(1)<_script>.png", b"a\xff\xfeb.png", b"a\\b.png",
    b"a\\xff.png", b"-a.png", "für\u202e.png".encode(),
]  # fmt: skip


def test_odd_names_come_back_from_their_records(tmp_path: Path, bright_session: Callable) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name in ODD_NAMES:
        save(folder / os.fsdecode(name))
    run_in(out, images(folder), bright_session(), explain=True)
    records = results(out)
    assert [os.fsencode(Path(unescape_name(record["image"])).name) for record in records] == sorted(ODD_NAMES)
    assert all((out / record["overlay"]).is_file() for record in records)
    assert all(Path(unescape_name(record["image"])).is_file() for record in records)
    assert b"<script>alert" not in (out / "report.html").read_bytes()


def test_a_request_has_the_box_and_the_label_of_its_image(tmp_path: Path, bright_session: Callable) -> None:
    for name in ("oak\xfc/a.png", "oak\xfc/b.png"):
        save(tmp_path / "in" / name)
    (tmp_path / "in/none").mkdir()
    (tmp_path / "boxes.csv").write_text("image,x0,y0,x1,y1\nb.png,20,10,60,40\n")
    items = discover([str(tmp_path / "in/oak\xfc"), str(tmp_path / "in/none")], Skipped())
    requests = list(build_requests(items, read_boxes(tmp_path / "boxes.csv"), FolderLabels()))
    assert [request.truth for request in requests] == ["oak\xfc", "oak\xfc", "in"]
    assert [request.error and request.error.code for request in requests] == ["no_box", None, "no_images"]
    run_in(tmp_path / "out", iter(requests), bright_session())
    first, second, third = results(tmp_path / "out")
    assert [list(record)[-1] for record in (first, second, third)] == ["truth"] * 3
    assert (first["error"]["code"], third["error"]["code"]) == ("no_box", "no_images")
    # the first of equal cells: the crop's upper left corner, 40/4 x 30/4 pixels
    assert second["evidence"][0]["box"] == [20, 10, 30, 17.5]


def raise_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def discard_and_raise_full(report: ReportWriter) -> None:
    report.discard()
    raise_full()


@pytest.mark.parametrize(
    ("owner", "method", "replacement", "message", "count"),
    [
        (Path, "write_bytes", raise_full, "No space left on device", 0),
        (ReportWriter, "close", discard_and_raise_full, r"report cannot be written \(No space left on device\)", 1),
    ],
    ids=["overlays", "report"],
)
def test_what_cannot_be_drawn_stops_the_run_with_the_reason(
    tmp_path: Path,
    bright_session: Callable,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    replacement: Callable,
    message: str,
    count: int,
) -> None:
    save(tmp_path / "a.png")
    monkeypatch.setattr(owner, method, replacement)
    with pytest.raises(StoppedEarly, match=message):
        run_in(tmp_path / "out", images(tmp_path / "a.png"), bright_session(), explain=True)
    assert len(results(tmp_path / "out")) == count


def test_a_place_where_overlays_cannot_go_is_a_wrong_call(tmp_path: Path, bright_session: Callable) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/overlays").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot be written .*choose another --out"):
        run_in(tmp_path / "out", images(save(tmp_path / "a.png")), bright_session(), explain=True)
