"""The plots of each kind of measurement. Each module draws one; rows that lack what it needs are left to the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opal_deploy.bench.measurement import Kind
from opal_deploy.bench.report.charts.latency import percentiles
from opal_deploy.bench.report.charts.memory import memory_over_time
from opal_deploy.bench.report.charts.overhead import overhead
from opal_deploy.bench.report.charts.ratios import ratios
from opal_deploy.bench.report.charts.roofline import roofline
from opal_deploy.bench.report.charts.server import latency_against_rate
from opal_deploy.bench.report.charts.stages import rates, stages
from opal_deploy.bench.report.charts.throughput import throughput
from opal_deploy.bench.report.drawing import Plot
from opal_deploy.bench.report.tables import Row

_CHARTS: dict[Kind, tuple[Callable[[Sequence[Row]], list[Plot]], ...]] = {
    "compare": (ratios,),
    "throughput": (throughput,),
    "latency": (percentiles, throughput),
    "server": (latency_against_rate,),
    "pipeline": (rates, stages, memory_over_time),
    "overhead": (overhead,),
    "roofline": (roofline,),
    "ceiling": (),
}


def plots_of(kind: Kind, rows: Sequence[Row]) -> list[Plot]:
    """Every plot that these measurements of one kind have what it takes for."""
    return [plot for chart in _CHARTS[kind] for plot in chart(rows)]
