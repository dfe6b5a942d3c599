"""Runs of `infer` that are uploaded to a bucket, as a whole or shard by shard."""

import json

import pytest

from opal_deploy import run_inference
from opal_deploy.errors import UsageError


def keys(s3):
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="photos")
    return {entry["Key"] for page in pages for entry in page.get("Contents", ())}


def read(s3, key):
    return s3.get_object(Bucket="photos", Key=key)["Body"].read()


@pytest.fixture
def images(tmp_path, monkeypatch, make_pictures):
    make_pictures(tmp_path / "in", 6)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def infer(model, **options):
    return run_inference("in", model, threads=1, batch=2, workers=1, isolate=False, log=lambda _: None, **options)


def test_a_run_is_uploaded_from_a_folder_that_stays(s3, images, exact_model):
    run = infer(exact_model, out="s3://photos/runs/one", explain=True)
    assert run.out.name == "one"
    names = {path.relative_to(run.out).as_posix() for path in run.out.rglob("*") if path.is_file()}
    assert keys(s3) == {f"runs/one/{name}" for name in names if not name.startswith(".")}
    assert read(s3, "runs/one/results.jsonl") == run.records.read_bytes()
    # the same call uploads again what is complete, and computes nothing
    s3.delete_object(Bucket="photos", Key="runs/one/report.html")
    infer(exact_model, out="s3://photos/runs/one", explain=True)
    assert "runs/one/report.html" in keys(s3)


def test_shards_of_machines_that_share_only_a_bucket_are_joined(s3, images, exact_model, monkeypatch):
    expected = infer(exact_model, out="alone", explain=True).records.read_bytes()
    for shard in ("1/2", "2/2"):
        machine = images / shard.replace("/", "-")
        machine.mkdir()
        (machine / "in").symlink_to(images / "in")
        monkeypatch.chdir(machine)
        infer(exact_model, out="s3://photos/run", shard=shard, explain=True)
        assert json.loads(read(s3, f"run/shards/{shard.replace('/', '-of-')}/summary.json"))["images"] in (2, 4)
    monkeypatch.chdir(images)
    run = infer(exact_model, out="s3://photos/run", shards=2, explain=True)
    assert run.records.read_bytes() == expected
    assert read(s3, "run/results.jsonl") == expected
    assert sum(key.startswith("run/overlays/") for key in keys(s3)) == 6
    assert not any(key.startswith("run/shards/") for key in keys(s3))


def test_a_bucket_that_does_not_exist_is_refused_before_the_run(s3, images, exact_model):
    with pytest.raises(UsageError, match="cannot be written"):
        infer(exact_model, out="s3://nowhere/run")
    assert not (images / "run").exists()
