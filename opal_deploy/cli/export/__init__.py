"""`opal-deploy export`: a checkpoint, or one of our ONNX files, to verified ONNX files and TensorRT engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from opal_deploy.cli.console import print_message, progress
from opal_deploy.cli.export.output import print_export
from opal_deploy.options import parse_size

_ENGINES = "Engines (--trt)"
_AUTHORS = "The authors' checkpoints, which do not record it"
_TRITON = "A model repository for Triton (--triton)"


def export(
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint (.pt, .pth), ours or the authors', or our .onnx file; for --triton also an .engine."
        ),
    ],
    trt: Annotated[
        bool, typer.Option("--trt", help="Build TensorRT engines too, with a GPU or without.", rich_help_panel=_ENGINES)
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The file to write, with --trt the folder; default: beside the source.")
    ] = None,
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"] | None,
        typer.Option(help="Precision of the body; the head stays float32. Default: fp32, with --trt fp16."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Photographs that int8's ranges are measured on; default: the model's training images."),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(
            help="Verify on the photographs of this folder; default: the data set that the model was trained on, "
            "validation images first, or where it is gone generated images."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare with the reference first; --no-verify is recorded.")
    ] = True,
    input_kind: Annotated[
        Literal["uint8", "float32"],
        typer.Option("--input", help="uint8 NHWC with normalisation inside, or float32 NCHW already normalised."),
    ] = "uint8",
    outputs: Annotated[
        Literal["attention", "topk"] | None,
        typer.Option(
            help="attention: the attention maps [N, K, H, W] too; topk: the best classes with their evidence instead "
            "of all classes and channels."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=2, max=32, help="Classes that --outputs topk lists; default: 5.")
    ] = None,
    classes: Annotated[Path | None, typer.Option(help="Class names, one a line; default: those in the source.")] = None,
    builder: Annotated[
        Literal["tensorrt", "tensorrt-rtx"] | None,
        typer.Option(help="Default: TensorRT where it and a GPU are, else TensorRT for RTX.", rich_help_panel=_ENGINES),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="GPU to build for: sm75 sm80 sm86 sm89 sm120, or a name such as a100, l4, rtx4090; repeatable. "
            "Default: the GPU here, else sm80.",
            rich_help_panel=_ENGINES,
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="MIN:OPT:MAX or one fixed size; default 1:64:256.", rich_help_panel=_ENGINES)
    ] = None,
    workspace: Annotated[
        str | None, typer.Option(help="Device memory a layer may use, such as 4G.", rich_help_panel=_ENGINES)
    ] = None,
    timing_cache: Annotated[
        Path | None, typer.Option(help="File to keep kernel timings in, read and written.", rich_help_panel=_ENGINES)
    ] = None,
    optimization_level: Annotated[
        int | None, typer.Option(min=0, max=5, help="0 builds fastest, 5 runs fastest.", rich_help_panel=_ENGINES)
    ] = None,
    version_compatible: Annotated[
        bool,
        typer.Option(
            "--version-compatible", help="Runs with newer TensorRT of the major version.", rich_help_panel=_ENGINES
        ),
    ] = False,
    hardware_compatible: Annotated[
        Literal["ampere+", "same"] | None,
        typer.Option(help="Runs on other GPUs: Ampere and newer, or of one capability.", rich_help_panel=_ENGINES),
    ] = None,
    strip_weights: Annotated[
        bool,
        typer.Option(
            "--strip-weights",
            help="Leave weights out; the ONNX file beside it puts them back.",
            rich_help_panel=_ENGINES,
        ),
    ] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Keep the weights replaceable.", rich_help_panel=_ENGINES)
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build even if the same engine is there.", rich_help_panel=_ENGINES)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the builder's log.", rich_help_panel=_ENGINES)
    ] = False,
    distance: Annotated[
        Literal["l1", "l2", "l3", "linf", "kl", "tropical"] | None,
        typer.Option(help="Default: l2.", rich_help_panel=_AUTHORS),
    ] = None,
    pooling: Annotated[
        Literal["max", "avg"] | None, typer.Option(help="Default: max; without anchors avg.", rich_help_panel=_AUTHORS)
    ] = None,
    cws: Annotated[
        bool | None, typer.Option("--cws/--no-cws", help="Default: on; without anchors off.", rich_help_panel=_AUTHORS)
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Input size, such as 224 or 224x448.", rich_help_panel=_AUTHORS)
    ] = None,
    crop: Annotated[
        Literal["boxes"] | None,
        typer.Option(help="It was trained on images cropped to boxes.", rich_help_panel=_AUTHORS),
    ] = None,
    triton: Annotated[
        Path | None,
        typer.Option(help="The repository's folder: two models are written to it.", rich_help_panel=_TRITON),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model that takes pixels; default: opal. NAME_explain takes image files.",
            rich_help_panel=_TRITON,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace other files, or models of a repository, that are there."),
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of ONNX Runtime while verifying.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report to stdout as JSON.")] = False,
) -> None:
    """Write a model that outputs logits and evidence, once it was verified: ONNX, and with --trt TensorRT engines.

    A file gets its name only after its outputs were compared with PyTorch's on images, in several batch sizes.
    With --triton the file, or an .onnx or .engine as it is, becomes a model repository for NVIDIA Triton.
    All formats in a table, with their files, what they run on and where they ran: docs/howto/export.md.
    """
    from opal_deploy.export.api import export_model

    with progress("building") as advance:
        result = export_model(
            source,
            trt=trt,
            out=out,
            precision=precision,
            calibrate=calibrate,
            pictures=pictures,
            verify=verify,
            input=input_kind,
            outputs=outputs,
            top_k=top_k,
            classes=classes,
            builder=builder,
            target=target,
            batch=batch,
            workspace=workspace,
            timing_cache=timing_cache,
            optimization_level=optimization_level,
            version_compatible=version_compatible,
            hardware_compatible=hardware_compatible,
            strip_weights=strip_weights,
            refit=refit,
            rebuild=rebuild,
            verbose=verbose,
            distance=distance,
            pooling=pooling,
            cws=cws,
            size=parse_size(size) if size else None,
            crop=crop,
            triton=triton,
            name=name,
            overwrite=overwrite,
            threads=threads,
            log=print_message,
            progress=advance,
        )
    print_export(result, as_json=as_json)
