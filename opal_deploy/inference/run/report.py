"""report.html of a run, written after the last record.

It is made from the records and the overlays on disk, so that a resumed run has the same report as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opal_deploy.artifact.measurements import EffectiveField, describe_evaluation
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ImageError, StoppedEarly
from opal_deploy.inference.run.results import read_records
from opal_deploy.inference.run_files import REPORT, RESULTS
from opal_deploy.logs import one_line
from opal_deploy.records.names import find_common_folder
from opal_deploy.storage.files import RemoteFile
from opal_deploy.visualization.report import REPORT_LIMIT, Fact, ImageMode, ReportWriter, choose_image_mode


@dataclass(frozen=True)
class ReportOptions:
    """The content of report.html.

    Attributes:
        facts: (name, value) pairs about the run, below the head of the page.
        limit: images shown; all are counted.
        images: `embed` overlays in the page or show the `files` beside it; None: embed if there are few.
        evidence: what was measured of the model's evidence, for the head of the page.
        field: the model's effective receptive field, shown on demand; None if it is unknown.
        draw_field: always draw it on the overlays.
    """

    facts: tuple[Fact, ...] = ()
    limit: int = REPORT_LIMIT
    images: ImageMode | None = None
    evidence: str = ""
    field: EffectiveField | None = None
    draw_field: bool = False


def report_facts(path: Path, metadata: Metadata, runtime: str, command: str) -> tuple[Fact, ...]:
    """Return the (name, value) pairs at the head of the report."""
    head = [
        ("Model", f"{path.name}: {metadata.backbone}, {metadata.num_classes} classes, "
         f"{metadata.prototypes_per_class} slots per class, distance {metadata.distance}"),
        ("Runtime", runtime),
    ]  # fmt: skip
    if metadata.file_sha256.strip("0"):
        head.append(("Model digest", metadata.file_sha256))
    if metadata.source.get("sha256"):
        head.append(("Checkpoint", f"{metadata.source.get('file')}, sha256 {metadata.source['sha256']}"))
    if metadata.unverified:
        head.append(("Not verified", metadata.unverified))
    if metadata.verification.get("reference"):
        head.append(
            ("Verified", f"against {metadata.verification['reference']} on {metadata.verification['image_set']}")
        )
    return (*head, ("Command", command))


def describe_evidence(path: Path, metadata: Metadata) -> str:
    """Return what was measured of the model's evidence in one line; empty if it is not single cells."""
    if metadata.evidence != "exact":
        return ""
    # a file that lists its best classes alone cannot be measured itself
    export_of = None if metadata.top_k is None else metadata.checkpoint_name
    return one_line(describe_evaluation(metadata.evaluation, path, metadata.receptive_field, export_of=export_of))


def write_report(
    out: Path, options: ReportOptions, thumbnails: Mapping[int, bytes], drawings_out: Path | RemoteFile | None = None
) -> None:
    """Write report.html of a run.

    Args:
        out: the run directory.
        options: the content.
        thumbnails: those in memory; the others are made from the overlays.
        drawings_out: the run directory, or its URL, that holds the overlays, if not `out`.

    Raises:
        StoppedEarly: the disk is full; everything else was written.
    """
    try:
        images = options.images
        if images is None:
            images = choose_image_mode(min(options.limit, _count_lines(out / RESULTS)))
        with ReportWriter(
            out / REPORT,
            title="OPAL explanations",
            facts=options.facts,
            limit=options.limit,
            image_mode=images,
            evidence=options.evidence,
            field=None if options.draw_field else options.field,
            folder=find_common_folder(record["image"] or "" for record in read_records(out / RESULTS)),
        ) as writer:
            for index, record in enumerate(read_records(out / RESULTS)):
                name = record.get("overlay")
                overlay: bytes | None = thumbnails.get(index)
                if overlay is None and name is not None and writer.embeds_images:
                    overlay = _read_overlay(drawings_out or out, name)
                writer.add(record, overlay)
    except OSError as error:
        raise StoppedEarly(
            f"the report cannot be written ({error.strerror or error}); make room and run again"
        ) from None


def _count_lines(path: Path) -> int:
    with path.open("rb") as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))


def _read_overlay(out: Path | RemoteFile, name: str) -> bytes | None:
    try:
        if isinstance(out, Path):
            return (out / name).read_bytes()
        with out.child(name).open() as stream:
            return stream.read()
    except (OSError, ImageError):
        # it was taken away; the card says that there is no image
        return None
