"""What `infer` tells people: in the report's head, in summary.json, and on the terminal."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.cli.console import one_line, print_message
from opal_deploy.errors import UsageError
from opal_deploy.inference.run.directory import SUMMARY, RunDirectory
from opal_deploy.inference.run.image_files import SHEETS
from opal_deploy.inference.run.results import REPORT, RESULTS, read_records
from opal_deploy.inference.run.run import RunOptions
from opal_deploy.inference.run.summary import Accuracy, Summary
from opal_deploy.inference.sources.items import Skipped
from opal_deploy.records.tables import TABLES, Format, write_table
from opal_deploy.runtime.session import Session


def facts(path: Path, metadata: Metadata, sessions: Sequence[Session]) -> list[tuple[str, str]]:
    """The report's head: (name, value) pairs."""
    head = [
        ("Model", f"{path.name}: {metadata.backbone}, {metadata.num_classes} classes, "
         f"{metadata.prototypes_per_class} slots a class, distance {metadata.distance}"),
        ("Runtime", runtime(sessions)),
    ]  # fmt: skip
    if metadata.file_sha256.strip("0"):
        head.append(("Model digest", metadata.file_sha256))
    if metadata.source.get("sha256"):
        head.append(("Checkpoint", f"{metadata.source.get('file')}, sha256 {metadata.source['sha256']}"))
    if metadata.unverified:
        head.append(("Not verified", metadata.unverified))
    if metadata.verification.get("reference"):
        head.append(
            ("Verified", f"against {metadata.verification['reference']} on {metadata.verification['pictures']}")
        )
    return [*head, ("Command", command())]


def about(identity: Mapping[str, Any], sessions: Sequence[Session]) -> dict[str, object]:
    """What summary.json says beside its counts."""
    return {"model": identity["model"], "runtime": runtime(sessions), "command": command(short=True)}


def runtime(sessions: Sequence[Session]) -> str:
    """Engines and devices."""
    return "; ".join(session.description for session in sessions)


def command(*, short: bool = False) -> str:
    """This call, as a shell takes it; `short`: absolute paths as their last part, which names no one's home."""
    arguments = sys.argv[1:]
    if short:
        arguments = [_short(argument) for argument in arguments]
    return shlex.join([Path(sys.argv[0]).name, *arguments])


def _short(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    return option + equals + (Path(value).name if os.path.isabs(value) else value)


def how_to_resume() -> str:
    """What to type, which is the same call again unless that would begin anew."""
    anew = {"--overwrite", "--no-resume"}
    if anew.isdisjoint(sys.argv):
        return f"the same command resumes: {command()}"
    name, *arguments = sys.argv
    return f"resume with: {shlex.join([Path(name).name, *(a for a in arguments if a not in anew)])}"


def note(summary: Summary) -> str:
    """Beside the progress bar."""
    failed = summary.statuses["error"]
    return f"{failed} failed" if failed else ""


def note_end(folder: RunDirectory, summary: Summary, about: Mapping[str, object], stopped: str) -> None:
    """Write summary.json of a run that ended early, if there is room for it."""
    with contextlib.suppress(UsageError):
        folder.end(summary, about, stopped)


def tell(summary: Summary, skipped: Skipped, out: Path, job: RunOptions) -> None:
    """What came of a run."""
    rate = f", {summary.rate:.1f} images/s" if summary.rate else ""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items()))
    before = f" ({summary.kept} of them before)" if summary.kept else ""
    print_message(f"{summary.total} images{before} in {summary.seconds:.1f} s{rate}: {counts or 'nothing to do'}")
    for code, count in summary.errors.most_common():
        print_message(f"  {code}: {count}")
    if summary.accuracy is not None:
        _tell_accuracy(summary.accuracy)
    if skipped.count:
        examples = one_line(", ".join(skipped.examples))
        print_message(f"Passed over {skipped.count} files that are hidden or no images by name ({examples})")
    print_message(f"Records: {out / RESULTS}")
    for kind in job.formats:
        print_message(f"Table: {out / TABLES[kind]}")
    if job.sheets is not None:
        print_message(f"Sheets: {out / SHEETS}")
    if job.explain:
        print_message(f"Report: {out / REPORT}")


def _tell_accuracy(accuracy: Accuracy) -> None:
    judged = accuracy.correct + accuracy.wrong
    value = "no answer could be judged" if accuracy.value is None else f"{accuracy.value:.2%} of {judged} answers"
    print_message(f"Accuracy: {value}")
    if accuracy.failed:
        print_message(f"  {accuracy.failed} labelled images failed and are not counted")
    if accuracy.unlabelled:
        print_message(f"  {accuracy.unlabelled} images have no label")
    if accuracy.unknown:
        examples = one_line(", ".join(accuracy.unknown_examples))
        print_message(f"  {accuracy.unknown} images have a label that is no class of the model ({examples})")


def tell_finished(folder: RunDirectory, formats: Sequence[Format]) -> dict[str, Any]:
    """That there is nothing left to do, but for tables that were not asked for before; returns summary.json's document.

    Raises:
        StoppedEarly: a table cannot be written.
    """
    document = folder.read_summary()
    print_message(
        f"{folder.root}: this run is finished ({document['images']} images, ended {document['ended']}); "
        "nothing is computed again, unless with --overwrite"
    )
    for kind in formats:
        if not (folder.root / TABLES[kind]).exists():
            write_table(read_records(folder.root / RESULTS), folder.root, kind)
            print_message(f"Table: {folder.root / TABLES[kind]}")
    print_message(f"Summary: {folder.root / SUMMARY}")
    return document
