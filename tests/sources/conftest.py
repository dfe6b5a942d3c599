"""A real S3 API: moto's server, which s3fs talks to over HTTP."""

import contextlib
import os

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


@pytest.fixture(scope="session")
def s3_client(s3_endpoint):
    """botocore's client of the server."""
    import botocore.session

    names = {"AWS_ACCESS_KEY_ID": "aws_access_key_id", "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key"}
    keys = {argument: _KEYS[name] for name, argument in names.items()}
    session = botocore.session.get_session()
    with contextlib.closing(
        session.create_client("s3", _KEYS["AWS_DEFAULT_REGION"], endpoint_url=s3_endpoint, **keys)
    ) as client:
        yield client


@pytest.fixture
def s3(s3_client, s3_endpoint, use_endpoint):
    """The client, with a bucket `photos` of this test's own."""
    use_endpoint(s3_endpoint)
    s3_client.create_bucket(Bucket="photos")
    yield s3_client
    for page in s3_client.get_paginator("list_objects_v2").paginate(Bucket="photos"):
        for entry in page.get("Contents", ()):
            s3_client.delete_object(Bucket="photos", Key=entry["Key"])
    s3_client.delete_bucket(Bucket="photos")
