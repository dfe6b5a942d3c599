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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, IntArray, Outputs
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import AttentionSession, ImageBatch, Session

CONSISTENCY, STABILITY, PURITY = "prototype_consistency", "prototype_stability", "part_purity"

# the protocols state their regions and patches in pixels of this input
_INPUT_SIZE = (224, 224)
_NOT_CROPPED = "the protocol crops to the boxes; leave --no-boxes out"

HALF_REGION = 36
"""Pixels of the 224 x 224 input from a region's centre to its edge."""

CONSISTENT = 0.8
"""Smallest share of images on which a consistent prototype hits the same part."""

NOISE_STD, NOISE_LIMIT = 0.2, 0.25
"""Standard deviation and largest amount of the noise, added to normalised images."""

# first word of the seeds: a stream of its own
_NOISE_STREAM = 2

TOP = 10
"""Images by which a channel's purity is judged."""

PATCH = 32
"""Side of a channel's patch in pixels of the 224 x 224 input."""

_SIDES = ("left ", "right ")


@dataclass(frozen=True)
class PartFigures:
    """Consistency, stability and purity over the images of a split, in percent as in the paper's tables.

    Attributes:
        consistency: see `prototype_consistency`; None where it cannot be measured.
        stability: see `prototype_stability`; None where it cannot be measured.
        purity: mean over the K channels, see `purity_by_channel`; None where it cannot be measured.
        purity_std: standard deviation of the purity over channels.
    """

    consistency: float | None
    stability: float | None
    purity: float | None
    purity_std: float | None
    prototypes: int
    images: int
    unavailable: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON as shares, 0 ... 1; a figure that was not measured is null, with its reason."""
        percent = {
            CONSISTENCY: self.consistency,
            STABILITY: self.stability,
            PURITY: self.purity,
            f"{PURITY}_std": self.purity_std,
        }
        figures: dict[str, Any] = {
            **{name: None if value is None else value / 100 for name, value in percent.items()},
            "part_prototypes": self.prototypes,
            "part_images": self.images,
        }
        return {**figures, "unavailable": self.unavailable} if self.unavailable else figures


class _NormalisedRunner(Protocol):
    def run_normalised(self, images: FloatArray) -> Outputs: ...


class PartMeter:
    """Accumulates consistency, stability and purity over the batches of a data set.

    A checkpoint's session always gives attention maps; an exported model only if they are among its outputs.

    Attributes:
        unavailable: figure to the reason why it cannot be measured on this model, and a remedy.
    """

    def __init__(
        self, session: Session, parts: PartLocations, labels: NDArray[np.int64], *, cropped: bool = True, seed: int = 0
    ) -> None:
        """Prepare for the data set's N images.

        Args:
            cropped: whether images are cropped to their boxes, as the protocol asks.
        """
        self._metadata, self._parts, self._labels, self._seed = session.metadata, parts, labels, seed
        self.run: Callable[[ImageBatch], Outputs] = session.run
        self._run_normalised: Callable[[FloatArray], Outputs] | None = None
        self.unavailable = explain_undefined(session.metadata, cropped=cropped)
        if isinstance(session, AttentionSession):
            self.run, self._run_normalised = session.run_with_attention, session.run_normalised
        else:
            if session.metadata.input_kind == "float32":
                self._run_normalised = cast(_NormalisedRunner, session).run_normalised
            self.unavailable = self.unavailable or explain_missing_outputs(session.metadata)
        self._points = parts.truncated_input_points(_INPUT_SIZE[0])
        self._clean: list[NDArray[np.bool_]] = []
        self._noisy: list[NDArray[np.bool_]] = []

    def add(self, first: int, pixels: ImageBatch, outputs: Outputs) -> None:
        """Add a batch: uint8 [n, H0, W0, 3], the data set's images from number `first` on, and the outputs of `run`."""
        if CONSISTENCY not in self.unavailable:
            self._clean.append(self._hits(first, outputs))
        if STABILITY not in self.unavailable and self._run_normalised is not None:
            images = normalise(pixels, self._metadata.mean, self._metadata.std)
            outputs = self._run_normalised(add_noise(images, first, self._seed))
            self._noisy.append(self._hits(first, outputs))

    def figures(
        self, scores: FloatArray | None, argmax: NDArray[np.int32] | None, geometries: Sequence[Geometry]
    ) -> PartFigures:
        """Return the figures after the last batch, from scores and argmax [N, K] and the geometries of all N images."""
        metadata, labels = self._metadata, self._labels
        consistency = stability = purity = purity_std = None
        if self._clean:
            clean = np.concatenate(self._clean)
            consistency = prototype_consistency(clean, self._parts.visible, labels, metadata.class_map)
            if self._noisy:
                stability = prototype_stability(clean, np.concatenate(self._noisy), labels, metadata.class_map)
        if PURITY not in self.unavailable and scores is not None and argmax is not None:
            # a box that leaves the image was clipped: the patch lies on what is left
            crops = np.array([geometry.crop for geometry in geometries], dtype=np.float64)
            points, visible = self._parts.input_points(_INPUT_SIZE[0], crops), self._parts.visible
            purities = purity_by_channel(scores, argmax, metadata.grid, points, visible, self._parts.names)
            purities = purities[(metadata.class_map.matrix > 0).any(axis=0)]
            purity, purity_std = 100.0 * float(purities.mean()), 100.0 * float(purities.std())
        prototypes = int(metadata.class_map.supporting[np.unique(labels)].sum()) if consistency is not None else 0
        return PartFigures(consistency, stability, purity, purity_std, prototypes, len(labels), dict(self.unavailable))

    def _hits(self, first: int, outputs: Outputs) -> NDArray[np.bool_]:
        assert outputs.attention is not None  # `unavailable` has a reason otherwise
        rows = slice(first, first + len(outputs))
        maps = self._metadata.class_map.take(outputs.attention, self._labels[rows])
        return part_hits(peak_locations(maps), self._points[rows], self._parts.visible[rows])


def explain_undefined(metadata: Metadata, *, cropped: bool = True) -> dict[str, str]:
    """Return, per figure, why it is not defined for a model; empty if all are."""
    reason = "" if cropped else _NOT_CROPPED
    if metadata.evidence == "none":
        reason = "the model has no prototypes (evidence none); only models with anchors have"
    elif metadata.input_size != _INPUT_SIZE:
        size = "x".join(map(str, metadata.input_size))
        reason = f"its input is {size}, but the protocol's regions are defined on 224x224; train it with --size 224"
    return dict.fromkeys((CONSISTENCY, STABILITY, PURITY), reason) if reason else {}


def explain_missing_outputs(metadata: Metadata) -> dict[str, str]:
    """Return, per figure, which output an exported model lacks, and the command that exports it."""
    source = metadata.source.get("file", "CHECKPOINT")
    # another file: the evaluated one may be in use, and earlier results name its digest
    command = f"opal-deploy export {source} --out {Path(source).stem}.attention.onnx --outputs attention"
    instead = f"evaluate {source} itself, or a file that has them: {command}"
    if not metadata.is_opal:
        instead = f"evaluate a file that has them: {command} --arch ARCHITECTURE"
    reasons = {}
    if "attention" not in metadata.outputs:
        reasons[CONSISTENCY] = f"the model has no output attention; {instead}"
    if "attention" not in metadata.outputs or metadata.input_kind != "float32":
        missing = [] if "attention" in metadata.outputs else ["output attention"]
        missing += [] if metadata.input_kind == "float32" else ["float32 input, which noise is added to"]
        reasons[STABILITY] = f"the model has no {' and no '.join(missing)}; {instead} --input float32"
    return reasons


def merge_sides(
    names: tuple[str, ...], present: NDArray[np.bool_], visible: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Merge `left X` and `right X` into one part X: present if either is, visible if either is.

    Args:
        names: P names.
        present, visible: [..., P].

    Returns:
        present, visible: [..., Q], Q parts in the order of their first mention.
    """
    merged_names = [name.removeprefix(_SIDES[0]).removeprefix(_SIDES[1]) for name in names]
    groups = [[i for i, other in enumerate(merged_names) if other == name] for name in dict.fromkeys(merged_names)]
    merged = [np.stack([array[..., group].any(axis=-1) for group in groups], axis=-1) for array in (present, visible)]
    return merged[0], merged[1]


def patch_boxes(cells: NDArray[np.integer], grid: tuple[int, int], size: int = 224) -> NDArray[np.int64]:
    """Return boxes int64 [..., 4], (x0, y0, x1, y1) in input pixels, PATCH on a side, of flat cells [...].

    The patches are spread evenly; the last row and column end at the image's edge.
    """
    bounds = []
    for index, count in ((cells % grid[1], grid[1]), (cells // grid[1], grid[0])):
        step = round((size - PATCH) / max(count - 1, 1))
        low = np.where(index == count - 1, size - PATCH, index * step)
        bounds.append((low, np.minimum(low + PATCH, size)))
    (x0, x1), (y0, y1) = bounds
    return np.stack([x0, y0, x1, y1], axis=-1).astype(np.int64)


def purity_by_channel(
    scores: FloatArray,
    argmax: IntArray,
    grid: tuple[int, int],
    points: NDArray[np.float64],
    visible: NDArray[np.bool_],
    names: tuple[str, ...],
) -> NDArray[np.float64]:
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
    present, seen = merge_sides(names, inside & visible[best], visible[best])  # [T, K, Q]
    shares = present.sum(axis=0) / np.maximum(seen.sum(axis=0), 1)  # [K, Q]
    purities: NDArray[np.float64] = shares.max(axis=1)
    return purities


def upsample(maps: NDArray[np.float32], size: int = 224) -> NDArray[np.float32]:
    """Upsample maps float32 [N, m, H, W] to [N, m, size, size], bicubic as OpenCV's INTER_CUBIC.

    That is a = -0.75, half-pixel centres, the border replicated.
    """
    larger: NDArray[np.float32] = torch.nn.functional.interpolate(
        torch.from_numpy(maps), size=(size, size), mode="bicubic", align_corners=False
    ).numpy()
    return larger


def peak_locations(maps: NDArray[np.float32], size: int = 224) -> NDArray[np.int64]:
    """Return the maximum (y, x) of each upsampled map, int64 [N, m, 2]; of equal ones the first, row-major.

    Args:
        maps: float32 [N, m, H, W].
    """
    # numpy's argmax promises the first of equal maxima; one image at a time, since classes may share 2,000 prototypes
    flat = np.array([upsample(each[None], size)[0].reshape(len(each), -1).argmax(axis=1) for each in maps])
    return np.stack([flat // size, flat % size], axis=2)


def part_hits(
    centres: NDArray[np.int64],
    points: NDArray[np.int64],
    visible: NDArray[np.bool_],
    size: int = 224,
) -> NDArray[np.bool_]:
    """Return whether a visible part lies in a prototype's region, edges included: bool [N, m, P].

    Args:
        centres: [N, m, 2], (y, x), see `peak_locations`.
        points: [N, P, 2], (x, y) of the parts; may lie outside the image.
        visible: [N, P].
        size: of the image; regions end at 0 and at `size`.
    """
    low = np.maximum(centres - HALF_REGION, 0)[:, :, None]  # [N, m, 1, 2]
    high = np.minimum(centres + HALF_REGION, size)[:, :, None]
    where = points[:, None, :, ::-1]  # [N, 1, P, 2], (y, x)
    inside = ((where >= low) & (where <= high)).all(axis=3)
    hits: NDArray[np.bool_] = inside & visible[:, None]
    return hits


def prototype_consistency(
    hit: NDArray[np.bool_], visible: NDArray[np.bool_], labels: NDArray[np.int64], class_map: ClassMap
) -> float:
    """Return the percentage, 0 ... 100, of prototypes that hit one part on at least 80 % of their class's images.

    The share is over the images on which the part is visible. Classes without images, dropped slots and
    those that speak against their class do not count.

    Args:
        hit: [N, m, P], on each image the prototypes of its own class.
        visible: [N, P].
    """
    scores: list[NDArray[np.bool_]] = []
    for label in np.unique(labels):
        of_class = labels == label
        seen = np.maximum(visible[of_class].sum(axis=0), 1)  # [P]; 0 of 0 is 0
        shares = hit[of_class].sum(axis=0) / seen  # [m, P]
        scores.append((shares >= CONSISTENT).any(axis=1)[class_map.supporting[label]])
    consistent = np.concatenate(scores)
    return 100.0 * int(consistent.sum()) / len(consistent)


def prototype_stability(
    clean: NDArray[np.bool_], noisy: NDArray[np.bool_], labels: NDArray[np.int64], class_map: ClassMap
) -> float:
    """Return the mean percentage, 0 ... 100, of images on which noise changes none of a prototype's hits.

    Args:
        clean, noisy: [N, m, P], hits without and with noise; on each image the prototypes of its own class.
        labels: [N].
    """
    same = (clean == noisy).all(axis=2)  # [N, m]
    shares = [same[labels == label].mean(axis=0)[class_map.supporting[label]] for label in np.unique(labels)]
    return 100.0 * float(np.concatenate(shares).mean())


def add_noise(images: FloatArray, first: int, seed: int) -> FloatArray:
    """Return `images` plus noise from N(0, 0.2), clipped to +-0.25.

    Args:
        images: float32 [N, 3, H0, W0], normalised.
        first: index of the first image in the split: noise depends on seed and index, not on the batch.
    """
    noisy = np.empty_like(images)
    for offset, image in enumerate(images):
        noise = np.random.default_rng((_NOISE_STREAM, seed, first + offset)).standard_normal(
            image.shape, dtype=np.float32
        )
        noisy[offset] = image + np.clip(np.float32(NOISE_STD) * noise, -NOISE_LIMIT, NOISE_LIMIT)
    return noisy
