"""Resuming a run: whole records of the same images are kept, and the end is that of an uninterrupted run."""

from __future__ import annotations

import contextlib
import json
import resource
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.inference.run.drawing import ReportOptions
from opal_deploy.inference.run.interrupt import Interrupt
from opal_deploy.inference.run.results import ResumePoint, load_resume_point, read_records
from opal_deploy.inference.run.run import RunOptions, run
from opal_deploy.inference.run.summary import ErrorLimit, Summary
from opal_deploy.inference.run_files import sheet_name
from opal_deploy.inference.sources.discovery import discover
from opal_deploy.inference.sources.items import Item, Skipped
from opal_deploy.inference.types import InferenceOptions, Request, build_requests
from opal_deploy.records.record import Record, error_record


def line(name: str, **more: Any) -> bytes:
    return json.dumps({**error_record(name, "not_found", "no such file"), **more}).encode() + b"\n"


def asked(*names: str) -> Iterator[Request]:
    return (Request(name, name) for name in names)


def kept(out: Path, content: bytes, *names: str) -> tuple[ResumePoint, list[str | None], list[str | None]]:
    """What is kept, the names counted, and those still asked for."""
    (out / "results.jsonl").write_bytes(content)
    requests = asked(*names)
    counted: list[str | None] = []
    found = load_resume_point(out, requests, lambda record: counted.append(record["image"]))
    return found, counted, [request.name for request in requests]


A, B = line("a"), line("b")

TAILS = {
    "nothing": b"",
    "half a line": B[:20],
    "a line without its end": B[:-1],
    "zeros": b"\0" * 5000,
    "zeros and an end": b"\0" * 50 + b"\n",
    "a half that runs into the next": B[:20] + B,
    "no record": b"{}\n",
    "no object": b"17\n",
    "another schema": line("b", schema=2),
    "an unknown status": line("b", status="maybe"),
    "an answer without a prediction": line("b", status="ok"),
    "not UTF-8": b'{"schema": 1, "image": "\xff"}\n',
    "deeply nested": b"[" * 100_000 + b"\n",
    "an empty line": b"\n",
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("after", [b"", line("c")], ids=["at the end", "before good ones"])
def test_reading_ends_at_the_first_line_that_is_not_a_whole_record(tmp_path: Path, tail: str, after: bytes) -> None:
    if tail == "nothing":
        after = b""
    found, counted, left = kept(tmp_path, A + TAILS[tail] + after, "a", "b", "c")
    assert found == ResumePoint(1, len(A), len(TAILS[tail] + after))
    assert counted == ["a"]
    assert left == ["b", "c"]


def test_no_file_is_no_record(tmp_path: Path) -> None:
    requests = asked("a")
    assert load_resume_point(tmp_path, requests, lambda _: None) == ResumePoint()
    assert next(requests).name == "a"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "x", "b"], r"number 2 was b, now it is x; give the same images"),
        (["b"], r"number 1 was a, now it is b"),
        (["a"], r"number 2 was b, there are no more images now"),
    ],
)
def test_other_images_are_refused_and_nothing_is_lost(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kept(tmp_path, A + B, *names)
    assert (tmp_path / "results.jsonl").read_bytes() == A + B


def test_records_whose_overlay_never_reached_the_disk_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "overlays").mkdir()
    for name, content in (("0.jpg", b"x"), ("1.jpg", b""), ("2.jpg", b"x")):
        (tmp_path / "overlays" / name).write_bytes(content)
    written = [line(str(n), overlay=f"overlays/{n}.jpg") for n in range(3)]
    found, _, left = kept(tmp_path, b"".join(written), "0", "1", "2")
    assert found.count == 1
    assert left == ["1", "2"]


NAMES = ["a", "b", "c", "d"]


def write_with_sheets(out: Path, sheets: str) -> list[bytes]:
    """Write the records of a, b, c, d with a sheet each, and the files of those in `sheets`."""
    (out / "sheets").mkdir()
    lines = [line(name, sheet=sheet_name(index, name)) for index, name in enumerate(NAMES)]
    for index, name in enumerate(NAMES):
        if name in sheets:
            (out / sheet_name(index, name)).write_bytes(b"png")
    return lines


@pytest.mark.parametrize("sheets", ["abcd", "abc", "abd", "acd", "bcd", "ad", ""])
def test_records_end_before_the_first_whose_sheet_is_missing(tmp_path: Path, sheets: str) -> None:
    lines = write_with_sheets(tmp_path, sheets)
    count = next((n for n, name in enumerate(NAMES) if name not in sheets), len(NAMES))
    found, counted, left = kept(tmp_path, b"".join(lines), *NAMES, "e")
    assert found == ResumePoint(count, len(b"".join(lines[:count])), len(b"".join(lines[count:])))
    assert counted == NAMES[:count]
    assert left == [*NAMES[count:], "e"]


def test_a_damaged_record_or_another_image_before_the_missing_sheet_counts(tmp_path: Path) -> None:
    lines = write_with_sheets(tmp_path, "abc")
    found, _, left = kept(tmp_path, lines[0] + b"\0\n" + b"".join(lines[1:]), *NAMES)
    assert (found.count, left) == (1, NAMES[1:])
    with pytest.raises(UsageError, match="number 2 was b, now it is x"):
        kept(tmp_path, b"".join(lines), "a", "x", "c", "d")
    assert (tmp_path / "results.jsonl").read_bytes() == b"".join(lines)


def test_memory_does_not_grow_with_the_records(tmp_path: Path) -> None:
    with (tmp_path / "results.jsonl").open("wb") as stream:
        for number in range(20_000):
            stream.write(line(f"{number}" + "x" * 300))
    count = [0]

    def add(_: Record) -> None:
        count[0] += 1

    tracemalloc.start()
    load_resume_point(tmp_path, (Request(f"{n}" + "x" * 300, "x") for n in range(20_000)), add)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == [20_000]
    # the file is 8 MB
    assert peak < 500_000


# ---- whole runs


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(23):
        Image.effect_noise((40 + number, 40), 40 + number).convert("RGB").save(folder / f"{number:02}.png")
    (folder / "07.png").write_bytes(b"no")
    return folder


def whole(out: Path, pictures: Path, session: Any, *, interrupt: Interrupt | None = None, **settings: Any) -> Summary:
    out.mkdir(exist_ok=True)
    report = ReportOptions(limit=settings.pop("report_limit", 1000)) if settings.pop("explain", False) else None
    options = RunOptions(out, InferenceOptions(batch=4), report, resume=True, **settings)
    return run(build_requests(discover([str(pictures)], Skipped())), [session], options, interrupt=interrupt)


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("fails_at", [0, 1, 3, 5])
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, pictures: Path, bright_session: Callable, fails_at: int, explain: bool
) -> None:
    whole(tmp_path / "clean", pictures, bright_session(), explain=explain)
    with pytest.raises(StoppedEarly):
        whole(tmp_path / "out", pictures, bright_session(fails_at=fails_at), explain=explain)
    summary = whole(tmp_path / "out", pictures, bright_session(), explain=explain)
    files = {p.relative_to(tmp_path / "clean") for p in (tmp_path / "clean").rglob("*")}
    assert {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*")} == files
    for name in files - {Path("overlays"), Path("report.html")}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "clean" / name).read_bytes(), name
    assert summary.total == 23
    assert summary.resumed > 0 or fails_at == 0
    assert summary.errors == {"not_an_image": 1}
    assert sum(summary.classes.values()) == 22


@pytest.mark.parametrize("cut", range(1, 8000, 333))
def test_wherever_the_file_was_cut_the_end_is_the_same(
    tmp_path: Path, pictures: Path, bright_session: Callable, cut: int
) -> None:
    whole(tmp_path / "out", pictures, bright_session())
    results = tmp_path / "out/results.jsonl"
    clean = results.read_bytes()
    assert cut < len(clean)
    results.write_bytes(clean[:cut])
    whole(tmp_path / "out", pictures, bright_session())
    assert results.read_bytes() == clean


def test_a_resumed_report_shows_what_an_uninterrupted_one_shows(
    tmp_path: Path, pictures: Path, bright_session: Callable
) -> None:
    whole(tmp_path / "clean", pictures, bright_session(), explain=True, report_limit=5)
    with pytest.raises(StoppedEarly):
        whole(tmp_path / "out", pictures, bright_session(fails_at=1), explain=True, report_limit=5)
    assert not (tmp_path / "out/report.html").exists()
    whole(tmp_path / "out", pictures, bright_session(), explain=True, report_limit=5)
    pages = [(tmp_path / name / "report.html").read_text() for name in ("clean", "out")]
    for page in pages:
        assert page.count("<article") == 6, "five answers and the failure"
        assert page.count('src="data:image/jpeg') == 5
        assert "07.png" in page
    assert pages[0].count("<b>23</b>") == pages[1].count("<b>23</b>") == 1


class Impatient:
    """Requests the end while image number `after` is fetched."""

    def __init__(self, pictures: Path, after: int) -> None:
        self.interrupt = Interrupt()
        self._items, self._after = list(discover([str(pictures)], Skipped())), after

    def __iter__(self) -> Iterator[Item]:
        for number, item in enumerate(self._items):
            if number == self._after:
                self.interrupt.requested = True
            yield item


@pytest.mark.parametrize("explain", [False, True])
def test_an_interrupted_run_writes_what_it_took_and_takes_no_more(
    tmp_path: Path, pictures: Path, bright_session: Callable, explain: bool
) -> None:
    items, out = Impatient(pictures, 9), tmp_path / "out"
    out.mkdir()
    options = RunOptions(out, InferenceOptions(batch=4), ReportOptions() if explain else None, resume=True)
    summary = run(build_requests(items), [bright_session()], options, interrupt=items.interrupt)
    assert items.interrupt.stopped
    # the image that was being fetched when the signal came is the last
    assert summary.total == len(list(read_records(out / "results.jsonl"))) == 10
    assert not (out / "report.html").exists()
    whole(out, pictures, bright_session(), explain=explain)
    whole(tmp_path / "clean", pictures, bright_session(), explain=explain)
    assert (out / "results.jsonl").read_bytes() == (tmp_path / "clean/results.jsonl").read_bytes()
    assert (out / "report.html").exists() == explain


def test_a_limit_on_errors_counts_those_of_before(tmp_path: Path, pictures: Path, bright_session: Callable) -> None:
    for number in (2, 9, 15):
        (pictures / f"{number:02}.png").write_bytes(b"")
    with pytest.raises(
        StoppedEarly, match=r"3 of 10 images failed, more than --max-errors 2; most often empty_file"
    ) as stopped:
        whole(tmp_path / "out", pictures, bright_session(), max_errors=ErrorLimit(2))
    assert stopped.tb is not None
    assert not [t for t in threading.enumerate() if t.name.startswith(("decode", "session-"))]
    with pytest.raises(StoppedEarly, match="3 of 10 images failed"):
        whole(tmp_path / "out", pictures, bright_session(), max_errors=ErrorLimit(2))
    assert whole(tmp_path / "out", pictures, bright_session(), max_errors=ErrorLimit(4)).statuses["error"] == 4


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Every file, as if the disk ended at that byte of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("explain", [False, True])
def test_a_disk_that_is_full_at_any_byte_costs_no_record(
    tmp_path: Path, pictures: Path, bright_session: Callable, explain: bool
) -> None:
    formats: Any = ("csv",) if explain else ()
    whole(tmp_path / "clean", pictures, bright_session(), explain=explain, formats=formats)
    clean = (tmp_path / "clean/results.jsonl").read_bytes()
    largest = max(p.stat().st_size for p in (tmp_path / "clean").iterdir())
    sizes = [*range(1, len(clean), len(clean) // (8 if explain else 40))]
    # then results.jsonl is whole, and something else is not
    sizes += range(len(clean), largest, largest // 4) if explain else ()
    for size in sizes:
        out = tmp_path / f"out{size}"
        with files_of_at_most(size), pytest.raises(StoppedEarly, match="File too large"):
            whole(out, pictures, bright_session(), explain=explain, formats=formats)
        left = (out / "results.jsonl").read_bytes()
        assert clean.startswith(left)
        assert left.endswith(b"\n") or not left
        assert {p.name for p in out.iterdir()} <= {"results.jsonl", "results.csv", "overlays", "report.html"}
        whole(out, pictures, bright_session(), explain=explain, formats=formats)
        for path in (tmp_path / "clean").rglob("*"):
            if path.is_file() and path.name != "report.html":
                assert (out / path.relative_to(tmp_path / "clean")).read_bytes() == path.read_bytes()
