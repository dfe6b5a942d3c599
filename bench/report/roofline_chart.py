"""The chart of the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opal_deploy.bench.report.axes import AXIS_HEIGHT, PLOT_HEIGHT, Axis, draw_axes, join_labels, label_ticks
from opal_deploy.bench.report.drawing import Chart, Key, Line, Marker, connect, series_dash
from opal_deploy.bench.report.rows import Row, find_figure, get_backbone, get_batch
from opal_deploy.bench.tables import format_value, is_number

# with few roofs each network stands on each, with many at the foot alone
_FEW_ROOFS = 3

# a device's FLOPs a second and bytes a second
Roof = tuple[float, float]


def draw_roofline(rows: Sequence[Row]) -> Iterator[Chart]:
    """Draw a chart for each precision and batch: what each device allows at the intensity of each network."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if find_figure(row.measurement, "FLOPs/byte"):
            target, batch = row.measurement.target, get_batch(row.measurement)
            title = join_labels(format_value(target.precision) if target else "", f"batch {batch}" if batch else "")
            groups.setdefault(title, []).append(row)
    for title, members in groups.items():
        if roofs := _get_roofs(members):
            unit = "TOP/s" if title.startswith("int8") else "TFLOP/s"
            full_title = f"Roofline, {title}" if len(groups) > 1 else "Roofline"
            yield _draw_roofs(full_title, unit, _get_intensities(members), roofs)


def _draw_roofs(title: str, unit: str, parts: dict[str, dict[str, float]], roofs: dict[Roof, str]) -> Chart:
    networks = list(dict.fromkeys(name for intensities in parts.values() for name in intensities))
    values = [value for intensities in parts.values() for value in intensities.values()]
    values += [flops / bandwidth for flops, bandwidth in roofs]
    x = Axis(min(values) / 2.5, max(values) * 2.5, 0.1, 0.97, logarithmic=True)
    floor = min(_attain(roof, x.low) for roof in roofs) / 1.5
    y = Axis(floor / 1e12, max(flops for flops, _ in roofs) * 1.6 / 1e12, PLOT_HEIGHT + 60, 16, logarithmic=True)
    elements = draw_axes(x, y, label_ticks(x.ticks(6)), "arithmetic intensity, FLOPs per byte", f"{unit} at most")
    for series, roof in enumerate(roofs):
        ends = sorted({x.low, roof[0] / roof[1], x.high})
        places = [(x(value), y(_attain(roof, value) / 1e12)) for value in ends]
        elements += connect(places, series, dash=series_dash(series))
    for part, intensities in parts.items():
        for name, intensity in intensities.items():
            heights = [y(_attain(roof, intensity) / 1e12) for roof in roofs]
            elements.append(Line((x(intensity), y.start), (x(intensity), min(heights))))
            feet = heights if len(heights) <= _FEW_ROOFS else [y.start - 6]
            elements += [Marker((x(intensity), foot), networks.index(name), part == "head") for foot in feet]
    return Chart(
        title,
        f"Roofs of {'; '.join(roofs.values())}, and the intensities of {', '.join(networks)}.",
        tuple(elements),
        PLOT_HEIGHT + 60 + AXIS_HEIGHT,
        (
            *(Key(name, series, "dashed") for series, name in enumerate(roofs.values())),
            *(Key(name, series) for series, name in enumerate(networks)),
        ),
        "Lines: the most that each device allows. Points: the intensity of each backbone, and of its head (hollow).",
    )


def _get_intensities(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return FLOPs per byte by part and network; a whole network is hardly more than its backbone."""
    parts: dict[str, dict[str, float]] = {}
    for row in rows:
        figure = find_figure(row.measurement, "FLOPs/byte")
        if figure and figure.value > 0:
            part = format_value(row.measurement.case.get("part") or "network")
            parts.setdefault(part, {})[get_backbone(row.measurement)] = figure.value
    return {part: intensities for part, intensities in parts.items() if part != "network"} or parts


def _get_roofs(rows: Sequence[Row]) -> dict[Roof, str]:
    """Return the ceilings in the details of all rows, with the names of all devices that have the same."""
    names: dict[Roof, list[str]] = {}
    for row in rows:
        ceilings = row.measurement.details.get("ceilings")
        for ceiling in ceilings if isinstance(ceilings, list) else []:
            if isinstance(ceiling, Mapping) and all(
                is_number(ceiling.get(name)) and ceiling[name] > 0 for name in ("flops", "bytes_per_second")
            ):
                roof = float(ceiling["flops"]), float(ceiling["bytes_per_second"])
                names.setdefault(roof, []).append(format_value(ceiling.get("name", "device")))
    return {roof: ", ".join(dict.fromkeys(devices)) for roof, devices in names.items()}


def _attain(roof: Roof, intensity: float) -> float:
    flops, bandwidth = roof
    return min(flops, intensity * bandwidth)
