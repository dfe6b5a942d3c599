"""`opal-deploy bench`: measurements that can be repeated and defended."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import emit_json, say
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Precision
    from opal_deploy.model.checkpoint import Checkpoint
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


@bench.command()
def engines(
    models: Annotated[
        list[str], typer.Argument(help="Checkpoints, or names of backbones, which get random weights and ten classes.")
    ],
    pictures: Annotated[Path, typer.Option(help="Photographs that the gate is run on.")],
    precision: Annotated[list[str] | None, typer.Option(help="Repeatable; default: fp32, fp16 and bf16.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Repeatable; default: sm80.")] = None,
    calibrate: Annotated[Path | None, typer.Option(help="Photographs to measure int8's ranges on.")] = None,
    batch: Annotated[str, typer.Option(help="MIN:OPT:MAX.")] = "1:64:256",
    threads: Annotated[int | None, typer.Option(min=1, help="Of ONNX Runtime in the gate.")] = None,
    as_json: Json = False,
) -> None:
    """Build time, size and the gate's figures for models, precisions and GPUs, ahead of time with TensorRT for RTX."""
    from opal_deploy.bench.engines import HEADER, measure
    from opal_deploy.bench.measure import machine
    from opal_deploy.export.candidate import ExportOptions
    from opal_deploy.export.tensorrt.choice import choose
    from opal_deploy.export.tensorrt.options import BuildOptions, parse_batch
    from opal_deploy.runtime.tensorrt.bindings import TENSORRT_RTX, load
    from opal_deploy.runtime.tensorrt.cuda import visible_driver

    require("torch", "export", "opal-deploy bench engines")
    wanted = [_precision(text) for text in precision or ("fp32", "fp16", "bf16")]
    choices = choose(TENSORRT_RTX, target or ["sm80"], visible_driver())
    library = load(TENSORRT_RTX, "opal-deploy bench engines")
    options = ExportOptions(pictures=pictures, calibrate=calibrate, threads=threads)
    rows = []
    say(HEADER)
    for model in models:
        checkpoint = _checkpoint(model)
        name = Path(model).name
        build = BuildOptions(batch=parse_batch(batch))
        for row in measure(checkpoint, name, wanted, choices, library, options, build):
            rows.append(row)
            for line in row.lines():
                say(line)
    if as_json:
        emit_json({"builder": library.title, "batch": batch, "machine": machine(), "rows": [r.to_dict() for r in rows]})


def _precision(text: str) -> Precision:
    known: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8")
    for precision in known:
        if text == precision:
            return precision
    raise UsageError(f"--precision {text!r}: expected {', '.join(known)}")


def _checkpoint(model: str) -> Checkpoint:
    """A checkpoint's file, or a backbone with random weights and ten classes."""
    import torch

    from opal_deploy.model.checkpoint import Checkpoint, load
    from opal_deploy.model.config import NetworkConfig
    from opal_deploy.model.network import OpalNetwork

    if Path(model).suffix in (".pt", ".pth") or Path(model).is_file():
        return load(Path(model))
    from opal_deploy.bench.engines import settle
    from opal_deploy.demo import example_pictures

    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig(model, 10, (224, 224)))
    settle(network, example_pictures(16, 224, 224))
    return Checkpoint(network, [str(number) for number in range(10)])


def _items(images: list[str], limit: int) -> list[Item]:
    import sys

    from opal_deploy.pipeline.discover import Skipped, check_inputs, discover

    check_inputs(images)
    items = list(itertools.islice(discover(images, Skipped(), sys.stdin), limit))
    if not items:
        raise UsageError("no images found")
    return items
