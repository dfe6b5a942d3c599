"""Files that are in the way of an export, found before any work is done.

A file that the same checkpoint and options gave is kept as it is: they give the same ONNX bytes again, and an engine's
builder, which does not, need not run again. Anything else is replaced only where that was asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import check_engine
from opal_deploy.artifact.metadata import Metadata, Precision
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.export.candidate import ExportSource
from opal_deploy.export.options import ExportOptions, ExportTargets
from opal_deploy.export.tensorrt.engine import engine_name
from opal_deploy.export.tensorrt.options import EngineRequest
from opal_deploy.triton.repository import Repository


def find_kept_files(source: ExportSource, targets: ExportTargets, options: ExportOptions) -> dict[Precision, Metadata]:
    """Return the metadata of ONNX files that are there already as this export would write them.

    Raises:
        UsageError: another file is in the way of an ONNX file or an engine, and `options.overwrite` is not set.
    """
    if options.overwrite:
        return {}
    kept = {}
    for precision, path in targets.onnx.items():
        if path.exists():
            try:
                metadata = onnx_file.read_metadata(path)
                onnx_file.check_digest(path, metadata)
            except ArtifactError:
                raise _in_the_way(path, "no file of ours, or a damaged one") from None
            _check_same(path, metadata, source, precision, options)
            kept[precision] = metadata
    if targets.engines is not None and not targets.engines.rebuild and len(kept) < len(targets.onnx):
        *_, (precision, path) = targets.onnx.items()
        _check_engines(targets.engines, path, source, precision, options)
    return kept


def _check_engines(
    request: EngineRequest, path: Path, source: ExportSource, precision: Precision, options: ExportOptions
) -> None:
    """Check the engines of an ONNX file that is not there; where it is, its graph tells when they are built."""
    for target in request.targets:
        engine = request.folder / engine_name(path.stem, precision, target)
        if not engine.exists():
            continue
        try:
            sidecar = check_engine(engine)
        except ArtifactError:
            raise _in_the_way(engine, "no engine of ours, or a damaged one") from None
        _check_same(engine, sidecar.metadata, source, precision, options)
        if sidecar.options != request.build.to_dict() or sidecar.builder["name"] != target.builder:
            raise _in_the_way(engine, "built with other options")


def check_repository(
    repository: Repository, source: ExportSource, precision: Precision, options: ExportOptions
) -> None:
    """Check that models in a Triton repository may stay or be replaced, before their file is exported.

    Raises:
        UsageError: they are there, of another source or other options, and `repository.overwrite` is not set.
    """
    metadata = None if repository.overwrite else repository.read_existing()
    if metadata is not None:
        path = repository.folder / repository.name
        _check_same(path, metadata, source, precision, options, advice="--name")


def _check_same(
    path: Path,
    metadata: Metadata,
    source: ExportSource,
    precision: Precision,
    options: ExportOptions,
    advice: str = "--out",
) -> None:
    """Raise UsageError unless the file is what the source gives with these options."""
    found, expected = _describe_file(metadata), _describe_request(source, precision, options)
    if expected["checkpoint"] is not None and found == expected:
        return
    checkpoint = f"of {metadata.checkpoint_name} (sha256 {str(found['checkpoint'])[:12]})"
    if found["checkpoint"] != expected["checkpoint"]:
        other = f"{checkpoint}, another checkpoint than this one ({str(expected['checkpoint'])[:12]})"
        raise _in_the_way(path, other, advice)
    others = ", ".join(name for name in found if found[name] != expected[name])
    raise _in_the_way(path, f"{checkpoint}, the same checkpoint, exported with other {others or 'weights'}", advice)


def _in_the_way(path: Path, what: str, advice: str = "--out") -> UsageError:
    return UsageError(f"{path}: it is there already, {what}; replace it with --overwrite, or give another {advice}")


def _describe_file(metadata: Metadata) -> dict[str, Any]:
    exporter = metadata.exporter
    return {
        **_describe_origin(metadata),
        "precision": metadata.precision,
        "input": metadata.input_kind,
        "outputs": ["attention" in metadata.outputs, metadata.top_k],
        "pictures": exporter.get("pictures"),
        "calibration images": exporter.get("calibrate"),
        "verification": not metadata.unverified,
        "versions": [exporter.get(name) for name in ("opal_deploy", "onnx", "onnxruntime")],
    }


def _describe_request(source: ExportSource, precision: Precision, options: ExportOptions) -> dict[str, Any]:
    origin = source.origin
    return {
        **_describe_origin(origin),
        "precision": precision,
        "input": options.input_kind,
        "outputs": [options.attention, options.top_k],
        "pictures": _as_text(options.images),
        "calibration images": _as_text(options.calibrate),
        "verification": options.verify and not origin.unverified,
        "versions": [__version__, onnx.__version__, onnxruntime.__version__],
    }


def _describe_origin(metadata: Metadata) -> dict[str, Any]:
    """Return what a file owes to its checkpoint: digest, assumed settings, class names, PyTorch's version."""
    return {
        "checkpoint": metadata.source.get("sha256"),
        "assumptions": metadata.source.get("assumed"),
        "class names": list(metadata.class_names),
        "PyTorch": metadata.exporter.get("torch"),
    }


def describe_options(options: ExportOptions) -> dict[str, str]:
    """Return the folders of images that were named, for the file's `exporter`."""
    folders = {"pictures": options.images, "calibrate": options.calibrate}
    return {name: str(folder) for name, folder in folders.items() if folder is not None}


def _as_text(folder: Path | None) -> str | None:
    return None if folder is None else str(folder)
