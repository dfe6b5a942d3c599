"""What `export_model` returns: the files that it wrote, with their verification reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.artifact.metadata import Metadata

if TYPE_CHECKING:
    from opal_deploy.export.tensorrt.engine import ExportedEngine
    from opal_deploy.runtime.verification import Comparison
    from opal_deploy.triton.repository import WrittenRepository


@dataclass(frozen=True)
class ExportedOnnx:
    """An ONNX file of an export; `kept` where it was there already, as the same source and options gave it.

    `comparison` with the reference is None where verification was skipped, or the file was kept.
    """

    path: Path
    metadata: Metadata
    comparison: Comparison | None
    kept: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return path, digest and verification report for JSON."""
        metadata = self.metadata
        return {"path": str(self.path), "sha256": metadata.file_sha256, "verification": metadata.verification}


@dataclass(frozen=True)
class ExportResult:
    """The files of one export.

    Attributes:
        source: the file that was exported.
        onnx: ONNX files, none where engines or a repository were made from an ONNX file as it is.
        engines: what was built from the last of them, or from the source.
        repository: the models for Triton; None without.
    """

    source: Path
    onnx: list[ExportedOnnx]
    engines: list[ExportedEngine]
    repository: WrittenRepository | None = None

    @property
    def path(self) -> Path:
        """The ONNX file of the precision that was asked for; the source where it was taken as it is."""
        return self.onnx[-1].path if self.onnx else self.source

    def to_dict(self) -> dict[str, Any]:
        """Return all files for JSON."""
        document: dict[str, Any] = {
            "files": [exported.to_dict() for exported in self.onnx],
            "engines": [engine.to_dict() for engine in self.engines],
        }
        return document if self.repository is None else {**document, **self.repository.to_dict()}
