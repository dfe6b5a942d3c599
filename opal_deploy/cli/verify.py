"""`opal-deploy verify`: check a model against its test vectors, or recorded explanations against their model."""

from __future__ import annotations

import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.cli.options import default_batch, default_workers
from opal_deploy.errors import ArtifactError, UsageError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.auditing.record_sources import RecordSources
    from opal_deploy.auditing.verify_records import CheckOptions, RecordsReport
    from opal_deploy.inference.types import InferenceOptions
    from opal_deploy.records.record import Record
    from opal_deploy.runtime.session import Session

_SAMPLE = 100
# findings printed
_LISTED = 10


def verify(
    target: Annotated[
        Path, typer.Argument(help="An exported model; or results.jsonl of `opal-deploy infer`, or its folder.")
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            help="Results: the images as `infer` was given them; needed for archives. Default: found by their names.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Results: the model that they are said to come from.", show_default=False)
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Results: so many records are computed again.")] = _SAMPLE,
    every: Annotated[bool, typer.Option("--all", help="Results: compute all records again.")] = False,
    seed: Annotated[
        int | None, typer.Option(help="Results: chooses the sample; default: a new one each time.", show_default=False)
    ] = None,
    root: Annotated[Path, typer.Option(help="Results: the folder that images' names are relative to.")] = Path(),
    boxes: Annotated[
        Path | None, typer.Option(help="Results: the file of boxes that the run had.", show_default=False)
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="Results: check `label` too: `folders`, or CSV (image,label).", show_default=False),
    ] = None,
    min_margin: Annotated[
        float | None, typer.Option(help="Results: the run's, where run.json is not beside them.", show_default=False)
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Results: as the run had it.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="On the CPU.")] = None,
    expect_sha256: Annotated[
        str | None, typer.Option("--expect-sha256", help="The model file's sha256 as given to you by a trusted way.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report to stdout as JSON.")] = False,
) -> None:
    """Check a model, or explanations.

    A model: its digest, then the test vectors that it carries, on this machine. Needs neither the checkpoint nor
    PyTorch.

    Explanations: a sample of the records is computed again from model and images; a record that is not what this model
    computes for this file ends in exit code 4.
    """
    from opal_deploy.auditing.results_reader import is_results

    if is_results(target):
        if model is None:
            raise UsageError(f"{target}: records are checked against a model; give it with --model")
        # whoever changes records must not know beforehand which are checked
        seed = secrets.randbelow(2**32) if seed is None else seed
        count = None if every else sample
        options = _ResultsOptions(
            images or [], model, count, seed, root, boxes, labels, min_margin, batch, device, threads, expect_sha256
        )
        _verify_results(target, options, as_json=as_json)
        return
    if images or model is not None:
        raise UsageError(f"{target}: not a results.jsonl; only records are checked against --model and images")
    _verify_model(target, device, threads, expect_sha256, as_json=as_json)


def _verify_model(path: Path, device: str, threads: int | None, expected: str | None, *, as_json: bool) -> None:
    from opal_deploy.artifact.files import check_sha256, compute_sha256, model_kind
    from opal_deploy.runtime.select import open_sessions
    from opal_deploy.runtime.verification import verify_test_vectors

    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; expected a file of `opal-deploy export`, or results.jsonl")
    if model_kind(path) not in ("onnx", "engine"):
        raise UsageError(f"{path}: only exported models carry test vectors; export the checkpoint, then verify that")
    sha256 = check_sha256(path, expected) if expected is not None else compute_sha256(path)
    session = open_sessions(path, device=device, threads=threads)[0]
    comparison = verify_test_vectors(session, str(path))
    print_message(f"{path}: {comparison.images} test vectors reproduced in {session.description}")
    if comparison.max_cosine is not None:
        print_message(
            f"largest differences: logit {comparison.max_logit:.2g}, cosine {comparison.max_cosine:.2g}, "
            f"score {comparison.max_score:.2g}; {comparison.cells_different} of {comparison.cells} cells differ"
        )
        if not comparison.cells:
            print_message("every cell of the test vectors is a tie, so cells were not compared")
    if session.metadata.unverified:
        print_message(f"NOT VERIFIED on images: this model was {session.metadata.unverified}")
    if as_json:
        print_json({"path": str(path), "sha256": sha256, "session": session.description, **comparison.to_dict()})


@dataclass(frozen=True)
class _ResultsOptions:
    """The options of the command that concern results; `sample` is None for all records."""

    images: list[str]
    model: Path
    sample: int | None
    seed: int
    root: Path
    boxes: Path | None
    labels: str | None
    min_margin: float | None
    batch: int | None
    device: str
    threads: int | None
    expected_sha256: str | None


def _verify_results(target: Path, options: _ResultsOptions, *, as_json: bool) -> None:
    """Compute records again.

    Raises:
        VerificationError: some are not what the model computes.
    """
    from opal_deploy.artifact.files import check_sha256, compute_sha256
    from opal_deploy.auditing.results_reader import find_results, read_run_options
    from opal_deploy.auditing.verify_records import sample_lines, verify_records
    from opal_deploy.inference.decoding.budget import raise_pillow_limit
    from opal_deploy.runtime.select import open_sessions

    path = find_results(target)
    run_options = read_run_options(path)
    if options.boxes is None and run_options.get("boxes") is not None:
        raise UsageError(f"{path}: that run cropped to boxes ({run_options['boxes']}); give the file with --boxes")
    total, lines = sample_lines(path, options.sample, options.seed)
    if not total:
        raise UsageError(f"{path}: no records in it")
    recursive = run_options.get("recursive") is not False
    sources = _find_sources(path, options, lines, recursive=recursive)
    session = open_sessions(options.model, device=options.device, threads=options.threads)[0]
    expected = options.expected_sha256
    sha256 = compute_sha256(options.model) if expected is None else check_sha256(options.model, expected)
    inference = _inference_options(run_options, options, session)
    raise_pillow_limit(inference.max_pixels)
    which = "all records" if lines is None else f"{len(lines)} of {total} records (--seed {options.seed})"
    print_message(f"{path}: computing {which} again with {options.model} in {session.description}")
    check = _check_options(sha256, path, run_options, options, session.metadata, inference, sources)
    with progress("records") as advance:
        report = verify_records(path, session, check, lines, lambda done: advance(done, len(lines or ()) or total))
    _print_report(report)
    if as_json:
        head: dict[str, Any] = {
            "path": str(path), "model": str(options.model), "model_sha256": sha256, "session": session.description,
            "seed": None if lines is None else options.seed,
        }  # fmt: skip
        print_json({**head, **report.to_dict()})
    if report.different:
        raise VerificationError(
            f"{path}: {report.different} of {report.checked} checked records are not what this model computes for "
            f"these files; the first: {report.findings[0]}"
        )


def _inference_options(run_options: dict[str, Any], options: _ResultsOptions, session: Session) -> InferenceOptions:
    """Return how the run prepared images; the defaults for what run.json does not state."""
    from opal_deploy.inference.types import InferenceOptions
    from opal_deploy.preprocess.decode import MAX_PIXELS, Decoding

    decode, max_pixels = run_options.get("decode"), run_options.get("max_pixels")
    min_margin, run_margin = options.min_margin, run_options.get("min_margin")
    if min_margin is None and isinstance(run_margin, int | float):
        min_margin = float(run_margin)
    return InferenceOptions(
        batch=options.batch or default_batch(session),
        fixed_batch=True,
        workers=default_workers(),
        max_pixels=max_pixels if isinstance(max_pixels, int) and max_pixels > 0 else MAX_PIXELS,
        min_margin=min_margin,
        decode=Decoding(decode) if decode in list(Decoding) else Decoding.default,
        isolate=True,
    )


def _find_sources(
    path: Path, options: _ResultsOptions, lines: frozenset[int] | None, *, recursive: bool
) -> RecordSources:
    """Return the images that were given.

    Raises:
        UsageError: records were made of an archive, or stand for a folder or list, that was not given: of all records
            where no image was given, else of the `lines` to check.
    """
    from opal_deploy.auditing.record_sources import RecordSources, find_container
    from opal_deploy.auditing.results_reader import read_numbered_records
    from opal_deploy.inference.sources import discovery
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.records.names import readable_name

    images = options.images

    def records() -> Iterator[tuple[int, Record]]:
        for number, record in read_numbered_records(path):
            if record is not None and (not images or lines is None or number in lines):
                yield number, record

    sources = RecordSources()
    if images:
        discovery.check_inputs(images)
        items = discovery.discover(images, Skipped(), sys.stdin, recursive=recursive)
        sources = RecordSources(items, None if lines is None else (record for _, record in records()))
    found: set[str] = set()
    missing: dict[str, tuple[int, str | None]] = {}
    for number, record in records():
        container = find_container(record, options.root)
        if container is not None and sources.find(record) is not None:
            found.add(container)
        elif container is not None:
            missing.setdefault(container, (number, record["image"]))
    absent = {container: where for container, where in missing.items() if container not in found}
    if absent:
        container, (number, name) = next(iter(absent.items()))
        needed = shlex.join([str(path), *map(readable_name, list(absent)[:_LISTED]), "--model", str(options.model)])
        raise UsageError(
            f"{path}: line {number}, {name}: checking it takes {container}, which was not given; give the images as "
            f"`infer` had them, such as: opal-deploy verify {needed}"
        )
    return sources


def _check_options(
    model_sha256: str,
    path: Path,
    run_options: dict[str, Any],
    options: _ResultsOptions,
    metadata: Metadata,
    inference: InferenceOptions,
    sources: RecordSources,
) -> CheckOptions:
    from opal_deploy.auditing.verify_records import CheckOptions
    from opal_deploy.inference.sources.annotations import read_boxes, read_labels

    top = run_options.get("top")
    return CheckOptions(
        model_sha256,
        top=min(top, metadata.max_top) if isinstance(top, int) else None,
        root=options.root,
        sources=sources,
        boxes=read_boxes(options.boxes) if options.boxes else None,
        labels=read_labels(options.labels) if options.labels else None,
        inference=inference,
    )


def _print_report(report: RecordsReport) -> None:
    equal = max(report.checked - report.different, 0)
    print_message(
        f"{equal} of {report.checked} are what the model computes, {report.identical} of them to the last bit"
    )
    for finding in report.findings[:_LISTED]:
        print_message(one_line(f"DIFFERENT: {finding}"))
    if report.different > _LISTED:
        print_message(f"and {report.different - _LISTED} more; --json lists them")
    if report.not_repeatable:
        print_message(f"{report.not_repeatable} errors of crashed, late or missing decoders did not happen again")
    if report.labels_unchecked:
        print_message(f"the `label` of {report.labels_unchecked} records was not checked; give --labels")
