"""Options of an export: which files it writes, and how they are verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from opal_deploy.artifact.files import ONNX_SUFFIX
from opal_deploy.artifact.metadata import InputKind, Precision
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.export.candidate import ExportSource
    from opal_deploy.export.tensorrt.options import EngineRequest

# receives one line of progress for a person
Report = Callable[[str], None]
# what a file name ends in before its suffix, for every precision but fp32
PRECISION_ENDINGS = tuple(f".{precision}" for precision in get_args(Precision) if precision != "fp32")


def no_report(message: str) -> None:
    """Discard a progress message."""


@dataclass(frozen=True)
class ExportOptions:
    """The options of making and verifying ONNX files.

    Attributes:
        input_kind: input of the graph; see `Metadata.input_kind`.
        attention: output the attention maps [N, K, H, W] too.
        top_k: output the k best classes with their evidence instead of all classes and channels; None: output all.
        images: folder of photographs to verify on; None: see `images.choose_images`.
        calibrate: folder of photographs that int8's ranges are measured on; None: the model's training images.
        threads: threads of ONNX Runtime during verification; None: as many as the process may use.
        verify: compare each file with its reference before it gets its name.
        overwrite: replace files that are there; False keeps those that the same source and options gave.
    """

    input_kind: InputKind = "uint8"
    attention: bool = False
    top_k: int | None = None
    images: Path | None = None
    calibrate: Path | None = None
    threads: int | None = None
    verify: bool = True
    overwrite: bool = True


@dataclass(frozen=True)
class ExportTargets:
    """The files that one export writes.

    Attributes:
        onnx: path of each ONNX file by its precision, in the order in which they are made. Empty: engines are built
            from the ONNX source itself.
        engines: engines to build from the last of these files; None for no engines.
    """

    onnx: Mapping[Precision, Path]
    engines: EngineRequest | None = None


def plan_targets(
    source: ExportSource,
    precision: Precision | None = None,
    *,
    out: Path | None = None,
    engines: EngineRequest | None = None,
) -> ExportTargets:
    """Return the files to write for a source, named by the rule of `onnx_path`.

    A checkpoint that becomes engines is written as fp32 ONNX too. An ONNX file that has the engines' precision already
    is built as it is.

    Args:
        source: the checkpoint or ONNX file.
        precision: precision of the ONNX file, or of the engines. None: fp32; for engines the precision of an ONNX
            source that is not fp32, else fp16.
        out: the ONNX file, where no engines are built; None: beside the source.
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
    """Return `ckpt.onnx`, or `ckpt.fp16.onnx` for a lower precision, beside `ckpt.pt` or `ckpt.onnx`.

    Raises:
        UsageError: the name of a checkpoint ends like a precision.
    """
    if source.suffix != ONNX_SUFFIX and source.stem.endswith(PRECISION_ENDINGS):
        raise UsageError(f"{source}: its name ends like a precision of ours, which would name another file; rename it")
    ending = "" if precision == "fp32" else f".{precision}"
    return source.with_name(f"{source.stem}{ending}{ONNX_SUFFIX}")
