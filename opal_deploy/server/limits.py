"""What keeps a client from taking the server down: limits on bytes, on requests at a time, and on seconds."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from opal_deploy.inference.service import Service

# how many of the largest bodies may be in memory at a time
_LARGEST_BODIES = 8
# bodies that are inflated at a time: each takes twice `max_body` before it is counted
_INFLATED_AT_ONCE = 2
# gzip or zlib, whichever the data begins with
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 47}


class HttpError(Exception):
    """A request that is refused.

    Args:
        status: of the response.
        message: one line: what was found, what was expected.
        code: a word for machines, as in error records.
        headers: of the response.
    """

    def __init__(
        self, status: HTTPStatus, message: str, code: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code or status.name.lower(), dict(headers or {})


def busy(message: str) -> HttpError:
    """Return the error for a client that should come again when there is less to do."""
    return HttpError(HTTPStatus.TOO_MANY_REQUESTS, message, headers={"Retry-After": "1"})


@dataclass(frozen=True)
class Limits:
    """The limits of the server.

    Attributes:
        max_body: bytes of a request's body, and of what a compressed one inflates to.
        max_requests: requests at a time whose bodies are read or which are in work.
        upload_timeout: seconds until a body must have arrived.
        request_timeout: seconds from then on until the answer.
    """

    max_body: int = 64 << 20
    max_requests: int = 256
    upload_timeout: float = 30.0
    request_timeout: float = 30.0


class Gate:
    """Lets in as many requests as the limits allow. For one event loop.

    Attributes:
        requests: that are read or in work.
        held_bytes: of their bodies.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.held_bytes, self._max_bytes = 0, _LARGEST_BODIES * limits.max_body
        self._inflating = asyncio.Semaphore(_INFLATED_AT_ONCE)

    @asynccontextmanager
    async def enter(self, request: Request, service: Service) -> AsyncIterator[bytes]:
        """Yield the request's body, decompressed; the request counts until the block is left.

        Args:
            request: for inference.
            service: does it; while it is full, nothing is read.

        Raises:
            HttpError: there are too many requests, the body is too large, too slow, or not what its headers say.
            starlette.requests.ClientDisconnect: the client went away.
        """
        if self.requests >= self._limits.max_requests:
            raise busy(f"{self.requests} requests are in work; try again later")
        if service.in_work >= service.capacity:
            raise busy(f"{service.in_work} images are in work; try again later")
        self.requests += 1
        held = _Held(self)
        try:
            yield await self._read(request, held)
        finally:
            held.release()
            self.requests -= 1

    def hold(self, count: int) -> None:
        """Count bytes.

        Raises:
            HttpError: with those that others hold they are too many.
        """
        if self.held_bytes + count > self._max_bytes:
            raise busy(f"requests hold {self.held_bytes:,} bytes; try again later")
        self.held_bytes += count

    def release(self, count: int) -> None:
        """Count bytes no more."""
        self.held_bytes -= count

    async def _read(self, request: Request, held: _Held) -> bytes:
        limit, seconds = self._limits.max_body, self._limits.upload_timeout
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(f"{int(announced):,} bytes found", limit)
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity", *_WBITS):
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
                    held.add(len(chunk))
                    chunks.append(chunk)
        except TimeoutError:
            raise HttpError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"{size:,} bytes found after {seconds:g} s, the whole body expected",
                headers={"Connection": "close"},
            ) from None
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if encoding in _WBITS:
            async with self._inflating:
                # it may take a while, and holds no lock
                body = await asyncio.to_thread(inflate, body, encoding, limit)
                held.add(len(body))
        return body


class _Held:
    """The bytes that one request holds."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._count = gate, 0

    def add(self, count: int) -> None:
        self._gate.hold(count)
        self._count += count

    def release(self) -> None:
        self._gate.release(self._count)


def inflate(data: bytes, encoding: str, limit: int) -> bytes:
    """Return the bytes that were compressed, by `gzip` or `deflate` (zlib).

    Raises:
        HttpError: they are more than `limit`, or damaged.
    """
    decompressor = zlib.decompressobj(_WBITS[encoding])
    try:
        inflated = decompressor.decompress(data, limit + 1)
    except zlib.error as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the body is no {encoding}: {str(error)[:80]}") from None
    if len(inflated) > limit:
        # the error's traceback would keep it
        del inflated
        raise _too_large(f"more than {limit:,} bytes found once inflated", limit)
    if not decompressor.eof or decompressor.unused_data:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the body's {encoding} ends early, or before the body does")
    return inflated


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None, **more: object) -> Response:
    """Return the protocol's error, one line under the key `error`."""
    return JSONResponse({"error": " ".join(message.split()), **more}, status, headers)


def _too_large(found: str, limit: int) -> HttpError:
    return HttpError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"{found}, {limit:,} at most expected (--max-body)",
        headers={"Connection": "close"},
    )
