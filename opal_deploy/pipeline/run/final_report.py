"""`report.html` of a complete run, made from its records and the overlays on the disk.

So a run that was interrupted and taken up again has the same report as one that ran through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from opal_deploy.errors import StoppedEarly
from opal_deploy.explain.report import Fact, Pictures, ReportWriter, Thumbnail, pictures_for
from opal_deploy.pipeline.run.output import REPORT, RESULTS
from opal_deploy.pipeline.run.resume import read_records

NO_THUMBNAILS: Mapping[int, Thumbnail] = {}


def write_report(
    out: Path,
    facts: Sequence[Fact],
    limit: int,
    thumbnails: Mapping[int, Thumbnail] = NO_THUMBNAILS,
    pictures: Pictures | None = None,
) -> None:
    """Write the report of the run in `out`.

    Args:
        out: the run's folder.
        facts: for the report's head.
        limit: images shown.
        thumbnails: those that are at hand, by the image's number; the others are made from overlays.
        pictures: in the page, or the overlays beside it; None: in the page where they are few.

    Raises:
        StoppedEarly: the disk is full; everything else is there.
    """
    try:
        if pictures is None:
            pictures = pictures_for(min(limit, _count(out / RESULTS)))
        title = "OPAL explanations"
        with ReportWriter(out / REPORT, title=title, facts=facts, limit=limit, pictures=pictures) as report:
            for index, record in enumerate(read_records(out / RESULTS)):
                name = record.get("overlay")
                overlay: bytes | None = thumbnails.get(index)
                if overlay is None and name is not None and report.wants_pictures:
                    overlay = _overlay(out / name)
                report.add(record, overlay)
    except OSError as error:
        raise StoppedEarly(
            f"the report cannot be written ({error.strerror or error}); make room and run again"
        ) from None


def _count(path: Path) -> int:
    """Lines of a file."""
    with path.open("rb") as stream:
        return sum(part.count(b"\n") for part in iter(lambda: stream.read(1 << 20), b""))


def _overlay(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        # somebody took it away; the card says that there is no picture
        return None
