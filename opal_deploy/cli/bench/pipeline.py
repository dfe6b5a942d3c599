"""`opal-deploy bench pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.cli.bench.options import Images, Json, find_items
from opal_deploy.cli.console import emit_json, say


def pipeline(
    images: Images,
    model: Annotated[Path, typer.Option(help="An exported model, or a checkpoint.")],
    limit: Annotated[int, typer.Option(min=1, help="At most so many pictures.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Pictures a forward pass.")] = 8,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads that decode and draw.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the runtime on the CPU.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    as_json: Json = False,
) -> None:
    """What `infer` loses against the bare session, with and without overlays."""
    from opal_deploy.bench.pipeline import measure
    from opal_deploy.pipeline.engine import EngineOptions
    from opal_deploy.runtime.onnx_session import available_cpus
    from opal_deploy.runtime.select import open_sessions

    session = open_sessions(model, device=device, threads=threads)[0]
    options = EngineOptions(batch=batch, workers=workers or min(8, available_cpus()))
    result = measure(session, find_items(images, limit), options, repeats=repeats, say=say)
    say(f"{result.images} pictures, batches of {batch}, {result.session}")
    for rate in (result.bare, result.plain, result.overlays):
        share = rate.median / result.bare.median
        say(f"{rate.line()}: {share:.1%} of the session alone")
    say(f"peak memory {result.peak_megabytes:.0f} MB")
    if as_json:
        emit_json(result.to_dict())
