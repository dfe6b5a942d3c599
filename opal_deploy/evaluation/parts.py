"""Consistency, stability (Huang et al. 2023) and part purity (PIP-Net, Nauta et al. 2023) on CUB's parts, in one pass.

Purity: for each channel the ten images with its highest scores are taken, of whatever class, and in each the 32 x 32
patch of its strongest cell. The purity is the largest share, over parts, of images whose patch holds the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.outputs import FloatArray, IntArray, Outputs
from opal_deploy.datasets import cub
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import consistency as regions
from opal_deploy.evaluation.attention_maps import CONSISTENCY, PURITY, STABILITY, MapSource, from_network
from opal_deploy.evaluation.predictions import predict_samples
from opal_deploy.logs import Progress
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import ImageBatch

TOP = 10
"""Images by which a channel's purity is judged."""

PATCH = 32
"""Side of a channel's patch in pixels of the 224 x 224 input."""

_SIDES = ("left ", "right ")


@dataclass(frozen=True)
class PartFigures:
    """Consistency, stability and purity over the images of a split, in percent as in the paper's tables.

    Attributes:
        consistency: see `consistency.consistency`; None where it cannot be measured.
        stability: see `consistency.stability`; None where it cannot be measured.
        purity: mean over the K channels, see `purity_by_channel`; None where it cannot be measured.
        purity_std: standard deviation of the purity over channels.
        prototypes: number of prototypes behind consistency and stability, those of classes with images.
        images: N.
        unavailable: figure to the reason why it is None.
    """

    consistency: float | None
    stability: float | None
    purity: float | None
    purity_std: float | None
    prototypes: int
    images: int
    unavailable: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON as shares, 0 ... 1; what was not measured is null, with its reason."""
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


class PartMeter:
    """Accumulates hits over the batches of a data set for consistency and stability; a `BatchCallback`.

    Args:
        source: the model.
        parts: part locations of the data set's N images.
        labels: [N], class indices.
        seed: of the noise, 0 or more.
    """

    def __init__(self, source: MapSource, parts: PartLocations, labels: NDArray[np.int64], *, seed: int = 0) -> None:
        self._source, self._parts, self._labels, self._seed = source, parts, labels, seed
        self._points = parts.truncated_input_points(source.input_size[0])
        self._clean: list[NDArray[np.bool_]] = []
        self._noisy: list[NDArray[np.bool_]] = []

    def __call__(self, first: int, pixels: ImageBatch, outputs: Outputs) -> None:
        """Add a batch; see `BatchCallback`."""
        source = self._source
        if CONSISTENCY not in source.unavailable:
            self._clean.append(self._hits(first, outputs))
        if STABILITY not in source.unavailable and source.run_normalised is not None:
            images = normalise(pixels, source.mean, source.std)
            outputs = source.run_normalised(regions.add_noise(images, first, self._seed))
            self._noisy.append(self._hits(first, outputs))

    def figures(
        self, scores: FloatArray | None, argmax: NDArray[np.int32] | None, geometries: Sequence[Geometry]
    ) -> PartFigures:
        """Return the figures after the last batch, of scores and argmax [N, K] and geometries of all N images."""
        source, labels = self._source, self._labels
        consistency = stability = purity = purity_std = None
        if self._clean:
            clean = np.concatenate(self._clean)
            consistency = regions.consistency(clean, self._parts.visible, labels)
            if self._noisy:
                stability = regions.stability(clean, np.concatenate(self._noisy), labels)
        if PURITY not in source.unavailable and scores is not None and argmax is not None:
            size = source.input_size[0]
            # a box that leaves the image was clipped: the patch lies on what is left
            crops = np.array([geometry.crop for geometry in geometries], dtype=np.float64)
            points, visible = self._parts.input_points(size, crops), self._parts.visible
            purities = purity_by_channel(scores, argmax, source.grid, points, visible, self._parts.names, size)
            purity, purity_std = 100.0 * float(purities.mean()), 100.0 * float(purities.std())
        prototypes = len(np.unique(labels)) * source.prototypes_per_class if consistency is not None else 0
        return PartFigures(
            consistency, stability, purity, purity_std, prototypes, len(labels), dict(source.unavailable)
        )

    def _hits(self, first: int, outputs: Outputs) -> NDArray[np.bool_]:
        assert outputs.attention is not None  # `unavailable` has a reason otherwise
        rows = slice(first, first + len(outputs))
        maps = regions.true_class_maps(outputs.attention, self._labels[rows], self._source.prototypes_per_class)
        centres = regions.peak_locations(maps, self._source.input_size[0])
        return regions.part_hits(centres, self._points[rows], self._parts.visible[rows], self._source.input_size[0])


def measure_parts(
    network: OpalNetwork, data: DataSet, *, batch: int = 32, seed: int = 0, report: Progress | None = None
) -> PartFigures:
    """Measure the three figures of a network on its device over the test images; leaves it in eval mode.

    Raises:
        UsageError: the data set has no part locations or no test images, the input is not 224 x 224, or the network
            has no prototypes.
    """
    if not cub.has_parts(data) or not data.test:
        missing = "test images" if cub.has_parts(data) else "part locations (parts/part_locs.txt of CUB)"
        raise UsageError(f"{data.root}: it has no {missing}, which consistency, stability and purity are measured on")
    source = from_network(network)
    if source.unavailable:
        raise UsageError(f"prototypes cannot be measured: {next(iter(source.unavailable.values()))}")
    labels = np.array([sample.label for sample in data.test], dtype=np.int64)
    meter = PartMeter(source, cub.read_parts(data.root, data.test), labels, seed=seed)
    outputs, geometries = predict_samples(
        source.run, data.test, source.input_size, batch=batch, watch=meter, report=report
    )
    return meter.figures(outputs.scores, outputs.argmax, geometries)


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

    The patches are spread evenly; those of the last row and column end at the image's edge.
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
    size: int = 224,
) -> NDArray[np.float64]:
    """Return purities float64 [K], 0 ... 1; 0 where no part is visible on any of the channel's images.

    Args:
        scores: [N, K]; of equal ones the earlier image comes first.
        argmax: [N, K], flat cell of each channel's maximum.
        grid: (H, W) that `argmax` counts in.
        points: [N, P, 2], (x, y) in pixels of the size x size input, not rounded.
        visible: [N, P].
        names: P names of the parts.
        size: of the input.
    """
    best = np.argsort(-scores, axis=0, kind="stable")[:TOP]  # [T, K]
    boxes = patch_boxes(np.take_along_axis(argmax, best, axis=0), grid, size)[:, :, None]  # [T, K, 1, 4]
    where = points[best]  # [T, K, P, 2]
    inside = ((where >= boxes[..., :2]) & (where <= boxes[..., 2:])).all(axis=3)
    present, seen = merge_sides(names, inside & visible[best], visible[best])  # [T, K, Q]
    shares = present.sum(axis=0) / np.maximum(seen.sum(axis=0), 1)  # [K, Q]
    purities: NDArray[np.float64] = shares.max(axis=1)
    return purities
