"""Consistency, stability (Huang et al. 2023) and part purity (PIP-Net, Nauta et al. 2023) on CUB's parts, in one pass.

Consistency and stability (paper, Supp. E.3): an image is cropped to its box and squashed to 224 x 224. Each of the m
attention maps of its class is upsampled to 224 x 224, and the prototype's region is the square around the maximum of
that *upsampled* map. It differs from the square around the centre of the strongest cell, since bicubic interpolation
moves the maximum towards strong neighbours. A part is hit if it is visible and inside the region. All fifteen parts
count; left and right ones are separate.

Purity: for each channel, take the ten images with its highest scores, whatever their class, and in each the 32 x 32
patch of its strongest cell. The purity is the largest share, over parts, of images whose patch holds the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, IntArray, Outputs
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.evaluation.metrics import Figures
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import AttentionSession, ImageBatch, Session

CONSISTENCY, STABILITY, PURITY = "prototype_consistency", "prototype_stability", "part_purity"

# the protocols state their regions and patches in pixels of this input
_SIDE = 224
# pixels from a region's centre to its edge, and the side of a channel's patch
HALF_REGION, PATCH = 36, 32
# smallest share of images on which a consistent prototype hits the same part
CONSISTENT = 0.8
# standard deviation and largest amount of the noise, added to normalised images
NOISE_STD, NOISE_LIMIT = 0.2, 0.25
# first words of the noise's seeds: a stream of its own
_NOISE_STREAM = (2, 0)
# images by which a channel's purity is judged
TOP = 10


@dataclass(frozen=True)
class PartFigures(Figures):
    """Consistency, stability and purity over the images of a split, shares 0 ... 1; None where not measured."""

    prototype_consistency: float | None  # see `prototype_consistency`
    prototype_stability: float | None  # see `prototype_stability`
    part_purity: float | None  # mean and standard deviation over channels, see `purity_by_channel`
    part_purity_std: float | None
    part_prototypes: int
    part_images: int
    unavailable: dict[str, str] = field(default_factory=dict)  # figure to the reason why it was not measured

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; a figure that was not measured is null, with its reason."""
        return {name: value for name, value in super().to_dict().items() if value != {}}


class PartProtocol:
    """The measurement of consistency, stability and purity on a data set's N images, batch by batch.

    A checkpoint's session gives attention maps; for an exported model purity alone is measured.

    Args:
        parts, labels: part locations and class indices of the N images.
        cropped: whether images are cropped to their boxes, as the protocol asks.
    """

    def __init__(
        self, session: Session, parts: PartLocations, labels: NDArray[np.int64], *, cropped: bool = True
    ) -> None:
        self._metadata, self._parts, self._labels = session.metadata, parts, labels
        # of each batch, without and with noise: [n, m, P]
        self._hits: list[tuple[NDArray[np.bool_], NDArray[np.bool_]]] = []
        reason = explain_undefined(session.metadata, cropped=cropped)
        self.unavailable = dict.fromkeys((CONSISTENCY, STABILITY, PURITY), reason) if reason else {}
        self._session = session if isinstance(session, AttentionSession) and not reason else None
        if self._session is None and not reason:
            reason = "exported models give no attention maps; evaluate the checkpoint"
            self.unavailable = dict.fromkeys((CONSISTENCY, STABILITY), reason)
        # a function of pixels
        self.run = session.run if self._session is None else self._session.run_with_attention

    def add(self, indices: Sequence[int], pixels: ImageBatch, outputs: Outputs) -> None:
        """Find the hits on a batch, without and with noise, if the session gives attention maps.

        Args:
            indices: of the images among the N.
            pixels: uint8 [n, H0, W0, 3].
            outputs: of `run`.
        """
        if self._session is None:
            return
        points, visible = self._parts.truncated_input_points(_SIDE)[indices], self._parts.visible[indices]

        def find(measured: Outputs) -> NDArray[np.bool_]:
            assert measured.attention is not None  # an AttentionSession gives it
            maps = self._metadata.class_map.take(measured.attention, self._labels[indices])
            return part_hits(peak_locations(maps), points, visible)

        images = normalise(pixels, self._metadata.mean, self._metadata.std)
        self._hits.append((find(outputs), find(self._session.run_normalised(add_noise(images, indices)))))

    def summarize(self, outputs: Outputs, geometries: Sequence[Geometry]) -> PartFigures:
        """Return the figures from the hits, and the outputs and geometries of all N images."""
        class_map, labels, visible = self._metadata.class_map, self._labels, self._parts.visible
        consistency = stability = purity = purity_std = None
        prototypes = 0
        if self._hits:
            clean, noisy = map(np.concatenate, zip(*self._hits, strict=True))
            consistency = prototype_consistency(clean, visible, labels, class_map)
            stability = prototype_stability(clean, noisy, labels, class_map)
            prototypes = int(class_map.supporting[np.unique(labels)].sum())
        if PURITY not in self.unavailable and outputs.scores is not None and outputs.argmax is not None:
            # a box that leaves the image was clipped: the patch lies on what is left
            crops = np.array([geometry.crop for geometry in geometries], dtype=np.float64)
            points, names = self._parts.input_points(_SIDE, crops), self._parts.names
            purities = purity_by_channel(outputs.scores, outputs.argmax, self._metadata.grid, points, visible, names)
            supporting = purities[(class_map.matrix > 0).any(axis=0)]
            purity, purity_std = float(supporting.mean()), float(supporting.std())
        return PartFigures(consistency, stability, purity, purity_std, prototypes, len(labels), self.unavailable)


def explain_undefined(metadata: Metadata, *, cropped: bool = True) -> str:
    """Return why the figures are not defined for a model; empty if they are."""
    if metadata.evidence in ("none", "regions"):
        return f"the model has no prototypes (evidence {metadata.evidence}); only models with anchors have"
    if metadata.input_size != (_SIDE, _SIDE):
        size = "x".join(map(str, metadata.input_size))
        return f"its input is {size}, but the protocol's regions are defined on 224x224; train it with --size 224"
    if metadata.form.rule.kind != "squash":
        return f"it resizes by {metadata.resize}, but the protocol squashes the box; train it with --resize squash"
    return "" if cropped else "the protocol crops to the boxes; leave --no-boxes out"


def patch_boxes(cells: NDArray[np.integer], grid: tuple[int, int]) -> NDArray[np.int64]:
    """Return boxes int64 [..., 4], (x0, y0, x1, y1) in input pixels, PATCH on a side, of flat cells [...].

    The patches are spread evenly; the last row and column end at the image's edge.
    """
    corners = []
    for index, count in ((cells % grid[1], grid[1]), (cells // grid[1], grid[0])):
        step = round((_SIDE - PATCH) / max(count - 1, 1))
        corners.append(np.where(index == count - 1, _SIDE - PATCH, index * step))
    corner = np.stack(corners, axis=-1)
    return np.concatenate([corner, np.minimum(corner + PATCH, _SIDE)], axis=-1).astype(np.int64)


def purity_by_channel(
    scores: FloatArray, argmax: IntArray, grid: tuple[int, int], points: NDArray[np.float64],
    visible: NDArray[np.bool_], names: tuple[str, ...],
) -> NDArray[np.float64]:  # fmt: skip
    """Return purities float64 [K], 0 ... 1; 0 where no part is visible on any of the channel's images.

    Args:
        scores: [N, K]; of equal ones the earlier image comes first.
        argmax: [N, K], flat cell of each channel's maximum.
        grid: (H, W).
        points: [N, P, 2], (x, y) in pixels of the 224 x 224 input, not rounded.
        visible: [N, P].
        names: P names of the parts.
    """
    best = np.argsort(-scores, axis=0, kind="stable")[:TOP]  # [T, K]
    boxes = patch_boxes(np.take_along_axis(argmax, best, axis=0), grid)[:, :, None]  # [T, K, 1, 4]
    where = points[best]  # [T, K, P, 2]
    inside = ((where >= boxes[..., :2]) & (where <= boxes[..., 2:])).all(axis=3)
    inside &= visible[best]
    # `left X` and `right X` are one part X: present if either is, visible if either is
    merged = [name.removeprefix("left ").removeprefix("right ") for name in names]
    groups = [[i for i, other in enumerate(merged) if other == name] for name in dict.fromkeys(merged)]
    present, seen = (
        np.stack([values[..., group].any(axis=-1).sum(axis=0) for group in groups], axis=-1)
        for values in (inside, visible[best])
    )  # [K, Q]
    purities: NDArray[np.float64] = (present / np.maximum(seen, 1)).max(axis=1)
    return purities


def peak_locations(maps: NDArray[np.float32], size: int = _SIDE) -> NDArray[np.int64]:
    """Return the maximum (y, x) of each map [N, m, H, W], upsampled to `size`, int64 [N, m, 2].

    Upsampling is bicubic as OpenCV's INTER_CUBIC: a = -0.75, half-pixel centres, the border replicated. Of equal maxima
    the first counts, row-major.
    """
    # numpy's argmax promises the first of equal maxima; one image at a time, since classes may share 2,000 prototypes
    upsampled = (interpolate(torch.from_numpy(image[None]), (size, size), mode="bicubic") for image in maps)
    flat = [image[0].flatten(1).numpy().argmax(axis=1) for image in upsampled]
    return np.stack(np.divmod(flat, size), axis=2)


def part_hits(centres: NDArray[np.int64], points: NDArray[np.int64], visible: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether a visible part lies in a prototype's region, edges included: bool [N, m, P].

    Args:
        centres: [N, m, 2], (y, x), see `peak_locations`.
        points: [N, P, 2], (x, y) of the parts; may lie outside the image, where regions end.
        visible: [N, P].
    """
    low = np.maximum(centres - HALF_REGION, 0)[:, :, None]  # [N, m, 1, 2]
    high = np.minimum(centres + HALF_REGION, _SIDE)[:, :, None]
    where = points[:, None, :, ::-1]  # [N, 1, P, 2], (y, x)
    hits: NDArray[np.bool_] = ((where >= low) & (where <= high)).all(axis=3) & visible[:, None]
    return hits


def prototype_consistency(
    hit: NDArray[np.bool_], visible: NDArray[np.bool_], labels: NDArray[np.int64], class_map: ClassMap
) -> float:
    """Return the share, 0 ... 1, of prototypes that hit one part on at least 80 % of their class's images.

    The share is over the images on which the part is visible. Classes without images, dropped slots and
    those that speak against their class do not count.

    Args:
        hit: [N, m, P], on each image the prototypes of its own class.
        visible: [N, P].
    """
    consistent: list[bool] = []
    for label in np.unique(labels):
        of_class = labels == label
        seen = np.maximum(visible[of_class].sum(axis=0), 1)  # [P]; 0 of 0 is 0
        shares = hit[of_class].sum(axis=0) / seen  # [m, P]
        consistent += (shares >= CONSISTENT).any(axis=1)[class_map.supporting[label]].tolist()
    return sum(consistent) / len(consistent)


def prototype_stability(
    clean: NDArray[np.bool_], noisy: NDArray[np.bool_], labels: NDArray[np.int64], class_map: ClassMap
) -> float:
    """Return the mean share, 0 ... 1, of images on which noise changes none of a prototype's hits.

    Args:
        clean, noisy: [N, m, P], hits without and with noise; on each image the prototypes of its own class.
        labels: [N].
    """
    same = (clean == noisy).all(axis=2)  # [N, m]
    shares = [same[labels == label].mean(axis=0)[class_map.supporting[label]] for label in np.unique(labels)]
    return float(np.concatenate(shares).mean())


def add_noise(images: FloatArray, indices: Sequence[int]) -> FloatArray:
    """Return `images` plus noise from N(0, 0.2), clipped to +-0.25.

    Args:
        images: float32 [n, 3, H0, W0], normalised.
        indices: of the images in the split: noise depends on them, not on the batch.
    """
    noisy = np.empty_like(images)
    for row, (image, index) in enumerate(zip(images, indices, strict=True)):
        noise = np.random.default_rng((*_NOISE_STREAM, index)).standard_normal(image.shape, dtype=np.float32)
        noisy[row] = image + np.clip(np.float32(NOISE_STD) * noise, -NOISE_LIMIT, NOISE_LIMIT)
    return noisy
