"""`opal-deploy export`: a checkpoint, or one of our ONNX files, to verified ONNX files and TensorRT engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opal_deploy.cli.console import one_line, print_message, progress
from opal_deploy.cli.export.output import print_engine_export, print_onnx, print_onnx_export
from opal_deploy.cli.options import parse_size
from opal_deploy.errors import ArtifactError, UsageError, require

if TYPE_CHECKING:
    from opal_deploy.model.checkpoint import Checkpoint

_ENGINES = "Engines (--trt)"
# as many classes as a record lists by default
_TOP_K = 5
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
    from opal_deploy.artifact.files import model_kind
    from opal_deploy.cli.export.triton import plan_repository, verify_model, write_repository
    from opal_deploy.export.tensorrt.options import (
        DEFAULT_BATCH,
        BuildOptions,
        EngineRequest,
        choose_engine_targets,
        parse_batch,
        parse_bytes,
    )

    if not source.is_file():
        raise ArtifactError(f"{source}: no such file; expected a checkpoint or an ONNX file of ours")
    kind = model_kind(source)
    engine_options = {
        "--builder": builder, "--target": target, "--batch": batch, "--workspace": workspace,
        "--rebuild": rebuild or None, "--timing-cache": timing_cache, "--optimization-level": optimization_level,
        "--refit": refit or None, "--version-compatible": version_compatible or None,
        "--hardware-compatible": hardware_compatible, "--strip-weights": strip_weights or None,
        "--verbose": verbose or None,
    }  # fmt: skip
    checkpoint_options = {
        "--distance": distance, "--pooling": pooling, "--cws": cws, "--size": size, "--crop": crop,
        "--classes": classes,
    }  # fmt: skip
    repository = plan_repository(triton, name, overwrite=overwrite, trt=trt, precision=precision)
    if repository is not None and (kind == "engine" or (kind == "onnx" and precision is None)):
        file_options = {
            "--out": out, "--outputs": outputs, "--top-k": top_k, "--pictures": pictures, "--precision": precision,
            "--calibrate": calibrate, "--input": None if input_kind == "uint8" else input_kind,
        }  # fmt: skip
        if unused := _given({**engine_options, **checkpoint_options, **file_options}):
            raise UsageError(f"{source}: it is served as it is; leave out {unused}")
        if verify:
            verify_model(source, threads)
        write_repository(repository, source, as_json=as_json)
        return
    if kind not in ("checkpoint", "onnx"):
        hint = "; weights to begin training from go to train --weights" if source.suffix == ".safetensors" else ""
        raise UsageError(f"{source}: expected a checkpoint (.pt, .pth) or one of our .onnx files{hint}")
    # without torch where no checkpoint has to be read
    require("onnx", "trt-rtx" if trt and kind == "onnx" else "export", "opal-deploy export")
    require("onnxruntime", "cpu", "opal-deploy export, to verify what it writes,")
    build = BuildOptions(
        batch=parse_batch(batch) if batch is not None else DEFAULT_BATCH,
        workspace=parse_bytes(workspace) if workspace is not None else None,
        timing_cache=timing_cache,
        optimization_level=optimization_level,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
        strip_weights=strip_weights,
        refit=refit,
    )
    if not trt and (given := _given(engine_options)):
        raise UsageError(f"{given}: about engines; add --trt")
    if top_k is not None and outputs != "topk":
        raise UsageError("--top-k: of the best classes that --outputs topk lists; add that")
    if precision != "int8" and calibrate is not None:
        raise UsageError("--calibrate: only int8 is calibrated; add --precision int8")
    checkpoint = None
    if kind == "onnx":
        if given := _given(checkpoint_options):
            raise UsageError(f"{source}: {given}: fixed in an ONNX file")
    else:
        for package in ("torch", "torchvision", "onnxscript"):
            require(package, "export", "exporting a checkpoint")
        checkpoint = _load(source, classes, distance, pooling, cws, size, crop)

    from opal_deploy.export import exporter
    from opal_deploy.export.candidate import ExportSource
    from opal_deploy.export.onnx_source import OnnxSource
    from opal_deploy.export.options import ExportOptions, plan_targets

    export_source: ExportSource = OnnxSource(source)
    if checkpoint is not None:
        from opal_deploy.export.checkpoint_source import CheckpointSource

        export_source = CheckpointSource(checkpoint, source)
    options = ExportOptions(
        input_kind=input_kind,
        attention=outputs == "attention",
        top_k=(top_k or _TOP_K) if outputs == "topk" else None,
        images=pictures,
        calibrate=calibrate,
        threads=threads,
        verify=verify,
        overwrite=overwrite,
    )
    if not trt:
        targets = plan_targets(export_source, precision, out=out)
        exported = exporter.export(export_source, targets, options, print_message).onnx[0]
        if repository is None:
            print_onnx_export(exported, as_json)
        else:
            print_onnx(exported)
            write_repository(repository, exported.path, as_json=as_json)
        return
    from opal_deploy.runtime.cuda import visible_driver

    driver = visible_driver()
    with progress("building") as advance:
        request = EngineRequest(
            choose_engine_targets(builder, target or [], driver),
            _engine_folder(source, out),
            driver,
            build,
            rebuild,
            overwrite,
            on_message=_print_builder_message if verbose else None,
            on_progress=lambda phase, step, steps: advance(step, steps, phase),
        )
        targets = plan_targets(export_source, precision, engines=request)
        result = exporter.export(export_source, targets, options, print_message)
    print_engine_export(result, as_json)


def _given(options: dict[str, Any]) -> str:
    """Return the names of the options that have a value."""
    return ", ".join(name for name, value in options.items() if value is not None)


def _engine_folder(source: Path, out: Path | None) -> Path:
    if out is None:
        return source.parent
    if out.suffix in (".onnx", ".engine") or out.is_file():
        raise UsageError(f"--out {out}: with --trt a folder is expected; files are named by model, precision and GPU")
    return out


def _print_builder_message(level: str, message: str) -> None:
    print_message(f"  {level.lower()}: {one_line(message)}")


def _load(
    source: Path,
    classes: Path | None,
    distance: Literal["l1", "l2", "l3", "linf", "kl", "tropical"] | None,
    pooling: Literal["max", "avg"] | None,
    cws: bool | None,
    size: str | None,
    crop: str | None,
) -> Checkpoint:
    """Load a checkpoint; what the authors' format does not record is taken from the options."""
    from opal_deploy.model import checkpoint as checkpoints
    from opal_deploy.model.authors_checkpoint import Assumptions

    names = checkpoints.read_class_names(classes) if classes else None
    assumptions = Assumptions(distance, pooling, cws, parse_size(size) if size else (224, 224), crop)
    checkpoint = checkpoints.load(source, class_names=names, assumptions=assumptions)
    assumed = checkpoint.source.get("assumed")
    given = [value for value in (distance, pooling, cws, size, crop) if value is not None]
    if assumed is None and given:
        raise UsageError(
            f"{source}: it records distance, pooling, CWS, size and crop itself; "
            "those options are for the authors' files"
        )
    if assumed is not None:
        print_message(
            "Assumed, since the authors' format does not record it: "
            + ", ".join(f"{k} {v}" for k, v in assumed.items())
        )
    return checkpoint
