"""Images in a bucket, and a run that is uploaded: the same as on a disk, whatever storages do."""

import io
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from opal_deploy import remote
from opal_deploy.errors import ImageError, MissingExtra, StoppedEarly, UsageError
from opal_deploy.preprocess.decode import open_file
from opal_deploy.remote import RemoteFile, check_output, redact, upload_folder
from opal_deploy.sources.discovery import check_inputs, discover
from opal_deploy.sources.image import Skipped
from tests.sources.packing import pack

CONTENT = bytes(range(256)) * 2000


def put(s3, contents):
    for key, content in contents.items():
        s3.put_object(Bucket="photos", Key=key, Body=content)


def items(*inputs, recursive=True):
    check_inputs(inputs)
    return list(discover(inputs, Skipped(), recursive=recursive))


def contents(images):
    """Each image's name and bytes, or the code of its error."""
    result = {}
    for item in images:
        try:
            if item.error is not None:
                raise item.error
            with io.BytesIO(item.source) if isinstance(item.source, bytes) else open_file(item.source) as stream:
                result[item.name] = stream.read()
        except ImageError as error:
            result[item.name] = error.code
    return result


def pack_all(folder, members):
    """Return the bytes of a tar, a compressed tar and a zip with these members, by name."""
    kinds = {"a.tar": "plain.tar", "a.tgz": "packed.tgz", "a.zip": "deflated.zip"}
    return {name: pack(folder / name, members, kind).read_bytes() for name, kind in kinds.items()}


@contextmanager
def failing_server(status, code):
    """Yield the URL of a server that answers every request with this error of S3's."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode())

        do_GET = do_PUT = do_POST = do_HEAD = answer

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_folders_lists_and_archives_of_a_bucket(s3, tmp_path):
    keys = ["a b.jpg", "a-b/1.jpg", "a.jpg", "a/1.jpg", "ä.jpg", ".hidden/1.jpg", "x.txt", "a/"]
    put(s3, {f"in/{key}": key.encode() for key in keys} | pack_all(tmp_path, {"m/1.png": b"1", "2.png": b"2"}))
    put(s3, {"list.txt": b"s3://photos/in/a.jpg\ns3://photos/none.jpg\nhttps://h/a.jpg\n"})
    # in the order of the names' bytes
    for folder in ("s3://photos/in", "s3://photos/in/"):
        relative = [item.relative for item in items(folder)]
        assert relative == ["a b.jpg", "a-b/1.jpg", "a.jpg", "a/1.jpg", "ä.jpg"]
    assert [item.relative for item in items("s3://photos/in", recursive=False)] == ["a b.jpg", "a.jpg", "ä.jpg"]
    assert contents(items("@s3://photos/list.txt")) == {
        "s3://photos/in/a.jpg": b"a.jpg", "s3://photos/none.jpg": "not_found", "https://h/a.jpg": "unreadable"
    }  # fmt: skip
    for name in ("a.tar", "a.tgz", "a.zip"):
        url = f"s3://photos/{name}"
        assert contents(items(url)) == {f"{url}/m/1.png": b"1", f"{url}/2.png": b"2"}


def test_what_goes_on_failing_costs_its_image(s3, use_endpoint, tmp_path):
    put(s3, {"in/1.png": b"x"} | pack_all(tmp_path, {"1.png": b"1"}))
    images = [image for name in ("in/", "a.tar", "a.zip") for image in items(f"s3://photos/{name}")]
    for status, code, expected in ((503, "SlowDown", "storage_unavailable"), (403, "AccessDenied", "unreadable")):
        with failing_server(status, code) as endpoint:
            use_endpoint(endpoint)
            assert list(contents(images).values()) == [expected] * 3


@pytest.mark.parametrize("url", ["s3://photos/in/", "s3://photos/a.tar", "@s3://photos/list.txt"])
def test_inputs_that_break_off_end_the_run(url, s3, use_endpoint, tmp_path):
    put(s3, {"in/a.jpg": b"x", "list.txt": b"a.jpg\n"} | pack_all(tmp_path, {"1.png": b"1"}))
    with failing_server(503, "SlowDown") as endpoint:
        use_endpoint(endpoint)
        with pytest.raises(StoppedEarly, match=r"SlowDown|503"):
            list(discover([url], Skipped()))


@pytest.mark.parametrize("name", ["a.tar", "a.zip", "in/", "in/ large"])
def test_an_object_that_changes_after_it_was_listed_never_gives_another_image(name, s3, tmp_path, monkeypatch):
    if "large" in name:
        monkeypatch.setattr(remote, "MAX_WHOLE_BYTES", 1000)
    first, second = ({"1.png": data, "2.png": data[::-1]} for data in (CONTENT, CONTENT[1:]))
    put(s3, {"in/1.png": CONTENT} | pack_all(tmp_path, first))
    images = items(f"s3://photos/{name.split()[0]}")
    assert contents(images[:1]) == {images[0].name: CONTENT}
    put(s3, {"in/1.png": CONTENT[1:]} | pack_all(tmp_path, second))
    assert set(contents(images).values()) == {"archive_changed" if name == "a.zip" else "unreadable"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://photos/nothing", "does not exist"),
        ("s3://nobucket/", "does not exist"),
        ("@s3://photos/none.txt", "does not exist"),
        ("s3://me:hidden@photos/a.jpg", "credentials"),
        ("s3:///a.jpg", "BUCKET"),
        ("s3://Not a bucket/", "Invalid"),
        ("https://me:hidden@host/a.jpg?sig=hidden", "not read"),
    ],
)
def test_a_url_that_is_wrong_is_refused_in_one_line(text, message, s3):
    with pytest.raises(UsageError, match=message) as refused:
        check_inputs([text])
    assert "\n" not in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("opal_deploy.errors.is_installed", lambda name: name != "s3fs")
    with pytest.raises(MissingExtra, match=r"opal-deploy\[s3\]"):
        RemoteFile.parse("s3://b/a.jpg")


def test_a_finished_run_is_uploaded_and_its_summary_last(s3, tmp_path, monkeypatch):
    for name in ("summary.json", "results.jsonl", "zz.html", "overlays/0001/a.jpg", ".lock", "overlays/.a.part"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert str(check_output("s3://photos/out/run")) == "s3://photos/out/run"
    uploaded, open_filesystem = [], remote._open_filesystem

    def put_file(path, url):
        uploaded.append(url)
        open_filesystem(url).put_file(path, url)

    monkeypatch.setattr(remote, "_open_filesystem", lambda _: SimpleNamespace(put_file=put_file))
    upload_folder(tmp_path, "s3://photos/out/run")
    assert uploaded[-1].endswith("/summary.json")
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="photos")["Contents"]]
    names = ["overlays/0001/a.jpg", "results.jsonl", "summary.json", "zz.html"]
    assert keys == [f"out/run/{name}" for name in names]


@pytest.mark.parametrize(
    ("url", "unset", "reason"),
    [
        ("s3://nobucket/run", (), "does not exist"),
        ("s3://photos/run", (), "refused"),
        ("s3://photos/run", ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "no credentials"),
        ("https://example.org/run", (), "not read"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused(url, unset, reason, s3, use_endpoint, monkeypatch):
    with failing_server(403, "AccessDenied") as endpoint:
        if reason == "refused":
            use_endpoint(endpoint)
        for name in unset:
            monkeypatch.delenv(name)
        with pytest.raises(UsageError, match=reason):
            check_output(url)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/a.jpg?sv=1&sig=abc#x", "https://h/a.jpg"),
        ("@https://me:hidden@h:8/l.txt", "@https://h:8/l.txt"),
        ("s3://b/what?really@home.jpg", "s3://b/what?really@home.jpg"),
        ("s3://key:hidden@b/a.jpg", "s3://b/a.jpg"),
        ("infer 'https://h/a.jpg?sig=1' x.jpg --out o", "infer 'https://h/a.jpg' x.jpg --out o"),
        ("a?sig=1@b.jpg", "a?sig=1@b.jpg"),
    ],
)
def test_a_url_is_shown_without_secrets(text, shown):
    assert redact(text) == shown
