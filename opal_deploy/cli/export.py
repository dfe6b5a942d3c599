"""`opal-deploy export`: a checkpoint, or one of our ONNX files, to a verified ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.console import emit_json, say
from opal_deploy.cli.options import parse_size
from opal_deploy.errors import ArtifactError, UsageError, require

if TYPE_CHECKING:
    from opal_deploy.export.onnx_export import Export, ExportOptions


def export(
    source: Annotated[Path, typer.Argument(help="A checkpoint (.pt, .pth), ours or the authors', or our .onnx file.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: beside the source.")] = None,
    precision: Annotated[Literal["fp32", "fp16"], typer.Option(help="Of the body; the head stays float32.")] = "fp32",
    input_kind: Annotated[
        Literal["uint8", "float32"],
        typer.Option("--input", help="uint8 NHWC with normalisation inside, or float32 NCHW already normalised."),
    ] = "uint8",
    outputs: Annotated[
        Literal["attention"] | None, typer.Option(help="Output the attention maps [N, K, H, W] too.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Verify on the photographs of this folder instead of generated pictures.")
    ] = None,
    classes: Annotated[Path | None, typer.Option(help="Class names, one a line; default: those in the source.")] = None,
    distance: Annotated[
        Literal["l1", "l2", "l3", "linf", "kl", "tropical"] | None,
        typer.Option(help="Of an authors' checkpoint, which does not record it; default: l2."),
    ] = None,
    pooling: Annotated[Literal["max", "avg"] | None, typer.Option(help="Likewise; default: max.")] = None,
    cws: Annotated[bool | None, typer.Option("--cws/--no-cws", help="Likewise; default: on.")] = None,
    size: Annotated[str | None, typer.Option(help="Likewise: input size, such as 224 or 224x448.")] = None,
    crop: Annotated[
        Literal["boxes"] | None, typer.Option(help="Likewise: it was trained on pictures cropped to boxes.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of ONNX Runtime while verifying.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report to stdout as JSON.")] = False,
) -> None:
    """Write an ONNX model that outputs logits and evidence, once it was verified.

    The file gets its name only after its outputs were compared with PyTorch's on pictures, in several batch sizes.
    """
    from opal_deploy.runtime.select import CHECKPOINT_SUFFIXES, ONNX_SUFFIX

    if not source.is_file():
        raise ArtifactError(f"{source}: no such file; expected a checkpoint or an ONNX file of ours")
    require("onnx", "export", "opal-deploy export")
    require("onnxruntime", "cpu", "opal-deploy export, to verify what it writes,")
    recorded = {"distance": distance, "pooling": pooling, "cws": cws, "size": size, "crop": crop}
    given = [f"--{name}" for name, value in recorded.items() if value is not None]
    if source.suffix == ONNX_SUFFIX:
        if given or classes:
            raise UsageError(
                f"{source}: {', '.join([*given, *(['--classes'] if classes else [])])}: fixed in an ONNX file"
            )
        from opal_deploy.export.onnx_export import ExportOptions, export_onnx

        options = ExportOptions(out, input_kind, precision, outputs is not None, pictures, threads)
        _tell(export_onnx(source, options, say), as_json)
        return
    if source.suffix not in CHECKPOINT_SUFFIXES:
        raise UsageError(f"{source}: expected a checkpoint (.pt, .pth) or one of our .onnx files")
    for package in ("torch", "torchvision", "onnxscript"):
        require(package, "export", "exporting a checkpoint")
    from opal_deploy.export.onnx_export import ExportOptions

    options = ExportOptions(out, input_kind, precision, outputs is not None, pictures, threads)
    _tell(_from_checkpoint(source, options, classes, distance, pooling, cws, size, crop), as_json)


def _from_checkpoint(
    source: Path,
    options: ExportOptions,
    classes: Path | None,
    distance: Literal["l1", "l2", "l3", "linf", "kl", "tropical"] | None,
    pooling: Literal["max", "avg"] | None,
    cws: bool | None,
    size: str | None,
    crop: str | None,
) -> Export:
    from opal_deploy.export.checkpoint_export import export_checkpoint
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
        say(
            "Assumed, since the authors' format does not record it: "
            + ", ".join(f"{k} {v}" for k, v in assumed.items())
        )
    return export_checkpoint(checkpoint, source, options, say)


def _tell(done: Export, as_json: bool) -> None:
    report, megabytes = done.comparison, done.path.stat().st_size / 1e6
    say(f"Verified on {report.images} pictures: largest differences: logit {report.max_logit:.2g}" + _evidence(done))
    say(f"Wrote {done.path} ({megabytes:.1f} MB, {done.metadata.precision}, evidence {done.metadata.evidence})")
    say(f"Next: opal-deploy infer images/ --explain --model {done.path}")
    if as_json:
        verification = done.metadata.verification
        emit_json({"path": str(done.path), "sha256": done.metadata.file_sha256, "verification": verification})


def _evidence(done: Export) -> str:
    report = done.comparison
    if report.max_cosine is None:
        return ""
    ties = f", {report.cells_tied} tied" if report.cells_tied else ""
    return (
        f", cosine {report.max_cosine:.2g}, score {report.max_score:.2g}; "
        f"{report.cells - report.cells_different} of {report.cells} cells equal{ties}"
    )
