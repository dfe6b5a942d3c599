"""Change the pixels outside the evidence, and see whether the answer and its evidence stay (`--attack-outside`).

A box shows where a score was read, not everything it depends on. Changes by a few grey levels show how much depends on
the rest: random ones, and those that projected gradient descent (PGD, Madry et al., ICLR 2018) finds against the mean
of the scores in the answer. Each is measured in two regions: outside the boxes, and outside the pixels that a cell sees
(`receptive_field`). Pixels are whole numbers throughout, so every changed image could be a file.

The figures of the strongest score are those of Sacha et al., "Interpretability benchmark for evaluating spatial
misalignment of prototypical parts explanations" (AAAI 2024): PAC, by how much it drops, and PLC, how much of the area
of its largest tenth moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opal_deploy.artifact.heads import find_contributions, find_strongest, find_values
from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.metrics import figures_to_dict, format_columns, format_percent
from opal_deploy.evaluation.perturbation import find_edges
from opal_deploy.evaluation.rankings import GradCam
from opal_deploy.evaluation.session import prepared_batches
from opal_deploy.logs import Progress, no_progress
from opal_deploy.model.network import OpalNetwork
from opal_deploy.statistics import Mean, mean_with_interval

BOXES, FIELD = "outside the boxes", "outside what the cells see"
NOISE, PGD = "random", "PGD"
# strongest cells of Grad-CAM that count as the boxes of a model without prototypes
_GRAD_CAM_CELLS = 5
# the share of a map that is its area in PLC
_LARGEST = 0.1
_BATCH = 8
# first word of the seeds: a stream of its own
_STREAM = 15


@dataclass(frozen=True)
class Outside:
    """The effect of one kind of change in one region, over the images that have the region.

    Attributes:
        region: `BOXES` or `FIELD`.
        method: `NOISE` or `PGD`.
        area: mean share of an image's pixels that may change, 0 ... 1.
        score_drop: relative drop of the strongest score (PAC); None without prototypes.
        area_moved: share of the area of its largest tenth that moves (PLC), 1 - intersection over union; likewise.
        cells_moved: share of the answer's cells that move; likewise.
        kept: share of images that get the same answer.
    """

    region: str
    method: str
    images: int
    area: float
    score_drop: Mean | None
    area_moved: Mean | None
    cells_moved: Mean | None
    kept: Mean


@dataclass(frozen=True)
class Attack:
    """The figures of `--attack-outside`.

    Attributes:
        images: measured ones; some may have no pixels outside what their cells see.
        levels: the largest change, in grey levels of 255.
        margin: pixels around a box that stay as they are, too.
        steps: of PGD.
    """

    images: int
    levels: int
    margin: int
    steps: int
    seed: int
    outside: list[Outside]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return figures_to_dict(self)


@dataclass(frozen=True)
class _Answer:
    """A network's answers to n images, and the cells of their evidence.

    Attributes:
        classes: int64 [n], predicted.
        channels: int64 [n, k], of the slots in the answer, the strongest first; None without prototypes.
        listed: bool [n, k], whether there is such a slot.
        cells: int64 [n, k], flat cells of the evidence.
    """

    classes: Tensor
    channels: Tensor | None
    listed: Tensor
    cells: Tensor


class Attacker:
    """Attacks a network, with the settings of an evaluation.

    Args:
        network: left in evaluation mode; computes on its device.
        metadata: of the same model.
        levels: the largest change of a pixel, in grey levels of 255.
        margin: pixels around a box that stay as they are, too.
        steps: gradient steps of PGD.
        field: of the cells; None or without an effective field leaves out the region `FIELD`.
    """

    def __init__(
        self,
        network: OpalNetwork,
        metadata: Metadata,
        *,
        levels: int,
        margin: int,
        steps: int,
        field: ReceptiveField | None = None,
    ) -> None:
        self._network, self._metadata = network.eval(), metadata
        self._levels, self._margin, self._steps, self._field = levels, margin, steps, field
        self._device = next(network.parameters()).device
        self._mean, self._std = (
            torch.tensor(values, device=self._device).reshape(1, 3, 1, 1) for values in (metadata.mean, metadata.std)
        )
        self._heat_map = None if metadata.evidence == "exact" else GradCam(network)

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions that can be measured."""
        known = self._field is not None and self._field.effective is not None
        return (BOXES, FIELD) if known else (BOXES,)

    def measure(self, images: NDArray[np.uint8], seeds: Sequence[Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield region, method and figures per image, float64 [n'], for images uint8 [n, H0, W0, 3].

        The n' images are those with pixels in the region. Figures are the fields of `Outside`; without prototypes only
        `area` and `kept`.

        Args:
            seeds: one per image, of its random changes.
        """
        clean = torch.from_numpy(images).permute(0, 3, 1, 2).float().to(self._device)
        with torch.no_grad():
            before = self._explain(clean)
        answer = self._find_answer(images, before)
        for region in self.regions:
            free = self._find_region(answer, region)
            has_some = free.flatten(1).any(1)
            for method in (NOISE, PGD):
                changed = self._add_noise(clean, free, seeds)
                if method == PGD:
                    changed = self._descend(clean, self._objective(before, answer), changed, free, answer)
                figures = self._compare(before, changed, answer)
                figures["area"] = free.flatten(1).float().mean(1)
                yield region, method, {name: each[has_some].double().cpu().numpy() for name, each in figures.items()}

    def _explain(self, pixels: Tensor) -> Any:
        """Return the head's outputs for pixels 0 ... 255, float32 [n, 3, H0, W0]."""
        return self._network.explain((pixels / 255 - self._mean) / self._std)

    def _find_answer(self, images: NDArray[np.uint8], before: Any) -> _Answer:
        classes = before.logits.argmax(1)
        if self._heat_map is not None:
            heat = torch.from_numpy(self._heat_map(images, classes.cpu().numpy())).to(self._device)
            cells = heat.topk(_GRAD_CAM_CELLS, dim=1).indices
            return _Answer(classes, None, torch.ones_like(cells, dtype=torch.bool), cells)
        metadata, predicted = self._metadata, classes.cpu().numpy()
        class_map = metadata.class_map
        table = class_map.channel_table[predicted]
        values = class_map.take(find_values(before.scores.cpu().numpy(), metadata), predicted)
        if metadata.is_opal:
            slots = np.argsort(np.where(class_map.kept[predicted], -values, np.inf), axis=1, kind="stable")
            listed = np.take_along_axis(class_map.kept[predicted], slots, axis=1)
        else:
            # what speaks for the class in a record
            parts = cast(Any, find_contributions(values, predicted, metadata))
            slots, listed = find_strongest(parts, class_map.kept[predicted] & (parts > 0))
        channels = torch.from_numpy(np.take_along_axis(table, slots, axis=1)).to(self._device)
        return _Answer(
            classes, channels, torch.from_numpy(listed).to(self._device), before.argmax.long().gather(1, channels)
        )

    def _find_region(self, answer: _Answer, region: str) -> Tensor:
        """Return the pixels that may change: bool [n, 1, H0, W0]."""
        input_size, grid = self._metadata.input_size, self._network.grid
        if region == BOXES:
            return outside_boxes(answer.cells, answer.listed, input_size, grid, self._margin)
        field = cast(ReceptiveField, self._field)
        low = field.stride * torch.stack([answer.cells // grid[1], answer.cells % grid[1]]) + (
            (field.effective_offset or 0.0) - (field.effective or 0) / 2
        )
        return _outside(low, low + (field.effective or 0), answer.listed, input_size)

    def _add_noise(self, clean: Tensor, free: Tensor, seeds: Sequence[Any]) -> Tensor:
        drawn = [
            np.random.default_rng((_STREAM, *seed)).integers(-self._levels, self._levels + 1, clean.shape[1:])
            for seed in seeds
        ]
        noise = torch.from_numpy(np.stack(drawn)).to(self._device)
        return (clean + noise * free).clamp(0, 255)

    def _descend(self, clean: Tensor, lowest: Tensor, start: Tensor, free: Tensor, answer: _Answer) -> Tensor:
        """Return the images with the lowest objective: clean ones, which have `lowest`, or some of PGD from `start`."""
        change, step, best = start - clean, self._levels / 4, clean
        for number in range(self._steps + 1):
            pixels = (clean + change).clamp(0, 255).round().requires_grad_()
            with torch.enable_grad():
                objective = self._objective(self._explain(pixels), answer)
                (gradient,) = torch.autograd.grad(objective.sum(), pixels)
            better = objective.detach() < lowest
            best = torch.where(better[:, None, None, None], pixels.detach(), best)
            lowest = torch.where(better, objective.detach(), lowest)
            if number < self._steps:
                change = (change - step * gradient.sign()).clamp(-self._levels, self._levels) * free
        return best

    def _objective(self, outputs: Any, answer: _Answer) -> Tensor:
        """Return what PGD minimises, [n]: the mean of the answer's scores, or without scores the logit's lead."""
        if answer.channels is not None:
            scores = outputs.scores.gather(1, answer.channels)
            mean: Tensor = (scores * answer.listed).sum(1) / answer.listed.sum(1)
            return mean
        own = outputs.logits.gather(1, answer.classes[:, None])[:, 0]
        others = outputs.logits.scatter(1, answer.classes[:, None], -torch.inf).amax(1)
        lead: Tensor = own - others
        return lead

    def _compare(self, before: Any, changed: Tensor, answer: _Answer) -> dict[str, Tensor]:
        with torch.no_grad():
            after = self._explain(changed)
        figures = {"kept": after.logits.argmax(1) == answer.classes}
        if answer.channels is None:
            return figures
        strongest = answer.channels[:, :1]
        old, new = (outputs.scores.gather(1, strongest)[:, 0] for outputs in (before, after))
        figures["score_drop"] = (old - new) / old.abs().clamp_min(1e-12)
        cells = after.argmax.long().gather(1, answer.channels)
        figures["cells_moved"] = ((cells != answer.cells) & answer.listed).sum(1) / answer.listed.sum(1)
        areas = [self._find_area(outputs.attention, strongest) for outputs in (before, after)]
        union = (areas[0] | areas[1]).sum(1)
        figures["area_moved"] = 1 - (areas[0] & areas[1]).sum(1) / union
        return figures

    def _find_area(self, attention: Tensor, channel: Tensor) -> Tensor:
        """Return the pixels of the largest tenth of one channel's map, upsampled: bool [n, H0 * W0]."""
        rows = torch.arange(len(channel), device=self._device)
        maps = attention[rows, channel[:, 0]][:, None]
        larger = torch.nn.functional.interpolate(maps, self._metadata.input_size, mode="bilinear").flatten(1)
        count = max(1, round(_LARGEST * larger.shape[1]))
        area = torch.zeros_like(larger, dtype=torch.bool)
        return area.scatter(1, larger.topk(count, dim=1).indices, True)


def outside_boxes(
    cells: Tensor, listed: Tensor, input_size: tuple[int, int], grid: tuple[int, int], margin: int
) -> Tensor:
    """Return the pixels outside the boxes of some cells, bool [n, 1, H0, W0].

    Args:
        cells: int64 [n, k], flat.
        listed: bool [n, k], whether a cell has a box.
        margin: pixels around a box that count as inside.
    """
    edges = [torch.from_numpy(edge).to(cells.device) for edge in find_edges(input_size, grid)]
    places = (cells // grid[1], cells % grid[1])
    low, high = (torch.stack([edge[place + end] for edge, place in zip(edges, places, strict=True)]) for end in (0, 1))
    return _outside(low - margin, high + margin, listed, input_size)


def _outside(low: Tensor, high: Tensor, listed: Tensor, input_size: tuple[int, int]) -> Tensor:
    """Return the pixels outside the boxes between `low` and `high`, [2, n, k] in rows and columns."""
    inside = []
    for first, last, length in zip(low, high, input_size, strict=True):
        centres = torch.arange(length, device=listed.device) + 0.5
        inside.append((centres > first[..., None]) & (centres < last[..., None]))  # [n, k, length]
    covered = inside[0][..., :, None] & inside[1][..., None, :] & listed[..., None, None]
    outside: Tensor = ~covered.any(1, keepdim=True)
    return outside


def measure_attack(
    network: OpalNetwork,
    metadata: Metadata,
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    levels: int,
    margin: int,
    steps: int,
    field: ReceptiveField | None = None,
    boxes: bool = True,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Attack:
    """Attack the images of some samples; see this module and `Attacker`.

    Args:
        indices: of the samples that are measured; random changes depend on `seed` and index only.

    Raises:
        UsageError: an image cannot be used.
    """
    attacker = Attacker(network, metadata, levels=levels, margin=margin, steps=steps, field=field)
    chosen = [samples[index] for index in indices]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    done = 0
    for pixels, _ in prepared_batches(chosen, metadata.input_size, boxes=boxes, batch=_BATCH):
        seeds = [(seed, index) for index in indices[done : done + len(pixels)]]
        for region, method, figures in attacker.measure(pixels, seeds):
            found.setdefault((region, method), []).append(figures)
        done += len(pixels)
        progress(done, len(chosen), "attacking")
    outside = []
    for (region, method), parts in found.items():
        values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if not len(values["kept"]):
            continue
        means = {
            name: mean_with_interval(values[name]) if name in values else None
            for name in ("score_drop", "area_moved", "cells_moved")
        }
        outside.append(
            Outside(
                region, method, len(values["kept"]), float(values["area"].mean()),
                kept=mean_with_interval(values["kept"]), **means,
            )
        )  # fmt: skip
    return Attack(len(chosen), levels, margin, steps, seed, outside)


def format_attack(attack: Attack) -> Iterator[str]:
    """Yield a heading and a table: per region and kind of change, means with their 95 % intervals."""
    yield (
        f"attack outside the evidence: changes of at most {attack.levels} of 255 grey levels, {attack.margin} pixels "
        f"or more from a box; {attack.images} images, PGD of {attack.steps} steps"
    )
    rows = [["changed", "how", "of the image", "score drops", "area moves", "cells move", "same answer"]]
    for each in attack.outside:
        means = (each.score_drop, each.area_moved, each.cells_moved, each.kept)
        rows.append([each.region, each.method, f"{each.area:.0%}", *(format_percent(mean, 1) for mean in means)])
    yield from format_columns(rows)
