"""A real S3 API: moto's server, which s3fs talks to over HTTP."""

import contextlib
import os
import urllib.request

import pytest

_KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    # nothing of who runs the tests
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@pytest.fixture(scope="session")
def s3_endpoint():
    """The URL of the server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def use_endpoint(monkeypatch):
    """Let this process, and those that it starts, find S3 at an endpoint, and ask once."""
    import s3fs

    from opal_deploy import remote

    def use(endpoint):
        for name, value in {**_KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_MAX_ATTEMPTS": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
        remote._connect.cache_clear()

    yield use
    remote._connect.cache_clear()


@pytest.fixture
def s3(s3_endpoint, use_endpoint):
    """botocore's client of the server, with a bucket `photos` of this test's own."""
    import botocore.session

    use_endpoint(s3_endpoint)
    with contextlib.closing(botocore.session.get_session().create_client("s3")) as client:
        client.create_bucket(Bucket="photos")
        yield client
    urllib.request.urlopen(f"{s3_endpoint}/moto-api/reset", data=b"").close()
