"""The OpenAPI document behind /docs, and the example commands that a wrong address is answered with."""

from __future__ import annotations

import json
import re
from typing import Any

from opal_deploy._version import __version__
from opal_deploy.predict.explain_tensors import EXPLAIN_SUFFIX
from opal_deploy.records.record import json_schema
from opal_deploy.server.inference import FORMATS

_ADDRESS = re.compile(r"[\w.:\[\]-]+(?:/[\w.~-]+)*")
_PROTOCOL = "https://github.com/kserve/open-inference-protocol"
_SCHEMAS = "#/components/schemas/"


def list_uses(address: str, *, has_token: bool) -> list[str]:
    """Return three example commands: for an image's record, for its evidence sheet, and for all addresses.

    Args:
        address: host and port, as a client would write them, and the path at which the application is mounted.
        has_token: clients have to send a token.
    """
    url = f"http://{address if _ADDRESS.fullmatch(address) else 'localhost:8000'}"
    curl = "curl --data-binary @IMAGE" + (' --header "Authorization: Bearer $TOKEN"' if has_token else "")
    return [
        f"{curl} {url}/explain",
        f"{curl} '{url}/explain?format=sheet' --output sheet.png",
        f"a page for people: {url}/ and all addresses: {url}/docs",
    ]


def build_openapi() -> dict[str, Any]:
    """Return the OpenAPI document; it names no model."""
    schema = json.loads(json.dumps(json_schema()).replace("#/$defs/", _SCHEMAS))
    record = {key: schema[key] for key in ("title", "description", "oneOf")}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    name |= {"description": f"A model's name: it takes pixels. NAME{EXPLAIN_SUFFIX} takes image files."}
    version = {"name": "version", "in": "path", "required": True, "schema": {"const": "1"}}
    model = {
        "": _operation("A model's inputs and outputs", {}),
        "/config": _operation("A model's configuration: class names, input size, digest, thresholds", {}),
        "/ready": _operation("200 while the model answers", None),
        "/infer": {
            **_operation("Tensors in, tensors out", {}),
            "description": f"The Open Inference Protocol's request, as JSON or with binary tensors: {_PROTOCOL}",
            "requestBody": _body("application/json", "application/octet-stream"),
        },
    }
    paths: dict[str, Any] = {
        "/explain": {"post": _describe_explain()},
        "/": {"get": _operation("A page that explains an image", None)},
        "/docs": {"get": _operation("This description, for people", None)},
        "/openapi.json": {"get": _operation("This description, for programs", {})},
        "/v2": {"get": _operation("The server's name, version and extensions", {})},
        "/v2/health/live": {"get": _operation("200 unless a device was lost", None)},
        "/v2/health/ready": {"get": _operation("200 while requests are answered", None)},
        "/v2/repository/index": {"post": _operation("The models and their states", {"type": "array"})},
        "/metrics": {"get": _operation("Metrics for Prometheus", None)},
        "/drift": {"get": _operation("Shifts since the validation images", {})},
    }
    for kind, parameters in (("", [name]), ("/versions/{version}", [name, version])):
        for part, operation in model.items():
            method = "post" if part == "/infer" else "get"
            paths[f"/v2/models/{{name}}{kind}{part}"] = {method: operation, "parameters": parameters}
    return {
        "openapi": "3.1.0",
        "info": {"title": "opal-deploy", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schema["$defs"], "Record": record},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _describe_explain() -> dict[str, Any]:
    texts = {
        "model": "The model; by default the first.",
        "format": "What to answer with; by default what the header Accept asks for, else the record.",
        "name": "The record's `image`.",
    }
    kinds: dict[str, Any] = {"format": {"enum": list(FORMATS)}}
    record = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Record"}}}
    drawn = {kind: _binary() for kind in FORMATS.values() if kind not in record}
    operation = _operation("Explain one image", None)
    operation["responses"]["200"] |= {"content": record | drawn}
    return operation | {
        "parameters": [
            {"name": key, "in": "query", "description": text, "schema": kinds.get(key, {"type": "string"})}
            for key, text in texts.items()
        ],
        "requestBody": _body("image/*", "multipart/form-data"),
    }


def _operation(summary: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return an operation that answers with JSON of a schema, or with something else for None."""
    content = {} if schema is None else {"content": {"application/json": {"schema": schema}}}
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    refused = {"description": "Refused, with the reason", "content": {"application/json": {"schema": error}}}
    return {"summary": summary, "responses": {"200": {"description": "Done", **content}, "default": refused}}


def _body(*kinds: str) -> dict[str, Any]:
    form = {"schema": {"type": "object", "properties": {"image": {"contentMediaType": "image/*"}}}}
    choices = {"application/json": {}, "multipart/form-data": form}
    return {"required": True, "content": {kind: choices.get(kind, _binary()) for kind in kinds}}


def _binary() -> dict[str, Any]:
    return {"schema": {"type": "string", "format": "binary"}}
