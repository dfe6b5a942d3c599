"""The bodies of requests and responses: read within limits on bytes and seconds; the protocol's JSON and tensors.

The Open Inference Protocol, version 2, is KServe's; binary tensors are Triton's extension. The header
`Inference-Header-Content-Length` gives the length of a request's JSON; the tensors with a `binary_data_size` follow in
their order. Elements are little-endian and row-major; a BYTES element is its length as uint32, then its bytes.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from math import prod
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from opal_deploy.api.service import Service
from opal_deploy.server.options import ServeOptions

# bodies of the largest size that may be in memory
_LARGEST_BODIES = 8
# bodies inflated concurrently: each takes up to twice `max_body` before it is counted
_CONCURRENT_INFLATIONS = 2
_ENCODINGS = ("gzip", "x-gzip", "deflate")
_CHUNK, _INFLATE_SECONDS = 64 << 10, 5.0
_CLIENT_LEFT = 499
# the length of a message's JSON, if tensors follow it
JSON_SIZE = "Inference-Header-Content-Length"
# numbers as an array, BYTES as a list of elements, one per row
Tensor: TypeAlias = NDArray[Any] | list[bytes]

DTYPES: dict[str, np.dtype[Any]] = {"UINT8": np.dtype("u1"), "INT32": np.dtype("<i4"), "FP32": np.dtype("<f4")}
# the elements of a tensor in JSON; null is JSON's only way to say that a number is missing
_ELEMENTS: dict[str, Any] = {
    "UINT8": Annotated[int, msgspec.Meta(ge=0, le=255)], "FP32": float | None, "BYTES": str
}  # fmt: skip
# parsing holds the interpreter's lock: this much takes a fifth of a second
MAX_JSON_BYTES, MAX_JSON_VALUES = 16 << 20, 1_000_000
_LENGTH = struct.Struct("<I")
_Size = Annotated[int, msgspec.Meta(ge=0)]


class BadRequest(HTTPException):
    """A request that does not follow the protocol, or does not fit the model."""

    def __init__(self, reason: str) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, reason)


def busy(message: str) -> HTTPException:
    """Return the error that tells a client to try again later."""
    return HTTPException(HTTPStatus.TOO_MANY_REQUESTS, f"{message}; try again later", {"Retry-After": "1"})


class BodyReader:
    """Reads the bodies of all requests of one event loop; `held_bytes` of them are in memory."""

    def __init__(self, options: ServeOptions) -> None:
        self._limit, self._seconds = options.max_body << 20, options.upload_timeout
        self.held_bytes = 0
        self._inflating = asyncio.Semaphore(_CONCURRENT_INFLATIONS)

    @asynccontextmanager
    async def read(self, request: Request, service: Service) -> AsyncIterator[bytes]:
        """Yield a request's decompressed body, which counts as held until the block is left.

        Raises HTTPException for a body that is too large, too slow or not what its headers say, if the service is full
        or too many bytes are held, and if the client leaves.
        """
        if service.in_flight >= service.capacity:
            raise busy(f"{service.in_flight} images are in flight")
        encoding = request.headers.get("content-encoding", "").strip().lower()
        held: list[int] = []
        try:
            body = await self._read(request, held)
            if encoding in _ENCODINGS:
                async with self._inflating:
                    # zlib releases the interpreter's lock
                    body = await asyncio.to_thread(inflate, body, self._limit)
                self._hold(held, len(body))
            elif encoding not in ("", "identity"):
                reason = f"Content-Encoding {encoding[:20]} found; expected gzip or deflate"
                raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, reason)
            yield body
        finally:
            self.held_bytes -= sum(held)

    async def _read(self, request: Request, held: list[int]) -> bytes:
        body, size = bytearray(), 0
        announced = request.headers.get("content-length", "0")
        is_kept = not announced.isdigit() or int(announced) <= self._limit
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    # a client that is still sending reads the answer only if the rest of its body is taken
                    if is_kept and size <= self._limit:
                        self._hold(held, len(chunk))
                        body += chunk
        except TimeoutError:
            reason = f"{size:,} bytes found after {self._seconds:g} s; expected the whole body"
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, reason, {"Connection": "close"}) from None
        except ClientDisconnect:
            # nobody reads the response; nginx's number is for the log
            raise HTTPException(_CLIENT_LEFT, "the client left") from None
        if size > self._limit:
            raise _too_large(self._limit)
        return bytes(body)

    def _hold(self, held: list[int], count: int) -> None:
        if self.held_bytes + count > _LARGEST_BODIES * self._limit:
            raise busy(f"requests hold {self.held_bytes:,} bytes")
        self.held_bytes += count
        held.append(count)


def inflate(data: bytes, limit: int) -> bytes:
    """Return the bytes of one gzip member or of zlib data; raise HTTPException if damaged, too large or too costly."""
    inflated, deadline = bytearray(), time.monotonic() + _INFLATE_SECONDS
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        for start in range(0, len(data), _CHUNK):
            if decompressor.eof or time.monotonic() > deadline:
                raise BadRequest(f"the body has several gzip members, or inflates for over {_INFLATE_SECONDS} s")
            inflated += decompressor.decompress(data[start : start + _CHUNK], limit + 1 - len(inflated))
            if len(inflated) > limit:
                raise _too_large(limit)
    except zlib.error as error:
        raise BadRequest(f"the body is not valid gzip or deflate: {str(error)[:80]}") from None
    if not decompressor.eof or decompressor.unused_data:
        raise BadRequest("the body's gzip or deflate data is truncated, or has several gzip members")
    return bytes(inflated)


def _too_large(limit: int) -> HTTPException:
    reason = f"the body is too large; expected at most {limit:,} bytes, decompressed (--max-body)"
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model: UINT8, INT32, FP32 or BYTES; -1 in the shape stands for any size.

    JSON, which is text, has the bytes of a file in base64, whether or not the request says so.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    is_file: bool = False

    def refuse(self, reason: str) -> BadRequest:
        """Return the error of a request whose tensor cannot be used."""
        return BadRequest(f"input {self.name!r}: {reason}")


class InferRequest(NamedTuple):
    """An inference request: its id (empty for none), inputs by name, and whether each wanted output is to be binary."""

    id: str
    inputs: dict[str, Any]
    outputs: dict[str, bool]


class _Parameters(msgspec.Struct):
    binary_data_size: _Size | None = None
    content_type: str = ""
    binary_data: bool | None = None
    binary_data_output: bool = False


class _Output(msgspec.Struct):
    name: str
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


class _Input(_Output, kw_only=True):
    datatype: str
    shape: list[_Size]
    data: msgspec.Raw = msgspec.Raw()


class _Document(msgspec.Struct):
    inputs: list[_Input]
    outputs: list[_Output] | None = None
    id: str = ""
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


def parse_request(
    body: bytes, json_size: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], max_images: int
) -> InferRequest:
    """Parse a body whose first `json_size` bytes are JSON, for a model with these inputs and outputs.

    Raises BadRequest if the body does not follow the protocol, does not fit the model, or has over `max_images` rows.
    """
    document = _parse_json(body[:json_size])
    tensors: dict[str, Any] = {}
    binary = memoryview(body)[json_size:]
    for raw in document.inputs:
        spec = _find_spec(raw.name, inputs, "input")
        shape, size = _read_shape(raw, spec), raw.parameters.binary_data_size
        if shape[0] > max_images:
            # before memory is taken for them
            raise BadRequest(f"{shape[0]} images found; expected at most {max_images}; send several requests")
        if size is None:
            tensors[spec.name] = _parse_json_tensor(raw, spec, shape)
        else:
            tensors[spec.name] = _parse_binary(binary[:size], spec, shape)
            binary = binary[size:]
    if binary:
        raise BadRequest(f"{len(binary)} unexpected bytes after the last tensor")
    if missing := [spec.name for spec in inputs if not spec.optional and spec.name not in tensors]:
        raise BadRequest(f"input {missing[0]!r} is missing; found {', '.join(tensors) or 'none'}")
    as_binary = document.parameters.binary_data_output
    chosen = {}
    for output in document.outputs or ():
        wanted = output.parameters.binary_data
        chosen[_find_spec(output.name, outputs, "output").name] = as_binary if wanted is None else wanted
    return InferRequest(document.id, tensors, chosen or {spec.name: as_binary for spec in outputs})


def build_response(
    model: str, request: InferRequest, specs: Sequence[TensorSpec], tensors: Mapping[str, Any]
) -> Response:
    """Return a response; `specs` are the outputs of the model called `model`, `tensors` their values.

    A list of BYTES has the shape [N, 1].
    """
    described: list[dict[str, Any]] = []
    parts: list[bytes] = []
    datatypes = {spec.name: spec.datatype for spec in specs}
    for name, as_binary in request.outputs.items():
        tensor = tensors[name]
        is_bytes = isinstance(tensor, list)
        shape = [len(tensor), 1] if is_bytes else tensor.shape
        document: dict[str, Any] = {"name": name, "datatype": datatypes[name], "shape": shape}
        if as_binary:
            elements = (_LENGTH.pack(len(element)) + element for element in tensor)
            parts.append(b"".join(elements) if is_bytes else tensor.tobytes())
            document["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            document["data"] = [element.decode(errors="replace") for element in tensor] if is_bytes else tensor.ravel()
        described.append(document)
    response = {"model_name": model, "model_version": "1"} | ({"id": request.id} if request.id else {})
    header = orjson.dumps(response | {"outputs": described}, option=orjson.OPT_SERIALIZE_NUMPY)
    if not parts:
        return Response(header, media_type="application/json")
    headers = {JSON_SIZE: str(len(header))}
    return Response(b"".join([header, *parts]), headers=headers, media_type="application/octet-stream")


def _parse_json(body: bytes) -> _Document:
    if len(body) > MAX_JSON_BYTES or body.count(b",") >= MAX_JSON_VALUES:
        limits = f"{MAX_JSON_BYTES:,} bytes and {MAX_JSON_VALUES:,} values"
        raise BadRequest(f"{len(body):,} bytes of JSON found; expected at most {limits}; send binary tensors")
    try:
        return msgspec.json.decode(body, type=_Document)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON of the protocol: {str(error)[:200]}") from None


def _find_spec(name: str, specs: Sequence[TensorSpec], kind: str) -> TensorSpec:
    for spec in specs:
        if spec.name == name:
            return spec
    raise BadRequest(f"{kind} {name[:80]!r} found; expected {', '.join(spec.name for spec in specs)}")


def _read_shape(raw: _Input, spec: TensorSpec) -> tuple[int, ...]:
    if raw.datatype != spec.datatype:
        raise spec.refuse(f"datatype {raw.datatype[:20]} found; expected {spec.datatype}")
    # KServe's clients omit the 1 of [N, 1]
    shape = [*raw.shape, 1] if spec.datatype == "BYTES" and len(raw.shape) == 1 else raw.shape
    fits = len(shape) == len(spec.shape) and all(m in (-1, n) for n, m in zip(shape, spec.shape, strict=True))
    if not fits or not shape[0]:
        expected = ", ".join("N" if n == -1 else str(n) for n in spec.shape)
        raise spec.refuse(f"shape {shape[:8]} found; expected {spec.datatype} [{expected}]")
    return tuple(shape)


def _parse_binary(data: memoryview, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    if spec.datatype != "BYTES":
        size = prod(shape) * DTYPES[spec.datatype].itemsize
        if len(data) != size:
            raise spec.refuse(f"{len(data)} bytes found; expected {size} for {list(shape)}")
        return np.frombuffer(data, DTYPES[spec.datatype]).reshape(shape)
    elements: list[bytes] = []
    offset = 0
    while len(elements) < shape[0] and offset + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += _LENGTH.size + length
        elements.append(bytes(data[offset - length : offset]))
    if len(elements) != shape[0] or offset != len(data):
        raise spec.refuse(f"{len(data)} bytes are not {shape[0]} elements")
    return elements


def _parse_json_tensor(raw: _Input, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """Parse a list that is flat, or nested like the shape."""
    if not (text := bytes(raw.data)):
        raise BadRequest(f"input {spec.name!r} has neither data nor a binary_data_size")
    nested = b"".join(text[:100].split()).startswith(b"[[")
    kind: Any = _ELEMENTS[spec.datatype]
    for _ in shape if nested else shape[:1]:
        kind = GenericAlias(list, (kind,))
    try:
        values = msgspec.json.decode(text, type=kind)
        # a number that float32 cannot hold becomes infinite
        with np.errstate(over="ignore"):
            array = np.array(values, DTYPES.get(spec.datatype, np.dtype(object)))
        array = array if nested else array.reshape(shape)
        if array.shape != shape:
            raise ValueError(f"shape {list(array.shape)}")
        if spec.datatype != "BYTES":
            return array
        elements = array.ravel().tolist()
        if not (spec.is_file or raw.parameters.content_type == "base64"):
            return [element.encode() for element in elements]
        # perhaps with line breaks or as a data URL
        codes = ("".join(element.rpartition(";base64,")[2].split()) for element in elements)
        return [base64.b64decode(code, validate=True) for code in codes]
    except ValueError as error:
        raise spec.refuse(f"data does not fit {spec.datatype} {list(shape)}: {str(error)[:200]}") from None
