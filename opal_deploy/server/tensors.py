"""The bodies of the Open Inference Protocol, version 2: JSON that holds the tensors, or binary tensors after it.

The protocol is KServe's, binary tensors are Triton's extension. The header `Inference-Header-Content-Length` gives the
length of a request's JSON; the tensors with a `binary_data_size` follow in their order. A length of 0 means no JSON:
the whole body is the only input. Elements are little-endian and row-major; a BYTES element is its length as uint32,
then its bytes.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

# numbers as an array, BYTES as a list of elements, one per row
Tensor: TypeAlias = NDArray[Any] | list[bytes]

DTYPES: dict[str, np.dtype[Any]] = {
    "UINT8": np.dtype("u1"),
    "INT32": np.dtype("<i4"),
    "FP32": np.dtype("<f4"),
}
# parsing JSON blocks the event loop: this much takes a fifth of a second
MAX_JSON_BYTES, MAX_JSON_VALUES, MAX_JSON_OBJECTS = 16 << 20, 1_000_000, 10_000
_LENGTH = struct.Struct("<I")
_MAX_RANK = 8


class BadRequest(ValueError):
    """A request that does not follow the protocol, or does not fit the model."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model: UINT8, INT32, FP32 or BYTES; -1 in the shape stands for any size.

    Its text is datatype and shape.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.datatype} [{', '.join('N' if n == -1 else str(n) for n in self.shape)}]"

    def to_dict(self) -> dict[str, Any]:
        """Return the tensor's entry in a model's metadata."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}

    def refuse(self, reason: str) -> BadRequest:
        """Return the error of a request whose tensor cannot be used."""
        return BadRequest(f"input {self.name!r}: {reason}")


@dataclass(frozen=True)
class InferRequest:
    """An inference request: its id (empty for none), inputs by name, and whether each wanted output is to be binary."""

    id: str
    inputs: dict[str, Tensor]
    outputs: dict[str, bool]


def datatype_of(dtype: np.dtype[Any]) -> str:
    """Return the protocol's name of a dtype of `DTYPES`."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def parse_request(
    body: bytes,
    json_size: int | None,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_images: int | None = None,
) -> InferRequest:
    """Parse the body of a request.

    Args:
        body: the whole body.
        json_size: the header Inference-Header-Content-Length; None: all of the body is JSON.
        inputs, outputs: the model's.
        max_images: maximum number of rows, checked before memory is taken for them; None: no limit.

    Raises:
        BadRequest: the body does not follow the protocol, or does not fit the model.
    """
    if json_size == 0:
        return _parse_raw(body, inputs, outputs)
    if json_size is not None and not 0 < json_size <= len(body):
        raise BadRequest(f"Inference-Header-Content-Length is {json_size}, and the body has {len(body)} bytes")
    document = _load_json(body[:json_size])
    tensors: dict[str, Tensor] = {}
    binary = memoryview(body)[len(body) if json_size is None else json_size :]
    for raw in _objects(document.get("inputs"), "inputs"):
        spec = _find_spec(raw, inputs, "input")
        if spec.name in tensors:
            raise BadRequest(f"input {spec.name!r} is given twice")
        shape = _read_shape(raw, spec)
        if max_images is not None and shape[0] > max_images:
            raise BadRequest(f"{shape[0]} images found; expected at most {max_images}; send several requests")
        size = _parameters(raw).get("binary_data_size")
        if size is None:
            tensors[spec.name] = _parse_json_tensor(raw, spec, shape)
            continue
        if type(size) is not int or size < 0:
            raise spec.refuse(f"binary_data_size {size!r} found; expected a number of bytes")
        if size > len(binary):
            raise spec.refuse(f"{len(binary)} binary bytes found; expected {size}")
        tensors[spec.name] = _parse_binary(binary[:size], spec, shape)
        binary = binary[size:]
    if binary:
        raise BadRequest(f"{len(binary)} unexpected bytes after the last tensor")
    if missing := [spec.name for spec in inputs if not spec.optional and spec.name not in tensors]:
        raise BadRequest(f"input {missing[0]!r} is missing; found {', '.join(tensors) or 'none'}")
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise BadRequest("id is not a string")
    return InferRequest(request_id, tensors, _read_outputs(document, outputs))


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
    tensor: Tensor
    if spec.datatype == "BYTES":
        tensor = [body]
    else:
        row = prod(spec.shape[1:]) * DTYPES[spec.datatype].itemsize
        if not body or len(body) % row:
            raise BadRequest(f"{len(body)} bytes found; expected a multiple of {row}, {spec}")
        tensor = np.frombuffer(body, DTYPES[spec.datatype]).reshape(-1, *spec.shape[1:])
    return InferRequest("", {spec.name: tensor}, {spec.name: True for spec in outputs})


def _load_json(body: bytes) -> dict[str, Any]:
    for found, limit, what in (
        (len(body), MAX_JSON_BYTES, "bytes"),
        (body.count(b",") + 1, MAX_JSON_VALUES, "values"),
        (body.count(b"{"), MAX_JSON_OBJECTS, "objects"),
    ):
        if found > limit:
            raise BadRequest(f"{found:,} {what} of JSON found; expected at most {limit:,}; send binary tensors")
    try:
        document = orjson.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {' '.join(str(error).split())[:120]}") from None
    if not isinstance(document, dict):
        raise BadRequest("the body is not a JSON object")
    return document


def _objects(value: object, what: str) -> Iterable[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise BadRequest(f"{what} is not a list of objects")
    return value


def _parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    parameters = raw.get("parameters", {})
    if not isinstance(parameters, dict):
        raise BadRequest("parameters is not an object")
    if "shared_memory_region" in parameters:
        raise BadRequest("shared memory is not supported; send the tensor in the request")
    return parameters


def _find_spec(raw: Mapping[str, Any], specs: Sequence[TensorSpec], kind: str) -> TensorSpec:
    name = raw.get("name")
    for spec in specs:
        if spec.name == name:
            return spec
    raise BadRequest(f"{kind} {str(name)[:80]!r} found; expected {', '.join(spec.name for spec in specs)}")


def _read_shape(raw: Mapping[str, Any], spec: TensorSpec) -> tuple[int, ...]:
    if raw.get("datatype") != spec.datatype:
        raise spec.refuse(f"datatype {str(raw.get('datatype'))[:20]} found; expected {spec.datatype}")
    shape = raw.get("shape")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(type(n) is int and n >= 0 for n in shape):
        raise spec.refuse(f"shape is not a list of sizes; expected {spec}")
    # KServe's clients omit the 1 of [N, 1]
    if spec.datatype == "BYTES" and len(shape) == 1:
        shape = [*shape, 1]
    fits = len(shape) == len(spec.shape) and all(m in (-1, n) for n, m in zip(shape, spec.shape, strict=True))
    if not fits or not shape[0]:
        raise spec.refuse(f"shape {shape} found; expected {spec}")
    return tuple(shape)


def _parse_binary(data: memoryview, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    count = prod(shape)
    if spec.datatype == "BYTES":
        return _split_elements(data, spec, count)
    dtype = DTYPES[spec.datatype]
    if len(data) != count * dtype.itemsize:
        raise spec.refuse(f"{len(data)} bytes found; expected {count * dtype.itemsize} for {list(shape)}")
    return np.frombuffer(data, dtype).reshape(shape)


def _split_elements(data: memoryview, spec: TensorSpec, count: int) -> list[bytes]:
    elements: list[bytes] = []
    offset = 0
    while offset < len(data) and len(elements) < count:
        end = offset + _LENGTH.size
        if end <= len(data):
            (size,) = _LENGTH.unpack_from(data, offset)
            end += size
        if end > len(data):
            raise spec.refuse(f"element {len(elements)} exceeds the tensor's {len(data)} bytes")
        elements.append(bytes(data[offset + _LENGTH.size : end]))
        offset = end
    if len(elements) != count or offset != len(data):
        left = len(data) - offset
        raise spec.refuse(f"{len(elements)} elements and {left} more bytes found; expected {count} elements")
    return elements


def _parse_json_tensor(raw: Mapping[str, Any], spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    if "data" not in raw:
        raise BadRequest(f"input {spec.name!r} has neither data nor a binary_data_size")
    values = _flatten(raw["data"], spec, shape)
    kinds = set(map(type, values))
    if spec.datatype == "BYTES":
        if kinds != {str}:
            raise spec.refuse("data has values other than strings")
        return _decode_texts(values, spec, _parameters(raw).get("content_type"))
    if spec.datatype == "UINT8":
        if kinds != {int} or min(values) < 0 or max(values) > 255:
            raise spec.refuse("data has values other than integers from 0 to 255")
    elif not kinds <= {int, float, type(None)}:
        raise spec.refuse("data has values other than numbers")
    with np.errstate(over="ignore"):
        # null is JSON's only way to say that a number is missing
        return np.array(values, np.float64).astype(DTYPES[spec.datatype]).reshape(shape)


def _flatten(data: object, spec: TensorSpec, shape: tuple[int, ...]) -> list[Any]:
    """Return the values of a list that is flat or nested like the shape."""
    if isinstance(data, list) and not any(isinstance(element, list) for element in data):
        shape = (prod(shape),)
    level: list[Any] = [data]
    for size in shape:
        for part in level:
            if not isinstance(part, list) or len(part) != size:
                found = f"{len(part)} values" if isinstance(part, list) else "no list"
                raise spec.refuse(f"{found} found; expected {size}, in lists like {list(shape)}")
        level = [element for part in level for element in part]
    return level


def _decode_texts(texts: list[str], spec: TensorSpec, content_type: object) -> list[bytes]:
    try:
        if content_type == "base64":
            return [base64.b64decode(text, validate=True) for text in texts]
        return [text.encode() for text in texts]
    except ValueError:
        raise spec.refuse("data is not base64") from None


def _read_outputs(document: Mapping[str, Any], outputs: Sequence[TensorSpec]) -> dict[str, bool]:
    default = _read_flag(_parameters(document), "binary_data_output")
    if not document.get("outputs"):
        return {spec.name: default for spec in outputs}
    requested = {}
    for raw in _objects(document["outputs"], "outputs"):
        name = _find_spec(raw, outputs, "output").name
        parameters = _parameters(raw)
        if parameters.get("classification"):
            raise BadRequest("classification is not supported; the explain model lists the top classes")
        requested[name] = _read_flag(parameters, "binary_data", default=default)
    return requested


def _read_flag(parameters: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"{name} {str(value)[:20]!r} found; expected true or false")
    return value
