"""`opal-deploy bench engines`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.bench.options import Json
from opal_deploy.cli.console import print_json, print_message
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Precision
    from opal_deploy.model.checkpoint import Checkpoint


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
    from opal_deploy.bench.engines import TABLE_HEADER, measure_precisions
    from opal_deploy.bench.machine import provenance
    from opal_deploy.export.options import ExportOptions
    from opal_deploy.export.tensorrt.options import BuildOptions, choose_engine_targets, parse_batch
    from opal_deploy.runtime.tensorrt.bindings import TENSORRT_RTX, load
    from opal_deploy.runtime.tensorrt.cuda import visible_driver

    require("torch", "export", "opal-deploy bench engines")
    wanted = [_precision(text) for text in precision or ("fp32", "fp16", "bf16")]
    choices = choose_engine_targets(TENSORRT_RTX, target or ["sm80"], visible_driver())
    library = load(TENSORRT_RTX, "opal-deploy bench engines")
    options = ExportOptions(images=pictures, calibrate=calibrate, threads=threads)
    rows = []
    print_message(TABLE_HEADER)
    for model in models:
        checkpoint = _checkpoint(model)
        name = Path(model).name
        build = BuildOptions(batch=parse_batch(batch))
        for row in measure_precisions(checkpoint, name, wanted, choices, library, options, build):
            rows.append(row)
            for line in row.lines():
                print_message(line)
    if as_json:
        print_json({"builder": library.title, "batch": batch, "rows": [r.to_dict() for r in rows], **provenance()})


def _precision(text: str) -> Precision:
    known: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8")
    for precision in known:
        if text == precision:
            return precision
    raise UsageError(f"--precision {text!r}: expected {', '.join(known)}")


def _checkpoint(model: str) -> Checkpoint:
    """A checkpoint's file, or a backbone with random weights and ten classes."""
    import torch

    from opal_deploy.artifact.files import model_kind
    from opal_deploy.model.checkpoint import Checkpoint, load
    from opal_deploy.model.config import NetworkConfig
    from opal_deploy.model.network import OpalNetwork

    if model_kind(Path(model)) == "checkpoint" or Path(model).is_file():
        return load(Path(model))
    from opal_deploy.bench.targets.networks import update_batch_norms
    from opal_deploy.synthetic import example_images

    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig(model, 10, (224, 224)))
    update_batch_norms(network, example_images(16, 224, 224))
    return Checkpoint(network, [str(number) for number in range(10)])
