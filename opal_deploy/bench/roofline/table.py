"""Rooflines of networks: work, arithmetic intensity, and the most that known GPUs or a measured device could do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement, Target
from opal_deploy.bench.roofline.ceiling import Ceiling
from opal_deploy.bench.roofline.work import BYTES_PER_ELEMENT, Work, count_backbone_work, count_head_work
from opal_deploy.model.config import HeadConfig

_HEADER = ("backbone", "part", "GMACs", "weights M", "MB moved", "FLOPs/byte")


@dataclass(frozen=True)
class Point:
    """One network, or the head alone, at one batch and precision.

    Attributes:
        backbone: torchvision's name.
        part: `backbone`, `head` or `network` (both).
        work: the part's layers.
        batch: images a forward pass.
        precision: of the whole network.
    """

    backbone: str
    part: str
    work: Work
    batch: int
    precision: str

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte."""
        return self.work.intensity(self.batch, self.precision)


@dataclass(frozen=True)
class Case:
    """The head, classes, input size (H0, W0), batch and precision that every backbone is counted with."""

    head: HeadConfig
    num_classes: int
    input_size: tuple[int, int]
    batch: int
    precision: str


def count_points(backbone: str, case: Case) -> tuple[Point, Point, Point]:
    """Count backbone, head and network.

    Raises:
        UsageError: there is no such backbone, or its stride does not divide the size.
    """
    body = count_backbone_work(backbone, case.input_size)
    head = count_head_work(backbone, case.num_classes, case.head, case.input_size)
    parts = (("backbone", body), ("head", head), ("network", body + head))
    points = [Point(backbone, part, work, case.batch, case.precision) for part, work in parts]
    return points[0], points[1], points[2]


def build_measurements(points: Sequence[Point], case: Case, ceilings: Sequence[Ceiling]) -> Iterator[Measurement]:
    """Yield one measurement per point; ceilings that lack the precision are left out."""
    origin = provenance()
    for point in points:
        work, batch, precision = point.work, point.batch, point.precision
        figures = {
            "macs": Figure(work.macs, "MACs"),
            "flops": Figure(work.flops(), "FLOPs"),
            "weights": Figure(work.weights, "elements"),
            "activations": Figure(work.activations, "elements"),
            "intensity": Figure(point.intensity, "FLOPs/byte"),
        }
        for kind in BYTES_PER_ELEMENT:
            figures[f"bytes_{kind}"] = Figure(work.bytes_moved(batch, kind), "bytes")
        known = [ceiling for ceiling in ceilings if precision in ceiling.flops]
        for ceiling in known:
            rate = ceiling.images_per_second(work, batch, precision)
            figures[f"ceiling {ceiling.name}"] = Figure(rate, "images/s")
        yield Measurement(
            kind="roofline",
            target=Target(
                name=work.name,
                backbone=point.backbone,
                head="opal" if point.part != "backbone" else "",
                precision=precision,
                input_size=case.input_size,
                num_classes=case.num_classes,
                prototypes_per_class=case.head.prototypes_per_class,
            ),
            case={"batch": batch, "part": point.part},
            figures=figures,
            settings={
                "bytes": "inputs, outputs and weights of every convolution and matrix product once, in one precision"
            },
            details={
                "ceilings": [
                    {
                        "name": ceiling.name,
                        "flops": ceiling.peak(precision),
                        "bytes_per_second": ceiling.bytes_per_second,
                        "bound": ceiling.bound(work, batch, precision),
                        "source": ceiling.source,
                    }
                    for ceiling in known
                ],
                "layers": [
                    {
                        "name": layer.name,
                        "operation": layer.operation,
                        "macs": layer.macs,
                        "inputs": layer.inputs,
                        "outputs": layer.outputs,
                        "weights": layer.weights,
                        "intensity": layer.intensity(batch, precision),
                    }
                    for layer in work.layers
                ],
            },
            **origin,
        )


def format_rows(points: Sequence[Point], ceilings: Sequence[Ceiling]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows as text: work per image, bytes per batch, and images a second at each ceiling."""
    rows = []
    for point in points:
        work, batch, precision = point.work, point.batch, point.precision
        row = [
            point.backbone,
            point.part,
            f"{work.macs / 1e9:.3f}",
            f"{work.weights / 1e6:.2f}",
            f"{work.bytes_moved(batch, precision) / 1e6:.1f}",
            f"{point.intensity:.1f}",
        ]
        for ceiling in ceilings:
            if precision not in ceiling.flops:
                row.append("-")
                continue
            bound = ceiling.bound(work, batch, precision)
            row.append(f"{ceiling.images_per_second(work, batch, precision):,.0f} {bound[0]}")
        rows.append(row)
    return [*_HEADER, *(ceiling.name for ceiling in ceilings)], rows


def format_sources(ceilings: Sequence[Ceiling], precision: str) -> list[str]:
    """Return a line for each ceiling: its figures, and where they are from."""
    lines = []
    for ceiling in ceilings:
        peak = f"{ceiling.peak(precision) / 1e12:.4g}" if precision in ceiling.flops else "no"
        unit = "TOP/s" if precision == "int8" else "TFLOP/s"
        lines.append(
            f"{ceiling.name}: {peak} {unit} {precision}, {ceiling.bytes_per_second / 1e9:.4g} GB/s ({ceiling.source})"
        )
    return lines
