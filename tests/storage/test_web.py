"""Images on web servers, and what records, messages and files of a run show of a URL that lets in whoever has it."""

import base64
import contextlib
import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler

import pytest

from opal_deploy.errors import ImageError
from opal_deploy.storage.files import RemoteFile
from opal_deploy.storage.urls import redact
from tests.bright import read_results
from tests.storage.faulty_proxy import serve


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/a.jpg?X-Amz-Credential=me&X-Amz-Signature=abc", "https://h/a.jpg"),
        ("https://h/a.jpg?sv=1&sig=abc#x", "https://h/a.jpg"),
        ("https://h/a.jpg?access_token=abc", "https://h/a.jpg"),
        ("https://h/get?id=7&size=big", "https://h/get?id=7&size=big"),
        ("@https://me:hidden@h:8/l.txt", "@https://h:8/l.txt"),
        ("s3://b/what?really@home.jpg", "s3://b/what?really@home.jpg"),
        ("s3://key:hidden@b/a.jpg", "s3://b/a.jpg"),
        ("abfs://box@account.dfs.core.windows.net/a.jpg", "abfs://box@account.dfs.core.windows.net/a.jpg"),
        ("infer 'https://h/a.jpg?sig=1' x.jpg --out o", "infer 'https://h/a.jpg' x.jpg --out o"),
        ("a?sig=1@b.jpg", "a?sig=1@b.jpg"),
    ],
)
def test_what_of_a_url_is_shown(url, shown):
    assert redact(url) == shown


def test_a_signed_archive_is_read_by_ranges_and_its_signature_shown_nowhere(
    s3, exact_model, make_pictures, opal, tmp_path
):
    import zipfile

    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        for path in make_pictures(tmp_path / "in", 2):
            archive.write(path, path.name)
    s3.put_object(Bucket="photos", Key="in.zip", Body=(tmp_path / "in.zip").read_bytes())
    arguments = {"Params": {"Bucket": "photos", "Key": "in.zip"}, "ExpiresIn": 60}
    url = s3.generate_presigned_url("get_object", **arguments)
    command = ["--model", exact_model, "--no-isolate", "--explain", "--out", tmp_path / "out"]
    result = opal("infer", url, *command)
    assert result.returncode == 0, result.stderr
    records = read_results(tmp_path / "out")
    plain = url.partition("?")[0]
    assert [record["image"] for record in records] == [f"{plain}/000.png", f"{plain}/001.png"]
    # signed anew, it is the same run
    again = opal("infer", s3.generate_presigned_url("get_object", **{**arguments, "ExpiresIn": 90}), *command)
    assert "this run is finished" in again.stderr
    text = result.stderr + again.stderr + result.stdout
    text += "".join(path.read_text() for path in (tmp_path / "out").glob("*.*") if path.is_file())
    assert "Signature" not in text
    assert "testing" not in text


_PASSWORD = "hidden-word"


class _Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        expected = "Basic " + base64.b64encode(f"me:{_PASSWORD}".encode()).decode()
        if self.path.startswith("/private/") and self.headers.get("Authorization") != expected:
            self.send_error(401)
            return
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def https_server(tmp_path):
    """A server with a certificate of its own, `certificate.pem`, of what lies in `tmp_path`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    certificate = (
        builder.not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "certificate.pem").write_bytes(certificate.public_bytes(pem) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem")
    with serve(partial(_Handler, directory=str(tmp_path)), context) as url:
        yield url


def test_a_list_on_an_https_server_names_images_there(https_server, exact_model, make_pictures, tmp_path):
    make_pictures(tmp_path / "in", 1)
    make_pictures(tmp_path / "private", 1)
    (tmp_path / "empty.jpg").touch()
    user = https_server.replace("://", f"://me:{_PASSWORD}@")
    lines = [f"{https_server}/in/000.png", f"{user}/private/000.png", f"{https_server}/private/000.png"]
    lines += [f"{https_server}/none.jpg", f"{https_server}/empty.jpg", "gopher://h/a.jpg"]
    (tmp_path / "private" / "list.txt").write_text("\n".join(lines))
    main = "import sys; sys.argv[0] = 'opal-deploy'; from opal_deploy.cli import main; main()"
    command = ["infer", f"@{user}/private/list.txt", "--model", str(exact_model), "--no-isolate", "--out", "out"]
    result = subprocess.run(
        [sys.executable, "-c", main, *command], capture_output=True, text=True, cwd=tmp_path,
        # aiohttp reads the certificates that it trusts when it is imported
        env={**os.environ, "SSL_CERT_FILE": str(tmp_path / "certificate.pem")},
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
    text = (tmp_path / "out" / "results.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["image"] for record in records] == [line.replace(f"me:{_PASSWORD}@", "") for line in lines]
    codes = [record["error"]["code"] if "error" in record else "ok" for record in records]
    assert codes == ["ok", "ok", "unreadable", "not_found", "empty_file", "unreadable"]
    assert records[2]["error"]["message"] == "access is refused (status 401)"
    assert _PASSWORD not in text + result.stderr + (tmp_path / "out" / "run.json").read_text()


_GIGABYTES = 10 << 30


class _OddHandler(BaseHTTPRequestHandler):
    """A server that knows no parts of files: one file of ten gigabytes."""

    sent = 0

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(_GIGABYTES))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        with contextlib.suppress(OSError):
            for _ in range(_GIGABYTES >> 20):
                self.wfile.write(bytes(1 << 20))
                type(self).sent += 1 << 20

    def log_message(self, *_):
        pass


def test_of_a_huge_file_no_more_is_taken_than_is_read():
    with serve(_OddHandler) as url, RemoteFile.parse(f"{url}/huge.jpg").open() as stream:
        assert stream.read(1 << 20) == bytes(1 << 20)
        stream.seek(1 << 30)
        with pytest.raises(ImageError, match="the server gives no parts of files; download it first"):
            stream.read(1)
    # 64 MiB to see that it is larger, and what lay in buffers
    assert _OddHandler.sent < 200 << 20
