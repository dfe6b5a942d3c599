"""The texts of `infer`: facts at the head of the report, context in summary.json, messages on the terminal."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from opal_deploy.artifact.evaluation import describe_evaluation
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.cli.console import one_line, print_message
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.inference.run.backend import Backend, RunOptions
from opal_deploy.inference.run.directory import RunConfig, RunDirectory, acquire_run_dir
from opal_deploy.inference.run.summary import Accuracy, Summary
from opal_deploy.inference.run_files import REPORT, RESULTS, SHEETS, SUMMARY
from opal_deploy.inference.sources.items import Skipped
from opal_deploy.records.tables import TABLES, Format
from opal_deploy.storage.files import RemoteFile
from opal_deploy.storage.urls import is_url, redact


def parse_out(text: str | None) -> tuple[Path | None, RemoteFile | None]:
    """Return the run directory that --out names, as a path or as a URL.

    Raises:
        UsageError: a URL that cannot be written to. MissingExtra: what writes to it is not installed.
    """
    from opal_deploy.storage.writing import parse_output

    if text is not None and is_url(text):
        return None, parse_output(text)
    return None if text is None else Path(text), None


def open_run_dir(
    out: Path | None, remote: RemoteFile | None, config: RunConfig, *, resume: bool, overwrite: bool
) -> AbstractContextManager[RunDirectory]:
    """Acquire the run directory, on this machine's disk or in a bucket; see `acquire_run_dir`."""
    from opal_deploy.inference.run.bucket import acquire_bucket_run_dir

    if remote is not None:
        return acquire_bucket_run_dir(remote, config, resume=resume, overwrite=overwrite)
    return acquire_run_dir(out, config, resume=resume, overwrite=overwrite)


def report_facts(path: Path, metadata: Metadata, runtime: str) -> list[tuple[str, str]]:
    """Return the (name, value) pairs at the head of the report."""
    head = [
        ("Model", f"{path.name}: {metadata.backbone}, {metadata.num_classes} classes, "
         f"{metadata.prototypes_per_class} slots a class, distance {metadata.distance}"),
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
    return [*head, ("Command", format_command(short=True))]


def describe_evidence(path: Path, metadata: Metadata) -> str:
    """Return what was measured of the model's evidence in one line; empty for a model whose evidence is no cells."""
    if metadata.evidence != "exact":
        return ""
    # a file that lists its best classes alone cannot be measured itself
    export_of = None if metadata.top_k is None else metadata.checkpoint_name
    return one_line(describe_evaluation(metadata.evaluation, path, metadata.receptive_field, export_of=export_of))


def summary_context(model: Mapping[str, str], backend: Backend) -> dict[str, object]:
    """Return what summary.json holds beside its counts: model, runtime, backend and command."""
    runtime = {"runtime": backend.description, **backend.summarize()}
    return {"model": model, **runtime, "command": format_command(short=True)}


def format_command(*, short: bool = False) -> str:
    """Return this call as a shell takes it; `short`: absolute paths as their last part, without home directories."""
    arguments = sys.argv[1:]
    if short:
        arguments = [_short(argument) for argument in arguments]
    return redact(shlex.join([Path(sys.argv[0]).name, *arguments]))


def _short(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    return option + equals + (Path(value).name if os.path.isabs(value) else value)


def resume_hint() -> str:
    """Return how to resume the run: by the same call, unless that would begin a new one."""
    restarting = {"--overwrite", "--no-resume"}
    if restarting.isdisjoint(sys.argv):
        return f"the same command resumes: {format_command()}"
    name, *arguments = sys.argv
    return f"resume with: {redact(shlex.join([Path(name).name, *(a for a in arguments if a not in restarting)]))}"


def progress_note(summary: Summary, backend: Backend) -> str:
    """Return the text beside the progress bar."""
    failed = summary.statuses["error"]
    return "; ".join(filter(None, [backend.describe_progress(), f"{failed} failed" if failed else ""]))


def write_early_summary(directory: RunDirectory, summary: Summary, context: Mapping[str, object], stopped: str) -> None:
    """Write summary.json of a run that ended early, if the disk has space for it."""
    with contextlib.suppress(UsageError, StoppedEarly):
        directory.write_summary(summary, context, stopped)


def print_summary(summary: Summary, skipped: Skipped, options: RunOptions, backend: Backend) -> None:
    """Print what came of a run."""
    rate = f", {summary.images_per_second:.1f} images/s" if summary.images_per_second else ""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items()))
    before = f" ({summary.resumed} of them before)" if summary.resumed else ""
    print_message(f"{summary.total} images{before} in {summary.seconds:.1f} s{rate}: {counts or 'nothing to do'}")
    if rates := backend.describe_progress():
        print_message(f"  {rates}")
    for code, count in summary.errors.most_common():
        names = summary.error_examples[code]
        named = f" ({', '.join(names)}{', ...' if count > len(names) else ''})" if names else ""
        print_message(f"  {code}: {count}{one_line(named)}")
    for code, count in summary.drawing_errors.most_common():
        print_message(f"  predicted, but not drawn: {code}: {count}")
    if summary.accuracy is not None:
        _print_accuracy(summary.accuracy)
    if skipped.count:
        examples = one_line(", ".join(skipped.examples))
        print_message(f"Passed over {skipped.count} files that are hidden or no images by name ({examples})")
    if skipped.folder_links:
        examples = one_line(", ".join(skipped.folder_link_examples))
        print_message(
            "Links not followed, to a folder around them or to one whose images come under its own name: "
            f"{skipped.folder_links} ({examples})"
        )
    out = options.drawings_out
    print_message(f"Records: {out}/{RESULTS}")
    for kind in options.formats:
        print_message(f"Table: {out}/{TABLES[kind]}")
    if options.sheets is not None:
        print_message(f"Sheets: {out}/{SHEETS}")
    if options.report is not None:
        print_message(f"Report: {out}/{REPORT}")


def _print_accuracy(accuracy: Accuracy) -> None:
    judged = accuracy.correct + accuracy.wrong
    value = (
        "no prediction could be judged" if accuracy.value is None else f"{accuracy.value:.2%} of {judged} predictions"
    )
    print_message(f"Accuracy: {value}")
    if accuracy.failed:
        print_message(f"  {accuracy.failed} labelled images failed and are not counted")
    if accuracy.unlabelled:
        print_message(f"  {accuracy.unlabelled} images have no label")
    if accuracy.unknown:
        examples = one_line(", ".join(accuracy.unknown_examples))
        print_message(f"  {accuracy.unknown} images have a label that is no class of the model ({examples})")


def print_finished(directory: RunDirectory, formats: Sequence[Format]) -> dict[str, Any]:
    """Print that the run is finished, write tables that are missing, and return the document of summary.json.

    Raises:
        StoppedEarly: a table cannot be written.
    """
    document = directory.read_summary()
    print_message(
        f"{directory.location}: this run is finished ({document['images']} images, ended {document['ended']}); "
        "nothing is computed again, unless with --overwrite"
    )
    for kind in formats:
        if not directory.has(TABLES[kind]):
            directory.write_table(kind)
            print_message(f"Table: {directory.location}/{TABLES[kind]}")
    print_message(f"Summary: {directory.location}/{SUMMARY}")
    return document
