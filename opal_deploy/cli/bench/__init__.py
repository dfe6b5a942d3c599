"""`opal-deploy bench`: measurements that can be repeated and defended."""

from __future__ import annotations

import typer

from opal_deploy.cli.bench.decoding import decoding
from opal_deploy.cli.bench.engines import engines
from opal_deploy.cli.bench.pipeline import pipeline

bench = typer.Typer(name="bench", help="Measure, and say what was measured.", no_args_is_help=True)
for verb in (pipeline, decoding, engines):
    bench.command()(verb)
