"""The application: the Open Inference Protocol, version 2, and the page for people."""

from __future__ import annotations

from asyncio import to_thread
from http import HTTPStatus
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from opal_deploy._version import __version__
from opal_deploy.predict.explain_tensors import EXPLAIN_SUFFIX
from opal_deploy.records.record import Failed
from opal_deploy.server import inference
from opal_deploy.server.admission import HttpError, error_response
from opal_deploy.server.middleware import RequestMiddleware
from opal_deploy.server.models import ServedModel, ServerState
from opal_deploy.server.openapi import build_openapi, find_address, list_uses
from opal_deploy.server.tensors import BadRequest, build_response, parse_request
from opal_deploy.visualization.pages import load_templates, read_asset, read_evidence_script, read_style

VERSION = "1"
_JSON_SIZE = "Inference-Header-Content-Length"
# JSON of this size is parsed in well under a millisecond
_SMALL_JSON = 64 << 10
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
    handlers = _Handlers(state, draw_workers)
    models = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    routes = [
        Route("/v2", handlers.server_metadata),
        Route("/v2/health/live", handlers.live),
        Route("/v2/health/ready", handlers.ready),
        *(Route(model, handlers.model_metadata) for model in models),
        *(Route(f"{model}/config", handlers.model_config) for model in models),
        *(Route(f"{model}/ready", handlers.model_ready) for model in models),
        *(Route(f"{model}/infer", handlers.infer, methods=["POST"]) for model in models),
        Route("/v2/repository/index", handlers.repository_index, methods=["POST"]),
        Route("/metrics", handlers.metrics),
        Route("/", handlers.page),
        *(Route(f"/{name}", handlers.asset) for name in ("page.css", "page.js", "evidence.js")),
        Route("/explain", handlers.explain, methods=["POST"]),
        Route("/docs", handlers.docs),
        Route("/openapi.json", handlers.openapi),
    ]
    refusals: dict[Any, Any] = {
        HttpError: _refuse, BadRequest: _refuse, HTTPException: handlers.refuse_route, ClientDisconnect: _disconnected,
        Exception: _report_bug,
    }  # fmt: skip
    app = Starlette(routes=routes, exception_handlers=refusals)
    # a redirect would name the host that the client gave
    app.router.redirect_slashes = False
    return RequestMiddleware(app, state)


class _Handlers:
    """The handlers of all routes; metrics and the log name a route after its handler."""

    def __init__(self, state: ServerState, draw_workers: int) -> None:
        self._state, self._drawings = state, inference.DrawingQueue(draw_workers)

    async def server_metadata(self, request: Request) -> Response:
        extensions = ["binary_tensor_data", "model_repository"]
        return JSONResponse({"name": "opal-deploy", "version": __version__, "extensions": extensions})

    async def live(self, request: Request) -> Response:
        return _health(self._state.problem if self._state.failed else "")

    async def ready(self, request: Request) -> Response:
        return _health(self._state.problem)

    async def model_ready(self, request: Request) -> Response:
        self._find(request)
        return _health(self._state.problem)

    async def model_metadata(self, request: Request) -> Response:
        model, explains = self._find(request)
        inputs, outputs = (
            [{"name": spec.name, "datatype": spec.datatype, "shape": spec.shape} for spec in specs]
            for specs in model.specs(explains=explains)
        )
        described = {"name": request.path_params["name"], "versions": [VERSION], "inputs": inputs, "outputs": outputs}
        return JSONResponse(described | {"platform": model.platform(explains=explains)})

    async def model_config(self, request: Request) -> Response:
        model, explains = self._find(request)
        return JSONResponse(model.config(explains=explains))

    async def metrics(self, request: Request) -> Response:
        text = await to_thread(generate_latest, self._state.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def repository_index(self, request: Request) -> Response:
        state = "UNAVAILABLE" if self._state.problem else "READY"
        names = [name for model in self._state.models for name in (model.name, model.name + EXPLAIN_SUFFIX)]
        return JSONResponse([{"name": name, "version": VERSION, "state": state} for name in names])

    async def infer(self, request: Request) -> Response:
        model, explains = self._find(request)
        async with self._state.admission.admit(request, model.service) as body:
            inputs, outputs = model.specs(explains=explains)
            json_size = _read_json_size(request)
            arguments = (body, json_size, inputs, outputs, model.service.capacity)
            small = (len(body) if json_size is None else json_size) <= _SMALL_JSON
            parsed = parse_request(*arguments) if small else await to_thread(parse_request, *arguments)
            request.state.images = len(next(iter(parsed.inputs.values())))
            work = (inference.infer_records if explains else inference.infer_pixels)(self._state, model, parsed)
            tensors = await inference.until_disconnected(request, work)
            content, size = build_response(request.path_params["name"], parsed, outputs, tensors)
        if size is None:
            return Response(content, media_type="application/json")
        return Response(content, media_type="application/octet-stream", headers={_JSON_SIZE: str(size)})

    async def explain(self, request: Request) -> Response:
        name = request.query_params.get("model", self._state.models[0].name)
        model, _ = self._state.find(name)
        request.state.model, request.state.images = name, 1
        chosen = inference.choose_format(request, model)
        async with self._drawings.place(chosen), self._state.admission.admit(request, model.service) as body:
            data, file_name = await inference.read_upload(request, body)
            work = inference.explain_image(self._state, model, data, file_name, drawn=chosen != "record")
            result = await inference.until_disconnected(request, work)
            if isinstance(result.record, Failed) or chosen == "record":
                return inference.record_response(result)
            drawing = await self._drawings.draw(model, result, chosen, self._state.options.request_timeout)
        return Response(drawing, media_type=inference.FORMATS[chosen])

    async def page(self, request: Request) -> Response:
        html = load_templates(_PACKAGE).get_template("page.html.jinja").render(
            models=self._state.models, formats=_PAGE_FORMATS,
            # without a token nobody learns the names
            listed=_CLASSES_LISTED if self._state.token is None else 0,
        )  # fmt: skip
        return Response(html, headers=_PAGE_HEADERS, media_type="text/html")

    async def asset(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        if name == "page.css":
            return Response(read_style(_PACKAGE, name), headers=_PAGE_HEADERS, media_type="text/css")
        text = read_evidence_script() if name == "evidence.js" else read_asset(_PACKAGE, name)
        return Response(text, headers=_PAGE_HEADERS, media_type="text/javascript")

    async def docs(self, request: Request) -> Response:
        template = load_templates(_PACKAGE).get_template("docs.html.jinja")
        html = template.render(api=build_openapi(), uses=self._list_uses(request))
        return Response(html, headers=_PAGE_HEADERS, media_type="text/html")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(build_openapi())

    async def refuse_route(self, request: Request, error: HTTPException) -> Response:
        """Refuse an unknown address or method, and name what would have worked."""
        reason = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return error_response(error.status_code, reason, error.headers, **{"try": self._list_uses(request)})

    def _list_uses(self, request: Request) -> list[str]:
        return list_uses(find_address(request), has_token=self._state.token is not None)

    def _find(self, request: Request) -> tuple[ServedModel, bool]:
        version = request.path_params.get("version", VERSION)
        if version != VERSION:
            raise HttpError(HTTPStatus.NOT_FOUND, f"model version {version[:20]} not found; available: {VERSION}")
        model = self._state.find(request.path_params["name"])
        request.state.model = request.path_params["name"]
        return model


def _read_json_size(request: Request) -> int | None:
    text = request.headers.get(_JSON_SIZE)
    if text is None:
        return None
    # Python refuses to convert longer text
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise BadRequest(f"{_JSON_SIZE} {text[:20]!r} found; expected a number of bytes")
    return int(text)


def _health(problem: str) -> Response:
    return error_response(HTTPStatus.SERVICE_UNAVAILABLE, problem) if problem else Response()


async def _refuse(request: Request, error: HttpError | BadRequest) -> Response:
    request.state.code = error.code
    return error_response(error.status, str(error), error.headers, code=error.code)


async def _disconnected(request: Request, error: ClientDisconnect) -> Response:
    # nobody reads the response; 499 is for the log
    return Response(status_code=499)


async def _report_bug(request: Request, error: Exception) -> Response:
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error: {type(error).__name__}")
