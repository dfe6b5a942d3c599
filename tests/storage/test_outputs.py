"""Run directories in a bucket: whole at the end, resumed from anywhere, written by one process at a time."""

import json
import subprocess
import sys
import time

import pytest

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.records.build import error_record
from opal_deploy.run import bucket
from opal_deploy.run.results import RecordWriter
from opal_deploy.run.summary import Summary
from opal_deploy.storage.files import RemoteFile
from tests.cli.calls import one_line

RUN = RemoteFile.parse("s3://photos/run")
# a part whenever the one before is up
_MAIN = """
import sys
sys.argv[0] = "opal-deploy"
from opal_deploy.run import bucket
bucket.PART_SECONDS = 0.0
from opal_deploy.cli import main
main()
"""


def _keys(s3):
    return [entry["Key"] for entry in s3.list_objects_v2(Bucket="photos", Prefix="run/").get("Contents", ())]


def _read(s3, name):
    data = s3.get_object(Bucket="photos", Key=f"run/{name}")["Body"].read()
    return data


def test_a_killed_run_is_resumed_on_another_machine(s3, exact_model, make_pictures, opal, tmp_path):
    paths = [str(path) for path in make_pictures(tmp_path / "in", 7)]
    options = ["--model", str(exact_model), "--batch", "1", "--workers", "1", "--explain"]
    command = ["infer", "-", *options, "--out", RUN.url]
    process = subprocess.Popen([sys.executable, "-c", _MAIN, *command], stdin=subprocess.PIPE, cwd=tmp_path)
    try:
        process.stdin.write("".join(f"{path}\n" for path in paths[:4]).encode())
        process.stdin.flush()
        # it waits for more images, with some of their records in the bucket
        while not any("/parts/" in key for key in _keys(s3)):
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    (part, *_) = sorted(key for key in _keys(s3) if "/parts/" in key)
    drawn = [json.loads(line)["overlay"] for line in _read(s3, part.removeprefix("run/")).splitlines()]
    assert set(drawn) <= {key.removeprefix("run/") for key in _keys(s3)}
    assert "run/summary.json" not in _keys(s3)

    text = "".join(f"{path}\n" for path in paths)
    resumed = subprocess.run([sys.executable, "-c", _MAIN, *command], input=text, text=True, capture_output=True)
    assert resumed.returncode == 0, resumed.stderr
    assert "records are there already" in resumed.stderr
    undisturbed = opal("infer", f"@{_write(tmp_path / 'list.txt', text)}", *options, "--out", tmp_path / "local")
    assert undisturbed.returncode == 0
    assert _read(s3, "results.jsonl") == (tmp_path / "local" / "results.jsonl").read_bytes()
    names = sorted(path.relative_to(tmp_path / "local").as_posix() for path in (tmp_path / "local").rglob("*.*"))
    assert sorted(key.removeprefix("run/") for key in _keys(s3)) == [name for name in names if name != ".lock"]
    for name in names:
        if name.startswith("overlays/"):
            assert _read(s3, name) == (tmp_path / "local" / name).read_bytes()


def _write(path, text):
    path.write_text(text)
    return path


def test_a_finished_run_is_found_replaced_and_given_tables(s3, exact_model, make_pictures, opal, tmp_path):
    make_pictures(tmp_path / "in", 2)
    command = ["infer", tmp_path / "in", "--model", exact_model, "--no-isolate", "--out", RUN.url]
    assert opal(*command).returncode == 0
    again = opal(*command, "--format", "csv")
    assert "this run is finished (2 images" in again.stderr
    assert len(_read(s3, "results.csv").splitlines()) == 3
    other = opal(*command, "--top", "2")
    assert other.returncode == 2
    assert "s3://photos/run: it holds another run: --top 5 there, 2 here" in other.stderr
    assert opal(*command, "--top", "2", "--overwrite").returncode == 0
    assert len(json.loads(_read(s3, "results.jsonl").splitlines()[0])["top"]) == 2
    assert "run/results.csv" not in _keys(s3)
    http = opal(*command[:-1], "https://example.org/run")
    assert (http.returncode, http.stderr.count("\n")) == (2, 1)
    assert "https://example.org/run: cannot be written to" in http.stderr


def _append(directory, count, keep=0):
    path = directory.root / "results.jsonl"
    with RecordWriter(path, path.stat().st_size if keep else 0, keep) as writer:
        writer.write(*(error_record(str(number), "not_found", "none") for number in range(keep, keep + count)))


def _acquire(**options):
    return bucket.acquire_bucket_run_dir(RUN, {"images": ["x"]}, **{"resume": True, "overwrite": False, **options})


def test_of_two_processes_that_write_to_one_run_one_goes_on(s3):
    with _acquire() as first, _acquire() as late:
        first.write_config()
        with pytest.raises(UsageError, match="another process has just begun a run there"):
            late.write_config()
        _append(first, 3)
        first.write_summary(Summary(), {}, "interrupted")
    with _acquire() as first, _acquire() as second:
        assert (first.state, second.state) == ("unfinished", "unfinished")
        for directory, count in ((first, 2), (second, 4)):
            directory.write_config()
            assert (directory.root / "results.jsonl").read_bytes().count(b"\n") == 3
            _append(directory, count, keep=3)
        first.write_summary(Summary(), {}, "interrupted")
        with pytest.raises(StoppedEarly, match="another process writes to this run, and has written record 4"):
            second.write_summary(Summary(), {})
    with pytest.raises(UsageError, match="--no-resume was given"), _acquire(resume=False):
        pass
    with _acquire() as last:
        lines = (last.root / "results.jsonl").read_text().splitlines()
        names = [json.loads(line)["image"] for line in lines]
        assert names == list("01234")


def test_a_missing_part_is_not_passed_over(s3):
    with _acquire() as directory:
        directory.write_config()
        for done in (0, 2):
            _append(directory, 2, keep=done)
            directory.write_summary(Summary(), {}, "interrupted")
    (first, _) = [key for key in _keys(s3) if "/parts/" in key]
    s3.delete_object(Bucket="photos", Key=first)
    with (
        pytest.raises(UsageError, match=r"000002\.jsonl: it, or the part before it, is damaged or missing"),
        _acquire(),
    ):
        pass
    with _acquire(overwrite=True) as directory:
        assert directory.state == "new"
        assert _keys(s3) == []


@pytest.mark.parametrize(
    ("bucket", "unset", "reason"),
    [
        ("nobucket", (), "no such bucket"),
        ("photos", (), "access is refused (403)"),
        ("photos", ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "no credentials were found"),
    ],
)
def test_a_bucket_that_cannot_be_written_to_is_refused_before_the_model_is_opened(
    s3, make_pictures, opal, tmp_path, monkeypatch, bucket, unset, reason
):
    make_pictures(tmp_path / "in", 1)
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": "arn:aws:s3:::photos/*"}
    s3.put_bucket_policy(Bucket="photos", Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
    for name in unset:
        monkeypatch.delenv(name)
    result = opal("infer", tmp_path / "in", "--model", tmp_path / "no.onnx", "--out", f"s3://{bucket}/run")
    assert f"opal-deploy: --out s3://{bucket}/run: cannot be written to: {reason}" in one_line(result)
    s3.delete_bucket_policy(Bucket="photos")


def test_drift_reads_a_run_in_a_bucket_finished_or_not(s3, exact_model, make_pictures, opal, tmp_path):
    images = make_pictures(tmp_path / "in", 24)
    opal("infer", tmp_path / "in", "--model", exact_model, "--batch", "8", "--workers", "1", "--out", RUN.url)
    done = opal("drift", RUN.url, "--against", RUN.url)
    assert done.stderr.startswith(f"{len(images)} images compared with {len(images)} of {RUN.url}\nNo shift found")
    s3.put_object(Bucket="photos", Key="run/parts/x/000000000000.jsonl", Body=_read(s3, "results.jsonl"))
    s3.delete_object(Bucket="photos", Key="run/results.jsonl")
    assert opal("drift", RUN.url, "--against", RUN.url).stderr == done.stderr
    assert "neither results.jsonl nor parts found" in one_line(
        opal("drift", "s3://photos/none", "--against", "s3://photos/none")
    )
