"""The application: the Open Inference Protocol, version 2, and the page for people; alone or within another one."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from opal_deploy._version import __version__
from opal_deploy.api.model import Model
from opal_deploy.artifact.outputs import INPUT, Outputs
from opal_deploy.errors import OutOfMemory, StoppedEarly
from opal_deploy.predict.explain_tensors import BOX, EXPLAIN_SUFFIX, IMAGE, NAME, RECORD, build_explain_requests
from opal_deploy.records.lines import to_json_line
from opal_deploy.records.record import Answered, Record
from opal_deploy.server.bodies import JSON_SIZE, BadRequest, build_response, busy, parse_request
from opal_deploy.server.middleware import RequestMiddleware
from opal_deploy.server.models import ServedModel, ServerState
from opal_deploy.server.options import ServeOptions
from opal_deploy.visualization.pages import load_templates, read_asset, read_evidence_script, read_style

T = TypeVar("T")
VERSION = "1"
_PACKAGE = "opal_deploy.server"
# of responses with an error record, by its code; 422 for all others
_STATUS = {
    "not_an_image": HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "unsupported_image": HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "too_many_pixels": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    # the model's fault, not the image's
    "not_finite": HTTPStatus.INTERNAL_SERVER_ERROR,
}
# class names on the page of an open server
_CLASSES_LISTED = 1000
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(state: ServerState) -> ASGIApp:
    """Return the application."""
    handlers = _Handlers(state)
    models = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    routes = [
        Route("/v2", handlers.server_metadata),
        Route("/v2/health/live", handlers.live),
        Route("/v2/health/ready", handlers.ready),
        *(Route(model, handlers.model_metadata) for model in models),
        *(Route(f"{model}/ready", handlers.model_ready) for model in models),
        *(Route(f"{model}/infer", handlers.infer, methods=["POST"]) for model in models),
        Route("/metrics", handlers.metrics),
        Route("/", handlers.page),
        *(Route(f"/{name}", handlers.asset) for name in ("page.css", "page.js", "evidence.js")),
        Route("/explain", handlers.explain, methods=["POST"]),
        Route("/patches", handlers.patches),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
    # a redirect would name the host that the client gave
    app.router.redirect_slashes = False
    return RequestMiddleware(app, state)


class _Handlers:
    """The handlers of all routes; metrics and the log name a route after its handler."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def server_metadata(self, request: Request) -> Response:
        names = [name for model in self._state.models for name in (model.name, model.name + EXPLAIN_SUFFIX)]
        described = {"name": "opal-deploy", "version": __version__, "extensions": ["binary_tensor_data"]}
        return JSONResponse(described | {"models": names})

    async def live(self, request: Request) -> Response:
        return _answer_health({"live": True}, self._state.problem if self._state.failed else "")

    async def ready(self, request: Request) -> Response:
        return _answer_health({"ready": True}, self._state.problem)

    async def model_ready(self, request: Request) -> Response:
        self._find(request)
        return _answer_health({"name": request.path_params["name"], "ready": True}, self._state.problem)

    async def model_metadata(self, request: Request) -> Response:
        model, explains = self._find(request)
        inputs, outputs = (
            [{"name": spec.name, "datatype": spec.datatype, "shape": spec.shape} for spec in specs]
            for specs in model.specs(explains=explains)
        )
        described = {"name": request.path_params["name"], "versions": [VERSION], "inputs": inputs, "outputs": outputs}
        parameters = model.facts() | {"class_names": model.session.metadata.class_names}
        return JSONResponse(described | {"platform": "opal-deploy", "parameters": parameters})

    async def metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(generate_latest, self._state.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def infer(self, request: Request) -> Response:
        model, explains = self._find(request)
        async with self._state.bodies.read(request, model.service) as body:
            inputs, outputs = model.specs(explains=explains)
            json_size = _parse_number(JSON_SIZE, request.headers.get(JSON_SIZE, str(len(body))), len(body))
            # long JSON would hold up the other requests
            parsed = await asyncio.to_thread(parse_request, body, json_size, inputs, outputs, model.service.capacity)
            request.state.images = len(next(iter(parsed.inputs.values())))
            if explains:
                records = await self._classify(model, parsed.inputs)
                tensors: dict[str, Any] = {RECORD: [to_json_line(record).rstrip(b"\n") for record in records]}
            else:
                rows = await self._run_jobs(lambda: model.service.submit_pixels(parsed.inputs[INPUT], wait=False))
                arrays = Outputs.concatenate(rows).to_arrays()
                # in Triton every tensor has a dimension besides N
                tensors = {name: array[:, None] if array.ndim == 1 else array for name, array in arrays.items()}
            return build_response(request.path_params["name"], parsed, outputs, tensors)

    async def explain(self, request: Request) -> Response:
        name = request.query_params.get("model", self._state.models[0].name)
        model, _ = self._state.find(name)
        request.state.model, request.state.images = name, 1
        if unknown := set(request.query_params) - {"model", "name"}:
            raise BadRequest(f"parameter {min(unknown)[:20]!r} found; expected model or name; crop before sending")
        async with self._state.bodies.read(request, model.service) as body:
            # only a text in the record: no file of that name is opened
            image_name = request.query_params.get("name", "").encode("utf-8", "replace")
            (record,) = await self._classify(model, {IMAGE: [body], NAME: [image_name]})
        if isinstance(record, Answered):
            return Response(to_json_line(record), media_type="application/json")
        problem = record.error
        status = _STATUS.get(problem.code, HTTPStatus.UNPROCESSABLE_ENTITY)
        document = {"error": problem.message, "code": problem.code, "record": record}
        return Response(to_json_line(document), status, media_type="application/json")

    async def patches(self, request: Request) -> Response:
        """Return the patches of training images for the slots of the class `class`, and how far they reach in cells."""
        model, _ = self._state.find(request.query_params.get("model", self._state.models[0].name))
        metadata = model.session.metadata
        class_id = _parse_number("class", request.query_params.get("class", ""), metadata.num_classes - 1)
        patches = {} if metadata.known_patches is None else metadata.known_patches.to_page(class_id)
        return JSONResponse({"reach": metadata.reach, "patches": patches})

    async def page(self, request: Request) -> Response:
        # without a token nobody learns the names
        listed = _CLASSES_LISTED if self._state.token is None else 0
        html = load_templates(_PACKAGE).get_template("page.html.jinja").render(models=self._state.models, listed=listed)
        return Response(html, headers=_PAGE_HEADERS, media_type="text/html")

    async def asset(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        if name == "page.css":
            return Response(read_style(_PACKAGE, name), headers=_PAGE_HEADERS, media_type="text/css")
        text = read_evidence_script() if name == "evidence.js" else read_asset(_PACKAGE, name)
        return Response(text, headers=_PAGE_HEADERS, media_type="text/javascript")

    def _find(self, request: Request) -> tuple[ServedModel, bool]:
        version = request.path_params.get("version", VERSION)
        if version != VERSION:
            reason = f"model version {version[:20]} not found; available: {VERSION}"
            raise HTTPException(HTTPStatus.NOT_FOUND, reason)
        model = self._state.find(request.path_params["name"])
        request.state.model = request.path_params["name"]
        return model

    async def _classify(self, model: ServedModel, inputs: Mapping[str, Any]) -> list[Record]:
        """Return and note the records of image files, signed with `--sign`; raise BadRequest, or as `_run_jobs`."""
        try:
            requests = build_explain_requests(inputs[IMAGE], inputs.get(NAME), inputs.get(BOX))
        except ValueError as error:
            raise BadRequest(str(error)) from None
        submit = model.service.submit_requests
        records = await self._run_jobs(lambda: submit(requests, lambda result: result.record, wait=False))
        if model.signer is not None:
            records = [model.signer.sign(record) for record in records]
        for record in records:
            self._state.metrics.count_record(model.name, record)
            if self._state.records is not None:
                self._state.records.write(record)
        return records

    async def _run_jobs(self, submit: Callable[[], list[Future[T]]]) -> list[T]:
        """Submit jobs and return their results; after the time limit those that have not begun are cancelled.

        Raises HTTPException if the service is full or too slow, or if its device was lost.
        """
        seconds = self._state.options.request_timeout
        try:
            futures = submit()
            async with asyncio.timeout(seconds):
                return await asyncio.gather(*map(asyncio.wrap_future, futures))
        except queue.Full as error:
            raise busy(str(error)) from None
        except TimeoutError:
            raise HTTPException(HTTPStatus.GATEWAY_TIMEOUT, f"not answered within {seconds:g} s") from None
        except StoppedEarly as error:
            if not isinstance(error, OutOfMemory):
                self._state.problem, self._state.failed = str(error), True
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None


def _answer_health(healthy: dict[str, Any], problem: str) -> Response:
    return JSONResponse({"error": problem}, HTTPStatus.SERVICE_UNAVAILABLE) if problem else JSONResponse(healthy)


def _parse_number(name: str, text: str, limit: int) -> int:
    """Return a number of a request, 0 ... `limit`; raise BadRequest for other text."""
    # Python refuses to convert long text
    if not text.isascii() or not text.isdigit() or len(text) > 15 or int(text) > limit:
        raise BadRequest(f"{name} {text[:20]!r} found; expected a number of at most {limit}")
    return int(text)


async def _refuse(request: Request, error: Any) -> Response:
    """Return an HTTPException as the protocol's error: one line under the key `error`."""
    reason = " ".join(error.detail.split())
    if reason in ("Not Found", "Method Not Allowed"):
        reason = f"{request.method} {request.url.path[:200]}: {reason}; post an image to /explain, or open / for a page"
    return JSONResponse({"error": reason}, error.status_code, error.headers)


class ModelApp(AbstractContextManager["ModelApp"]):
    """The addresses of `opal-deploy serve`, as an ASGI application: the page, `/explain` and the protocol.

    Mount it, such as `app.mount("/model", model_app)`, and close it when the program ends. The program around it
    decides who may use it: it asks for no token and accepts any host name.
    """

    def __init__(self, model: Model, *, name: str = "model", **options: Any) -> None:
        """Warm up the model, and start its threads and decoding processes.

        Args:
            model: served until `close`; it may be used elsewhere at the same time.
            name: of the model in addresses and metrics.
            options: those of `opal-deploy serve`: `batch`, `queue`, `min_margin`, ...; an address, a token, a device
                and the like have no effect.

        Raises:
            TypeError: no such option, or a path instead of a loaded model.
            UsageError: the model does not support an option. StoppedEarly: the device was lost.
        """
        if not hasattr(model, "sessions"):
            raise TypeError(f"ModelApp takes a loaded model, found {type(model).__name__}; use opal_deploy.load(path)")
        self._state = ServerState(ServeOptions(**options, allowed_host=("*",), log_format="off"))
        self._state.load(name, model.path or Path(name), model.sessions, model.sha256)
        self._app = create_app(self._state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Finish the images in flight, and end threads and processes."""
        self._state.close()

    def __exit__(self, *_: object) -> None:
        self.close()
