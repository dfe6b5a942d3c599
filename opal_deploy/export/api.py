"""The public `export_model`, which `opal-deploy export` calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from opal_deploy.artifact.files import model_kind
from opal_deploy.artifact.metadata import InputKind, Precision
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.export.result import ExportResult
from opal_deploy.export.tensorrt.options import (
    DEFAULT_BATCH,
    BuildOptions,
    EngineRequest,
    choose_engine_targets,
    parse_batch,
    parse_bytes,
)
from opal_deploy.logs import Log, log_line
from opal_deploy.runtime.cuda import visible_driver
from opal_deploy.triton.repository import Repository

if TYPE_CHECKING:
    from opal_deploy.export.candidate import ExportSource
    from opal_deploy.logs import Progress
    from opal_deploy.model.checkpoint import Checkpoint

Distance = Literal["l1", "l2", "l3", "linf", "kl", "tropical"]
OutputKind = Literal["attention", "topk"]
Builder = Literal["tensorrt", "tensorrt-rtx"]
HardwareCompatible = Literal["ampere+", "same"]
StrPath = str | os.PathLike[str]

# as many classes as a record lists by default
_TOP_K = 5


def export_model(
    source: StrPath,
    *,
    trt: bool = False,
    out: StrPath | None = None,
    precision: Precision | None = None,
    calibrate: StrPath | None = None,
    pictures: StrPath | None = None,
    verify: bool = True,
    input: InputKind = "uint8",
    outputs: OutputKind | None = None,
    top_k: int | None = None,
    classes: StrPath | None = None,
    builder: Builder | None = None,
    target: str | Sequence[str] | None = None,
    batch: int | str | None = None,
    workspace: int | str | None = None,
    timing_cache: StrPath | None = None,
    optimization_level: int | None = None,
    version_compatible: bool = False,
    hardware_compatible: HardwareCompatible | None = None,
    strip_weights: bool = False,
    refit: bool = False,
    rebuild: bool = False,
    verbose: bool = False,
    distance: Distance | None = None,
    pooling: Literal["max", "avg"] | None = None,
    cws: bool | None = None,
    size: int | tuple[int, int] | None = None,
    crop: Literal["boxes"] | None = None,
    triton: StrPath | None = None,
    name: str | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    log: Log = log_line,
    progress: Progress | None = None,
) -> ExportResult:
    """Write a model that outputs logits and evidence, once it was verified: ONNX files, engines, a Triton repository.

    Does what `opal-deploy export` does, with options of the same names; prints nothing.

    Args:
        source: a checkpoint, ours or the authors', or our ONNX file; for `triton` also an engine.
        trt: build TensorRT engines too, with a GPU or without.
        out: the file to write, with `trt` the folder; None: beside the source.
        precision: of the body; the head stays float32. None: fp32, with `trt` fp16.
        calibrate: folder of photographs that int8's ranges are measured on; None: the model's training images.
        pictures: folder of photographs to verify on; None: the data set that the model was trained on.
        verify: compare with the reference first; False is recorded in the file.
        input: `uint8` NHWC with normalisation inside, or `float32` NCHW already normalised.
        outputs: `attention`: the attention maps too; `topk`: the best classes with their evidence instead of all.
        top_k: classes that `topk` lists, 2 ... 32; None: 5.
        classes: file of class names, one a line; None: those in the source.
        builder: of engines; None: TensorRT where it and a GPU are, else TensorRT for RTX.
        target: GPUs to build for, such as `sm80` or `l4`; None: the GPU here, else sm80.
        batch: of engines, `MIN:OPT:MAX` or one fixed size; None: 1:64:256.
        workspace: device memory that a layer may use, in bytes or as `4G`.
        timing_cache: file to keep kernel timings in.
        optimization_level: 0 builds fastest, 5 runs fastest.
        version_compatible: the engine runs with newer TensorRT of the major version.
        hardware_compatible: the engine runs on other GPUs: Ampere and newer, or of one capability.
        strip_weights: leave weights out of the engine; the ONNX file beside it puts them back.
        refit: keep the engine's weights replaceable.
        rebuild: build even if the same engine is there.
        verbose: send the builder's log to `log`.
        distance, pooling, cws, size, crop: of the authors' checkpoints, which do not record them; `size` one number or
            (height, width) in pixels.
        triton: folder of a Triton model repository to write two models to.
        name: of the model that takes pixels; None: opal.
        overwrite: replace other files, or models of a repository, that are there.
        threads: of ONNX Runtime while verifying; None: as many as this process may use.
        log: called with each line on the way; by default they go to the logger `opal_deploy`.
        progress: called with an engine builder's steps done, in all, and its phase.

    Returns:
        The files with their verification reports; files that were there already as they would be written are kept.

    Raises:
        MissingExtra: a package that this export needs is not installed.
        ArtifactError: there is no such source, it is damaged, or cannot be converted.
        UsageError: options do not fit, or another file is in the way. Messages name options as the command does.
        VerificationError: outputs differ from the reference by more than the gate allows; nothing is left behind.
    """
    source = Path(source)
    if not source.is_file():
        raise ArtifactError(f"{source}: no such file; expected a checkpoint or an ONNX file of ours")
    for option, value, choices in (
        ("precision", precision, get_args(Precision)),
        ("input", input, get_args(InputKind)),
        ("outputs", outputs, get_args(OutputKind)),
        ("builder", builder, get_args(Builder)),
        ("hardware_compatible", hardware_compatible, get_args(HardwareCompatible)),
        ("top_k", top_k, range(2, 33)),
        ("optimization_level", optimization_level, range(6)),
    ):
        if value is not None and value not in choices:
            raise UsageError(f"{option} {value!r}: expected one of {', '.join(map(str, choices))}")
    kind = model_kind(source)
    targets = [target] if isinstance(target, str) else list(target or [])
    engine_options = {
        "--builder": builder, "--target": targets or None, "--batch": batch, "--workspace": workspace,
        "--rebuild": rebuild or None, "--timing-cache": timing_cache, "--optimization-level": optimization_level,
        "--refit": refit or None, "--version-compatible": version_compatible or None,
        "--hardware-compatible": hardware_compatible, "--strip-weights": strip_weights or None,
        "--verbose": verbose or None,
    }  # fmt: skip
    checkpoint_options = {
        "--distance": distance, "--pooling": pooling, "--cws": cws, "--size": size, "--crop": crop,
        "--classes": classes,
    }  # fmt: skip
    repository = _plan_repository(triton, name, overwrite=overwrite, trt=trt, precision=precision)
    if repository is not None and (kind == "engine" or (kind == "onnx" and precision is None)):
        file_options = {
            "--out": out, "--outputs": outputs, "--top-k": top_k, "--pictures": pictures, "--precision": precision,
            "--calibrate": calibrate, "--input": None if input == "uint8" else input,
        }  # fmt: skip
        if unused := _given({**engine_options, **checkpoint_options, **file_options}):
            raise UsageError(f"{source}: it is served as it is; leave out {unused}")
        return _serve_as_is(source, repository, threads, verify=verify, log=log)
    if kind not in ("checkpoint", "onnx"):
        hint = "; weights to begin training from go to train --weights" if source.suffix == ".safetensors" else ""
        raise UsageError(f"{source}: expected a checkpoint (.pt, .pth) or one of our .onnx files{hint}")
    # without torch where no checkpoint has to be read
    require("onnx", "trt-rtx" if trt and kind == "onnx" else "export", "export")
    require("onnxruntime", "cpu", "export, to verify what it writes,")
    build = BuildOptions(
        batch=parse_batch(str(batch)) if batch is not None else DEFAULT_BATCH,
        workspace=parse_bytes(str(workspace)) if workspace is not None else None,
        timing_cache=_path(timing_cache),
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
    if kind == "onnx" and (given := _given(checkpoint_options)):
        raise UsageError(f"{source}: {given}: fixed in an ONNX file")

    from opal_deploy.export import exporter
    from opal_deploy.export.existing import check_repository
    from opal_deploy.export.onnx_source import OnnxSource
    from opal_deploy.export.options import ExportOptions, plan_targets

    export_source: ExportSource = OnnxSource(source)
    if kind == "checkpoint":
        for package in ("torch", "torchvision", "onnxscript"):
            require(package, "export", "exporting a checkpoint")
        from opal_deploy.export.checkpoint_source import CheckpointSource

        checkpoint = _load_checkpoint(source, _path(classes), distance, pooling, cws, size, crop, log)
        export_source = CheckpointSource(checkpoint, source)
    options = ExportOptions(
        input_kind=input,
        attention=outputs == "attention",
        top_k=(top_k or _TOP_K) if outputs == "topk" else None,
        images=_path(pictures),
        calibrate=_path(calibrate),
        threads=threads,
        verify=verify,
        overwrite=overwrite,
    )
    if trt:
        driver = visible_driver()
        request = EngineRequest(
            choose_engine_targets(builder, targets, driver),
            _engine_folder(source, _path(out)),
            driver,
            build,
            rebuild,
            overwrite,
            on_message=(lambda level, message: log(f"  {level.lower()}: {message}")) if verbose else None,
            on_progress=lambda phase, step, steps: progress(step, steps, phase) if progress else None,
        )
        return exporter.export(export_source, plan_targets(export_source, precision, engines=request), options, log)
    if repository is not None:
        check_repository(repository, export_source, precision or "fp32", options)
    result = exporter.export(export_source, plan_targets(export_source, precision, out=_path(out)), options, log)
    return result if repository is None else replace(result, repository=repository.write(result.path))


def _given(options: dict[str, Any]) -> str:
    """Return the names of the options that have a value."""
    return ", ".join(name for name, value in options.items() if value is not None)


def _path(path: StrPath | None) -> Path | None:
    return None if path is None else Path(path)


def _engine_folder(source: Path, out: Path | None) -> Path:
    if out is None:
        return source.parent
    if out.suffix in (".onnx", ".engine") or out.is_file():
        raise UsageError(f"--out {out}: with --trt a folder is expected; files are named by model, precision and GPU")
    return out


def _load_checkpoint(
    source: Path,
    classes: Path | None,
    distance: Distance | None,
    pooling: Literal["max", "avg"] | None,
    cws: bool | None,
    size: int | tuple[int, int] | None,
    crop: str | None,
    log: Log,
) -> Checkpoint:
    """Load a checkpoint; what the authors' format does not record is taken from the options."""
    from opal_deploy.model import checkpoint as checkpoints
    from opal_deploy.model.authors_checkpoint import Assumptions

    names = checkpoints.read_class_names(classes) if classes else None
    input_size = (size, size) if isinstance(size, int) else size or (224, 224)
    checkpoint = checkpoints.load(
        source, class_names=names, assumptions=Assumptions(distance, pooling, cws, input_size, crop)
    )
    assumed = checkpoint.source.get("assumed")
    if assumed is None and any(value is not None for value in (distance, pooling, cws, size, crop)):
        raise UsageError(
            f"{source}: it records distance, pooling, CWS, size and crop itself; "
            "those options are for the authors' files"
        )
    if assumed is not None:
        settings = ", ".join(f"{key} {value}" for key, value in assumed.items())
        log(f"Assumed, since the authors' format does not record it: {settings}")
    return checkpoint


def _plan_repository(
    folder: StrPath | None, name: str | None, *, overwrite: bool, trt: bool, precision: str | None
) -> Repository | None:
    """Return the repository to write, once it is known that it can be; None without.

    Raises:
        UsageError: models of others have these names, or other options do not go with it.
    """
    if folder is None:
        if name is not None:
            raise UsageError("--name: of a Triton repository; add --triton")
        return None
    if trt:
        raise UsageError("--triton: build the engine first (--trt), then export the .engine with --triton")
    if precision == "bf16":
        raise UsageError("--triton: ONNX Runtime has no bfloat16 convolutions; give fp32 or fp16, or an engine")
    repository = Repository(Path(folder), name or "opal", overwrite=overwrite)
    repository.check()
    return repository


def _serve_as_is(source: Path, repository: Repository, threads: int | None, *, verify: bool, log: Log) -> ExportResult:
    """Write the repository of an ONNX file or an engine as it is.

    An ONNX file's test vectors are run first. An engine needs its GPU for that: its digest is checked when it is
    written, and the rest by the server.

    Raises:
        VerificationError: the file does not reproduce its test vectors.
    """
    if verify and model_kind(source) == "onnx":
        require("onnxruntime", "cpu", "export --triton, to verify what it serves,")
        from opal_deploy.runtime.onnx_session import OnnxSession
        from opal_deploy.runtime.verification import verify_test_vectors

        log(f"Checking {source.name} against its own test vectors")
        session = OnnxSession(source, device="cpu", threads=threads)
        if session.metadata.unverified:
            log(f"NOT VERIFIED: {source.name} was {session.metadata.unverified}")
        verify_test_vectors(session, str(source))
    return ExportResult(source, [], [], repository.write(source))
