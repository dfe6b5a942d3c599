"""`opal-deploy bench`: the commands of the benchmarks, one module each; `options` is what they share."""

from __future__ import annotations

import typer

from opal_deploy.cli.bench.compare import compare
from opal_deploy.cli.bench.decoding import decoding
from opal_deploy.cli.bench.diff import diff
from opal_deploy.cli.bench.engines import engines
from opal_deploy.cli.bench.latency import latency
from opal_deploy.cli.bench.overhead import overhead
from opal_deploy.cli.bench.pipeline import pipeline
from opal_deploy.cli.bench.report import report
from opal_deploy.cli.bench.roofline import roofline
from opal_deploy.cli.bench.throughput import throughput

bench = typer.Typer(
    name="bench",
    help="Measure speed, memory and cost; each result records its settings and machine.",
    no_args_is_help=True,
)
for command in (overhead, roofline, latency, throughput, compare, pipeline, decoding, engines, report, diff):
    bench.command()(command)
