"""Runs of `infer` that are uploaded to a bucket, as a whole or shard by shard."""

import json

import pytest

from opal_deploy import run_inference


def read(s3, key):
    return s3.get_object(Bucket="photos", Key=key)["Body"].read()


@pytest.fixture
def images(tmp_path, monkeypatch, make_pictures):
    make_pictures(tmp_path / "in", 6)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def infer(model, **options):
    return run_inference("in", model, threads=1, batch=2, workers=1, isolate=False, log=lambda _: None, **options)


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
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="photos")["Contents"]]
    assert sum(key.startswith("run/overlays/") for key in keys) == 6
    assert not any(key.startswith("run/shards/") for key in keys)
