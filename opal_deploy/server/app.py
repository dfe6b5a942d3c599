"""Which address is answered by what: the Open Inference Protocol, version 2, and the page for people."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from opal_deploy._version import __version__
from opal_deploy.server.explain import (
    FORMATS,
    DrawingThreads,
    check_format,
    choose_format,
    explain,
    read_upload,
    record_response,
)
from opal_deploy.server.inference import infer_pixels, infer_records
from opal_deploy.server.limits import Gate, HttpError, Limits
from opal_deploy.server.models import EXPLAIN_INPUTS, EXPLAIN_OUTPUTS, EXPLAIN_SUFFIX, ServedModel
from opal_deploy.server.tensors import BadRequest, TensorSpec, build_response, parse_request

VERSION = "1"
_JSON_SIZE = "Inference-Header-Content-Length"


@dataclass
class ServerState:
    """What requests share.

    Attributes:
        models: in the order in which they were given.
        limits: of requests.
        gate: lets requests in.
        problem: why no requests are to be sent here any more; empty while all is well.
        failed: whether a restart alone can help.
    """

    models: Sequence[ServedModel]
    limits: Limits
    gate: Gate = field(init=False)
    problem: str = ""
    failed: bool = False

    def __post_init__(self) -> None:
        self.gate = Gate(self.limits)
        self._by_name = {model.name: model for model in self.models}

    def find(self, name: str) -> tuple[ServedModel, bool]:
        """Return the model of a name, and whether the name is that of its explain model.

        Raises:
            HttpError: there is none.
        """
        if name in self._by_name:
            return self._by_name[name], False
        base = name.removesuffix(EXPLAIN_SUFFIX)
        if base != name and base in self._by_name:
            return self._by_name[base], True
        known = ", ".join(f"{known}, {known}{EXPLAIN_SUFFIX}" for known in self._by_name)
        raise HttpError(HTTPStatus.NOT_FOUND, f"model {name[:80]!r} found, one of {known} expected")


def create_app(state: ServerState, *, drawers: int = 2) -> Starlette:
    """Return the application.

    Args:
        state: what its requests share.
        drawers: pictures that are drawn at a time.
    """
    people = _PeopleRoutes(state, drawers)
    v2 = _ProtocolRoutes(state)
    model = "/v2/models/{name}"
    versioned = model + "/versions/{version}"
    routes = [
        Route("/v2", v2.server_metadata),
        Route("/v2/health/live", v2.live),
        Route("/v2/health/ready", v2.ready),
        *(Route(prefix, v2.model_metadata) for prefix in (model, versioned)),
        *(Route(f"{prefix}/ready", v2.model_ready) for prefix in (model, versioned)),
        *(Route(f"{prefix}/infer", v2.infer, methods=["POST"]) for prefix in (model, versioned)),
        Route("/v2/repository/index", v2.repository_index, methods=["POST"]),
        Route("/explain", people.explain, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        exception_handlers={
            HttpError: _refuse,
            BadRequest: _refuse_body,
            HTTPException: _refuse_address,
            ClientDisconnect: _leave,
            Exception: _report_bug,
        },
    )


class _ProtocolRoutes:
    """The answers of the protocol."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def server_metadata(self, request: Request) -> Response:
        return JSONResponse(
            {"name": "opal-deploy", "version": __version__, "extensions": ["binary_tensor_data", "model_repository"]}
        )

    async def live(self, request: Request) -> Response:
        return _health(self._state.problem if self._state.failed else "")

    async def ready(self, request: Request) -> Response:
        return _health(self._state.problem)

    async def model_ready(self, request: Request) -> Response:
        self._find(request)
        return _health(self._state.problem)

    async def model_metadata(self, request: Request) -> Response:
        model, explains = self._find(request)
        inputs, outputs = _specs(model, explains=explains)
        return JSONResponse(
            {
                "name": request.path_params["name"],
                "versions": [VERSION],
                "platform": "opal_explain" if explains else model.platform,
                "inputs": [spec.to_dict() for spec in inputs],
                "outputs": [spec.to_dict() for spec in outputs],
            }
        )

    async def repository_index(self, request: Request) -> Response:
        state = "UNAVAILABLE" if self._state.problem else "READY"
        names = [name for model in self._state.models for name in (model.name, model.name + EXPLAIN_SUFFIX)]
        return JSONResponse([{"name": name, "version": VERSION, "state": state} for name in names])

    async def infer(self, request: Request) -> Response:
        model, explains = self._find(request)
        async with self._state.gate.enter(request) as body:
            inputs, outputs = _specs(model, explains=explains)
            parsed = parse_request(body, _read_json_size(request), inputs, outputs)
            seconds = self._state.limits.request_timeout
            if explains:
                answer, _ = await infer_records(model, parsed, seconds)
            else:
                answer = await infer_pixels(model, parsed, seconds)
            content, json_size = build_response(request.path_params["name"], parsed, answer)
        if json_size is None:
            return Response(content, media_type="application/json")
        return Response(content, media_type="application/octet-stream", headers={_JSON_SIZE: str(json_size)})

    def _find(self, request: Request) -> tuple[ServedModel, bool]:
        version = request.path_params.get("version", VERSION)
        if version != VERSION:
            raise HttpError(HTTPStatus.NOT_FOUND, f"version {version[:20]} found, {VERSION} expected")
        return self._state.find(request.path_params["name"])


class _PeopleRoutes:
    """The answers for people."""

    def __init__(self, state: ServerState, drawers: int) -> None:
        self._state, self._threads = state, DrawingThreads(drawers)

    async def explain(self, request: Request) -> Response:
        name = request.query_params.get("model", self._state.models[0].name)
        model, _ = self._state.find(name)
        chosen = choose_format(request)
        check_format(model, chosen)
        seconds = self._state.limits.request_timeout
        async with self._state.gate.enter(request) as body:
            upload = await read_upload(request, body)
            result = await explain(model, upload, drawn=chosen != "record", seconds=seconds)
            if "error" in result.record or chosen == "record":
                return record_response(result)
            drawing = await self._threads.draw(model, result, "sheet" if chosen == "sheet" else "overlay", seconds)
        return Response(drawing, media_type=FORMATS[chosen])


def _specs(model: ServedModel, *, explains: bool) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
    return (EXPLAIN_INPUTS, EXPLAIN_OUTPUTS) if explains else (model.inputs, model.outputs)


def _read_json_size(request: Request) -> int | None:
    text = request.headers.get(_JSON_SIZE)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise BadRequest(f"{_JSON_SIZE} {text[:20]!r} found, a number of bytes expected")
    return int(text)


def _health(problem: str) -> Response:
    if problem:
        return error_response(HTTPStatus.SERVICE_UNAVAILABLE, problem)
    return Response(status_code=HTTPStatus.OK)


def error_response(status: int, message: str, headers: dict[str, str] | None = None, **more: object) -> JSONResponse:
    """Return the protocol's error, one line under the key `error`."""
    return JSONResponse({"error": " ".join(message.split()), **more}, status, headers)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error_response(error.status, str(error), error.headers, code=error.code)


async def _refuse_body(request: Request, error: Exception) -> Response:
    return error_response(HTTPStatus.BAD_REQUEST, str(error))


async def _refuse_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(error.status_code, reason, dict(error.headers or {}))


async def _leave(request: Request, error: Exception) -> Response:
    await asyncio.sleep(0)
    # nobody reads it; nginx logs this number too
    return Response(status_code=499)


async def _report_bug(request: Request, error: Exception) -> Response:
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, f"this is a bug of ours: {type(error).__name__}")
