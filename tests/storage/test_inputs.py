"""Images in a bucket and on a web server: the same records as from a disk."""

import json
import tarfile
import zipfile

import pytest

import opal_deploy
from tests.bright import read_results


@pytest.fixture
def photos(s3, make_pictures, tmp_path):
    """A local folder of pictures with a text file, and the same in the bucket, below `in/`, and as archives."""
    folder = tmp_path / "in"
    make_pictures(folder / "b", 3)
    make_pictures(folder / "a", 2)
    (folder / "a" / "note.txt").write_text("no image")
    (folder / "a" / "broken.jpg").write_bytes(b"\xff\xd8\xff no more")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        s3.put_object(Bucket="photos", Key=path.relative_to(tmp_path).as_posix(), Body=path.read_bytes())
    for name, mode in (("in.tar", "w"), ("in.tgz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as tar:
            tar.add(folder, "in")
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            archive.write(path, path.relative_to(tmp_path))
    for name in ("in.tar", "in.tgz", "in.zip"):
        s3.put_object(Bucket="photos", Key=name, Body=(tmp_path / name).read_bytes())
    return folder


def _records(out, above):
    """Return a run's records, with their images' names relative to what they lie in."""
    records = read_results(out)
    assert all(record["image"].startswith(above) for record in records), (above, records[0]["image"])
    return [{**record, "image": record["image"].removeprefix(above)} for record in records]


@pytest.mark.parametrize("name", ["in", "in.tar", "in.tgz", "in.zip"])
def test_records_of_a_bucket_are_those_of_a_disk(name, photos, exact_model, opal, tmp_path):
    options = ["--model", exact_model, "--workers", "1", "--out"]
    local = opal("infer", tmp_path / name, *options, tmp_path / "local", "--no-isolate")
    remote = opal("infer", f"s3://photos/{name}", *options, tmp_path / "remote")
    assert (local.returncode, remote.returncode) == (3, 3), remote.stderr
    expected = _records(tmp_path / "local", f"{tmp_path}/")
    assert len(expected) == 6
    assert _records(tmp_path / "remote", "s3://photos/") == expected


def test_lists_globs_and_single_objects(photos, s3, exact_model, opal, tmp_path):
    lines = ["s3://photos/in/b/002.png", str(photos / "a/000.png"), "s3://photos/none.jpg", "s3://photos/in.zip"]
    s3.put_object(Bucket="photos", Key="list.txt", Body="\n".join(lines).encode())
    inputs = ["@s3://photos/list.txt", "s3://photos/in/**/00?.png", "s3://photos/in/b/001.png"]
    command = ["--labels", "folders", "--model", exact_model, "--no-isolate", "--out", tmp_path / "out"]
    result = opal("infer", *inputs, *command)
    assert result.returncode == 3, result.stderr
    records = _records(tmp_path / "out", "")
    names = [record["image"].removeprefix("s3://photos/") for record in records]
    members = [f"in.zip/in/{name}" for name in ("a/000.png", "a/001.png", "a/broken.jpg", *_B)]
    s3.put_object(Bucket="photos", Key="empty.jpg", Body=b"")
    (single, empty) = opal_deploy.load(exact_model).predict(["s3://photos/in/b/001.png", "s3://photos/empty.jpg"])
    assert {**records[-1], **single} == records[-1]
    assert empty["error"]["code"] == "empty_file"
    assert names[:3] == ["in/b/002.png", lines[1], "none.jpg"]
    assert names[3:] == [*members, "in/a/000.png", "in/a/001.png", *(f"in/{name}" for name in _B), "in/b/001.png"]
    assert records[2]["error"]["code"] == "not_found"
    assert "label" not in records[2]
    assert records[-1]["label"] == "b"


_B = ("b/000.png", "b/001.png", "b/002.png")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://photos/nothing", "s3://photos/nothing: no such object"),
        ("s3://nobucket/", "s3://nobucket/: no such bucket"),
        ("@s3://photos/none.txt", "s3://photos/none.txt: the list cannot be read: no such object"),
        ("s3://me:hidden@photos/a.jpg", "s3://photos/a.jpg: credentials inside the URL are not used"),
        ("s3:///a.jpg", "s3:///a.jpg: it names no bucket; expected s3://BUCKET/"),
        ("s3://Not a bucket/", "cannot be used: Parameter validation failed: Invalid bucket name"),
        ("file:///a.jpg", "file:///a.jpg: file:// is not read; give the path itself"),
        ("ftp://host/a.jpg", "ftp://host/a.jpg: ftp:// is not read"),
    ],
)
def test_a_url_that_is_wrong_is_refused_in_one_line(text, message, s3, exact_model, opal, tmp_path):
    result = opal("infer", text, "--model", exact_model, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "hidden" not in result.stderr


def test_records_of_a_bucket_are_verified_by_their_names(photos, exact_model, opal, tmp_path):
    command = ["--model", exact_model, "--labels", "folders"]
    opal("infer", "s3://photos/in", "s3://photos/in.zip", *command, "--no-isolate", "--out", tmp_path / "out")
    results = tmp_path / "out" / "results.jsonl"
    refused = opal("verify", results, *command)
    assert "needs s3://photos/in.zip, which was not given" in refused.stderr
    report = opal("verify", results, "s3://photos/in.zip", *command, "--all", "--json")
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["identical"] == 12


def test_what_is_not_installed_is_named(opal):
    result = opal("infer", "s3://b/a.jpg", "--model", "m.onnx", blocked=("s3fs",))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "reading s3:// needs s3fs, which is not installed: pip install 'opal-deploy[s3]'" in result.stderr


def test_a_url_where_a_path_is_meant_is_refused_in_one_line(opal, tmp_path):
    for arguments in (
        ["infer", "s3://photos/in", "--model", "s3://models/m.onnx"],
        ["train", "s3://photos/in"],
        ["verify", "https://me:hidden@host/run", "--model", "m.onnx"],
        ["infer", tmp_path, "--labels", "s3://photos/labels.csv"],
    ):
        result = opal(*arguments)
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
        assert "a URL is not read here" in result.stderr
        assert "hidden" not in result.stderr
