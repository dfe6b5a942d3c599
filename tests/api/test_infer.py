"""`run_inference`: the same run directory as the command's, resumed after an interruption."""

import json
import os
import zipfile
from pathlib import Path

import pytest

import opal_deploy
from tests.cli.calls import check

TIMES = ("started", "ended", "resumed", "seconds", "images_per_second", "time", "new_images")


@pytest.fixture
def folder(tmp_path, make_pictures, monkeypatch):
    make_pictures(tmp_path / "in", 12)
    (tmp_path / "in/bad.jpg").write_bytes(b"no")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_run(out):
    """Return the files of a run, without times, the run's id, and the page, which embeds images as they come."""
    paths = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != "report.html"]
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}
    for name in ("run.json", "summary.json"):
        document = json.loads(files[name])
        files[name] = json.dumps({key: value for key, value in document.items() if key not in {*TIMES, "id"}}).encode()
    return files


def test_it_writes_what_the_command_writes_also_after_an_interruption(folder, exact_model, opal):
    options = ["--out", "out", "--explain", "--labels", "folders", "--format", "csv", "--batch", "2"]
    check(opal("infer", "in", "--model", exact_model, *options, "--threads", "1"), 3)
    expected = read_run(folder / "out")
    (folder / "out").rename(folder / "command")

    def stop(done, total, note):
        if done >= 4:
            raise KeyboardInterrupt

    lines = []

    def call(**more):
        return opal_deploy.run_inference(
            "in", exact_model, out="out", explain=True, labels="folders", formats=["csv"], batch=2,
            threads=1, log=lines.append, **more,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        call(progress=stop)
    assert "records are in out; the same command resumes" in lines[-1]
    run = call()
    assert read_run(folder / "out") == expected
    assert run.counts == {"error": 1, "ok": 12}
    assert (run.records, run.report) == (Path("out/results.jsonl"), Path("out/report.html"))
    assert run.accuracy is None
    assert run.summary == call().summary
    assert "this run is finished" in lines[-1]


def test_an_archive_that_changes_while_it_is_read_stops_the_run_which_resumes_with_the_old_one(folder, exact_model):
    with zipfile.ZipFile("in.zip", "w") as archive:
        for number in range(40):
            archive.write("in/000.png", f"{number:02}.png")
    whole = Path("in.zip").read_bytes()

    def cut(done, total, note):
        if done >= 4:
            os.truncate("in.zip", 5_000)

    def run(out, **more):
        options = {"out": out, "batch": 2, "threads": 1, "workers": 1, "log": lambda line: None}
        return opal_deploy.run_inference("in.zip", exact_model, **options, **more)

    with pytest.raises(opal_deploy.StoppedEarly, match=r"in\.zip was changed"):
        run("cut", progress=cut)
    assert 4 <= len(Path("cut/results.jsonl").read_text().splitlines()) < 40
    Path("in.zip").write_bytes(whole)
    # a restored file is another one by its time
    assert run("cut").counts == run("once").counts == {"ok": 40}
    assert Path("cut/results.jsonl").read_bytes() == Path("once/results.jsonl").read_bytes()


def test_an_open_model_runs_too(folder, exact_model):
    model = opal_deploy.load(exact_model, device="cpu", threads=1)
    run = opal_deploy.run_inference(["in/000.png", Path("in/001.png")], model, min_margin=2.0)
    assert (run.out, run.counts, run.report) == (Path("explanations"), {"abstained": 2}, None)
    with pytest.raises(opal_deploy.UsageError, match="top 0: expected at least 1"):
        opal_deploy.run_inference("in", model, top=0)
