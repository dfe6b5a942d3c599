"""`opal-deploy export`: a checkpoint, or one of our ONNX files, to verified ONNX files and TensorRT engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.cli.options import parse_size
from opal_deploy.errors import ArtifactError, UsageError, require

if TYPE_CHECKING:
    from opal_deploy.export.candidate import ExportOptions
    from opal_deploy.export.onnx_export import ExportedModel
    from opal_deploy.export.tensorrt.engine_export import EngineExport, EngineJob
    from opal_deploy.export.tensorrt.from_onnx import Deployment
    from opal_deploy.export.tensorrt.options import BuildOptions
    from opal_deploy.model.checkpoint import Checkpoint
    from opal_deploy.runtime.nvml import Driver

_ENGINES = "Engines (--trt)"
_AUTHORS = "The authors' checkpoints, which do not record it"


def export(
    source: Annotated[Path, typer.Argument(help="A checkpoint (.pt, .pth), ours or the authors', or our .onnx file.")],
    trt: Annotated[
        bool, typer.Option("--trt", help="Build TensorRT engines too, with a GPU or without.", rich_help_panel=_ENGINES)
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The file to write, with --trt the folder; default: beside the source.")
    ] = None,
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"] | None,
        typer.Option(help="Of the body; the head stays float32. Default: fp32, with --trt fp16."),
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Photographs that int8's ranges are measured on, such as the model will see.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Verify on the photographs of this folder instead of generated pictures.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare with the reference first; --no-verify is recorded.")
    ] = True,
    input_kind: Annotated[
        Literal["uint8", "float32"],
        typer.Option("--input", help="uint8 NHWC with normalisation inside, or float32 NCHW already normalised."),
    ] = "uint8",
    outputs: Annotated[
        Literal["attention"] | None, typer.Option(help="Output the attention maps [N, K, H, W] too.")
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
        bool, typer.Option("--verbose", help="Show what the builder says.", rich_help_panel=_ENGINES)
    ] = False,
    distance: Annotated[
        Literal["l1", "l2", "l3", "linf", "kl", "tropical"] | None,
        typer.Option(help="Default: l2.", rich_help_panel=_AUTHORS),
    ] = None,
    pooling: Annotated[
        Literal["max", "avg"] | None, typer.Option(help="Default: max.", rich_help_panel=_AUTHORS)
    ] = None,
    cws: Annotated[bool | None, typer.Option("--cws/--no-cws", help="Default: on.", rich_help_panel=_AUTHORS)] = None,
    size: Annotated[
        str | None, typer.Option(help="Input size, such as 224 or 224x448.", rich_help_panel=_AUTHORS)
    ] = None,
    crop: Annotated[
        Literal["boxes"] | None,
        typer.Option(help="It was trained on pictures cropped to boxes.", rich_help_panel=_AUTHORS),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of ONNX Runtime while verifying.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report to stdout as JSON.")] = False,
) -> None:
    """Write a model that outputs logits and evidence, once it was verified: ONNX, and with --trt TensorRT engines.

    A file gets its name only after its outputs were compared with PyTorch's on pictures, in several batch sizes.
    """
    from opal_deploy.artifact.files import model_kind
    from opal_deploy.export.tensorrt.options import DEFAULT_BATCH, BuildOptions, parse_batch, parse_bytes

    if not source.is_file():
        raise ArtifactError(f"{source}: no such file; expected a checkpoint or an ONNX file of ours")
    kind = model_kind(source)
    if kind not in ("checkpoint", "onnx"):
        raise UsageError(f"{source}: expected a checkpoint (.pt, .pth) or one of our .onnx files")
    # without torch where no checkpoint has to be read
    require("onnx", "trt-rtx" if trt and kind == "onnx" else "export", "opal-deploy export")
    require("onnxruntime", "cpu", "opal-deploy export, to verify what it writes,")
    build = BuildOptions(
        parse_batch(batch) if batch is not None else DEFAULT_BATCH,
        parse_bytes(workspace) if workspace is not None else None,
        timing_cache,
        optimization_level,
        version_compatible,
        hardware_compatible,
        strip_weights,
        refit,
    )
    if not trt:
        about_engines = {
            "--builder": builder, "--target": target, "--batch": batch, "--workspace": workspace, "--rebuild": rebuild,
            "--timing-cache": timing_cache, "--optimization-level": optimization_level, "--refit": refit,
            "--version-compatible": version_compatible, "--hardware-compatible": hardware_compatible,
            "--strip-weights": strip_weights, "--verbose": verbose,
        }  # fmt: skip
        given = [name for name, value in about_engines.items() if value is not None and value is not False]
        if given:
            raise UsageError(f"{', '.join(given)}: about engines; add --trt")
    if precision != "int8" and calibrate is not None:
        raise UsageError("--calibrate: only int8 is calibrated; add --precision int8")
    recorded = {"distance": distance, "pooling": pooling, "cws": cws, "size": size, "crop": crop}
    checkpoint = None
    if kind == "onnx":
        fixed = [f"--{name}" for name, value in {**recorded, "classes": classes}.items() if value is not None]
        if fixed:
            raise UsageError(f"{source}: {', '.join(fixed)}: fixed in an ONNX file")
    else:
        for package in ("torch", "torchvision", "onnxscript"):
            require(package, "export", "exporting a checkpoint")
        checkpoint = _load(source, classes, distance, pooling, cws, size, crop)
    from opal_deploy.export.candidate import ExportOptions

    options = ExportOptions(
        None if trt else out,
        input_kind,
        precision or _default_precision(source, checkpoint, trt=trt),
        outputs is not None,
        pictures,
        threads,
        calibrate,
        verify,
    )
    if not trt:
        _tell(_export(source, checkpoint, options), as_json)
        return
    from opal_deploy.runtime.tensorrt.cuda import visible_driver

    driver = visible_driver()
    job = _engine_job(build, builder, target or [], rebuild, verbose, driver)
    folder = _folder(source, out)
    with progress("building") as advance:
        shown = replace(job, advance=lambda phase, step, steps: advance(step, steps, phase))
        done = _deploy(source, checkpoint, options, folder, shown, driver)
    _tell_engines(done, as_json)


def _default_precision(
    source: Path, checkpoint: Checkpoint | None, *, trt: bool
) -> Literal["fp32", "fp16", "bf16", "int8"]:
    """fp32; for engines fp16, or what an ONNX file is already, if that is not fp32."""
    if not trt:
        return "fp32"
    if checkpoint is not None:
        return "fp16"
    from opal_deploy.artifact.onnx_file import read_metadata

    found = read_metadata(source).precision
    return "fp16" if found == "fp32" else found


def _folder(source: Path, out: Path | None) -> Path:
    if out is None:
        return source.parent
    if out.suffix in (".onnx", ".engine") or out.is_file():
        raise UsageError(f"--out {out}: with --trt a folder is expected; files are named by model, precision and GPU")
    return out


def _engine_job(
    build: BuildOptions, builder: str | None, targets: list[str], rebuild: bool, verbose: bool, driver: Driver
) -> EngineJob:
    from opal_deploy.export.tensorrt.engine_export import EngineJob
    from opal_deploy.export.tensorrt.options import choose

    choices = choose(builder, targets, driver)
    for choice in choices:
        # what a builder cannot do is said before minutes of verification
        build.check_for(choice.builder, gpu=bool(driver.gpus))

    def listen(level: str, message: str) -> None:
        print_message(f"  {level.lower()}: {one_line(message)}")

    return EngineJob(choices, build, rebuild, listen if verbose else None)


def _export(source: Path, checkpoint: Checkpoint | None, options: ExportOptions) -> ExportedModel:
    if checkpoint is None:
        from opal_deploy.export.onnx_export import export_onnx

        return export_onnx(source, options, print_message)
    from opal_deploy.export.checkpoint_export import export_checkpoint

    return export_checkpoint(checkpoint, source, options, print_message)


def _deploy(
    source: Path, checkpoint: Checkpoint | None, options: ExportOptions, folder: Path, job: EngineJob, driver: Driver
) -> Deployment:
    if checkpoint is None:
        from opal_deploy.export.tensorrt.from_onnx import deploy_onnx

        return deploy_onnx(source, options, folder, job, driver, print_message)
    from opal_deploy.export.tensorrt.from_checkpoint import deploy_checkpoint

    return deploy_checkpoint(checkpoint, source, options, folder, job, driver, print_message)


def _load(
    source: Path,
    classes: Path | None,
    distance: Literal["l1", "l2", "l3", "linf", "kl", "tropical"] | None,
    pooling: Literal["max", "avg"] | None,
    cws: bool | None,
    size: str | None,
    crop: str | None,
) -> Checkpoint:
    """The checkpoint, with what its own format does not record taken from the options."""
    from opal_deploy.model import checkpoint as checkpoints
    from opal_deploy.model.config import HeadConfig

    names = checkpoints.read_class_names(classes) if classes else None
    head = HeadConfig(cws=cws is not False, pooling=pooling or "max", distance=distance or "l2")
    assumptions = checkpoints.Assumptions(head, parse_size(size) if size else (224, 224), crop)
    checkpoint = checkpoints.load(source, class_names=names, assumptions=assumptions)
    assumed = checkpoint.source.get("assumed")
    told = [value for value in (distance, pooling, cws, size, crop) if value is not None]
    if assumed is None and told:
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


def _tell(done: ExportedModel, as_json: bool) -> None:
    _say_written(done)
    print_message(f"Next: opal-deploy infer images/ --explain --model {done.path}")
    if as_json:
        print_json(_document(done))


def _tell_engines(done: Deployment, as_json: bool) -> None:
    for file in done.files:
        _say_written(file)
    for engine in done.engines:
        _say_engine(engine)
    print_message("Next: opal-deploy infer images/ --explain")
    if as_json:
        engines = [_engine_document(engine) for engine in done.engines]
        print_json({"files": [_document(file) for file in done.files], "engines": engines})


def _say_written(done: ExportedModel) -> None:
    report, megabytes = done.comparison, done.path.stat().st_size / 1e6
    if done.metadata.unverified:
        print_message(f"NOT VERIFIED: {done.metadata.unverified}: nobody compared its answers with PyTorch's")
    if report is None:
        pass
    else:
        print_message(
            f"Verified on {report.images} pictures: largest differences: logit {report.max_logit:.2g}" + _evidence(done)
        )
    print_message(
        f"Wrote {done.path} ({megabytes:.1f} MB, {done.metadata.precision}, evidence {done.metadata.evidence})"
    )


def _say_engine(engine: EngineExport) -> None:
    from opal_deploy.artifact.engine_file import read_checks

    sidecar = engine.sidecar
    seconds = "" if engine.reused else f", built in {sidecar.built['seconds']:.1f} s"
    print_message(
        f"{'Kept' if engine.reused else 'Wrote'} {engine.path} ({sidecar.engine['bytes'] / 1e6:.1f} MB{seconds})"
    )
    if sidecar.state["state"] == "verified":
        print_message(f"  verified on {sidecar.state['machine']['gpu']}: its test vectors are reproduced")
    else:
        passed = [check for check in read_checks(engine.path) if check.passed]
        if engine.reused and passed:
            print_message(f"  checked on {passed[-1].machine.get('gpu')} on {passed[-1].when[:10]}")
            return
        print_message(
            f"  unverified: it was never run on hardware; the first {sidecar.target['sm']} machine that loads it runs "
            "its test vectors before it answers anything"
        )


def _engine_document(engine: EngineExport) -> dict[str, object]:
    sidecar = engine.sidecar
    return {
        "path": str(engine.path),
        "sha256": sidecar.engine["sha256"],
        "bytes": sidecar.engine["bytes"],
        "builder": sidecar.builder,
        "target": sidecar.target,
        "options": sidecar.options,
        "seconds": sidecar.built["seconds"],
        "state": sidecar.state,
        "reused": engine.reused,
    }


def _document(done: ExportedModel) -> dict[str, object]:
    return {"path": str(done.path), "sha256": done.metadata.file_sha256, "verification": done.metadata.verification}


def _evidence(done: ExportedModel) -> str:
    report = done.comparison
    if report is None or report.max_cosine is None:
        return ""
    text = f", cosine {report.max_cosine:.2g}, score {report.max_score:.2g}; "
    if done.metadata.precision == "fp32":
        ties = f", {report.cells_tied} tied" if report.cells_tied else ""
        return f"{text}{report.cells - report.cells_different} of {report.cells} cells equal{ties}"
    equal = report.block_cells - report.block_cells_different
    near = f" ({report.block_near_ties} of the others near ties)" if report.block_near_ties else ""
    return f"{text}{equal} of {report.block_cells} cells of the predicted classes equal{near}"
