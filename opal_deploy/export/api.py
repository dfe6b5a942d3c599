"""The public functions that export, and `run_export`, which `opal-deploy export` calls."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.files import model_kind
from opal_deploy.artifact.metadata import check_fixed_size
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.export.files import EngineTargets, ExportResult, plan_targets
from opal_deploy.export.options import (
    CheckpointOptions,
    CommonOptions,
    EngineExportOptions,
    EngineOptions,
    ExportOptions,
    OnnxOptions,
    TritonOptions,
    WebOptions,
)
from opal_deploy.logs import WarningLine
from opal_deploy.options import StrPath, flag_of, keywords
from opal_deploy.records.decision import Decision
from opal_deploy.triton.repository import Repository, WrittenRepository
from opal_deploy.web.site import Site, WrittenSite

if TYPE_CHECKING:
    from opal_deploy.export.candidate import ExportSource

_COMMON = {field.name for field in fields(CommonOptions)}
_SITE_ONLY = [field.name for field in fields(WebOptions) if field.name not in _COMMON]
# options that apply where a file is served or copied as it is
_SERVING = ("triton", "name", "web", *_SITE_ONLY, *_COMMON)
_COPYING = ("mlflow", "overwrite", "verify", "threads")


@keywords(OnnxOptions)
def export_model(source: StrPath, options: OnnxOptions) -> ExportResult:
    """Export a checkpoint, or an exported ONNX file in another precision, to a verified ONNX file.

    Does what `opal-deploy export` does; prints nothing. A file gets its name only after its outputs were compared with
    the reference's.

    Args:
        source: a checkpoint, ours or the authors', or an exported ONNX file.

    Returns:
        The file with its verification. An identical existing file is kept.

    Raises:
        MissingExtra: a package that this export needs is not installed.
        ArtifactError: the source is missing, damaged, or cannot be converted.
        UsageError: options do not fit together or the source, or another file is in the way.
        VerificationError: outputs differ from the reference by more than the gate allows; nothing is left behind.
    """
    return run_export(source, ExportOptions(**options.keywords()))


@keywords(EngineExportOptions)
def export_engines(source: StrPath, options: EngineExportOptions) -> ExportResult:
    """Export a checkpoint or an ONNX file to TensorRT engines, as `opal-deploy export --trt` does.

    Args:
        source: a checkpoint, whose ONNX files are written too, or an exported ONNX file.

    Returns:
        The engines and the ONNX files that were written, or existed already.

    Errors are those of `export_model`.
    """
    return run_export(source, ExportOptions(**options.keywords(), trt=True))


@keywords(TritonOptions)
def export_triton(source: StrPath, folder: StrPath, options: TritonOptions) -> WrittenRepository:
    """Write a Triton model repository, as `opal-deploy export --triton` does.

    Args:
        source: an exported ONNX file or an engine, or a checkpoint, which is exported first.
        folder: the repository; other models in it stay.

    Errors are those of `export_model`.
    """
    repository = run_export(source, ExportOptions(**options.keywords(), triton=folder)).repository
    assert repository is not None
    return repository


@keywords(WebOptions)
def export_web(source: StrPath, folder: StrPath, options: WebOptions) -> WrittenSite:
    """Write a page that runs the model in the visitor's browser, as `opal-deploy export --web` does.

    Args:
        source: an exported ONNX file, or a checkpoint, which is exported first.
        folder: the page's folder: new, empty, or an earlier page's.

    Errors are those of `export_model`.
    """
    site = run_export(source, ExportOptions(**options.keywords(), web=folder)).site
    assert site is not None
    return site


@keywords(OnnxOptions)
def export_hugging_face(source: StrPath, folder: StrPath, options: OnnxOptions) -> list[Path]:
    """Write the folder that Hugging Face's libraries load, as `opal-deploy export --hf` does; return its files.

    Args:
        source: a checkpoint.
        folder: new, or an earlier one's with `overwrite`.

    Errors are those of `export_model`.
    """
    files = run_export(source, ExportOptions(**options.keywords(), hf=folder)).files
    assert files is not None
    return files


def run_export(source: StrPath, options: ExportOptions) -> ExportResult:
    """Do what `opal-deploy export` does: write the ONNX file of `export_model`, and what the options make from it."""
    source = Path(source)
    if not source.is_file():
        raise ArtifactError(f"{source}: no such file; expected a checkpoint or an exported ONNX file")
    # PIP-Net's files have no suffix
    kind = "checkpoint" if options.arch is not None else model_kind(source)
    if options.hf is not None or options.mlflow is not None:
        return _export_folder(source, kind, options)
    repository, site = _open_repository(options), _open_site(options)
    target = repository or site
    as_is = (kind == "onnx" and options.precision is None) or (kind == "engine" and repository is not None)
    if target is not None and as_is:
        return _serve_as_is(source, target, options)
    if kind not in ("checkpoint", "onnx"):
        hint = "; pretrained weights go to train --weights" if source.suffix == ".safetensors" else ""
        raise UsageError(f"{source}: expected a checkpoint (.pt, .pth) or an exported .onnx file{hint}")
    # nothing of torch where no checkpoint has to be read
    require("onnx", "trt-rtx" if options.trt and kind == "onnx" else "export", "export")
    require("onnxruntime", "cpu", "export, to verify what it writes,")
    _check_options(source, options)
    from opal_deploy.export.exporter import export

    export_source = _open_source(source, options)
    if options.trt:
        check_fixed_size(export_source.origin, str(source), "TensorRT")
        targets = plan_targets(export_source, options.precision, engines=_choose_engines(source, options))
        return export(export_source, targets, options)
    if repository is not None:
        check_fixed_size(export_source.origin, str(source), "Triton")
    out = None if options.out is None else Path(options.out)
    result = export(export_source, plan_targets(export_source, options.precision, out=out), options)
    return result if target is None else _write_target(result, target)


def _export_folder(source: Path, kind: str | None, options: ExportOptions) -> ExportResult:
    """Export a model into a folder for another library, and return the result with the folder's files."""
    from opal_deploy.export.folders import OWN
    from opal_deploy.export.hugging_face import MODEL, HuggingFaceFolder
    from opal_deploy.export.mlflow_folder import MlflowFolder

    given = [
        name for name in ("hf", "mlflow", "trt", "triton", "web", "out") if getattr(options, name) not in (None, False)
    ]
    if len(given) > 1:
        raise UsageError(f"{', '.join(map(flag_of, given))}: a folder by itself; give one of them")
    folder: HuggingFaceFolder | MlflowFolder
    if options.hf is not None:
        if kind != "checkpoint":
            raise UsageError(f"{source}: --hf takes a checkpoint (.pt, .pth), since the graph's input differs")
        folder = HuggingFaceFolder(Path(options.hf), options.overwrite)
    else:
        folder = MlflowFolder(Path(options.mlflow or ""), options.overwrite)
    folder.check()
    as_is = kind == "onnx" and options.precision is None
    if as_is:
        if unused := options.changed(but=_COPYING):
            raise UsageError(f"{source}: copied as it is; leave out {unused}")
        # before there is a folder, which a refused file would leave empty
        _check_as_is(source, options)
    own = replace(options, hf=None, mlflow=None, out=folder.folder / OWN)
    if options.hf is not None:
        (folder.folder / MODEL).parent.mkdir(parents=True, exist_ok=True)
        run_export(source, replace(own, out=folder.folder / MODEL, input="float32"))
    folder.folder.mkdir(parents=True, exist_ok=True)
    if as_is:
        shutil.copyfile(source, folder.folder / OWN)
        result = ExportResult(source, [], [])
    else:
        result = run_export(source, own)
    return replace(result, files=folder.write())


def _write_target(result: ExportResult, target: Repository | Site) -> ExportResult:
    """Return the result with the repository or site made from its file."""
    if isinstance(target, Site):
        return replace(result, site=target.write(result.path))
    return replace(result, repository=target.write(result.path))


def _check_options(source: Path, options: ExportOptions) -> None:
    if not options.trt and (changed := options.changed(EngineOptions)):
        raise UsageError(f"{changed}: only for engines; add --trt")
    if options.top_k != ExportOptions().top_k and options.outputs != "topk":
        raise UsageError("--top-k: only for --outputs topk; add that")
    opal = [name for name in ("distance", "pooling", "cws") if getattr(options, name) is not None]
    if options.arch is not None and opal:
        raise UsageError(f"{', '.join(map(flag_of, opal))}: of OPAL's head, but --arch names another; leave it out")
    if options.precision != "int8" and options.calibrate is not None:
        raise UsageError("--calibrate: only int8 is calibrated; add --precision int8")
    if options.input == "image" and (options.trt or options.triton is not None):
        raise UsageError("--input image: TensorRT and Triton take images of one size; leave it out")
    if options.arch is None and model_kind(source) == "onnx" and (changed := options.changed(CheckpointOptions)):
        raise UsageError(f"{source}: {changed}: fixed in an ONNX file")


def _open_source(source: Path, options: ExportOptions) -> ExportSource:
    """Return the source; options supply the settings that an authors' checkpoint does not record."""
    if options.arch is None and model_kind(source) == "onnx":
        from opal_deploy.export.onnx_source import OnnxSource

        return OnnxSource(source)
    for package in ("torch", "torchvision", "onnxscript"):
        require(package, "export", "exporting a checkpoint")
    from opal_deploy.export.checkpoint_source import CheckpointSource
    from opal_deploy.model import checkpoint as checkpoints
    from opal_deploy.model.authors_checkpoint import Assumptions

    names = checkpoints.read_class_names(Path(options.classes)) if options.classes else None
    size = (options.size, options.size) if isinstance(options.size, int) else options.size or (224, 224)
    assumptions = Assumptions(options.distance, options.pooling, options.cws, size, options.crop)
    checkpoint = checkpoints.load(source, class_names=names, assumptions=assumptions, arch=options.arch)
    assumed = checkpoint.source.get("assumed")
    if assumed is not None:
        settings = ", ".join(f"{key} {value}" for key, value in assumed.items())
        options.log(f"Assumed, since the checkpoint does not record it: {settings}")
    elif changed := replace(options, classes=None).changed(CheckpointOptions):
        raise UsageError(f"{source}: {changed}: recorded in the checkpoint; only for the authors' checkpoints")
    if not options.ood_score:
        checkpoint.network.neighbours = None
    return CheckpointSource(checkpoint, source)


def _choose_engines(source: Path, options: ExportOptions) -> EngineTargets:
    from opal_deploy.export.builder import choose_engine_targets
    from opal_deploy.runtime.cuda import visible_driver

    folder = source.parent if options.out is None else Path(options.out)
    if folder.suffix in (".onnx", ".engine") or folder.is_file():
        raise UsageError(f"--out {folder}: expected a folder with --trt; files are named by model, precision and GPU")
    driver = visible_driver()
    return EngineTargets(choose_engine_targets(options, driver), folder, driver)


def _open_repository(options: ExportOptions) -> Repository | None:
    """Return the repository after checking that it can be written; None without --triton.

    Raises:
        UsageError: it holds models of these names that are not ours, or other options do not fit.
    """
    if options.triton is None:
        if options.name != ExportOptions().name:
            raise UsageError("--name: only for a Triton repository; add --triton")
        return None
    if options.trt:
        raise UsageError("--triton: build the engine first (--trt), then export the .engine with --triton")
    if options.precision == "bf16":
        raise UsageError("--triton: ONNX Runtime has no bfloat16 convolutions; use fp32 or fp16, or an engine")
    repository = Repository(Path(options.triton), options.name, overwrite=options.overwrite)
    repository.check()
    return repository


def _open_site(options: ExportOptions) -> Site | None:
    """Return the site after checking that it can be written; None without --web.

    Raises:
        UsageError: the folder holds something else, ONNX Runtime Web is missing, or other options do not fit.
    """
    if options.web is None:
        if given := options.changed(names=_SITE_ONLY):
            raise UsageError(f"{given}: only for a site; add --web")
        return None
    if options.trt or options.triton is not None:
        raise UsageError("--web: writes only a site; leave out --trt and --triton")
    if options.precision not in (None, "fp32") or options.input != "uint8" or options.outputs == "topk":
        raise UsageError("--web: browsers run fp32 files with uint8 input and all outputs; leave out other settings")
    ort_web, examples, atlas = (
        None if path is None else Path(path) for path in (options.ort_web, options.examples, options.atlas)
    )
    site = Site(
        Path(options.web), ort_web, examples, atlas, Decision.of(options), webgpu=options.webgpu,
        overwrite=options.overwrite,
    )  # fmt: skip
    site.check()
    return site


def _serve_as_is(source: Path, target: Repository | Site, options: ExportOptions) -> ExportResult:
    """Write the repository or site of an ONNX file, or the repository of an engine, as it is.

    An ONNX file's test vectors run first. An engine's digest is checked when it is written; the server, which has its
    GPU, checks the rest.

    Raises:
        UsageError: options that would change the file.
        VerificationError: the file does not reproduce its test vectors.
    """
    if unused := options.changed(but=_SERVING):
        raise UsageError(f"{source}: served as it is; leave out {unused}")
    if model_kind(source) == "onnx":
        _check_as_is(source, options)
    return _write_target(ExportResult(source, [], []), target)


def _check_as_is(source: Path, options: ExportOptions) -> None:
    """Run the test vectors of an ONNX file that is used as it is, and say if it was never verified."""
    if not options.verify:
        onnx_file.check_digest(source, onnx_file.read_metadata(source))
        return
    require("onnxruntime", "cpu", "export, to verify what it copies,")
    from opal_deploy.runtime.select import open_sessions
    from opal_deploy.runtime.verification import verify_test_vectors

    options.log(f"Checking {source.name} against its own test vectors")
    (session,) = open_sessions(source, device="cpu", threads=options.threads)
    if session.metadata.unverified:
        options.log(WarningLine(f"NOT VERIFIED: {source.name} was {session.metadata.unverified}"))
    verify_test_vectors(session, str(source))
