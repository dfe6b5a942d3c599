"""Arrays in JSON documents: little-endian bytes, compressed with zlib, in base64."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

# a document may come from anywhere: an array's size is bounded before it is decompressed
_MAX_BYTES = 256 * 1024 * 1024
_DTYPES = ("float32", "int32", "float16")


def pack_array(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array of one of three types as a document: dtype, shape, zlib."""
    little_endian = array.astype(array.dtype.newbyteorder("<"))
    data = base64.b64encode(zlib.compress(little_endian.tobytes(), 9)).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "zlib": data}


def unpack_array(document: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array of a document.

    Raises:
        KeyError, TypeError, ValueError, zlib.error: the document is not what `pack_array` wrote.
    """
    dtype = np.dtype(document["dtype"])
    if dtype.name not in _DTYPES:
        raise ValueError(f"dtype {dtype.name}")
    inflater = zlib.decompressobj()
    data = inflater.decompress(base64.b64decode(document["zlib"]), _MAX_BYTES)
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(document["shape"]).astype(dtype)
