"""Inference requests: tensors in, tensors out; or one image file in, its record, overlay or evidence sheet out."""

from __future__ import annotations

import asyncio
import queue
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Literal, TypeVar, cast

import numpy as np
from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import OutOfMemory, StoppedEarly
from opal_deploy.predict.explain_tensors import BOX, IMAGE, NAME, RECORD, build_explain_requests, parse_name
from opal_deploy.predict.types import Result
from opal_deploy.records.lines import to_json_line
from opal_deploy.records.record import Answered
from opal_deploy.server.admission import HttpError, busy, unavailable
from opal_deploy.server.models import ServedModel, ServerState
from opal_deploy.server.tensors import BadRequest, InferRequest, Tensor
from opal_deploy.sources.image import InputImage

T = TypeVar("T")
Drawn = Literal["overlay", "sheet", "picture"]
Format = Literal["record", Drawn]
# of two formats of one type, a header Accept takes the first; a picture is the image as the model saw it, upright
FORMATS: dict[Format, str] = {
    "record": "application/json", "overlay": "image/jpeg", "sheet": "image/png",
    "picture": "image/jpeg",
}  # fmt: skip
# an image that waits to be drawn takes about 6 MB
_WAITING_PER_WORKER = 8
_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")
# of responses with an error record, by its code; 422 for all others
_STATUS = {
    "not_an_image": HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "unsupported_image": HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "too_many_pixels": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    # the model's fault, not the image's
    "not_finite": HTTPStatus.INTERNAL_SERVER_ERROR,
}
# uploads stay in memory, which `--max-body` limits: a container's disk may be read-only
MultiPartParser.spool_max_size = 1 << 40


async def infer_pixels(state: ServerState, model: ServedModel, request: InferRequest) -> dict[str, Tensor]:
    """Return the graph's outputs for pixels: `images`, uint8 [N, H0, W0, 3]; raise HttpError as `_run_jobs`."""
    pixels = cast("np.ndarray[Any, np.dtype[np.uint8]]", request.inputs["images"])
    rows = await _run_jobs(state, lambda: model.service.submit_pixels(pixels, wait=False))
    arrays = Outputs.concatenate(rows).to_arrays()
    # in Triton every tensor has a dimension besides N
    return {name: array.reshape(len(array), -1) if array.ndim == 1 else array for name, array in arrays.items()}


async def infer_records(state: ServerState, model: ServedModel, request: InferRequest) -> dict[str, Tensor]:
    """Return a record per image file; raise BadRequest for inputs of different lengths, or HttpError as `_run_jobs`."""
    inputs: dict[str, Any] = request.inputs
    try:
        requests = build_explain_requests(inputs[IMAGE], inputs.get(NAME), inputs.get(BOX))
    except ValueError as error:
        raise BadRequest(str(error)) from None
    results = await _classify(state, model, requests)
    return {RECORD: [to_json_line(result.record).rstrip(b"\n") for result in results]}


async def explain_image(
    state: ServerState, model: ServedModel, data: bytes, name: str | None, *, drawn: bool
) -> Result:
    """Return the result of an image file's bytes; with `drawn`, keep what drawing it needs.

    `name` is for the record; no file of that name is opened. Raises BadRequest if it is too long, and as `_run_jobs`.
    """
    try:
        shown = None if name is None else parse_name(name.encode("utf-8", "replace"))
    except ValueError as error:
        raise BadRequest(str(error)) from None
    (result,) = await _classify(state, model, [InputImage(shown, data, drawn=drawn)])
    return result


async def _classify(state: ServerState, model: ServedModel, requests: Sequence[InputImage]) -> list[Result]:
    """Return the results of images, and note their records, signed if the server signs; raise as `_run_jobs`."""
    results = await _run_jobs(state, lambda: model.service.submit_requests(requests, wait=False))
    if model.signer is not None:
        results = [replace(result, record=model.signer.sign(result.record)) for result in results]
    for result in results:
        state.note_record(model.name, result.record)
    return results


async def _run_jobs(state: ServerState, submit: Callable[[], list[Future[T]]]) -> list[T]:
    """Submit jobs and return their results; after the time limit those that have not begun are cancelled.

    Raises HttpError if the service is full, too slow or stopping, if its device was lost, or for too many jobs.
    """
    try:
        futures = submit()
    except queue.Full as error:
        raise busy(str(error)) from None
    except ValueError as error:
        raise BadRequest(f"{error}; send several requests") from None
    except RuntimeError:
        raise unavailable("the server is stopping") from None
    seconds = state.options.request_timeout
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.gather(*map(asyncio.wrap_future, futures))
    except TimeoutError:
        raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, f"not answered within {seconds:g} s") from None
    except StoppedEarly as error:
        if not isinstance(error, OutOfMemory):
            state.problem, state.failed = str(error), True
        raise unavailable(str(error)) from None


async def until_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work for a client whose body was read; raise ClientDisconnect if the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


class DrawingQueue:
    """Draws results in the models' drawing processes; a bounded number of images waits."""

    def __init__(self, workers: int) -> None:
        self._threads = ThreadPoolExecutor(workers, "serve-draw")
        self._free = _WAITING_PER_WORKER * workers

    @asynccontextmanager
    async def place(self, chosen: Format) -> AsyncIterator[None]:
        """Hold a place in the queue during the block, if anything is to be drawn; HttpError if the queue is full."""
        count = int(chosen != "record")
        if self._free < count:
            raise busy("the drawing queue is full")
        self._free -= count
        try:
            yield
        finally:
            self._free += count

    async def draw(self, model: ServedModel, result: Result, chosen: Drawn, seconds: float) -> bytes:
        """Return the encoded drawing; raise HttpError if drawing failed or took too long."""
        # the file's bytes are no longer needed and would be sent to the drawing process
        prepared = replace(result.prepared, input=replace(result.prepared.input, source=b""))
        result = replace(result, prepared=prepared)
        work = asyncio.get_running_loop().run_in_executor(self._threads, model.drawings.draw, result, (chosen,))
        try:
            async with asyncio.timeout(seconds):
                drawings = await work
        except TimeoutError:
            raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, f"not drawn within {seconds:g} s") from None
        except StoppedEarly as error:
            raise unavailable(str(error)) from None
        if drawings.error is not None:
            raise HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, drawings.error.message, drawings.error.code)
        return drawings.files[chosen]


def choose_format(request: Request, model: ServedModel) -> Format:
    """Return the format that `?format=` or the header Accept asks for, `record` by default; HttpError if impossible."""
    if unknown := set(request.query_params) - {"format", "model", "name"}:
        raise BadRequest(f"parameter {min(unknown)[:20]!r} found; expected format, model or name; crop before sending")
    chosen = request.query_params.get("format") or _preferred_format(request.headers.get("accept", ""))
    if chosen not in FORMATS:
        raise BadRequest(f"format {chosen[:20]!r} found; expected {', '.join(FORMATS)}")
    if chosen == "sheet" and model.metadata.evidence != "exact":
        raise BadRequest(f"{model.name}: its evidence is not single cells, so it has no sheets")
    if chosen == "overlay" and model.metadata.evidence == "none":
        raise BadRequest(f"{model.name}: it has no anchors, so it has no evidence to show")
    return chosen


def _preferred_format(accept: str) -> str:
    """Return the format of the highest quality in a header Accept (RFC 9110, 12.5.1); `record` without one."""
    qualities: dict[str, float] = {}
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        weight = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        qualities[kind] = float(weight) if _QUALITY.fullmatch(weight) else 0.0

    def quality(name: Format) -> float:
        ranges = (FORMATS[name], f"{FORMATS[name].partition('/')[0]}/*", "*/*")
        return next((qualities[key] for key in ranges if key in qualities), 0.0)

    return max(FORMATS, key=quality)


async def read_upload(request: Request, body: bytes) -> tuple[bytes, str | None]:
    """Return the bytes and name of an image file: the body, or the first file of a form; HttpError without one."""
    name = request.query_params.get("name")
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return body, name

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    try:
        async with Request(request.scope, receive).form(max_files=1, max_fields=8, max_part_size=4096) as form:
            for value in form.values():
                if isinstance(value, UploadFile):
                    return await value.read(), name or value.filename
    except (HTTPException, FormParserError, KeyError, ValueError) as error:
        reason = getattr(error, "detail", "") or str(error)
        raise BadRequest(f"the form cannot be read: {reason[:120]}") from None
    raise BadRequest("the form has no file")


def record_response(result: Result) -> Response:
    """Return a record; an error record with a status that fits, and its message as the protocol's error."""
    line = to_json_line(result.record)
    if isinstance(result.record, Answered):
        return Response(line, media_type=FORMATS["record"])
    problem = result.record.error
    status = _STATUS.get(problem.code, HTTPStatus.UNPROCESSABLE_ENTITY)
    document = {"error": problem.message, "code": problem.code, "record": result.record}
    return Response(to_json_line(document), status, media_type=FORMATS["record"])
