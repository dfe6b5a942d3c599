"""`opal-deploy bench roofline`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.bench import options
from opal_deploy.cli.console import print_message, progress
from opal_deploy.errors import UsageError, require
from opal_deploy.options import parse_size

if TYPE_CHECKING:
    from opal_deploy.bench.roofline.ceiling import Ceiling
    from opal_deploy.bench.roofline.table import Point


def roofline(
    backbone: options.Counted = None,
    classes: Annotated[int, typer.Option(min=2, help="C.")] = 200,
    prototypes: options.CountedPrototypes = 5,
    size: options.CountedSize = "224",
    batch: Annotated[int, typer.Option(min=1, help="Images a forward pass.")] = 64,
    precision: Annotated[
        Literal["fp32", "tf32", "fp16", "bf16", "int8"] | None,
        typer.Option(
            help="Precision of the whole network; default: fp16, for a measured CPU fp32.", show_default=False
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="A GPU with a data sheet, repeatable: a100-80gb-sxm, h100-sxm, h200-sxm, l4, t4, ..., or its own "
            "name; default: all.",
            show_default=False,
        ),
    ] = None,
    ceiling: Annotated[
        Path | None, typer.Option(help="A file with a ceiling that --measure-ceiling measured.", show_default=False)
    ] = None,
    measure_ceiling: Annotated[
        bool, typer.Option("--measure-ceiling", help="Time a large copy and a large product on --device first.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device for --measure-ceiling: cpu, cuda, cuda:N.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for --measure-ceiling.")] = None,
    output: Annotated[
        Literal["text", "markdown"], typer.Option("--format", help="Format of the table on stdout.")
    ] = "text",
    chart: options.ChartFile = None,
    out: options.Out = None,
    as_json: options.JsonLines = False,
) -> None:
    """The work of each network, and the most images a second that a device could do of it: its roofline."""
    for package in ("torch", "torchvision"):
        require(package, "train", "opal-deploy bench roofline")
    from opal_deploy.bench.overhead.paper import load_paper
    from opal_deploy.bench.report.charts import draw_charts
    from opal_deploy.bench.report.drawing import check_chart_path, write_charts
    from opal_deploy.bench.roofline.table import Case, build_measurements, count_points, format_rows, format_sources
    from opal_deploy.bench.tables import format_table
    from opal_deploy.model.config import HeadConfig

    check_chart_path(chart)
    if measure_ceiling and precision == "int8":
        raise UsageError(
            "--measure-ceiling --precision int8: torch has no such product; measure fp32, tf32, fp16, bf16"
        )
    ceilings = _find_ceilings(gpu, ceiling, measured_too=measure_ceiling)
    if measure_ceiling:
        ceilings.insert(0, _measure_ceiling(device, threads, precision, out, as_json=as_json))
    if precision is None:
        # processors without half precision's instructions are measured in fp32 alone
        precision = "fp16" if any("fp16" in known.flops for known in ceilings) else "fp32"
    case = Case(HeadConfig(prototypes_per_class=prototypes), classes, parse_size(size), batch, precision)
    if not any(precision in known.flops for known in ceilings):
        raise UsageError(
            f"--precision {precision}: none of {', '.join(known.name for known in ceilings)} has a figure for it; "
            "choose another --precision or --gpu"
        )
    points: list[Point] = []
    names = list(dict.fromkeys(backbone or load_paper().backbones))
    with progress("networks") as advance:
        advance(0, len(names))
        for done, name in enumerate(names, 1):
            points += count_points(name, case)
            network = points[-1]
            print_message(
                f"{name}: {len(network.work.layers)} layers, {network.work.macs / 1e9:.3f} GMACs, "
                f"{network.intensity:.1f} FLOPs/byte"
            )
            advance(done, len(names))
    measurements = list(build_measurements(points, case, ceilings))
    for measurement in measurements if out is not None or as_json else ():
        options.write_measurement(measurement, out, as_json=as_json)
    if not as_json:
        header, rows = format_rows(points, ceilings)
        print(format_table(header, rows, left=2, markdown=output == "markdown"), flush=True)
        print(
            f"per image of {case.input_size[0]}x{case.input_size[1]}, C = {classes}, m = {prototypes}; MB moved by a "
            f"batch of {batch} in {precision}: inputs, outputs and weights of every convolution and matrix product once"
        )
        print("ceilings in images/s; c: arithmetic is the bound, m: memory is")
        for line in format_sources(ceilings, precision):
            print(f"- {line}", flush=True)
    if chart is not None:
        heading = f"Roofline, {precision}, batch {batch}: where each network may be at most"
        write_charts(draw_charts("roofline", measurements), heading, chart)
        print_message(f"{chart}: written")


def _find_ceilings(gpus: list[str] | None, path: Path | None, *, measured_too: bool) -> list[Ceiling]:
    from opal_deploy.bench.measurement import read_measurements
    from opal_deploy.bench.roofline.ceiling import find_device, known_devices
    from opal_deploy.bench.roofline.measure import read_ceiling

    ceilings = []
    if path is not None:
        ceilings = [
            read_ceiling(measurement) for measurement in read_measurements([path]) if measurement.kind == "ceiling"
        ]
        if not ceilings:
            raise UsageError(f"--ceiling {path}: no measured ceiling in it; make one: --measure-ceiling --out {path}")
    # data sheets come with a measured ceiling on request only
    if gpus or not (ceilings or measured_too):
        ceilings += [find_device(text) for text in dict.fromkeys(gpus or known_devices())]
    return ceilings


def _measure_ceiling(
    device: str, threads: int | None, precision: str | None, out: Path | None, *, as_json: bool
) -> Ceiling:
    from opal_deploy.bench.roofline.measure import CeilingOptions, default_precisions, measure_ceiling, read_ceiling

    precisions = default_precisions(device) if precision is None else (precision,)
    with progress("runs") as advance:
        measurement = measure_ceiling(CeilingOptions(device, precisions, threads, progress=advance))
    options.write_measurement(measurement, out, as_json=as_json)
    for name, figure in measurement.figures.items():
        spread = f", spread {figure.spread:.0%}" if figure.spread is not None else ""
        print_message(f"{name}: {figure.value:.3f} {figure.unit}, best of {len(figure.repeats)}{spread}")
    print_message(f"timed: {measurement.timed}")
    for mark in measurement.marks:
        print_message(f"MARKED {mark}")
    return read_ceiling(measurement)
