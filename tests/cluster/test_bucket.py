"""`infer --ray` from a bucket into a bucket: no storage of files that the nodes share."""

import pytest

from tests.storage.conftest import s3, s3_endpoint, use_endpoint

__all__ = ["s3", "s3_endpoint", "use_endpoint"]

pytest.importorskip("ray")


@pytest.mark.slow
def test_actors_read_from_a_bucket_and_draw_into_it(
    s3, exact_model, make_pictures, opal_process, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    for path in make_pictures(tmp_path / "in", 20):
        s3.put_object(Bucket="photos", Key=f"in/{path.name}", Body=path.read_bytes())
    command = ["infer", "s3://photos/in/", "--model", exact_model, "--threads", "1", "--workers", "1", "--explain"]
    cluster = ("--ray", "local", "--ray-cpus", "1")
    for name, arguments in (("one", ()), ("ray", cluster)):
        done = opal_process(*command, "--out", f"s3://photos/{name}", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    def files(name):
        entries = s3.list_objects_v2(Bucket="photos", Prefix=f"{name}/")["Contents"]
        keys = [entry["Key"] for entry in entries if not entry["Key"].endswith((".html", "run.json", "summary.json"))]
        return {key.removeprefix(name): s3.get_object(Bucket="photos", Key=key)["Body"].read() for key in keys}

    assert len(files("one")) == 21
    assert files("ray") == files("one")
