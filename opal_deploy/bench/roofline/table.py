"""Rooflines of networks: work, arithmetic intensity, and the maximum speed on known GPUs or a measured device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement, Target
from opal_deploy.bench.options import RooflineOptions
from opal_deploy.bench.report import format_table
from opal_deploy.bench.roofline.ceiling import (
    Ceiling,
    find_device,
    known_devices,
    read_ceilings,
)
from opal_deploy.bench.roofline.work import BYTES_PER_ELEMENT, Work, count_backbone_work, count_head_work
from opal_deploy.errors import UsageError
from opal_deploy.model.config import HeadConfig

_HEADER = ("backbone", "part", "GMACs", "weights M", "MB moved", "FLOPs/byte")


@dataclass(frozen=True)
class Point:
    """A backbone, its head, or both (`network`), at one batch size and precision."""

    backbone: str
    part: str
    work: Work
    batch: int
    precision: str

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte."""
        return self.work.intensity(self.batch, self.precision)


def count_points(backbone: str, options: RooflineOptions, precision: str) -> list[Point]:
    """Count backbone, head and network.

    Raises:
        UsageError: no such backbone, or its stride does not divide the size.
    """
    size, head = options.input_size, HeadConfig(prototypes_per_class=options.prototypes)
    body, head_work = count_backbone_work(backbone, size), count_head_work(backbone, options.classes, head, size)
    parts = {"backbone": body, "head": head_work, "network": body + head_work}
    return [Point(backbone, part, work, options.batch, precision) for part, work in parts.items()]


def build_measurements(
    points: Sequence[Point], options: RooflineOptions, ceilings: Sequence[Ceiling]
) -> Iterator[Measurement]:
    """Yield one measurement per point, without ceilings that lack the precision."""
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
                input_size=options.input_size,
                num_classes=options.classes,
                prototypes_per_class=options.prototypes,
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
                "layers": [{**asdict(layer), "intensity": layer.intensity(batch, precision)} for layer in work.layers],
            },
            **origin,
        )


def find_ceilings(options: RooflineOptions) -> list[Ceiling]:
    """Return the ceilings of `--ceiling` and `--gpu`; by default all data sheets, unless a ceiling is measured.

    Raises:
        UsageError: no ceiling in the file, or an unknown GPU.
    """
    ceilings = [] if options.ceiling is None else read_ceilings(options.ceiling)
    if options.gpu or not (ceilings or options.measure_ceiling):
        ceilings += [find_device(text) for text in dict.fromkeys(options.gpu or known_devices())]
    return ceilings


def choose_precision(options: RooflineOptions, ceilings: Sequence[Ceiling]) -> str:
    """Return `--precision`, by default fp16, or fp32 if no ceiling has fp16.

    Raises:
        UsageError: no ceiling has a figure for the precision.
    """
    precision = options.precision or ("fp16" if any("fp16" in known.flops for known in ceilings) else "fp32")
    if not any(precision in known.flops for known in ceilings):
        raise UsageError(
            f"--precision {precision}: none of {', '.join(known.name for known in ceilings)} has a figure for it; "
            "choose another --precision or --gpu"
        )
    return precision


def format_roofline(points: Sequence[Point], options: RooflineOptions, ceilings: Sequence[Ceiling]) -> str:
    """Return the table, what it counts, and the ceilings with their sources."""
    precision = points[0].precision
    header = (*_HEADER, *(ceiling.name for ceiling in ceilings))
    rows = [_format_row(point, ceilings) for point in points]
    height, width = options.input_size
    lines = [
        format_table(header, rows, left=2, markdown=options.table == "markdown"),
        f"per image of {height}x{width}, C = {options.classes}, m = {options.prototypes}; MB moved per batch of "
        f"{options.batch} in {precision}: inputs, outputs and weights of every convolution and matrix product once",
        "ceilings in images/s; c: bound by arithmetic, m: bound by memory",
    ]
    for ceiling in ceilings:
        peak = f"{ceiling.peak(precision) / 1e12:.4g}" if precision in ceiling.flops else "no"
        unit = "TOP/s" if precision == "int8" else "TFLOP/s"
        bandwidth = ceiling.bytes_per_second / 1e9
        lines.append(f"- {ceiling.name}: {peak} {unit} {precision}, {bandwidth:.4g} GB/s ({ceiling.source})")
    return "\n".join(lines)


def _format_row(point: Point, ceilings: Sequence[Ceiling]) -> list[str]:
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
    return row
