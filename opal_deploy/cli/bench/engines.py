"""`opal-deploy bench engines`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from opal_deploy.cli.bench.options import Json
from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Precision
    from opal_deploy.model.checkpoint import Checkpoint

_NUM_CLASSES = 10
_BATCH_NORM_IMAGES = 16


def engines(
    models: Annotated[
        list[str], typer.Argument(help="Checkpoints, or names of backbones, which get random weights and ten classes.")
    ],
    pictures: Annotated[Path, typer.Option(help="Images that the graph is verified on.")],
    precision: Annotated[list[str] | None, typer.Option(help="Repeatable; default: fp32, fp16 and bf16.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Repeatable; default: sm80.")] = None,
    calibrate: Annotated[Path | None, typer.Option(help="Images to measure int8's ranges on.")] = None,
    batch: Annotated[str, typer.Option(help="MIN:OPT:MAX.")] = "1:64:256",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of ONNX Runtime while verifying.")] = None,
    as_json: Json = False,
) -> None:
    """Measure build time, size and verification of engines for GPUs, built ahead of time with TensorRT for RTX."""
    from opal_deploy.bench.engines import TABLE_HEADER, measure_precisions
    from opal_deploy.bench.machine import provenance
    from opal_deploy.export.builder import choose_engine_targets
    from opal_deploy.export.options import EngineOptions, ExportOptions
    from opal_deploy.runtime.cuda import visible_driver
    from opal_deploy.runtime.tensorrt.bindings import TENSORRT_RTX, load

    require("torch", "export", "opal-deploy bench engines")
    precisions = [_parse_precision(text) for text in precision or ("fp32", "fp16", "bf16")]
    choices = choose_engine_targets(EngineOptions(builder="tensorrt-rtx", target=target or ["sm80"]), visible_driver())
    library = load(TENSORRT_RTX, "opal-deploy bench engines")
    options = ExportOptions(images=pictures, calibrate=calibrate, threads=threads)
    build = EngineOptions(batch=batch)
    results = []
    print_message(TABLE_HEADER)
    done, total = itertools.count(1), len(models) * len(precisions) * len(choices)
    with progress("engines") as advance:
        advance(0, total)
        for model in models:
            checkpoint = _load_or_build(model)
            name = Path(model).name
            for result in measure_precisions(
                checkpoint, name, precisions, choices, library, options, build,
                on_engine=lambda: advance(next(done), total),
            ):  # fmt: skip
                results.append(result)
                for row in result.table_rows():
                    print_message(row)
    if as_json:
        print_json({"builder": library.title, "batch": batch, "rows": [r.to_dict() for r in results], **provenance()})


def _parse_precision(text: str) -> Precision:
    from opal_deploy.artifact.metadata import Precision

    choices: tuple[Precision, ...] = get_args(Precision)
    for precision in choices:
        if text == precision:
            return precision
    raise UsageError(f"--precision {text!r}: expected {', '.join(choices)}")


def _load_or_build(model: str) -> Checkpoint:
    """Return a checkpoint from a file, or a backbone with random weights and ten classes."""
    from opal_deploy.bench.targets.networks import build_random_network, update_batch_norms
    from opal_deploy.model.checkpoint import load
    from opal_deploy.synthetic import example_images

    if Path(model).suffix in (".pt", ".pth") or Path(model).is_file():
        return load(Path(model))
    checkpoint = build_random_network(model, num_classes=_NUM_CLASSES).checkpoint
    network = checkpoint.network
    update_batch_norms(network, example_images(_BATCH_NORM_IMAGES, *network.config.input_size))
    return checkpoint
