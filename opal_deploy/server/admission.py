"""Limits on a request's body: bytes, seconds, and how many requests and bytes are in flight."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Mapping
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
_CHUNK, _MAX_MEMBERS, _INFLATE_SECONDS = 64 << 10, 1000, 5.0
_CLOSE = {"Connection": "close"}


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

    `requests` are in flight, from reading the body to the answer; their bodies have `held_bytes`.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options, self._max_body = options, options.max_body << 20
        self.requests = self.held_bytes = 0
        self._inflating = asyncio.Semaphore(_CONCURRENT_INFLATIONS)

    @asynccontextmanager
    async def admit(self, request: Request, service: Service) -> AsyncIterator[bytes]:
        """Yield a request's decompressed body; the request counts until the block is left.

        Raises HttpError for too many requests, before anything is read, or for a body that is too large, too slow or
        not what its headers say; ClientDisconnect if the client leaves.
        """
        if self.requests >= self._options.max_requests:
            raise busy(f"{self.requests} requests are in flight")
        if service.in_flight >= service.capacity:
            raise busy(f"{service.in_flight} images are in flight")
        held: list[int] = []
        self.requests += 1
        try:
            yield await self._read(request, held)
        finally:
            self.held_bytes -= sum(held)
            self.requests -= 1

    def _hold(self, held: list[int], count: int) -> None:
        if self.held_bytes + count > _LARGEST_BODIES * self._max_body:
            raise busy(f"requests hold {self.held_bytes:,} bytes")
        self.held_bytes += count
        held.append(count)

    async def _read(self, request: Request, held: list[int]) -> bytes:
        limit, seconds = self._max_body, self._options.upload_timeout
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(f"{int(announced):,} bytes found", limit)
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", *_ENCODINGS):
            reason = f"Content-Encoding {encoding[:20]} found; expected gzip or deflate"
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, reason)
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > limit:
                        raise _too_large(f"more than {limit:,} bytes found", limit)
                    self._hold(held, len(chunk))
                    body += chunk
        except TimeoutError:
            reason = f"{len(body):,} bytes found after {seconds:g} s; expected the whole body"
            raise HttpError(HTTPStatus.REQUEST_TIMEOUT, reason, headers=_CLOSE) from None
        if encoding not in _ENCODINGS:
            return bytes(body)
        async with self._inflating:
            # zlib releases the interpreter's lock
            inflated = await asyncio.to_thread(inflate, bytes(body), limit)
        self._hold(held, len(inflated))
        return inflated


def inflate(data: bytes, limit: int) -> bytes:
    """Return the bytes of gzip members or zlib data; raise HttpError if damaged, too large or too costly."""
    inflated, members, deadline = bytearray(), 1, time.monotonic() + _INFLATE_SECONDS
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            while chunk:
                if decompressor.eof:
                    decompressor, members = zlib.decompressobj(zlib.MAX_WBITS | 32), members + 1
                if members > _MAX_MEMBERS or time.monotonic() > deadline:
                    reason = f"the body has over {_MAX_MEMBERS} gzip members, or inflates for over {_INFLATE_SECONDS} s"
                    raise HttpError(HTTPStatus.BAD_REQUEST, f"{reason}; compress it as one member")
                inflated += decompressor.decompress(chunk, limit + 1 - len(inflated))
                if len(inflated) > limit:
                    raise _too_large(f"more than {limit:,} bytes found after decompression", limit)
                chunk = decompressor.unused_data
    except zlib.error as error:
        reason = f"the body is not valid gzip or deflate: {str(error)[:80]}"
        raise HttpError(HTTPStatus.BAD_REQUEST, reason) from None
    if not decompressor.eof:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the body's gzip or deflate data is truncated")
    return bytes(inflated)


def _too_large(found: str, limit: int) -> HttpError:
    reason = f"{found}; expected at most {limit:,} (--max-body)"
    return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason, headers=_CLOSE)
