"""Limits that keep a client from taking the server down: bytes, concurrent requests, and seconds."""

from __future__ import annotations

import asyncio
import gzip
import io
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from opal_deploy.api.service import Service
from opal_deploy.server.options import ServeOptions

# bodies of the largest size that may be in memory
_LARGEST_BODIES = 8
# bodies inflated concurrently: each takes up to twice `max_body` before it is counted
_CONCURRENT_INFLATIONS = 2
_ENCODINGS = ("gzip", "x-gzip", "deflate")


class HttpError(Exception):
    """A refused request: the response's status, one line, and a word for machines; by default the status's name."""

    def __init__(
        self, status: HTTPStatus, message: str, code: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code or status.name.lower(), dict(headers or {})


def busy(message: str) -> HttpError:
    """Return the error that tells a client to try again later."""
    return HttpError(HTTPStatus.TOO_MANY_REQUESTS, f"{message}; try again later", headers={"Retry-After": "1"})


def unavailable(message: str) -> HttpError:
    """Return the error of a server that cannot answer now, or at all."""
    return HttpError(HTTPStatus.SERVICE_UNAVAILABLE, message)


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None, **more: object) -> Response:
    """Return the protocol's error: one line under the key `error`."""
    return JSONResponse({"error": " ".join(message.split()), **more}, status, headers)


class AdmissionLimit:
    """Admits as many requests as the options allow; for one event loop.

    Attributes:
        requests: in flight, from reading the body to the answer.
        held_bytes: of their bodies.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options, self._max_body = options, options.max_body << 20
        self.requests = self.held_bytes = 0
        self._inflating = asyncio.Semaphore(_CONCURRENT_INFLATIONS)

    @asynccontextmanager
    async def admit(self, request: Request, service: Service) -> AsyncIterator[bytes]:
        """Yield a request's decompressed body; the request counts until the block is left.

        Nothing is read while the limit or the service is full.

        Raises:
            HttpError: too many requests, or a body that is too large, too slow or not what its headers say.
            starlette.requests.ClientDisconnect: the client disconnected.
        """
        if self.requests >= self._options.max_requests:
            raise busy(f"{self.requests} requests are in flight")
        if service.in_flight >= service.capacity:
            raise busy(f"{service.in_flight} images are in flight")
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            if self.held_bytes + count > _LARGEST_BODIES * self._max_body:
                raise busy(f"requests hold {self.held_bytes:,} bytes")
            self.held_bytes += count
            held += count

        self.requests += 1
        try:
            yield await self._read(request, hold)
        finally:
            self.held_bytes -= held
            self.requests -= 1

    async def _read(self, request: Request, hold: Callable[[int], None]) -> bytes:
        limit, seconds = self._max_body, self._options.upload_timeout
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(f"{int(announced):,} bytes found", limit)
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", *_ENCODINGS):
            raise HttpError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {encoding[:20]} found; expected gzip or deflate"
            )
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        chunks.clear()
                        raise _too_large(f"more than {limit:,} bytes found", limit)
                    hold(len(chunk))
                    chunks.append(chunk)
        except TimeoutError:
            raise HttpError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"{size:,} bytes found after {seconds:g} s; expected the whole body",
                headers={"Connection": "close"},
            ) from None
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if encoding in _ENCODINGS:
            async with self._inflating:
                # zlib releases the interpreter's lock
                body = await asyncio.to_thread(inflate, body, encoding, limit)
                hold(len(body))
        return body


def inflate(data: bytes, encoding: str, limit: int) -> bytes:
    """Return decompressed bytes; raise HttpError for more than `limit` of them, or damaged data."""
    try:
        if encoding == "deflate":
            decompressor = zlib.decompressobj()
            inflated = decompressor.decompress(data, limit + 1)
            whole = decompressor.eof and not decompressor.unused_data
        else:
            # of one or several members
            inflated, whole = gzip.GzipFile(fileobj=io.BytesIO(data)).read(limit + 1), True
    except EOFError:
        inflated, whole = b"", False
    except (zlib.error, gzip.BadGzipFile) as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the body is not valid {encoding}: {str(error)[:80]}") from None
    if len(inflated) > limit:
        # the error's traceback would keep it in memory
        del inflated
        raise _too_large(f"more than {limit:,} bytes found after decompression", limit)
    if not whole:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the body's {encoding} data is truncated or has trailing bytes")
    return inflated


def _too_large(found: str, limit: int) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"{found}; expected at most {limit:,} (--max-body)",
        headers={"Connection": "close"},
    )
