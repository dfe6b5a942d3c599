"""Inputs with the reference's float32 outputs, stored in the artifact: `verify` needs nothing else, years later.

Pictures are stored as PNG bytes, not as a seed: numpy does not promise its random streams across versions.
"""

from __future__ import annotations

import base64
import io
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.outputs import FloatArray, Outputs
from opal_deploy.errors import ArtifactError

# a vector's decoded size is bounded before it is decoded: the metadata may come from anywhere
_MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Reference:
    """What the reference answered for some pictures.

    Attributes:
        images: uint8 [N, H0, W0, 3], RGB.
        outputs: of PyTorch in float32 on the CPU.
        gap: float32 [N, K], how far each channel's best cell is ahead of its second, relative to the best; infinite for
            a single cell. None for `evidence: none`.
    """

    images: NDArray[np.uint8]
    outputs: Outputs
    gap: FloatArray | None = None


def pack(reference: Reference) -> dict[str, Any]:
    """For the metadata's `test_vectors`."""
    outputs = reference.outputs
    arrays = {"logits": outputs.logits, "argmax": outputs.argmax, "scores": outputs.scores, "gap": reference.gap}
    return {
        "pictures": [_png(image) for image in reference.images],
        **{name: _packed(array) for name, array in arrays.items() if array is not None},
    }


def unpack(document: dict[str, Any], origin: str) -> Reference:
    """The inverse of `pack`; `origin` names the file in errors.

    Raises:
        ArtifactError: there are none, or they are damaged.
    """
    if not document.get("pictures"):
        raise ArtifactError(f"{origin}: it carries no test vectors; export it again")
    try:
        images = np.stack([_pixels(text) for text in document["pictures"]])
        arrays = {name: _unpacked(document[name]) for name in ("logits", "argmax", "scores", "gap") if name in document}
        outputs = Outputs(arrays["logits"], arrays.get("argmax"), arrays.get("scores"))
    except (KeyError, TypeError, ValueError, OSError, SyntaxError, AttributeError, zlib.error) as error:
        raise ArtifactError(f"{origin}: its test vectors are damaged ({error}); export it again") from None
    return Reference(images, outputs, arrays.get("gap"))


def _png(image: NDArray[np.uint8]) -> str:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def _pixels(text: str) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))


def _packed(array: NDArray[Any]) -> dict[str, Any]:
    little = array.astype(array.dtype.newbyteorder("<"))
    data = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "zlib": data}


def _unpacked(document: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(document["dtype"])
    if dtype.name not in ("float32", "int32", "float16"):
        raise ValueError(f"dtype {dtype.name}")
    inflater = zlib.decompressobj()
    data = inflater.decompress(base64.b64decode(document["zlib"]), _MAX_BYTES)
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(document["shape"]).astype(dtype)
