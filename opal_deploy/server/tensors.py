"""The bodies of the Open Inference Protocol, version 2: JSON that holds the tensors, or binary tensors after it.

The protocol is KServe's, binary tensors are Triton's extension. The header `Inference-Header-Content-Length` gives the
length of a request's JSON; the tensors with a `binary_data_size` follow in their order. A length of 0 means no JSON:
the whole body is the only input. Elements are little-endian and row-major; a BYTES element is its length as uint32,
then its bytes.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from math import prod
from types import GenericAlias
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

# numbers as an array, BYTES as a list of elements, one per row
Tensor: TypeAlias = NDArray[Any] | list[bytes]

DTYPES: dict[str, np.dtype[Any]] = {"UINT8": np.dtype("u1"), "INT32": np.dtype("<i4"), "FP32": np.dtype("<f4")}
# the elements of a tensor in JSON; null is JSON's only way to say that a number is missing
_ELEMENTS: dict[str, Any] = {
    "UINT8": Annotated[int, msgspec.Meta(ge=0, le=255)], "FP32": float | None, "BYTES": str
}  # fmt: skip
# parsing holds the interpreter's lock: this much takes a fifth of a second
MAX_JSON_BYTES, MAX_JSON_VALUES, MAX_JSON_OBJECTS = 16 << 20, 1_000_000, 10_000
_LENGTH = struct.Struct("<I")
_Size = Annotated[int, msgspec.Meta(ge=0)]


class BadRequest(ValueError):
    """A request that does not follow the protocol, or does not fit the model; attributes as of `HttpError`."""

    status, code, headers = HTTPStatus.BAD_REQUEST, "bad_request", None


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model: UINT8, INT32, FP32 or BYTES; -1 in the shape stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        """Return datatype and shape."""
        return f"{self.datatype} [{', '.join('N' if n == -1 else str(n) for n in self.shape)}]"

    def refuse(self, reason: str) -> BadRequest:
        """Return the error of a request whose tensor cannot be used."""
        return BadRequest(f"input {self.name!r}: {reason}")


@dataclass(frozen=True)
class InferRequest:
    """An inference request: its id (empty for none), inputs by name, and whether each wanted output is to be binary."""

    id: str
    inputs: dict[str, Tensor]
    outputs: dict[str, bool]


class _Parameters(msgspec.Struct):
    binary_data_size: _Size | None = None
    content_type: str = ""
    shared_memory_region: Any = None
    binary_data: bool | None = None
    binary_data_output: bool = False
    classification: int = 0


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
    body: bytes,
    json_size: int | None,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_images: int,
) -> InferRequest:
    """Parse the body of a request; raise BadRequest if it does not follow the protocol, or does not fit the model.

    Args:
        body: the whole body.
        json_size: the header Inference-Header-Content-Length; None: all of the body is JSON.
        inputs, outputs: the model's.
        max_images: maximum number of rows, checked before memory is taken for them.
    """
    if json_size == 0:
        return _parse_raw(body, inputs, outputs)
    if json_size is not None and json_size > len(body):
        raise BadRequest(f"Inference-Header-Content-Length is {json_size}, and the body has {len(body)} bytes")
    document = _load_json(body[:json_size])
    tensors: dict[str, Tensor] = {}
    binary = memoryview(body)[len(body) if json_size is None else json_size :]
    for raw in document.inputs:
        spec = _find_spec(raw.name, inputs, "input")
        if spec.name in tensors:
            raise BadRequest(f"input {spec.name!r} is given twice")
        shape, size = _read_shape(raw, spec), raw.parameters.binary_data_size
        if shape[0] > max_images:
            raise BadRequest(f"{shape[0]} images found; expected at most {max_images}; send several requests")
        if size is None:
            tensors[spec.name] = _parse_json_tensor(raw, spec, shape)
            continue
        if size > len(binary):
            raise spec.refuse(f"{len(binary)} binary bytes found; expected {size}")
        tensors[spec.name] = _parse_binary(binary[:size], spec, shape)
        binary = binary[size:]
    if binary:
        raise BadRequest(f"{len(binary)} unexpected bytes after the last tensor")
    if missing := [spec.name for spec in inputs if not spec.optional and spec.name not in tensors]:
        raise BadRequest(f"input {missing[0]!r} is missing; found {', '.join(tensors) or 'none'}")
    return InferRequest(document.id, tensors, _choose_outputs(document, outputs))


def build_response(
    model: str, request: InferRequest, specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor]
) -> tuple[bytes, int | None]:
    """Return the body of a response and the length of its JSON, None where all of it is JSON.

    `specs` are the outputs of the model called `model`, `tensors` their values; a list of BYTES has the shape [N, 1].
    """
    described: list[dict[str, Any]] = []
    parts: list[bytes] = []
    datatypes = {spec.name: spec.datatype for spec in specs}
    for name, as_binary in request.outputs.items():
        tensor = tensors[name]
        shape = [len(tensor), 1] if isinstance(tensor, list) else list(tensor.shape)
        document: dict[str, Any] = {"name": name, "datatype": datatypes[name], "shape": shape}
        if as_binary:
            parts.append(_encode_binary(tensor))
            document["parameters"] = {"binary_data_size": len(parts[-1])}
        elif isinstance(tensor, list):
            document["data"] = [element.decode("utf-8", "replace") for element in tensor]
        else:
            document["data"] = np.ascontiguousarray(tensor).reshape(-1)
        described.append(document)
    response: dict[str, Any] = {"model_name": model, "model_version": "1"}
    if request.id:
        response["id"] = request.id
    header = orjson.dumps(response | {"outputs": described}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([header, *parts]), len(header)) if parts else (header, None)


def _encode_binary(tensor: Tensor) -> bytes:
    if isinstance(tensor, list):
        return b"".join(_LENGTH.pack(len(element)) + element for element in tensor)
    return np.ascontiguousarray(tensor).tobytes()


def _parse_raw(body: bytes, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> InferRequest:
    """Parse a body that is the model's only required input: one BYTES element, or images as numbers."""
    (spec,) = [spec for spec in inputs if not spec.optional]
    tensor: Tensor = [body]
    if spec.datatype != "BYTES":
        row = prod(spec.shape[1:]) * DTYPES[spec.datatype].itemsize
        if not body or len(body) % row:
            raise BadRequest(f"{len(body)} bytes found; expected a multiple of {row}, {spec}")
        tensor = np.frombuffer(body, DTYPES[spec.datatype]).reshape(-1, *spec.shape[1:])
    return InferRequest("", {spec.name: tensor}, {spec.name: True for spec in outputs})


def _load_json(body: bytes) -> _Document:
    for count, limit, unit in (
        (len(body), MAX_JSON_BYTES, "bytes"),
        (body.count(b",") + 1, MAX_JSON_VALUES, "values"),
        (body.count(b"{"), MAX_JSON_OBJECTS, "objects"),
    ):
        if count > limit:
            raise BadRequest(f"{count:,} {unit} of JSON found; expected at most {limit:,}; send binary tensors")
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
    if raw.parameters.shared_memory_region is not None:
        raise spec.refuse("shared memory is not supported; send the tensor in the body")
    if raw.datatype != spec.datatype:
        raise spec.refuse(f"datatype {raw.datatype[:20]} found; expected {spec.datatype}")
    # KServe's clients omit the 1 of [N, 1]
    shape = [*raw.shape, 1] if spec.datatype == "BYTES" and len(raw.shape) == 1 else raw.shape
    fits = len(shape) == len(spec.shape) and all(m in (-1, n) for n, m in zip(shape, spec.shape, strict=True))
    if not fits or not shape[0]:
        raise spec.refuse(f"shape {shape[:8]} found; expected {spec}")
    return tuple(shape)


def _parse_binary(data: memoryview, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    if spec.datatype == "BYTES":
        return _split_elements(data, spec, prod(shape))
    size = prod(shape) * DTYPES[spec.datatype].itemsize
    if len(data) != size:
        raise spec.refuse(f"{len(data)} bytes found; expected {size} for {list(shape)}")
    return np.frombuffer(data, DTYPES[spec.datatype]).reshape(shape)


def _split_elements(data: memoryview, spec: TensorSpec, count: int) -> list[bytes]:
    elements: list[bytes] = []
    offset = 0
    while offset < len(data) and len(elements) < count:
        end = offset + _LENGTH.size
        if end <= len(data):
            end += _LENGTH.unpack_from(data, offset)[0]
        if end > len(data):
            raise spec.refuse(f"element {len(elements)} exceeds the tensor's {len(data)} bytes")
        elements.append(bytes(data[offset + _LENGTH.size : end]))
        offset = end
    if len(elements) != count or offset != len(data):
        left = len(data) - offset
        raise spec.refuse(f"{len(elements)} elements and {left} more bytes found; expected {count} elements")
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
        decode = partial(base64.b64decode, validate=True) if raw.parameters.content_type == "base64" else str.encode
        return [decode(text) for text in array.ravel().tolist()]
    except ValueError as error:
        raise spec.refuse(f"data does not fit {spec.datatype} {list(shape)}: {str(error)[:200]}") from None


def _choose_outputs(document: _Document, outputs: Sequence[TensorSpec]) -> dict[str, bool]:
    default = document.parameters.binary_data_output
    chosen = {}
    for output in document.outputs or ():
        if output.parameters.classification:
            raise BadRequest("classification is not supported; the explain model lists the top classes")
        binary = output.parameters.binary_data
        chosen[_find_spec(output.name, outputs, "output").name] = default if binary is None else binary
    return chosen or {spec.name: default for spec in outputs}
