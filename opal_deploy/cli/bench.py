"""`opal-deploy bench`: measurements that can be repeated and defended."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import emit_json, say
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.pipeline.discover import Item

bench = typer.Typer(name="bench", help="Measure, and say what was measured.", no_args_is_help=True)

Images = Annotated[list[str], typer.Argument(help="Photographs: folders, files, globs, or - for a list on stdin.")]
Json = Annotated[bool, typer.Option("--json", help="Write the result to stdout as JSON.")]


@bench.command()
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
    result = measure(session, _items(images, limit), options, repeats=repeats, say=say)
    say(f"{result.images} pictures, batches of {batch}, {result.session}")
    for rate in (result.bare, result.plain, result.overlays):
        share = rate.median / result.bare.median
        say(f"{rate.line()}: {share:.1%} of the session alone")
    say(f"peak memory {result.peak_megabytes:.0f} MB")
    if as_json:
        emit_json(result.to_dict())


@bench.command()
def decoding(
    images: Images,
    limit: Annotated[int, typer.Option(min=1, help="At most so many pictures.")] = 200,
    size: Annotated[int, typer.Option(min=1, help="Input size in pixels.")] = 224,
    as_json: Json = False,
) -> None:
    """Every decode path against plain Pillow: largest and mean difference in counts, and pictures a second."""
    from opal_deploy.bench.decoding import compare
    from opal_deploy.bench.measure import machine

    results = compare([item.path for item in _items(images, limit)], (size, size))
    for r in results:
        say(
            f"{r.name}: {r.images} pictures, largest difference {r.largest}, mean {r.mean:.4f} counts; "
            f"{r.path_per_second:.0f}/s, plain Pillow {r.pillow_per_second:.0f}/s, one thread each"
        )
    if as_json:
        emit_json({"paths": [r.to_dict() for r in results], "machine": machine()})


def _items(images: list[str], limit: int) -> list[Item]:
    import sys

    from opal_deploy.pipeline.discover import Skipped, check_inputs, discover

    check_inputs(images)
    items = list(itertools.islice(discover(images, Skipped(), sys.stdin), limit))
    if not items:
        raise UsageError("no images found")
    return items
