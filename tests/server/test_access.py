"""Who is answered: clients with the token, and without one no page of another site."""

import httpx
import pytest

from tests.bright import BrightSession


@pytest.fixture(scope="module")
def foreign(serving):
    with (
        serving({"light": BrightSession()}, allowed_host=("example.org",)) as open_server,
        serving({"light": BrightSession()}, token="s3cret") as locked,
    ):
        yield open_server, locked


def test_a_token_opens_everything_and_health_is_open(foreign):
    with httpx.Client(base_url=foreign[1].url) as client:
        assert client.get("/v2/health/live").status_code == client.get("/v2/health/ready").status_code == 200
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}):
            for path in ("/v2/models/light", "/metrics", "/none"):
                refused = client.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
        assert client.get("/v2/models/light", headers={"Authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200, id="its own page"),
        pytest.param({"Host": "[::1]:8000"}, 200, id="an address"),
        pytest.param({"Host": "Example.org:80"}, 200, id="allowed"),
        pytest.param({"Origin": "https://example.org"}, 200, id="an allowed page"),
        pytest.param({"Host": "rebound.test", "Origin": "http://rebound.test"}, 403, id="a name pointed here"),
        pytest.param({"Host": "localhost.rebound.test"}, 403, id="a name that begins like ours"),
        pytest.param({"Host": "localhost:8000", "Origin": "http://localhost:3000"}, 403, id="another port"),
        pytest.param({"Origin": "null"}, 403, id="a page without an origin"),
        pytest.param({"Origin": "http://["}, 403, id="an origin that is none"),
    ],
)
def test_without_a_token_only_this_servers_names_are_answered(foreign, headers, status):
    open_server, locked = foreign
    answer = httpx.post(f"{open_server.url}/explain", content=b"no image", headers=headers)
    assert answer.status_code == (415 if status == 200 else status)
    # a load balancer asks by any name, and who has the token is no stranger
    assert httpx.get(f"{open_server.url}/v2/health/live", headers=headers).status_code == 200
    authorized = {**headers, "Authorization": "Bearer s3cret"}
    assert httpx.get(f"{locked.url}/metrics", headers=authorized).status_code == 200
