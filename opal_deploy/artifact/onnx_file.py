"""The header, metadata and digest of ONNX files, read without onnx and ONNX Runtime (docs/contract.md).

The digest is sha256 over the whole file with the 64 characters of `file_sha256` in its metadata set to zeros. ONNX
Runtime loads bit-flipped files without complaint, so every session checks the digest first. The digest finds
corruption, not tampering.

The onnx package is not used: deployment machines do not have it, and it would read all weights for a few fields.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy._version import __version__
from opal_deploy.artifact.files import atomic_write, check_regular
from opal_deploy.artifact.metadata import BLANK_DIGEST, METADATA_KEY, Metadata
from opal_deploy.errors import ArtifactError

if TYPE_CHECKING:
    from onnx import ModelProto

_MARKER = b'"file_sha256": "'
_BLANK = BLANK_DIGEST.encode()

# field numbers of onnx.proto's ModelProto, OperatorSetIdProto and StringStringEntryProto
_IR_VERSION, _GRAPH, _OPSET_IMPORT, _METADATA_PROPS = 1, 7, 8, 14
_KEY, _VALUE = 1, 2
_OPSET_DOMAIN, _OPSET_VERSION = 1, 2
_FUNCTIONS = 25
# of GraphProto, NodeProto, AttributeProto and TensorProto, and TensorProto.EXTERNAL
_NODE, _INITIALIZER = 1, 5
_OPERATOR, _ATTRIBUTE, _DOMAIN = 4, 5, 7
_TENSOR, _SUBGRAPH, _SUBGRAPHS = 5, 6, 11
_DATA_LOCATION, _EXTERNAL = 14, 1


@dataclass(frozen=True)
class OnnxHeader:
    """An ONNX file's format, default operator set and `metadata_props`.

    Attributes:
        external: whether weights lie in other files.
        unsafe: what in the graph may run for any time or run other code, such as a loop; empty if nothing.
    """

    ir_version: int
    opset: int
    properties: dict[str, str]
    external: bool = False
    unsafe: str = ""


def read_header(path: Path) -> OnnxHeader:
    """Return what an ONNX file says outside its weights; ArtifactError for a missing or any other file."""
    with _map_file(path) as data:
        ir_version, opset, properties, graphs, external, unsafe = 0, 0, {}, 0, False, ""
        try:
            for number, value in _fields(data, 0, len(data)):
                if number == _IR_VERSION and isinstance(value, int):
                    ir_version = value
                elif isinstance(value, int):
                    continue
                elif number == _GRAPH:
                    graphs += 1
                    external = external or _has_external_weights(data, value)
                    unsafe = unsafe or _find_unsafe_node(data, value)
                elif number == _FUNCTIONS:
                    unsafe = "functions of its own"
                elif number == _OPSET_IMPORT:
                    opset = max(opset, _read_default_opset(data, value))
                elif number == _METADATA_PROPS:
                    entry = {n: data[v].decode() for n, v in _fields(data, value.start, value.stop) if type(v) is slice}
                    properties[entry.get(_KEY, "")] = entry.get(_VALUE, "")
        except (ValueError, IndexError) as error:
            raise ArtifactError(f"{path}: not an ONNX file, or damaged ({error}); export or copy it again") from None
    if not graphs or not ir_version:
        raise ArtifactError(f"{path}: not an ONNX file; expected a model that `opal-deploy export` wrote")
    return OnnxHeader(ir_version, opset, properties, external, unsafe)


def read_metadata(path: Path) -> Metadata:
    """Return the opal metadata of an ONNX file; ArtifactError if it is missing, damaged or not an exported file."""
    header = read_header(path)
    properties = header.properties
    if header.external:
        raise ArtifactError(f"{path}: weights lie in other files, which no digest covers; save it as one file")
    check_operators(header, str(path))
    if METADATA_KEY not in properties:
        raise ArtifactError(
            f"{path}: not written by opal-deploy; a classifier of another tool is explained after: "
            f"opal-deploy export {path} --preprocess torchvision"
        )
    return Metadata.from_json(properties[METADATA_KEY], str(path))


def check_operators(header: OnnxHeader, name: str) -> None:
    """Raise ArtifactError for a graph, of the file of this name, that may run for any time or run other code."""
    if header.unsafe:
        raise ArtifactError(f"{name}: {header.unsafe} found; expected ONNX's own operators, without loops and branches")


def check_digest(path: Path, metadata: Metadata) -> None:
    """Raise ArtifactError unless a file has the digest in its own metadata."""
    with _map_file(path) as data:
        digest = _compute_digest(data, metadata.file_sha256.encode("ascii", "replace"))
    if digest is None or digest != metadata.file_sha256:
        raise ArtifactError(
            f"{path}: its bytes do not match the digest written at export (found {_shorten(digest)}, expected "
            f"{_shorten(metadata.file_sha256)}); the file is damaged or was edited: copy or export it again; if a tool "
            "simplified its graph: opal-deploy verify FILE --reseal ORIGINAL"
        )


def write_model(model: ModelProto, metadata: Metadata, path: Path) -> None:
    """Write an ONNX graph with our metadata, the digest blank until `embed_digest`; ArtifactError above ONNX's 2 GB."""
    del model.metadata_props[:]
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, metadata.to_json()
    model.producer_name, model.producer_version = "opal-deploy", __version__
    try:
        path.write_bytes(model.SerializeToString())
    except ValueError as error:  # protobuf's limit
        raise ArtifactError(f"the model is over ONNX's 2 GB ({error}); use a smaller backbone") from None


def rewrite_metadata(path: Path, metadata: Metadata) -> str:
    """Write one of our ONNX files again, atomically, with other metadata around the same graph; return its digest.

    Raises:
        ArtifactError: the file is missing, damaged or without opal metadata.
        UsageError: its folder cannot be written.
    """
    read_metadata(path)
    text = replace(metadata, file_sha256=BLANK_DIGEST).to_json().encode()
    entry = _encode_field(_KEY, METADATA_KEY.encode()) + _encode_field(_VALUE, text)
    with _map_file(path) as data, atomic_write(path) as temporary:
        with memoryview(data) as view, temporary.open("wb") as stream:
            kept = 0
            for number, value in _fields(data, 0, len(data)):
                if number != _METADATA_PROPS or not isinstance(value, slice):
                    continue
                if not data[value].startswith(_encode_field(_KEY, METADATA_KEY.encode())):
                    continue
                # the field's tag and length, which protobuf writes in as few bytes as possible, come before its value
                head = _encode_varint(_METADATA_PROPS << 3 | 2) + _encode_varint(value.stop - value.start)
                stream.write(view[kept : value.start - len(head)])
                kept = value.stop
            stream.write(view[kept:])
            stream.write(_encode_field(_METADATA_PROPS, entry))
        return embed_digest(temporary)


def embed_digest(path: Path) -> str:
    """Write the digest into a file whose metadata has a blank one (else ArtifactError), and return it."""
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as data:
        position = data.find(_MARKER + _BLANK)
        if position < 0:
            raise ArtifactError(f"{path}: no blank digest to fill in")
        digest = hashlib.sha256(data).hexdigest()
        start = position + len(_MARKER)
        data[start : start + len(_BLANK)] = digest.encode()
        data.flush()
    return digest


def _compute_digest(data: mmap.mmap, stated: bytes) -> str | None:
    position = data.find(_MARKER + stated)
    if position < 0 or len(stated) != len(_BLANK):
        return None
    start = position + len(_MARKER)
    digest = hashlib.sha256()
    with memoryview(data) as view:
        digest.update(view[:start])
        digest.update(_BLANK)
        digest.update(view[start + len(_BLANK) :])
    return digest.hexdigest()


def _shorten(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def _map_file(path: Path) -> mmap.mmap:
    try:
        check_regular(path)
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    except ValueError:
        raise ArtifactError(f"{path}: the file is empty; export or copy it again") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from None


def _has_external_weights(data: mmap.mmap, graph: slice) -> bool:
    """Return whether a weight of a graph, or a node's constant, is stored in another file."""
    tensors = [*_parts(data, graph, _INITIALIZER)]
    for node in _parts(data, graph, _NODE):
        for attribute in _parts(data, node, _ATTRIBUTE):
            tensors += _parts(data, attribute, _TENSOR)
    return any((_DATA_LOCATION, _EXTERNAL) in _fields(data, tensor.start, tensor.stop) for tensor in tensors)


def _find_unsafe_node(data: mmap.mmap, graph: slice) -> str:
    """Return the first operator of a graph that is not ONNX's own or that holds a graph, as loops and branches do."""
    for node in _parts(data, graph, _NODE):
        operator = b"".join(data[part] for part in _parts(data, node, _OPERATOR)).decode()
        for domain in _parts(data, node, _DOMAIN):
            if data[domain] not in (b"", b"ai.onnx"):
                return f"operator {data[domain].decode()}.{operator}"
        for attribute in _parts(data, node, _ATTRIBUTE):
            if any(number in (_SUBGRAPH, _SUBGRAPHS) for number, _ in _fields(data, attribute.start, attribute.stop)):
                return f"operator {operator}"
    return ""


def _parts(data: mmap.mmap, message: slice, number: int) -> Iterator[slice]:
    """Yield the fields of bytes that have this number."""
    for key, value in _fields(data, message.start, message.stop):
        if key == number and isinstance(value, slice):
            yield value


def _read_default_opset(data: mmap.mmap, span: slice) -> int:
    entry = dict(_fields(data, span.start, span.stop))
    domain = entry.get(_OPSET_DOMAIN)
    is_default = not isinstance(domain, slice) or data[domain] in (b"", b"ai.onnx")
    version = entry.get(_OPSET_VERSION)
    return version if is_default and isinstance(version, int) else 0


def _fields(data: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, int | slice]]:
    """Yield (field number, varint) or (field number, slice of bytes) from protobuf's wire format."""
    position = start
    while position < stop:
        key, position = _varint(data, position, stop)
        number, kind = key >> 3, key & 7
        if number == 0 or kind not in (0, 1, 2, 5):
            raise ValueError(f"field number {number}, wire type {kind}")
        if kind == 0:
            value, position = _varint(data, position, stop)
            yield number, value
            continue
        length = 8 if kind == 1 else 4
        if kind == 2:
            length, position = _varint(data, position, stop)
        if position + length > stop:
            raise ValueError("it ends early")
        yield number, slice(position, position + length)
        position += length


def _encode_field(number: int, value: bytes) -> bytes:
    """Return a field of bytes in protobuf's wire format."""
    return _encode_varint(number << 3 | 2) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _varint(data: mmap.mmap, position: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= stop or shift > 63:
            raise ValueError("it ends early")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
