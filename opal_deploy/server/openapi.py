"""The OpenAPI document behind /docs, and the example commands that a wrong address is answered with."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.requests import Request

from opal_deploy._version import __version__
from opal_deploy.records.record import json_schema
from opal_deploy.visualization.pages import read_asset

_ADDRESS = re.compile(r"[\w.:\[\]-]+(?:/[\w.~-]+)*/?")


def build_openapi() -> dict[str, Any]:
    """Return the OpenAPI document; it names no model, and its addresses are relative to its own."""
    document: dict[str, Any] = json.loads(read_asset("opal_deploy.server", "openapi.json"))
    schema = json.loads(json.dumps(json_schema()).replace("#/$defs/", "#/components/schemas/"))
    record = {key: schema[key] for key in ("title", "description", "oneOf")}
    document["info"]["version"] = __version__
    document["components"]["schemas"] = {**schema["$defs"], "Record": record}
    return document


def find_address(request: Request) -> str:
    """Return the address without its scheme under which a client reached the application.

    It is the header Host, the path that a proxy took away (X-Forwarded-Prefix), and that of the mount.
    """
    prefix = request.headers.get("x-forwarded-prefix", "") + request.scope.get("root_path", "")
    return f"{request.url.netloc}{prefix.rstrip('/')}"


def list_uses(address: str, *, has_token: bool) -> list[str]:
    """Return three example commands: for an image's record, for its evidence sheet, and for all addresses.

    `address` is a client's text: host, port and path. `has_token` is whether clients have to send a token.
    """
    url = f"http://{address if _ADDRESS.fullmatch(address) else 'localhost:8000'}"
    curl = "curl --data-binary @IMAGE" + (' --header "Authorization: Bearer $TOKEN"' if has_token else "")
    return [
        f"{curl} {url}/explain",
        f"{curl} '{url}/explain?format=sheet' --output sheet.png",
        f"a page for people: {url}/ and all addresses: {url}/docs",
    ]
