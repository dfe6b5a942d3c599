"""`infer` that is killed or interrupted: the same command goes on, and nothing is lost or doubled."""

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import IO, cast

import pytest

from tests import runs
from tests.cli.calls import check, read_results

IMAGES = 100
EXPLAIN = ("--explain", "--format", "csv")


@pytest.fixture(scope="module")
def many(tmp_path_factory, make_pictures):
    """Images, some of them broken."""
    folder = tmp_path_factory.mktemp("many") / "in"
    for number, path in enumerate(make_pictures(folder, IMAGES)):
        if number % 50 == 7:
            path.write_bytes(b"no")
    return folder


class Infer(runs.Infer):
    """`infer` on these images, in a folder of its own: in this process, or in another one that `start` returns."""

    def __init__(self, cwd, model, pictures, opal):
        super().__init__(cwd, model, pictures)
        self.fixed, self._opal = ["in/", "--model", str(model), "--threads", "1", "--workers", "2"], opal

    def __call__(self, *arguments):
        return self._opal("infer", *self.fixed, "--out", "out", *arguments, cwd=self.cwd)

    def start(self, *arguments, before=""):
        # a shell may have told its background jobs to ignore the signal
        default = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        return super().start("out", *arguments, before=default + before)


@pytest.fixture
def infer(tmp_path, exact_model, many, opal):
    return Infer(tmp_path, exact_model, many, opal)


@pytest.fixture(scope="module")
def clean(tmp_path_factory, exact_model, many, opal):
    """The output of a run that nothing happened to."""
    cwd = tmp_path_factory.mktemp("clean")
    check(Infer(cwd, exact_model, many, opal)(*EXPLAIN), 3)
    return cwd / "out"


def assert_goes_on(infer, clean):
    """Run the same command to its end, with the files of the clean run; return what it says."""

    def files(root):
        return {path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.name != ".lock"}

    done = check(infer(*EXPLAIN), 3)
    assert files(infer.cwd / "out") == files(clean)
    # report and summary name times and commands
    for name in files(clean) - {Path("report.html"), Path("run.json"), Path("summary.json")}:
        assert (infer.cwd / "out" / name).read_bytes() == (clean / name).read_bytes(), name
    one, other = infer.summary("out"), json.loads((clean / "summary.json").read_text())
    for key in ("complete", "images", "statuses", "errors", "classes", "results_bytes"):
        assert one[key] == other[key], key
    assert one["complete"] is True
    return done.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_like_a_run_that_was_not(infer, clean, kills):
    moments = random.Random(kills)
    while kills:
        with infer.start(*EXPLAIN) as process:
            infer.wait_for("out", infer.count() + moments.randint(1, IMAGES // 8), process)
            time.sleep(moments.random() * 0.02)
            process.kill()
            process.communicate()
        kills -= process.returncode == -signal.SIGKILL
        written = (infer.cwd / "out/results.jsonl").read_bytes()
        assert (clean / "results.jsonl").read_bytes().startswith(written[: written.rfind(b"\n") + 1])
        if infer.count() == IMAGES or process.returncode != -signal.SIGKILL:
            assert_goes_on(infer, clean)
            shutil.rmtree(infer.cwd / "out")
    assert_goes_on(infer, clean)


def slow_batches(seconds):
    """A program that keeps every batch but the first three in work for so long."""
    return (
        "import time\nfrom opal_deploy.runtime.onnx_session import OnnxSession as S\nrun, n = S.run, [0]\n"
        f"def slow(*a):\n    n[0] += 1\n    time.sleep({seconds} * (n[0] > 3))\n    return run(*a)\nS.run = slow\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_it_in_good_order_and_says_how_to_go_on(infer, clean, number):
    with infer.start(*EXPLAIN, before=slow_batches(0.5)) as process:
        infer.wait_for("out", 5, process)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "opal-deploy: interrupted"
    assert "Traceback" not in said
    count = infer.count()
    assert 5 <= count < IMAGES
    assert f"Interrupted: {count} records are in out; the same command resumes" in said
    document = infer.summary("out")
    assert (document["complete"], document["stopped"], document["images"]) == (False, "interrupted", count)
    assert not (infer.cwd / "out/report.html").exists()
    said = assert_goes_on(infer, clean)
    assert f"out: {count} records are there already\n" in said
    assert f"{IMAGES} images ({count} of them before) in" in said
    document = infer.summary("out")
    assert (len(document["resumed"]), document["new_images"]) == (1, IMAGES - count)


def test_a_second_signal_ends_it_at_once_with_whole_records(infer):
    with infer.start("--batch", "4", before=slow_batches(600)) as process:
        infer.wait_for("out", 8, process)
        process.send_signal(signal.SIGINT)
        # two signals at a time would be one
        assert any("interrupt again to exit at once" in line for line in cast(IO[str], process.stderr))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "ending at once" in stderr
    assert (infer.cwd / "out/results.jsonl").read_bytes().endswith(b"}\n")


def test_too_many_errors_stop_it_and_a_higher_limit_goes_on(infer, clean):
    for _ in range(2):
        last = check(infer("--max-errors", "0"), 5).stderr.splitlines()[-1]
        assert "1 of 8 images failed, more than --max-errors 0; most often not_an_image (1)" in last
        assert "the same command resumes" in last
    # options that change no record
    check(infer("--max-errors", "10", "--batch", "3", "--workers", "1", "--no-isolate"), 3)
    expected = read_results(clean)
    for record in expected:
        record.pop("overlay", None)
    assert read_results(infer.cwd / "out") == expected


def test_a_finished_run_is_not_computed_again_and_ends_as_it_ended(infer, clean):
    def times():
        return {path: path.stat().st_mtime_ns for path in (infer.cwd / "out").rglob("*") if path.is_file()}

    shutil.copytree(clean, infer.cwd / "out")
    before = times()
    done = check(infer(*EXPLAIN, "--json"), 3)
    assert "out: this run is finished (100 images, ended " in done.stderr
    assert json.loads(done.stdout) == json.loads((clean / "summary.json").read_text())
    assert times() == before
    # a table that was not asked for then
    (infer.cwd / "out/results.csv").unlink()
    assert infer(*EXPLAIN).returncode == 3
    assert (infer.cwd / "out/results.csv").read_bytes() == (clean / "results.csv").read_bytes()


def test_a_record_whose_overlay_was_lost_is_made_again_with_all_after_it(infer, clean):
    shutil.copytree(clean, infer.cwd / "out")
    (infer.cwd / "out/summary.json").unlink()
    (infer.cwd / "out/overlays/000004-004.jpg").unlink()
    assert "out: 4 records are there already\n" in assert_goes_on(infer, clean)
