"""The application: the Open Inference Protocol, version 2, and the page for people.

Around every request: its id, authentication, log line and metrics, and how its connection ends.
"""

from __future__ import annotations

from asyncio import to_thread
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from opal_deploy._version import __version__
from opal_deploy.predict.explain_tensors import EXPLAIN_SUFFIX
from opal_deploy.records.record import Failed
from opal_deploy.server.admission import HttpError, error_response
from opal_deploy.server.inference import (
    FORMATS,
    DrawingQueue,
    check_parameters,
    choose_format,
    explain_image,
    infer_pixels,
    infer_records,
    read_upload,
    record_response,
    until_disconnected,
)
from opal_deploy.server.middleware import RequestMiddleware
from opal_deploy.server.models import ServedModel, ServerState
from opal_deploy.server.openapi import build_openapi, list_uses
from opal_deploy.server.telemetry import CONTENT_TYPE
from opal_deploy.server.tensors import BadRequest, build_response, parse_request
from opal_deploy.visualization.pages import load_templates, read_asset, read_evidence_script, read_style

VERSION = "1"
_MAX_DIGITS = 15
_JSON_SIZE = "Inference-Header-Content-Length"
_PACKAGE = "opal_deploy.server"
# class names on the page of an open server
_CLASSES_LISTED = 1000
# the formats in which the page shows evidence, with and without scripts
_PAGE_FORMATS = {"exact": ("picture", "sheet"), "map": ("overlay", "overlay"), "none": ("record", "record")}
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(state: ServerState, *, draw_workers: int = 2) -> ASGIApp:
    """Return the application; it draws at most `draw_workers` images concurrently."""
    people, v2 = _PageHandlers(state, draw_workers), _ProtocolHandlers(state)
    models = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    routes = [
        Route("/v2", v2.server_metadata),
        Route("/v2/health/live", v2.live),
        Route("/v2/health/ready", v2.ready),
        *(Route(model, v2.model_metadata) for model in models),
        *(Route(f"{model}/config", v2.model_config) for model in models),
        *(Route(f"{model}/ready", v2.model_ready) for model in models),
        *(Route(f"{model}/infer", v2.infer, methods=["POST"]) for model in models),
        Route("/v2/repository/index", v2.repository_index, methods=["POST"]),
        Route("/metrics", v2.metrics),
        Route("/drift", v2.drift),
        Route("/", people.page),
        Route("/page.css", people.style),
        Route("/page.js", people.script),
        Route("/evidence.js", people.script),
        Route("/explain", people.explain, methods=["POST"]),
        Route("/docs", people.docs),
        Route("/openapi.json", people.openapi),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HttpError: _refuse,
            BadRequest: _refuse_body,
            HTTPException: people.refuse_route,
            ClientDisconnect: _disconnected,
            Exception: _report_bug,
        },
    )
    # a redirect would name the host that the client gave
    app.router.redirect_slashes = False
    return RequestMiddleware(app, state)


class _ProtocolHandlers:
    """The handlers of the protocol, /metrics and /drift."""

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
                "platform": model.platform(explains=explains),
                "inputs": [spec.to_dict() for spec in inputs],
                "outputs": [spec.to_dict() for spec in outputs],
            }
        )

    async def model_config(self, request: Request) -> Response:
        model, explains = self._find(request)
        return JSONResponse(model.config(explains=explains))

    async def metrics(self, request: Request) -> Response:
        return Response(await to_thread(self._state.render_metrics), media_type=CONTENT_TYPE)

    async def drift(self, request: Request) -> Response:
        return JSONResponse(await to_thread(self._describe_drift))

    def _describe_drift(self) -> dict[str, Any]:
        monitors = {model.name: self._state.monitors.get(model.name) for model in self._state.models}
        described = {name: None if monitor is None else monitor.describe() for name, monitor in monitors.items()}
        return {"window": self._state.options.drift_window, "models": described}

    async def repository_index(self, request: Request) -> Response:
        state = "UNAVAILABLE" if self._state.problem else "READY"
        names = [name for model in self._state.models for name in (model.name, model.name + EXPLAIN_SUFFIX)]
        return JSONResponse([{"name": name, "version": VERSION, "state": state} for name in names])

    async def infer(self, request: Request) -> Response:
        model, explains = self._find(request)
        async with self._state.admission.admit(request, model.service) as body:
            inputs, outputs = model.specs(explains=explains)
            parsed = parse_request(body, _read_json_size(request), inputs, outputs, model.service.capacity)
            seconds = self._state.options.request_timeout
            request.state.images = len(next(iter(parsed.inputs.values())))
            if explains:
                tensors, results = await until_disconnected(request, infer_records(model, parsed, seconds))
                for result in results:
                    self._state.count_record(model.name, result.record)
            else:
                tensors = await until_disconnected(request, infer_pixels(model, parsed, seconds))
            content, json_size = build_response(request.path_params["name"], parsed, outputs, tensors)
        if json_size is None:
            return Response(content, media_type="application/json")
        return Response(content, media_type="application/octet-stream", headers={_JSON_SIZE: str(json_size)})

    def _find(self, request: Request) -> tuple[ServedModel, bool]:
        version = request.path_params.get("version", VERSION)
        if version != VERSION:
            raise HttpError(HTTPStatus.NOT_FOUND, f"model version {version[:20]} not found; available: {VERSION}")
        found = self._state.find(request.path_params["name"])
        request.state.model = request.path_params["name"]
        return found


class _PageHandlers:
    """The handlers of the page, which loads nothing from other sites, and of its uploads."""

    def __init__(self, state: ServerState, draw_workers: int) -> None:
        self._state, self._drawings = state, DrawingQueue(draw_workers)

    async def page(self, request: Request) -> Response:
        html = load_templates(_PACKAGE).get_template("page.html.jinja").render(
            models=self._state.models, formats=_PAGE_FORMATS,
            # without a token nobody learns the names
            listed=_CLASSES_LISTED if self._state.token is None else 0,
        )  # fmt: skip
        return Response(html, headers=_PAGE_HEADERS, media_type="text/html")

    async def style(self, request: Request) -> Response:
        return Response(read_style(_PACKAGE, "page.css"), headers=_PAGE_HEADERS, media_type="text/css")

    async def script(self, request: Request) -> Response:
        shared = request.url.path.endswith("/evidence.js")
        text = read_evidence_script() if shared else read_asset(_PACKAGE, "page.js")
        return Response(text, headers=_PAGE_HEADERS, media_type="text/javascript")

    async def docs(self, request: Request) -> Response:
        html = load_templates(_PACKAGE).get_template("docs.html.jinja").render(
            api=build_openapi(), uses=self._list_uses(request)
        )  # fmt: skip
        return Response(html, headers=_PAGE_HEADERS, media_type="text/html")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(build_openapi())

    async def refuse_route(self, request: Request, error: Exception) -> Response:
        """Refuse an unknown address or method, and name what would have worked."""
        assert isinstance(error, HTTPException)
        reason = f"{request.method} {request.url.path[:200]}: {error.detail}"
        uses = self._list_uses(request)
        return error_response(error.status_code, reason, dict(error.headers or {}), **{"try": uses})

    def _list_uses(self, request: Request) -> list[str]:
        address = request.url.netloc + request.scope.get("root_path", "")
        return list_uses(address, has_token=self._state.token is not None)

    async def explain(self, request: Request) -> Response:
        check_parameters(request)
        name = request.query_params.get("model", self._state.models[0].name)
        model, _ = self._state.find(name)
        request.state.model, request.state.images = name, 1
        chosen = choose_format(request, model)
        seconds = self._state.options.request_timeout
        async with self._drawings.place(chosen), self._state.admission.admit(request, model.service) as body:
            data, file_name = await read_upload(request, body)
            drawn = chosen != "record"
            work = explain_image(model, data, file_name, drawn=drawn, seconds=seconds)
            result = await until_disconnected(request, work)
            self._state.count_record(model.name, result.record)
            if isinstance(result.record, Failed) or chosen == "record":
                return record_response(result)
            drawing = await self._drawings.draw(model, result, chosen, seconds)
        return Response(drawing, media_type=FORMATS[chosen])


def _read_json_size(request: Request) -> int | None:
    text = request.headers.get(_JSON_SIZE)
    if text is None:
        return None
    # Python refuses to convert longer text
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        raise BadRequest(f"{_JSON_SIZE} {text[:20]!r} found; expected a number of bytes")
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


async def _disconnected(request: Request, error: Exception) -> Response:
    # nobody reads the response; 499 is for the log
    return Response(status_code=499)


async def _report_bug(request: Request, error: Exception) -> Response:
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}")
