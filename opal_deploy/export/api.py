"""The public functions that export, and `run_export`, which `opal-deploy export` calls."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from opal_deploy.api.model import Model
from opal_deploy.api.model import load as load_model
from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.files import ONNX_SUFFIX, model_kind
from opal_deploy.artifact.metadata import METADATA_KEY
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.export.options import (
    CheckpointOptions,
    EngineExportOptions,
    ExportOptions,
    OnnxOptions,
    TritonOptions,
    WebOptions,
)
from opal_deploy.export.plan import EngineTargets, ExportResult, check_options, plan_export
from opal_deploy.options import RuntimeName, StrPath, keywords
from opal_deploy.records.decision import Decision
from opal_deploy.runtime.verification import verify_file
from opal_deploy.triton.repository import Repository, WrittenRepository
from opal_deploy.web.site import Site, WrittenSite

if TYPE_CHECKING:
    from opal_deploy.export.checkpoint_source import CheckpointSource


@keywords(OnnxOptions)
def export_model(source: StrPath | Any, options: OnnxOptions) -> ExportResult:
    """Export a checkpoint, another tool's classifier, or an exported file in another precision to a verified ONNX file.

    Does what `opal-deploy export` does; prints nothing. A file gets its name only after its outputs were compared with
    the reference's.

    Args:
        source: a checkpoint, ours or the authors', an exported ONNX file, or somebody's classifier: its ONNX file, or a
            `torch.nn.Module`.

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


def load(
    path: StrPath | None = None, *, device: str = "auto", threads: int | None = None, runtime: RuntimeName = "auto",
    classes: StrPath | Sequence[str] | None = None, preprocess: str | None = None,
) -> Model:  # fmt: skip
    """Load a model: a file of `opal-deploy export`, a checkpoint (which needs torch), or somebody's ONNX classifier.

    Args:
        path: the model file, or the folder of one; None: the model that `opal-deploy infer` finds without --model.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, or `0,1` for several GPUs.
        threads: CPU threads of the runtime; None: all that this process may use.
        runtime: `openvino` instead of ONNX Runtime for an ONNX file; `auto` decides by the file.
        classes, preprocess: of a classifier, as in `export_model`, whose errors are raised. It is exported to a
            temporary file that lives as long as the model.

    Raises:
        ArtifactError: the file is missing, damaged, or not a model.
        MissingExtra: the runtime is not installed. UsageError: the device does not exist, or the runtime
            does not run such a file.
    """
    open_model = partial(load_model, device=device, threads=threads, runtime=runtime)
    if path is None or Path(path).suffix != ONNX_SUFFIX or not is_classifier(Path(path)):
        if classes is not None or preprocess is not None:
            raise UsageError(f"{path}: states its classes and preprocessing; leave out classes and preprocess")
        return open_model(path)
    folder = tempfile.mkdtemp(prefix="opal-")
    out = Path(folder) / f"{Path(path).stem}.opal.onnx"
    options = ExportOptions(classes=classes, preprocess=preprocess, threads=threads, out=out, log=lambda line: None)
    try:
        model = open_model(run_export(path, options).path)
    except BaseException:
        shutil.rmtree(folder)
        raise
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def run_export(source: StrPath | Any, options: ExportOptions) -> ExportResult:
    """Do what `opal-deploy export` does: write the ONNX file of `export_model`, and what the options make from it."""
    if not isinstance(source, str | os.PathLike):
        from opal_deploy.export.classifier import export_module

        return export_module(source, options, Path(type(source).__name__.lower()))
    path = Path(source)
    # a folder as Hugging Face's tools write it
    path = path / "model.onnx" if path.is_dir() else path
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; expected a checkpoint or an exported ONNX file")
    # PIP-Net's files have no suffix
    kind = "checkpoint" if options.arch is not None else model_kind(path)
    destination = _open_destination(options)
    is_others = kind == "onnx" and is_classifier(path)
    as_is = (kind == "onnx" and destination is not None and options.precision is None and not is_others) or (
        kind == "engine" and isinstance(destination, Repository)
    )
    check_options(path, kind, options, as_is=as_is, is_classifier=is_others)
    if destination is not None:
        destination.check()
    if as_is:
        # the server, which has an engine's GPU, checks an engine
        if kind == "onnx":
            verify_file(path, verify=options.verify, threads=options.threads, log=options.log)
        result = ExportResult(path, [], [])
    else:
        result = _export(path, kind, options)
    if isinstance(destination, Repository):
        return replace(result, repository=destination.write(result.path))
    return result if destination is None else replace(result, site=destination.write(result.path))


def _open_destination(options: ExportOptions) -> Repository | Site | None:
    """Return what is to be made from the ONNX file; None for the file itself or engines."""
    if options.triton is not None:
        return Repository(Path(options.triton), options.name, overwrite=options.overwrite)
    if options.web is None:
        return None
    ort_web, examples = (None if path is None else Path(path) for path in (options.ort_web, options.examples))
    return Site(
        Path(options.web), ort_web, examples, Decision.of(options), webgpu=options.webgpu,
        overwrite=options.overwrite,
    )  # fmt: skip


def is_classifier(path: Path) -> bool:
    """Return whether an ONNX file was exported by somebody else."""
    with suppress(ArtifactError):
        return METADATA_KEY not in onnx_file.read_header(path).properties
    return False


def _export(path: Path, kind: str | None, options: ExportOptions) -> ExportResult:
    # nothing of torch where no checkpoint has to be read
    require("onnx", "trt-rtx" if options.trt and kind == "onnx" else "export", "export")
    require("onnxruntime", "cpu", "export, to verify what it writes,")
    if (options.arch or "").partition(":")[0] in ("timm", "torchvision"):
        from opal_deploy.export.classifier import export_state_dict

        return export_state_dict(path, options)
    if kind == "onnx" and is_classifier(path):
        from opal_deploy.export.classifier import export_classifier

        return export_classifier(path, options)
    from opal_deploy.export.exporter import export
    from opal_deploy.export.onnx_source import OnnxSource

    source = OnnxSource(path) if kind == "onnx" else _open_checkpoint(path, options)
    return export(plan_export(source, options, _choose_engines(path, options) if options.trt else None))


def _open_checkpoint(path: Path, options: ExportOptions) -> CheckpointSource:
    """Return the source; options supply the settings that an authors' checkpoint does not record."""
    for package in ("torch", "torchvision", "onnxscript"):
        require(package, "export", "exporting a checkpoint")
    from opal_deploy.export.checkpoint_source import CheckpointSource
    from opal_deploy.model import checkpoint as checkpoints
    from opal_deploy.model.authors_checkpoint import Assumptions

    names = checkpoints.read_class_names(Path(cast(StrPath, options.classes))) if options.classes else None
    size = options.input_size or (224, 224)
    assumptions = Assumptions(options.distance, options.pooling, options.cws, size, options.crop)
    checkpoint = checkpoints.load(path, class_names=names, assumptions=assumptions, arch=options.arch)
    assumed = checkpoint.source.get("assumed")
    if assumed is not None:
        settings = ", ".join(f"{key} {value}" for key, value in assumed.items())
        options.log(f"Assumed, since the checkpoint does not record it: {settings}")
    elif changed := replace(options, classes=None).changed(CheckpointOptions):
        raise UsageError(f"{path}: {changed}: recorded in the checkpoint; only for the authors' checkpoints")
    if not options.ood_score:
        checkpoint.network.neighbours = None
    patches = checkpoint.patches
    checkpoint.patches = patches.fit() if options.patches and patches else None
    return CheckpointSource(checkpoint, path)


def _choose_engines(source: Path, options: ExportOptions) -> EngineTargets:
    from opal_deploy.export.builder import choose_engine_targets
    from opal_deploy.runtime.cuda import visible_driver

    folder = source.parent if options.out is None else Path(options.out)
    if folder.suffix in (".onnx", ".engine") or folder.is_file():
        raise UsageError(f"--out {folder}: expected a folder with --trt; files are named by model, precision and GPU")
    driver = visible_driver()
    return EngineTargets(choose_engine_targets(options, driver), folder, driver)
