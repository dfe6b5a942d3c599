"""A picture in; its record, overlay or evidence sheet out: for people, and programs that have one picture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus

from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from opal_deploy.errors import StoppedEarly
from opal_deploy.inference.drawings import Part
from opal_deploy.inference.types import Request, Result
from opal_deploy.records.lines import to_json_line
from opal_deploy.server.inference import read_name, run_jobs, unavailable
from opal_deploy.server.limits import HttpError, busy
from opal_deploy.server.models import ServedModel

# format to media type; the first is the default
FORMATS = {"record": "application/json", "overlay": "image/jpeg", "sheet": "image/png"}
_STATUS = {
    "not_an_image": HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "unsupported_image": HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "too_many_pixels": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    # the picture is fine, the model's answer is not
    "not_finite": HTTPStatus.INTERNAL_SERVER_ERROR,
}
# an image to draw on takes six megabytes
_PLACES_PER_WORKER = 8
_MAX_FIELDS, _MAX_FIELD_BYTES = 8, 4096


@dataclass(frozen=True)
class Upload:
    """A picture as it was sent: its bytes, and its file's name where one was told. The name is never opened."""

    data: bytes
    name: str | None


class DrawingThreads:
    """The threads that wait for drawing processes, as many as draw at a time; some more pictures wait in line."""

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers, "serve-draw")
        self._places = _PLACES_PER_WORKER * workers

    @asynccontextmanager
    async def place(self, chosen: str) -> AsyncIterator[None]:
        """Take a place in line until the block is left, if something is to be drawn.

        Raises:
            HttpError: there is none.
        """
        count = int(chosen != "record")
        if self._places < count:
            raise busy("as many pictures as may wait to be drawn do; try again later")
        self._places -= count
        try:
            yield
        finally:
            self._places += count

    async def draw(self, model: ServedModel, result: Result, part: Part, seconds: float) -> bytes:
        """Return the drawing.

        Raises:
            HttpError: it could not be made, or not in time.
        """
        # the file's digest is in the record; its bytes need not travel
        prepared = replace(result.prepared, request=replace(result.prepared.request, source=b""))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                drawings = await loop.run_in_executor(
                    self._pool, model.drawings.draw, replace(result, prepared=prepared), (part,)
                )
        except TimeoutError:
            raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, f"not drawn within {seconds:g} s") from None
        except StoppedEarly as error:
            raise unavailable(str(error)) from None
        if drawings.error is not None:
            raise HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, drawings.error["message"], drawings.error["code"])
        return drawings.files[part]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


def choose_format(request: HttpRequest) -> str:
    """Return `record`, `overlay` or `sheet`: by ?format=, else by the header Accept.

    Raises:
        HttpError: there is no such format.
    """
    chosen = request.query_params.get("format")
    if chosen is None:
        accepted = request.headers.get("accept", "")
        return next((name for name, media_type in FORMATS.items() if media_type in accepted), "record")
    if chosen not in FORMATS:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"format {chosen[:20]!r} found; expected {', '.join(FORMATS)}")
    return chosen


def check_format(model: ServedModel, chosen: str) -> None:
    """Check that a model has the evidence that a drawing shows.

    Raises:
        HttpError: it has not.
    """
    evidence = model.metadata.evidence
    if chosen == "sheet" and evidence != "exact":
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{model.name}: no single cell is its evidence; it has no sheets")
    if chosen == "overlay" and evidence == "none":
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{model.name}: it has no anchors, so no evidence can be shown")


async def read_upload(request: HttpRequest, body: bytes) -> Upload:
    """Return the picture of a request: the body, or the first file of a form.

    Raises:
        HttpError: the form is damaged, or has no file.
    """
    name = request.query_params.get("name")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        return Upload(body, name)

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(
        request.headers, stream(), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
    )
    # never on the disk
    parser.spool_max_size = len(body) + 1
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError, KeyError, ValueError) as error:
        reason = getattr(error, "message", "") or str(error)
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the form cannot be read: {reason[:120]}") from None
    try:
        for value in form.values():
            if isinstance(value, UploadFile):
                return Upload(await value.read(), name or value.filename)
    finally:
        await form.close()
        # a file that breaks off is no part of the form, and to starlette no error
        for file in parser._files_to_close_on_error:
            file.close()
    raise HttpError(HTTPStatus.BAD_REQUEST, "the form has no file")


async def explain(model: ServedModel, upload: Upload, *, drawn: bool, seconds: float) -> Result:
    """Return the result of a picture.

    Args:
        model: answers.
        upload: the picture.
        drawn: keep what drawing it needs.
        seconds: until it must be there.

    Raises:
        BadRequest: the name is too long. HttpError: as `run_jobs`.
    """
    name = None if upload.name is None else read_name(upload.name.encode("utf-8", "replace"))
    request = Request(name, upload.data, drawn=drawn)
    (result,) = await run_jobs(lambda: model.service.submit_requests([request], wait=False), seconds)
    return result


def record_response(result: Result) -> Response:
    """Return the record; for an error record with the status that fits, and its message as the protocol's error."""
    line = to_json_line(result.record)
    if "error" not in result.record:
        return Response(line, media_type=FORMATS["record"])
    problem = result.record["error"]
    status = _STATUS.get(problem["code"], HTTPStatus.UNPROCESSABLE_ENTITY)
    head = to_json_line({"error": problem["message"], "code": problem["code"]}).rstrip(b"}\n")
    content = b"".join([head, b',"record":', line.rstrip(b"\n"), b"}\n"])
    return Response(content, status, media_type=FORMATS["record"])
