"""What storages do on a bad day costs time, or the image that it happened to, and never gives another image's bytes."""

import tarfile
import zipfile

import pytest
from botocore.exceptions import ClientError

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import open_file
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.items import Skipped
from opal_deploy.storage import buckets, filesystem
from opal_deploy.storage.files import RemoteFile
from tests.bright import read_results
from tests.storage.faulty_proxy import faulty_proxy


@pytest.mark.parametrize("kind", [503, 500, "reset", "cut"])
def test_what_fails_for_the_moment_is_repeated(kind, s3, s3_endpoint, use_endpoint, tmp_path):
    content = bytes(range(256)) * 2000
    s3.put_object(Bucket="photos", Key="in/a.jpg", Body=content)
    # every request fails once
    with faulty_proxy(s3_endpoint, lambda method, path, count: kind if count == 1 else None) as (endpoint, counts):
        use_endpoint(endpoint)
        ((_, file),) = buckets.list_files(RemoteFile.parse("s3://photos/in"), recursive=True)
        assert file.open().read() == content
        with file.open_ranges() as stream:
            stream.seek(1000)
            assert stream.read(500) == content[1000:1500]
        assert counts["GET", "/photos/in/a.jpg"] == 3


def test_what_goes_on_failing_costs_its_image_and_no_secret(
    s3, s3_endpoint, use_endpoint, exact_model, make_pictures, opal, tmp_path, monkeypatch
):
    monkeypatch.setattr(filesystem, "PATIENCE_SECONDS", 0.3)
    for path in make_pictures(tmp_path / "in", 4):
        s3.put_object(Bucket="photos", Key=f"in/{path.name}", Body=path.read_bytes())

    def fault(method, path, count):
        return {"/photos/in/001.png": 503, "/photos/in/002.png": 403}.get(path) if method == "GET" else None

    with faulty_proxy(s3_endpoint, fault) as (endpoint, _):
        use_endpoint(endpoint)
        command = ["infer", "s3://photos/in", "--model", exact_model, "--out", tmp_path / "out", "--no-isolate"]
        result = opal(*command)
    assert result.returncode == 3, result.stderr
    records = read_results(tmp_path / "out")
    assert [record["status"] for record in records] == ["ok", "error", "error", "ok"]
    assert records[1]["error"] == {
        "code": "storage_unavailable", "message": "the storage did not answer within 0.3 s (SlowDown)"
    }  # fmt: skip
    assert records[2]["error"] == {"code": "unreadable", "message": "access is refused (AccessDenied)"}
    everything = "".join(path.read_text() for path in (tmp_path / "out").glob("*.json*")) + result.stderr
    assert "testing" not in everything


def test_a_listing_that_breaks_off_ends_the_run_which_can_be_resumed(
    s3, s3_endpoint, use_endpoint, exact_model, make_pictures, opal, tmp_path, monkeypatch
):
    monkeypatch.setattr(filesystem, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(buckets, "_PAGE_NAMES", 2)
    for path in make_pictures(tmp_path / "in", 4):
        s3.put_object(Bucket="photos", Key=f"in/{path.name}", Body=path.read_bytes())
    command = ["infer", "s3://photos/in/", "--model", exact_model, "--out", tmp_path / "out", "--no-isolate"]
    # the check of the call, and the first page
    with faulty_proxy(s3_endpoint, lambda _, path, count: 503 if path == "/photos" and count > 2 else None) as (url, _):
        use_endpoint(url)
        broken = opal(*command)
    assert broken.returncode == 5
    assert "s3://photos/in/: the storage did not answer within 0.1 s (SlowDown)" in broken.stderr
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 2
    use_endpoint(s3_endpoint)
    resumed = opal(*command)
    assert resumed.returncode == 0
    assert "4 images (2 of them before)" in resumed.stderr


@pytest.mark.parametrize("suffix", ["tar", "zip", "png", "large.png"])
def test_an_object_that_changes_in_mid_run_never_gives_another_image(suffix, s3, make_pictures, tmp_path, monkeypatch):
    paths = make_pictures(tmp_path / "in", 2)
    if suffix == "large.png":
        monkeypatch.setattr("opal_deploy.storage.files.MAX_WHOLE_BYTES", 1000)

    def put(first, second):
        if suffix.endswith("png"):
            s3.put_object(Bucket="photos", Key="in/a.png", Body=first.read_bytes() + second.read_bytes()[:1])
            return "s3://photos/in/"
        archive = tmp_path / f"a.{suffix}"
        if suffix == "tar":
            with tarfile.open(archive, "w") as tar:
                for number, path in enumerate((first, second)):
                    tar.add(path, f"{number}.png")
        else:
            with zipfile.ZipFile(archive, "w") as zipped:
                for number, path in enumerate((first, second)):
                    zipped.write(path, f"{number}.png")
        s3.put_object(Bucket="photos", Key=f"a.{suffix}", Body=archive.read_bytes())
        return f"s3://photos/a.{suffix}"

    items = list(discover([put(*paths)], Skipped()))
    with open_file(items[0].source) as stream:
        assert stream.read(len(paths[0].read_bytes())) == paths[0].read_bytes()
    put(paths[1], paths[0])
    for item in items:
        with pytest.raises(ImageError, match="was changed") as error, open_file(item.source) as stream:
            stream.read()
        assert error.value.code == "unreadable"


def test_a_bucket_is_listed_page_by_page_in_byte_order(s3, s3_endpoint, use_endpoint, monkeypatch):
    keys = [f"in/{number:04}.jpg" for number in range(4)]
    keys += ["in/a.jpg", "in/a/1.jpg", "in/a-b/1.jpg", "in/B/1.jpg", "in/ä.jpg", "in/a b.jpg", "in/a/"]
    for key in keys:
        s3.put_object(Bucket="photos", Key=key, Body=b"x")
    monkeypatch.setattr(buckets, "_PAGE_NAMES", 5)
    expected = sorted((key.removeprefix("in/") for key in keys if not key.endswith("/")), key=str.encode)
    with faulty_proxy(s3_endpoint, lambda *_: None) as (endpoint, counts):
        use_endpoint(endpoint)
        folder = RemoteFile.parse("s3://photos/in")
        files = buckets.list_files(folder, recursive=True)
        next(files)
        assert counts["GET", "/photos"] == 1
        assert len(list(files)) == len(expected) - 1
        assert counts["GET", "/photos"] == 3
        assert [name for name, _ in buckets.list_files(folder, recursive=True)] == expected
        flat = [name for name, _ in buckets.list_files(folder, recursive=False)]
        assert flat == [name for name in expected if "/" not in name]
        # as storages other than S3 are listed
        monkeypatch.setattr(buckets, "_list_s3", lambda fs, root, deep: buckets._list_tree(fs, root, "", deep))
        assert list(buckets.list_files(folder, recursive=True)) == [
            (name, folder.child(name, file.fingerprint)) for name, file in buckets.list_files(folder, recursive=True)
        ]
        assert [name for name, _ in buckets.list_files(folder, recursive=True)] == expected


class TooManyRedirects(Exception):
    """As aiohttp's."""


EXPIRED = {"Error": {"Code": "400", "Message": "Bad Request"}, "ResponseMetadata": {"HTTPStatusCode": 400}}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ClientError(EXPIRED, "HeadObject"), "the request is refused (status 400), as where credentials have expired"),
        (TooManyRedirects(), "the server refers from one address to another without end"),
    ],
)
def test_an_error_without_words_says_what_it_may_be(error, message):
    assert str(filesystem.to_image_error(error)) == message
