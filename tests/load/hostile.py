"""Hostile requests, each with its expected answer, sent over raw sockets: no HTTP client sends half a head.

They exceed the limits with which `run.LIMITS` starts the server.
"""

from __future__ import annotations

import gzip
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MIB = 1 << 20
# of a client that wants an answer; the server's own timeouts are shorter
_PATIENCE = 40.0
_CLIENT_ERRORS = frozenset(range(400, 500))


@dataclass(frozen=True)
class Reply:
    """The reply to a raw request: the status, 0 where the connection ended without one, and the body."""

    status: int
    body: bytes

    @property
    def reason(self) -> str:
        """The one line that the server says; empty where there is none."""
        try:
            document = json.loads(self.body)
        except ValueError:
            # the HTTP library itself refuses in plain text
            return self.body.decode("latin-1").strip()
        return str(document.get("error", "")) if isinstance(document, dict) else ""


@dataclass(frozen=True)
class HostileRequest:
    """A request with its expected answer.

    Attributes:
        name: for the statistics.
        parts: makes the pieces to send from the model's name; a number is a pause in seconds.
        expected: allowed statuses, each with a reason; 0: the connection ends without a reply. None: the client
            leaves without reading.
    """

    name: str
    parts: Callable[[str], Iterator[bytes | float]]
    expected: frozenset[int] | None

    def send(self, host: str, port: int, model: str) -> str:
        """Send the request, and return the problem with the answer; empty if there is none."""
        with socket.create_connection((host, port), timeout=_PATIENCE) as connection:
            try:
                for part in self.parts(model):
                    if isinstance(part, bytes):
                        connection.sendall(part)
                    else:
                        time.sleep(part)
            except (BrokenPipeError, ConnectionResetError):
                # refused before everything was sent; there may still be a reply
                pass
            if self.expected is None:
                return ""
            reply = read_reply(connection)
        # a busy server may refuse without reading
        if reply.status not in (*self.expected, 429):
            return f"{reply.status} found, {min(self.expected)} to {max(self.expected)} expected: {reply.body[:200]!r}"
        return "" if reply.status == 0 or reply.reason else f"{reply.status} without a reason"


def read_reply(connection: socket.socket) -> Reply:
    """Read a reply to its end, or as far as it comes."""
    head = body = b""
    try:
        while b"\r\n\r\n" not in head:
            if not (chunk := connection.recv(1 << 16)):
                break
            head += chunk
        head, _, body = head.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        # without a length, the end of the connection is the end of the body
        while head and (not lengths or len(body) < int(lengths[0])):
            if not (chunk := connection.recv(1 << 16)):
                break
            body += chunk
    except ConnectionResetError:
        pass
    return Reply(int(head.split(b" ")[1]) if head.startswith(b"HTTP/1.") else 0, body)


def post(path: str, body: bytes = b"", *, length: int | None = None, **headers: str) -> bytes:
    """Return a POST; `length` is what its Content-Length claims, the body's own length by default."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def infer_path(model: str) -> str:
    """Return the path of a model's explain model in the Open Inference Protocol."""
    return f"/v2/models/{model}_explain/infer"


def build_infer(*images: bytes, **changes: object) -> tuple[bytes, int]:
    """Return the body of a request for records, images in binary, and the length of its JSON.

    `changes` replace members of the description of its input.
    """
    data = b"".join(struct.pack("<I", len(image)) + image for image in images)
    tensor: dict[str, object] = {
        "name": "image", "datatype": "BYTES", "shape": [len(images), 1], "parameters": {"binary_data_size": len(data)},
    }  # fmt: skip
    outputs = [{"name": "record", "parameters": {"binary_data": True}}]
    document = json.dumps({"inputs": [tensor | changes], "outputs": outputs}).encode()
    return document + data, len(document)


def _infer(model: str, body: bytes, json_size: object) -> bytes:
    return post(infer_path(model), body, Inference_Header_Content_Length=str(json_size))


def _once(build: Callable[[str], bytes]) -> Callable[[str], Iterator[bytes | float]]:
    def parts(model: str) -> Iterator[bytes | float]:
        yield build(model)

    return parts


def _too_long(model: str) -> Iterator[bytes | float]:
    yield post("/explain", length=1 << 40)
    for _ in range(64):
        yield bytes(MIB)


def _too_long_in_chunks(model: str) -> Iterator[bytes | float]:
    yield b"POST /explain HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(64):
        yield b"100000\r\n" + bytes(MIB) + b"\r\n"


def _slow_body(model: str) -> Iterator[bytes | float]:
    yield post("/explain", b"\xff", length=1000)
    for _ in range(20):
        yield 0.5
        yield b"\xff"


def _slow_head(model: str) -> Iterator[bytes | float]:
    yield b"POST /explain HTTP/1.1\r\n"
    for number in range(30):
        yield 0.5
        yield b"X-%d: 1\r\n" % number


def _breaks_off(model: str) -> Iterator[bytes | float]:
    yield post("/explain", bytes(1000), length=MIB)


def _leaves(model: str) -> Iterator[bytes | float]:
    body, size = build_infer(*[bytes([number]) * 50_000 for number in range(4)])
    yield _infer(model, body, size)


def _reads_late(model: str) -> Iterator[bytes | float]:
    yield post("/explain", b"no image")
    yield 5.0


_JPEG = b"\xff\xd8\xff"
_BOMB = gzip.compress(bytes(64 * MIB), 9)
_DEEP = b"[" * 100_000


def _infer_once(*images: bytes, **changes: object) -> Callable[[str], bytes]:
    return lambda model: _infer(model, *build_infer(*images, **changes))


# requests of one piece that deserve a client error
_ONCE: dict[str, Callable[[str], bytes]] = {
    "empty body": lambda model: post("/explain"),
    "no image": lambda model: post("/explain", b"GIF89a but not really"),
    "no such model": lambda model: _infer("x/../..", *build_infer(b"x")),
    "wrong method": lambda model: b"DELETE /explain HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no JSON": lambda model: post(infer_path(model), b"{]"),
    "deep JSON": lambda model: post(infer_path(model), _DEEP),
    "JSON longer than body": lambda model: _infer(model, b"{}", 99),
    "length of JSON": lambda model: _infer(model, b"{}", "-1"),
    "length of 5,000 digits": lambda model: _infer(model, b"{}", "9" * 5000),
    "huge shape": _infer_once(_JPEG, shape=[2**31, 2**31]),
    "negative shape": _infer_once(_JPEG, shape=[-1, 1]),
    "other type": _infer_once(_JPEG, datatype="FP32"),
    "lying size": _infer_once(_JPEG, parameters={"binary_data_size": 2**40}),
    "shared memory": _infer_once(_JPEG, parameters={"shared_memory_region": "x"}),
    "too many images": _infer_once(*[b"x"] * 5000),
    "broken gzip": lambda model: post("/explain", b"x", Content_Encoding="gzip"),
    "other parameter": lambda model: post("/explain?format=../x", b"x"),
}
_BOMB_REQUEST = _once(lambda model: post("/explain", _BOMB, Content_Encoding="gzip"))

REQUESTS = (
    *(HostileRequest(name, _once(build), _CLIENT_ERRORS) for name, build in _ONCE.items()),
    HostileRequest("too long", _too_long, frozenset([413])),
    HostileRequest("too long, in chunks", _too_long_in_chunks, frozenset([413])),
    HostileRequest("gzip bomb", _BOMB_REQUEST, frozenset([413])),
    HostileRequest("slow body", _slow_body, frozenset([408])),
    HostileRequest("slow head", _slow_head, frozenset([0, 408])),
    HostileRequest("breaks off", _breaks_off, None),
    HostileRequest("leaves", _leaves, None),
    HostileRequest("reads late", _reads_late, _CLIENT_ERRORS),
)
