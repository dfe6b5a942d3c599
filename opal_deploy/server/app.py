"""Which address is answered by what: the Open Inference Protocol, version 2, and the page for people."""

from __future__ import annotations

from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from opal_deploy._version import __version__
from opal_deploy.server import page
from opal_deploy.server.explain import (
    FORMATS,
    DrawingThreads,
    check_format,
    choose_format,
    explain,
    read_upload,
    record_response,
)
from opal_deploy.server.inference import infer_pixels, infer_records, until_disconnected
from opal_deploy.server.limits import HttpError, error_response
from opal_deploy.server.metrics import CONTENT_TYPE
from opal_deploy.server.middleware import RequestMiddleware
from opal_deploy.server.models import EXPLAIN_SUFFIX, ServedModel
from opal_deploy.server.state import ServerState
from opal_deploy.server.tensors import BadRequest, build_response, parse_request

VERSION = "1"
# what Triton's clients may ask beside the protocol, by a part of the address
_NOT_SUPPORTED = {
    "stats": "statistics are at /metrics, for Prometheus",
    "load": "models are given on the command line",
    "sharedmemory": "there is no shared memory; send tensors in the request",
    "trace": "nothing is traced",
    "logging": "the log is set on the command line",
}
_MAX_DIGITS = 15
_JSON_SIZE = "Inference-Header-Content-Length"


def create_app(state: ServerState, *, drawers: int = 2) -> ASGIApp:
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
        *(Route(f"{prefix}/config", v2.model_config) for prefix in (model, versioned)),
        *(Route(f"{prefix}/ready", v2.model_ready) for prefix in (model, versioned)),
        *(Route(f"{prefix}/infer", v2.infer, methods=["POST"]) for prefix in (model, versioned)),
        Route("/v2/repository/index", v2.repository_index, methods=["POST"]),
        Route("/v2/{rest:path}", v2.not_supported, methods=["GET", "POST"]),
        Route("/metrics", v2.metrics),
        Route("/", people.page),
        Route("/page.css", people.style),
        Route("/page.js", people.script),
        Route("/explain", people.explain, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HttpError: _refuse,
            BadRequest: _refuse_body,
            HTTPException: _refuse_address,
            ClientDisconnect: _leave,
            Exception: _report_bug,
        },
    )
    return RequestMiddleware(app, state)


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
        inputs, outputs = model.specs(explains=explains)
        return JSONResponse(
            {
                "name": request.path_params["name"],
                "versions": [VERSION],
                "platform": "opal_explain" if explains else model.platform,
                "inputs": [spec.to_dict() for spec in inputs],
                "outputs": [spec.to_dict() for spec in outputs],
            }
        )

    async def model_config(self, request: Request) -> Response:
        model, explains = self._find(request)
        return JSONResponse(model.config(explains=explains))

    async def not_supported(self, request: Request) -> Response:
        path = request.path_params["rest"]
        reason = next(
            (reason for part, reason in _NOT_SUPPORTED.items() if part in path),
            "no such address, or not by this method",
        )
        return error_response(HTTPStatus.NOT_FOUND, f"{request.method} /v2/{path[:200]}: {reason}")

    async def metrics(self, request: Request) -> Response:
        return Response(self._state.metrics.render(), media_type=CONTENT_TYPE)

    async def repository_index(self, request: Request) -> Response:
        state = "UNAVAILABLE" if self._state.problem else "READY"
        names = [name for model in self._state.models for name in (model.name, model.name + EXPLAIN_SUFFIX)]
        return JSONResponse([{"name": name, "version": VERSION, "state": state} for name in names])

    async def infer(self, request: Request) -> Response:
        model, explains = self._find(request)
        async with self._state.gate.enter(request, model.service) as body:
            inputs, outputs = model.specs(explains=explains)
            parsed = parse_request(body, _read_json_size(request), inputs, outputs, model.service.capacity)
            seconds = self._state.limits.request_timeout
            request.state.images = len(next(iter(parsed.inputs.values())))
            if explains:
                answer, results = await until_disconnected(request, infer_records(model, parsed, seconds))
                for result in results:
                    self._state.metrics.count_record(model.name, result.record)
            else:
                answer = await until_disconnected(request, infer_pixels(model, parsed, seconds))
            content, json_size = build_response(request.path_params["name"], parsed, answer)
        if json_size is None:
            return Response(content, media_type="application/json")
        return Response(content, media_type="application/octet-stream", headers={_JSON_SIZE: str(json_size)})

    def _find(self, request: Request) -> tuple[ServedModel, bool]:
        version = request.path_params.get("version", VERSION)
        if version != VERSION:
            raise HttpError(HTTPStatus.NOT_FOUND, f"version {version[:20]} found, {VERSION} expected")
        found = self._state.find(request.path_params["name"])
        request.state.model = request.path_params["name"]
        return found


class _PeopleRoutes:
    """The answers for people."""

    def __init__(self, state: ServerState, drawers: int) -> None:
        self._state, self._threads = state, DrawingThreads(drawers)

    async def page(self, request: Request) -> Response:
        return Response(page.render_page(self._state.models), headers=page.HEADERS, media_type="text/html")

    async def style(self, request: Request) -> Response:
        return Response(page.STYLE, headers=page.HEADERS, media_type="text/css")

    async def script(self, request: Request) -> Response:
        return Response(page.SCRIPT, headers=page.HEADERS, media_type="text/javascript")

    async def explain(self, request: Request) -> Response:
        name = request.query_params.get("model", self._state.models[0].name)
        model, _ = self._state.find(name)
        request.state.model, request.state.images = name, 1
        chosen = choose_format(request)
        check_format(model, chosen)
        seconds = self._state.limits.request_timeout
        async with self._threads.place(chosen), self._state.gate.enter(request, model.service) as body:
            upload = await read_upload(request, body)
            result = await until_disconnected(
                request, explain(model, upload, drawn=chosen != "record", seconds=seconds)
            )
            self._state.metrics.count_record(model.name, result.record)
            if "error" in result.record or chosen == "record":
                return record_response(result)
            drawing = await self._threads.draw(model, result, "sheet" if chosen == "sheet" else "overlay", seconds)
        return Response(drawing, media_type=FORMATS[chosen])


def _read_json_size(request: Request) -> int | None:
    text = request.headers.get(_JSON_SIZE)
    if text is None:
        return None
    # Python turns no longer text into a number
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        raise BadRequest(f"{_JSON_SIZE} {text[:20]!r} found, a number of bytes expected")
    return int(text)


def _health(problem: str) -> Response:
    if problem:
        return error_response(HTTPStatus.SERVICE_UNAVAILABLE, problem)
    return Response(status_code=HTTPStatus.OK)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    request.state.code = error.code
    return error_response(error.status, str(error), error.headers, code=error.code)


async def _refuse_body(request: Request, error: Exception) -> Response:
    return error_response(HTTPStatus.BAD_REQUEST, str(error))


async def _refuse_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(error.status_code, reason, dict(error.headers or {}))


async def _leave(request: Request, error: Exception) -> Response:
    # nobody reads it; nginx logs this number too
    return Response(status_code=499)


async def _report_bug(request: Request, error: Exception) -> Response:
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, f"this is a bug of ours: {type(error).__name__}")
