"""Latency percentiles: a row each, a point a percentile."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opal_deploy.bench.measurement import Measurement
from opal_deploy.bench.report.charts.dots import MOST_ROWS, dots
from opal_deploy.bench.report.charts.series import titled
from opal_deploy.bench.report.drawing import Plot
from opal_deploy.bench.report.tables import Row, labels

_PERCENTILE = re.compile(r"p(\d{2}(?:\.\d+)?)(?:_ms)?$")


def percentiles(rows: Sequence[Row]) -> list[Plot]:
    """All rows that have percentiles in milliseconds, in plots of a length that a screen can show."""
    found = [row for row in rows if _percentiles(row.measurement)]
    groups = [found[start : start + MOST_ROWS] for start in range(0, len(found), MOST_ROWS)]
    out = []
    for place, group in enumerate(groups, 1):
        values = [_percentiles(row.measurement) for row in group]
        series = sorted({name for each in values for name in each}, key=lambda name: float(name[1:]))
        title = titled("Latency percentiles", f"part {place}" if len(groups) > 1 else "")
        out.append(dots(title, labels(group), values, series, "milliseconds a batch"))
    return out


def _percentiles(measurement: Measurement) -> dict[str, float]:
    matches = ((_PERCENTILE.match(name), figure) for name, figure in measurement.figures.items() if figure.unit == "ms")
    return {f"p{match.group(1)}": figure.value for match, figure in matches if match}
