"""The file of records: whole lines only, and after an interruption or a full disk the end of an undisturbed run."""

import contextlib
import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.records.build import error_record
from opal_deploy.records.lines import to_document, to_json_line
from opal_deploy.run import directory
from opal_deploy.run.directory import RecordWriter, load_resume_point
from opal_deploy.run.setup import RunOptions
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.image import InputImage, Skipped
from opal_deploy.visualization.report import ReportOptions
from tests.bright import BrightSession, memory_under, write_run


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
    "zeros and an end": b"\0" * 50 + b"\n",
    "no record": b"{}\n",
    "an unknown status": line("b", status="maybe", prediction={}),
    "an answer without a prediction": line("b", status="ok"),
    "not UTF-8": b'{"schema": 1, "image": "\xff"}\n',
    "an empty line": b"\n",
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_reading_ends_at_the_first_line_that_is_not_a_whole_record(tmp_path, tail):
    # at the end, and before good ones
    for after in (b"", line("c")) if tail else (b"",):
        found, counted, left = load(tmp_path, A + tail + after, "a", "b", "c")
        assert found == (1, len(A))
        assert (counted, left) == (["a"], ["b", "c"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "x", "b"], "number 2 was b, now it is x"),
        (["b"], "number 1 was a, now it is b"),
        (["a"], "number 2 was b, there are no more images"),
    ],
)
def test_other_images_are_refused_and_nothing_is_lost(tmp_path, names, message):
    with pytest.raises(UsageError, match=message):
        load(tmp_path, A + B, *names)
    assert (tmp_path / "results.jsonl").read_bytes() == A + B


def test_memory_does_not_grow_with_the_records(tmp_path):
    # 8 MB
    (tmp_path / "results.jsonl").write_bytes(b"".join(line(f"{number}" + "x" * 300) for number in range(20_000)))
    requests = (InputImage(f"{n}" + "x" * 300, "x") for n in range(20_000))
    with memory_under(500_000):
        assert load_resume_point(tmp_path, requests, lambda _: None)[0] == 20_000


# ---- writing records

RECORD = error_record("a", "not_found", "no such file")


def test_a_record_is_one_line_of_json_and_in_the_file_once_it_is_written(tmp_path):
    name = 'a\nb"<script>\ud800\r\v\f\x1c\x1d\x1e\x7f\x85\x9b\u2028\u2029.jpg'
    odd = error_record(name, "not_found", "no such file", frame=0, time=0.1 + 0.2)
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write(odd)
        writer.write(odd)
        text = (tmp_path / "r.jsonl").read_bytes().decode()
    # by Unicode's rules as well as by JSON's, and without what steers a terminal
    first, second = text.splitlines()
    assert json.loads(first) == json.loads(second) == to_document(odd)
    assert text.replace("\n", "").isprintable()


def test_appending_cuts_off_what_is_not_kept(tmp_path):
    path, line = tmp_path / "r.jsonl", to_json_line(RECORD)
    for kept, count in ((len(line), 1), 2), ((), 1):
        path.write_bytes(line + b"x" * 500 + b'\n{"half')
        with RecordWriter(path, *kept) as writer:
            writer.write(RECORD)
            assert writer.count == count
        assert path.read_bytes() == line * count


def test_records_are_handed_to_the_disk_every_few_seconds_and_at_the_end(tmp_path, monkeypatch):
    now, synced = [0.0], []
    monkeypatch.setattr(directory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(directory.os, "fsync", lambda _: synced.append(now[0]))
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        for second in range(12):
            now[0] = float(second)
            writer.write(RECORD)
    assert synced == [5.0, 10.0, 11.0]


def test_a_disk_that_loses_what_it_was_given_stops_the_run(tmp_path, monkeypatch):
    def lost(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(directory.os, "fsync", lost)
    with pytest.raises(StoppedEarly, match="Input/output error"), RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write(RECORD)


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


def run_whole(out, explain=True, *, fails_at=None, formats=(), **callbacks):
    """Run on the images in `in` next to `out`."""
    out.mkdir(exist_ok=True)
    report = ReportOptions() if explain else None
    options, images = RunOptions(out, InferenceOptions(batch=4), report, formats=formats), str(out.parent / "in")
    return write_run(options, discover([images], Skipped()), PlacedSession(fails_at=fails_at), **callbacks)


def assert_same_files(out, clean):
    files = {path.relative_to(clean) for path in clean.rglob("*")}
    assert {path.relative_to(out) for path in out.rglob("*")} == files
    for name in files - {Path("overlays"), Path("report.html")}:
        assert (out / name).read_bytes() == (clean / name).read_bytes(), name


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, images, fails_at):
    clean, out = tmp_path / "clean", tmp_path / "out"
    run_whole(clean)
    with pytest.raises(StoppedEarly):
        run_whole(out, fails_at=fails_at)
    assert not (out / "report.html").exists()
    summary = run_whole(out)
    assert_same_files(out, clean)
    assert (summary.total, summary.errors, sum(summary.classes.values())) == (23, {"not_an_image": 1}, 22)
    assert summary.resumed > 0 or fails_at == 0
    for page in ((folder / "report.html").read_text() for folder in (clean, out)):
        assert [page.count(text) for text in ('"slots":', '"text/plain"', "<b>23</b>")] == [22, 22, 1]
        assert "07.png" in page


@contextlib.contextmanager
def limit_file_size(size):
    """Let every file end at a byte, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_at_any_byte_costs_no_record(tmp_path, images):
    run_whole(tmp_path / "clean", formats=("csv",))
    clean = (tmp_path / "clean/results.jsonl").read_bytes()
    largest = max(path.stat().st_size for path in (tmp_path / "clean").iterdir())
    # at last results.jsonl is whole, and something else is not
    for size in [*range(1, len(clean), len(clean) // 9), *range(len(clean), largest, largest // 4)]:
        out = tmp_path / f"out{size}"
        with limit_file_size(size), pytest.raises(StoppedEarly, match="File too large"):
            run_whole(out, formats=("csv",))
        left = (out / "results.jsonl").read_bytes()
        assert clean.startswith(left)
        assert left.endswith(b"\n") or not left
        assert {path.name for path in out.iterdir()} <= {"results.jsonl", "results.csv", "overlays", "report.html"}
        run_whole(out, formats=("csv",))
        assert_same_files(out, tmp_path / "clean")


def replace_file(path):
    path.unlink()
    path.write_bytes(b"")


@pytest.mark.parametrize(("name", "remove"), [("results.jsonl", replace_file), ("", shutil.rmtree)])
def test_what_is_removed_during_a_run_is_no_success(tmp_path, images, name, remove):
    out, removed = tmp_path / "out", []

    def remove_once(_):
        if not removed:
            removed.append(remove(out / name))

    with pytest.raises(StoppedEarly, match="removed"):
        run_whole(out, False, report=remove_once)
    # the next run misses nothing
    for run in (out, tmp_path / "clean"):
        run_whole(run, False)
    assert_same_files(out, tmp_path / "clean")
