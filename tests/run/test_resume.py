"""Resuming a run: whole records of the same images are kept, and the end is that of an uninterrupted run."""

import contextlib
import json
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.records.build import error_record
from opal_deploy.records.lines import to_document, to_json_line
from opal_deploy.records.run_files import sheet_name
from opal_deploy.run.drawing import ReportOptions
from opal_deploy.run.interrupt import Interrupt
from opal_deploy.run.results import ResumePoint, load_resume_point, read_records
from opal_deploy.run.run import LocalBackend, RunOptions, run
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.image import InputImage
from opal_deploy.sources.items import Skipped
from tests.bright import BrightSession
from tests.records.test_schema import OK


def line(name, **more):
    return json.dumps({**to_document(error_record(name, "not_found", "no such file")), **more}).encode() + b"\n"


def load(out, content, *names):
    """Write a results file; return where it is resumed, the names counted, and those that are left."""
    (out / "results.jsonl").write_bytes(content)
    requests = (InputImage(name, name) for name in names)
    counted = []
    found = load_resume_point(out, requests, lambda record: counted.append(record.image))
    return found, counted, [request.name for request in requests]


A, B = line("a"), line("b")
TAILS = {
    "nothing": b"",
    "a line without its end": B[:-1],
    "zeros": b"\0" * 5000,
    "zeros and an end": b"\0" * 50 + b"\n",
    "a half that runs into the next": B[:20] + B,
    "no record": b"{}\n",
    "no object": b"17\n",
    "another schema": line("b", schema=2),
    "an unknown status": line("b", status="maybe", prediction={}),
    "an answer without a prediction": line("b", status="ok"),
    "not UTF-8": b'{"schema": 1, "image": "\xff"}\n',
    "deeply nested": b"[" * 100_000 + b"\n",
    "an empty line": b"\n",
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_reading_ends_at_the_first_line_that_is_not_a_whole_record(tmp_path, tail):
    # at the end, and before good ones
    for after in (b"", line("c")) if tail else (b"",):
        found, counted, left = load(tmp_path, A + tail + after, "a", "b", "c")
        assert found == ResumePoint(1, len(A), len(tail + after))
        assert (counted, left) == (["a"], ["b", "c"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "x", "b"], r"number 2 was b, now it is x; give the same images"),
        (["b"], r"number 1 was a, now it is b"),
        (["a"], r"number 2 was b, there are no more images now"),
    ],
)
def test_other_images_are_refused_and_nothing_is_lost(tmp_path, names, message):
    with pytest.raises(UsageError, match=message):
        load(tmp_path, A + B, *names)
    assert (tmp_path / "results.jsonl").read_bytes() == A + B


NAMES = ["a", "b", "c", "d"]


def write_with_sheets(out, sheets):
    """Write the sheets of some of a, b, c, d; return the records of all of them."""
    (out / "sheets").mkdir()
    for index, name in enumerate(NAMES):
        if name in sheets.lower():
            (out / sheet_name(index, name)).write_bytes(b"png" if name in sheets else b"")
    records = ({**OK, "image": name, "sheet": sheet_name(index, name)} for index, name in enumerate(NAMES))
    return [to_json_line(record) for record in records]


@pytest.mark.parametrize(("sheets", "count"), [("abcd", 4), ("abc", 3), ("aBcd", 1), ("bcd", 0), ("", 0)])
def test_records_end_before_the_first_whose_sheet_is_missing(tmp_path, sheets, count):
    lines = write_with_sheets(tmp_path, sheets)
    found, counted, left = load(tmp_path, b"".join(lines), *NAMES, "e")
    assert found == ResumePoint(count, len(b"".join(lines[:count])), len(b"".join(lines[count:])))
    assert (counted, left) == (NAMES[:count], [*NAMES[count:], "e"])


def test_memory_does_not_grow_with_the_records(tmp_path):
    # 8 MB
    (tmp_path / "results.jsonl").write_bytes(b"".join(line(f"{number}" + "x" * 300) for number in range(20_000)))
    tracemalloc.start()
    requests = (InputImage(f"{n}" + "x" * 300, "x") for n in range(20_000))
    assert load_resume_point(tmp_path, requests, lambda _: None).count == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000


# ---- whole runs


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(23):
        Image.effect_noise((40 + number, 40), 40 + number).convert("RGB").save(folder / f"{number:02}.png")
    (folder / "07.png").write_bytes(b"no")
    return folder


class PlacedSession(BrightSession):
    """A session whose logits depend on the place of an image in its batch, as the last bit of a real one's may."""

    def run(self, images):
        outputs = super().run(images)
        outputs.logits[:] -= np.float32(1e-3) * np.arange(len(images), dtype=np.float32)[:, None]
        return outputs


def run_whole(out, limit=1000, fails_at=None, **settings):
    """Run over the images beside `out`; with a report and overlays unless `limit` is None."""
    out.mkdir(exist_ok=True)
    report = None if limit is None else ReportOptions(limit=limit)
    options = RunOptions(out, InferenceOptions(batch=4), report, resume=True, **settings)
    requests = discover([str(out.parent / "in")], Skipped())
    return run(requests, LocalBackend([PlacedSession(fails_at=fails_at)]), options)


def assert_same_files(out, clean):
    files = {path.relative_to(clean) for path in clean.rglob("*")}
    assert {path.relative_to(out) for path in out.rglob("*")} == files
    for name in files - {Path("overlays"), Path("report.html")}:
        assert (out / name).read_bytes() == (clean / name).read_bytes(), name


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, images, fails_at):
    clean, out = tmp_path / "clean", tmp_path / "out"
    run_whole(clean, 5)
    with pytest.raises(StoppedEarly):
        run_whole(out, 5, fails_at)
    assert not (out / "report.html").exists()
    summary = run_whole(out, 5)
    assert_same_files(out, clean)
    assert (summary.total, summary.errors, sum(summary.classes.values())) == (23, {"not_an_image": 1}, 22)
    assert summary.resumed > 0 or fails_at == 0
    for page in ((folder / "report.html").read_text() for folder in (clean, out)):
        # five predictions and the failure
        assert [page.count(text) for text in ("<article", 'src="data:image/jpeg', "<b>23</b>")] == [6, 5, 1]
        assert "07.png" in page


def test_wherever_the_file_was_cut_the_end_is_the_same(tmp_path, images):
    run_whole(tmp_path / "out", None)
    results = tmp_path / "out/results.jsonl"
    clean = results.read_bytes()
    for cut in range(1, len(clean), 666):
        results.write_bytes(clean[:cut])
        run_whole(tmp_path / "out", None)
        assert results.read_bytes() == clean, cut


def test_an_interrupted_run_writes_what_it_took_and_takes_no_more(tmp_path, images):
    interrupt, out = Interrupt(), tmp_path / "out"

    def interrupted():
        for number, item in enumerate(discover([str(images)], Skipped())):
            interrupt.requested = number >= 9
            yield item

    out.mkdir()
    options = RunOptions(out, InferenceOptions(batch=4), ReportOptions(), resume=True)
    summary = run(interrupted(), LocalBackend([PlacedSession()]), options, interrupt=interrupt)
    assert interrupt.stopped
    # the image that was being fetched when the signal came is the last
    assert summary.total == len(list(read_records(out / "results.jsonl"))) == 10
    assert not (out / "report.html").exists()
    run_whole(out)
    run_whole(tmp_path / "clean")
    assert_same_files(out, tmp_path / "clean")


@contextlib.contextmanager
def limit_file_size(size):
    """Let every file end at a byte, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("explain", [False, True])
def test_a_disk_that_is_full_at_any_byte_costs_no_record(tmp_path, images, explain):
    limit, settings = (1000, {"formats": ("csv",)}) if explain else (None, {})
    run_whole(tmp_path / "clean", limit, **settings)
    clean = (tmp_path / "clean/results.jsonl").read_bytes()
    largest = max(path.stat().st_size for path in (tmp_path / "clean").iterdir())
    sizes = [*range(1, len(clean), len(clean) // (6 if explain else 13))]
    # then results.jsonl is whole, and something else is not
    sizes += range(len(clean), largest, largest // 4) if explain else ()
    for size in sizes:
        out = tmp_path / f"out{size}"
        with limit_file_size(size), pytest.raises(StoppedEarly, match="File too large") as stopped:
            run_whole(out, limit, **settings)
        left = (out / "results.jsonl").read_bytes()
        count = left.count(b"\n")
        assert explain or f"the {count} records before are whole; make room and run again" in str(stopped.value)
        assert clean.startswith(left)
        assert left.endswith(b"\n") or not left
        assert {path.name for path in out.iterdir()} <= {"results.jsonl", "results.csv", "overlays", "report.html"}
        run_whole(out, limit, **settings)
        assert_same_files(out, tmp_path / "clean")
