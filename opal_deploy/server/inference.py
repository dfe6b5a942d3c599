"""Requests of the Open Inference Protocol through a model's service: tensors in, tensors out."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import StoppedEarly
from opal_deploy.inference.types import Request, Result
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.lines import to_json_line
from opal_deploy.server.limits import HttpError, busy
from opal_deploy.server.models import EXPLAIN_OUTPUTS, ServedModel
from opal_deploy.server.tensors import BadRequest, InferRequest, Tensor, TensorSpec

T = TypeVar("T")
_MAX_NAME_BYTES = 4096
# the tensors of a response by name, with their shapes
Answer = dict[str, tuple[TensorSpec, Tensor, Sequence[int]]]


async def infer_pixels(model: ServedModel, request: InferRequest, seconds: float) -> Answer:
    """Return the graph's outputs for pixels: `images`, uint8 [N, H0, W0, 3].

    Raises:
        HttpError: as `run_jobs`.
    """
    pixels = request.inputs["images"]
    assert isinstance(pixels, np.ndarray)  # its spec says so
    rows = await run_jobs(lambda: model.service.submit_pixels(pixels, wait=False), seconds)
    arrays = Outputs.concatenate(rows).to_arrays() if len(rows) > 1 else rows[0].to_arrays()
    # every spec has a dimension beside N
    arrays = {name: array.reshape(len(array), -1) if array.ndim == 1 else array for name, array in arrays.items()}
    return {spec.name: (spec, arrays[spec.name], arrays[spec.name].shape) for spec in model.outputs}


async def infer_records(model: ServedModel, request: InferRequest, seconds: float) -> tuple[Answer, list[Result]]:
    """Return a record for each encoded image, as a tensor and as results.

    Raises:
        BadRequest: the inputs do not belong together. HttpError: as `run_jobs`.
    """
    requests = _read_requests(request)
    results = await run_jobs(lambda: model.service.submit_requests(requests, wait=False), seconds)
    records: Tensor = [to_json_line(result.record).rstrip(b"\n") for result in results]
    return {"record": (EXPLAIN_OUTPUTS[0], records, (len(records), 1))}, results


async def run_jobs(submit: Callable[[], list[Future[T]]], seconds: float) -> list[T]:
    """Return the results of jobs that begin together; they are cancelled if they take longer than `seconds`.

    Raises:
        HttpError: they are too many; the service has no room for them, takes too long, or stops.
    """
    try:
        futures = submit()
    except queue.Full as error:
        raise busy(str(error)) from None
    except ValueError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{error}; send several requests") from None
    except RuntimeError:
        raise unavailable("the server stops") from None
    try:
        async with asyncio.timeout(seconds):
            # leaving the block cancels what has not begun
            return await asyncio.gather(*map(asyncio.wrap_future, futures))
    except TimeoutError:
        raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, f"not answered within {seconds:g} s") from None
    except StoppedEarly as error:
        raise unavailable(str(error)) from None


async def until_disconnected(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work for a client, which is cancelled when the client goes away.

    Args:
        request: whose body was read.
        work: is cancelled then.

    Raises:
        ClientDisconnect: it went away.
    """
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


def unavailable(reason: str) -> HttpError:
    """Return the error of a server that cannot answer now, or ever."""
    return HttpError(HTTPStatus.SERVICE_UNAVAILABLE, reason)


def _read_requests(request: InferRequest) -> list[Request]:
    images = request.inputs["image"]
    names = request.inputs.get("name", [b""] * len(images))
    boxes = request.inputs.get("box")
    for name, tensor in (("name", names), ("box", boxes)):
        if tensor is not None and len(tensor) != len(images):
            raise BadRequest(f"input {name!r}: {len(tensor)} rows found, {len(images)} expected, one an image")
    rows: list[Any] = [None] * len(images) if boxes is None else [_read_box(row) for row in boxes]
    return [Request(read_name(name), bytes(image), box) for image, name, box in zip(images, names, rows, strict=True)]


def read_name(name: bytes) -> str | None:
    """Return an image's name as its record shows it; None for an empty one.

    Raises:
        BadRequest: it is too long, or no UTF-8.
    """
    if len(name) > _MAX_NAME_BYTES:
        raise BadRequest(f"input 'name': {len(name)} bytes found, {_MAX_NAME_BYTES} at most expected")
    try:
        return name.decode() or None
    except UnicodeDecodeError:
        raise BadRequest("input 'name': bytes that are not UTF-8") from None


def _read_box(row: Any) -> Box | None:
    if np.isnan(row).all():
        return None
    x0, y0, x1, y1 = row.tolist()
    return (x0, y0, x1, y1)
