"""Test vectors: input images with the reference's float32 outputs, stored in the metadata of a model file.

`opal-deploy verify` needs nothing else to check a file on any machine, years later. Images are stored as PNG bytes, not
as a seed, since numpy may change its random streams between versions.
"""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.documents import pack_array, unpack_array
from opal_deploy.artifact.outputs import OUTPUT_SPECS, FloatArray, Outputs
from opal_deploy.errors import ArtifactError

_STORED = tuple(name for name, spec in OUTPUT_SPECS.items() if spec.in_test_vectors)
_MARGIN = "top2_margin"


@dataclass(frozen=True)
class Reference:
    """Images with the outputs that a model has to reproduce.

    Attributes:
        images: uint8 [N, H0, W0, 3], RGB.
        outputs: float32 outputs of the reference; for stored test vectors, of PyTorch on the CPU.
        top2_margin: float32 [N, K], by how much each channel's best cell exceeds its second, relative to the best;
            infinite for a feature map of one cell; None for `evidence: none`.
    """

    images: NDArray[np.uint8]
    outputs: Outputs
    top2_margin: FloatArray | None = None

    def rows(self, start: int, stop: int) -> Reference:
        """Return the reference on images `start` to `stop`; views of the arrays."""
        margin = None if self.top2_margin is None else self.top2_margin[start:stop]
        return Reference(self.images[start:stop], self.outputs.rows(start, stop), margin)

    def repeat(self, count: int) -> Reference:
        """Return a reference of `count` images that repeats these."""
        rows = [row % len(self.images) for row in range(count)]
        margin = None if self.top2_margin is None else self.top2_margin[rows]
        return Reference(self.images[rows], self.outputs.take(rows), margin)

    @staticmethod
    def concatenate(parts: Sequence[Reference]) -> Reference:
        """Return one reference for consecutive batches of one model."""
        margins = [part.top2_margin for part in parts if part.top2_margin is not None]
        return Reference(
            np.concatenate([part.images for part in parts]),
            Outputs.concatenate([part.outputs for part in parts]),
            np.concatenate(margins) if margins else None,
        )


def find_top2_margin(cells: NDArray[Any]) -> FloatArray:
    """Return (best - second) / largest |cell| of maps [N, K, H * W]: float32 [N, K]; infinite for one cell.

    Of attention, the largest is the best; sums of both signs have errors of the size of the largest one.
    """
    if cells.shape[2] < 2:
        return np.full(cells.shape[:2], np.inf, np.float32)
    best = np.partition(cells, (-2, -1), axis=2)[..., -2:]  # [N, K, 2]
    margin: NDArray[Any] = (best[..., 1] - best[..., 0]) / np.maximum(np.abs(cells).max(axis=2), 1e-30)
    return margin.astype(np.float32)


def pack(reference: Reference) -> dict[str, Any]:
    """Return a reference as the JSON document that the metadata's `test_vectors` holds."""
    arrays = {name: getattr(reference.outputs, name) for name in _STORED}
    if reference.top2_margin is not None:
        # half precision is enough to tell which cells are tied
        arrays[_MARGIN] = reference.top2_margin.astype(np.float16)
    return {
        "images": [_encode_png(image) for image in reference.images],
        **{name: pack_array(array) for name, array in arrays.items() if array is not None},
    }


def unpack(document: dict[str, Any], origin: str) -> Reference:
    """Return the reference that `pack` made a document of; for any other, ArtifactError that begins with `origin`."""
    if not document.get("images"):
        raise ArtifactError(f"{origin}: it has no test vectors; export it again")
    try:
        images = np.stack([_decode_png(text) for text in document["images"]])
        arrays: dict[str, Any] = {
            name: unpack_array(document[name]) for name in (*_STORED, _MARGIN) if name in document
        }
        margin = arrays.pop(_MARGIN, None)
        outputs = Outputs(**arrays)
    except (KeyError, TypeError, ValueError, OSError, SyntaxError, AttributeError, zlib.error) as error:
        raise ArtifactError(f"{origin}: its test vectors are damaged ({error}); export it again") from None
    return Reference(images, outputs, margin)


def _encode_png(image: NDArray[np.uint8]) -> str:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def _decode_png(text: str) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))
