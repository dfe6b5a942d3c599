"""The files of an export: their names, and descriptions of the written ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from opal_deploy.artifact.engine_file import Sidecar
from opal_deploy.artifact.files import ENGINE_SUFFIX, ONNX_SUFFIX
from opal_deploy.artifact.metadata import Metadata, Precision
from opal_deploy.errors import UsageError
from opal_deploy.runtime.tensorrt import SHORT_NAMES

if TYPE_CHECKING:
    from opal_deploy.export.builder import EngineTarget
    from opal_deploy.export.candidate import ExportSource
    from opal_deploy.runtime.devices import Driver
    from opal_deploy.runtime.verification import Comparison
    from opal_deploy.triton.repository import WrittenRepository
    from opal_deploy.web.site import WrittenSite

# what a file's stem ends in for every precision but fp32
_PRECISION_ENDINGS = tuple(f".{precision}" for precision in get_args(Precision) if precision != "fp32")


@dataclass(frozen=True)
class EngineTargets:
    """The engines to build from one ONNX file: builder and GPU of each, their folder, and this machine's driver."""

    targets: Sequence[EngineTarget]
    folder: Path
    driver: Driver


@dataclass(frozen=True)
class ExportTargets:
    """The files that one export writes: ONNX files by precision, in order, and engines to build from the last of them.

    Without ONNX files, engines are built from the ONNX source itself.
    """

    onnx: Mapping[Precision, Path]
    engines: EngineTargets | None = None


def plan_targets(
    source: ExportSource,
    precision: Precision | None = None,
    *,
    out: Path | None = None,
    engines: EngineTargets | None = None,
) -> ExportTargets:
    """Return the files to write for a source, named by the rule of `onnx_path`.

    A checkpoint that becomes engines is written as fp32 ONNX too. An ONNX file that already has the engines' precision
    is built as it is.

    Args:
        source: the checkpoint or ONNX file.
        precision: precision of the ONNX file or of the engines. None: fp32; for engines the precision of an ONNX
            source that is not fp32, else fp16.
        out: the ONNX file, where no engines are built; None: next to the source.
        engines: engines to build; all files go to their folder.

    Raises:
        UsageError: the source's name would give a file the name of another precision.
    """
    if engines is None:
        precision = precision or "fp32"
        return ExportTargets({precision: out or onnx_path(source.path, precision)})
    own = source.onnx_precision
    precision = precision or (own if own not in (None, "fp32") else "fp16")
    precisions = {} if precision == own else dict.fromkeys([precision] if own else ["fp32", precision])
    return ExportTargets({p: engines.folder / onnx_path(source.path, p).name for p in precisions}, engines)


def onnx_path(source: Path, precision: Precision) -> Path:
    """Return `ckpt.onnx`, or `ckpt.fp16.onnx` for a lower precision, next to `ckpt.pt` or `ckpt.onnx`.

    Raises:
        UsageError: the name of a checkpoint ends like a precision.
    """
    if source.suffix != ONNX_SUFFIX and source.stem.endswith(_PRECISION_ENDINGS):
        raise UsageError(f"{source}: its name ends like a precision, which would name another file; rename it")
    ending = "" if precision == "fp32" else f".{precision}"
    return source.with_name(f"{source.stem}{ending}{ONNX_SUFFIX}")


def engine_name(stem: str, precision: Precision, target: EngineTarget) -> str:
    """Return `ckpt.fp16.sm80.rtx.engine` for the stem `ckpt` or `ckpt.fp16`."""
    for ending in _PRECISION_ENDINGS:
        stem = stem.removesuffix(ending)
    return f"{stem}.{precision}.{target.sm}.{SHORT_NAMES[target.builder]}{ENGINE_SUFFIX}"


@dataclass(frozen=True)
class ExportedOnnx:
    """An exported ONNX file.

    `comparison` is None where verification was skipped, or the file existed, written from the same source with the same
    options, and was kept.
    """

    path: Path
    metadata: Metadata
    comparison: Comparison | None
    kept: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return path, digest and verification for JSON."""
        metadata = self.metadata
        return {"path": str(self.path), "sha256": metadata.file_sha256, "verification": metadata.verification}


@dataclass(frozen=True)
class ExportedEngine:
    """An exported engine; `reused` where the same engine existed already."""

    path: Path
    sidecar: Sidecar
    reused: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the engine's description for JSON."""
        sidecar = self.sidecar
        return {
            "path": str(self.path),
            "sha256": sidecar.engine["sha256"],
            "bytes": sidecar.engine["bytes"],
            **{name: getattr(sidecar, name) for name in ("builder", "target", "options")},
            "seconds": sidecar.built["seconds"],
            "state": sidecar.state,
            "reused": self.reused,
        }


@dataclass(frozen=True)
class ExportResult:
    """The files of one export.

    Attributes:
        source: the file that was exported.
        onnx: ONNX files; none where engines or a repository were made from an ONNX file as it is.
        engines: engines, built from the last ONNX file or from the source.
        repository: the models for Triton; None without.
        site: the folder for browsers; None without.
        files: of a folder for another library; None without.
    """

    source: Path
    onnx: list[ExportedOnnx]
    engines: list[ExportedEngine]
    repository: WrittenRepository | None = None
    site: WrittenSite | None = None
    files: list[Path] | None = None

    @property
    def path(self) -> Path:
        """The ONNX file of the requested precision; the source where it was used as it is."""
        return self.onnx[-1].path if self.onnx else self.source

    def to_dict(self) -> dict[str, Any]:
        """Return all files for JSON."""
        document: dict[str, Any] = {
            "files": [exported.to_dict() for exported in self.onnx],
            "engines": [engine.to_dict() for engine in self.engines],
        }
        written = self.repository or self.site
        return document if written is None else {**document, **written.to_dict()}
