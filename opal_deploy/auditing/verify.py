"""The work of `opal-deploy verify`: a model against its test vectors, or recorded explanations against their model."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.files import check_sha256, compute_sha256, model_kind
from opal_deploy.auditing.options import VerifyOptions
from opal_deploy.auditing.record_diff import Tolerance
from opal_deploy.auditing.results import STOPPED_EARLY, find_results, is_results, read_run_options, scan_lines
from opal_deploy.auditing.verify_records import (
    CheckOptions,
    GivenImages,
    RecordsReport,
    sample_lines,
    verify_records,
    verify_signatures,
)
from opal_deploy.errors import ArtifactError, ImageError, UsageError, VerificationError
from opal_deploy.logs import Log, WarningLine, as_progress, one_line
from opal_deploy.options import StrPath, keywords
from opal_deploy.predict.prepare import InferenceOptions, Pixels, prepare, raise_pillow_limit
from opal_deploy.preprocess.decode import MAX_PIXELS, Decoding
from opal_deploy.records.decision import Decision
from opal_deploy.records.signatures import PublicKeys
from opal_deploy.runtime.devices import default_batch, default_workers
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import Session
from opal_deploy.runtime.verification import verify_test_vectors, wide_batch
from opal_deploy.sources import discovery
from opal_deploy.sources.annotations import read_boxes
from opal_deploy.sources.image import Skipped
from opal_deploy.synthetic import example_images

# findings logged
_LISTED = 10
# images on which a rewritten model is compared with its original, how many at once, and how near its outputs must be
_RESEALED, _RESEALED_BATCH, _SAME = 64, 8, 1e-6


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`.

    Attributes:
        document: for JSON.
        failure: why the check failed; empty if nothing wrong was found.
        not_checked: records whose image could not be read.
    """

    document: dict[str, Any]
    failure: str = ""
    not_checked: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing wrong was found and, for results, every image to be checked could be read."""
        return not self.failure and not self.not_checked


@keywords(VerifyOptions)
def verify(target: StrPath, options: VerifyOptions) -> Verification:
    """Check a model against its test vectors, or a sample of recorded explanations against their model.

    Args:
        target: an exported model; or results.jsonl, or its folder.

    With `reseal`, a file of the original that another tool rewrote gets a valid digest again.

    Raises:
        UsageError: the call does not fit the target, or a file cannot be read.
        VerificationError: the model does not reproduce its test vectors or, to be resealed, the original's outputs.
    """
    path, model = Path(target), options.model
    if options.reseal is not None:
        return _reseal(path, Path(options.reseal), options)
    if not is_results(path):
        if options.images or options.public_key or model is not None:
            raise UsageError(f"{path}: not a results.jsonl; --model, --public-key and images are only for results")
        return _verify_model(path, options)
    if model is None and (not options.public_key or options.images or options.boxes):
        raise UsageError(
            f"{path}: records are compared with a model; give --model MODEL, or only --public-key KEY to check "
            "signatures and whether records are missing"
        )
    path = find_results(path)
    public_keys = PublicKeys(options.public_key) if options.public_key else None
    if model is not None:
        return _verify_results(path, Path(model), public_keys, options)
    report = verify_signatures(path, public_keys)
    options.log("Not checked: whether a model gives these answers; give --model")
    return _conclude(path, report, {"model": None}, options)


def _verify_model(path: Path, options: VerifyOptions) -> Verification:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; expected an exported model or results.jsonl")
    if model_kind(path) not in ("onnx", "engine"):
        raise UsageError(f"{path}: only exported models carry test vectors; export the checkpoint, then verify that")
    log, (session, sha256) = options.log, _open(path, options)
    comparison = verify_test_vectors(session, str(path))
    wide = ""
    if model_kind(path) == "onnx":
        batch = wide_batch(session.metadata)
        verify_test_vectors(session, str(path), batch)
        wide = f", in a batch of {batch} too"
    log(f"{path}: {comparison.images} test vectors reproduced in {session.description}{wide}")
    if comparison.max_cosine is not None:
        log(
            f"Largest differences: logit {comparison.max_logit:.2g}, cosine {comparison.max_cosine:.2g}, "
            f"score {comparison.max_score:.2g}; {comparison.cells_different} of {comparison.cells} cells differ"
        )
        if not comparison.cells:
            log("Cells were not compared: all cells of the test vectors are ties")
    if session.metadata.unverified:
        log(WarningLine(f"NOT VERIFIED on images: this model was {session.metadata.unverified}"))
    return Verification({"path": str(path), "sha256": sha256, "session": session.description, **comparison.to_dict()})


def _reseal(path: Path, original: Path, options: VerifyOptions) -> Verification:
    """Write the digest of a file that another tool rewrote again, if it answers as the original does."""
    metadata = onnx_file.read_metadata(path)
    # a rewritten file keeps the original's digest in its metadata
    if metadata.to_json() != onnx_file.read_metadata(original).to_json():
        raise UsageError(f"{path}: its metadata differs from that of {original}; expected a file made from it")
    before = OnnxSession(original, device="cpu", threads=options.threads)
    after = OnnxSession(path, device="cpu", threads=options.threads, check_digest=False)
    verify_test_vectors(after, str(path), wide_batch(metadata))
    pixels, source = example_images(_RESEALED, *metadata.input_size), "generated creatures"
    if options.images:
        source = "images"
        listed = discovery.discover([os.fspath(image) for image in options.images], Skipped(), sys.stdin)
        ready = [prepare(image, metadata.form, InferenceOptions()) for image in islice(listed, _RESEALED)]
        for image in ready:
            if image.error is not None:
                raise ImageError(image.error.code, f"{image.input.name}: {image.error}; leave it out")
        pixels = np.stack([cast(Pixels, image.pixels) for image in ready])
    for start in range(0, len(pixels), _RESEALED_BATCH):
        batch = pixels[start : start + _RESEALED_BATCH]
        arrays = after.run(batch).to_arrays()
        for name, expected in before.run(batch).to_arrays().items():
            if not np.allclose(arrays[name], expected, rtol=_SAME, atol=_SAME):
                difference = np.abs(arrays[name] - expected).max()
                raise VerificationError(f"{path}: {name} differs by {difference:.3g} from {original}; export it again")
    note = f"from {metadata.file_sha256}, compared on {len(pixels)} {source}"
    sealed = replace(metadata, exporter={**metadata.exporter, "resealed": note})
    digest = onnx_file.rewrite_metadata(path, sealed)
    options.log(f"{path}: test vectors and {len(pixels)} {source} give the outputs of {original}; wrote its new digest")
    return Verification({"path": str(path), "digest": digest, "original": str(original), "images": len(pixels)})


def _open(model: Path, options: VerifyOptions) -> tuple[Session, str]:
    """Return a session of a model, and the sha256 of its file, which must be the expected one."""
    expected = options.expect_sha256
    sha256 = compute_sha256(model) if expected is None else check_sha256(model, expected)
    return open_sessions(model, device=options.device, threads=options.threads, runtime=options.runtime)[0], sha256


def _verify_results(path: Path, model: Path, public_keys: PublicKeys | None, options: VerifyOptions) -> Verification:
    run = read_run_options(path)
    if options.boxes is None and run.get("boxes") is not None:
        raise UsageError(f"{path}: the run cropped to boxes ({run['boxes']}); specify the file with --boxes")
    # a new seed each time: nobody can know in advance which records are checked
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    total, lines = sample_lines(path, None if options.every else options.sample, seed)
    images = _list_images(path, options, lines, recursive=run.get("recursive") is not False)
    session, sha256 = _open(model, options)
    inference = _inference_options(run, model, options, session)
    raise_pillow_limit(inference.max_pixels)
    which = "all records" if lines is None else f"{len(lines)} of {total} records (--seed {seed})"
    limits = Tolerance.for_model(session.metadata)
    up_to = f"cosine {limits.cosine:g}, score {limits.score:g}, logit {limits.logit:g} relative"
    options.log(f"{path}: checking {which} with {model} in {session.description}, up to {up_to}")
    progress, count = as_progress(options.progress), len(lines or ()) or total
    # whatever the run's --box-confidence was: a record names its box
    boxes = read_boxes(Path(options.boxes), confidence=0) if options.boxes else None
    check = CheckOptions(sha256, Path(options.root), images, boxes, public_keys, inference)
    report = verify_records(path, session, check, lines, lambda done: progress(done, count, ""))
    document = {"model": str(model), "model_sha256": sha256, "session": session.description}
    return _conclude(path, report, {**document, "seed": None if lines is None else seed}, options)


def _conclude(path: Path, report: RecordsReport, document: dict[str, Any], options: VerifyOptions) -> Verification:
    """Log the report, and return the outcome with what is wrong with the records in one line."""
    if not (report.records or report.run_faults):
        raise UsageError(f"{path}: contains no records")
    _log_report(report, options.log)
    failures = [*report.run_faults]
    if not options.allow_incomplete and any(STOPPED_EARLY in note for note in report.run_notes):
        failures.append("the run stopped early: resume it, or accept it with --allow-incomplete")
    if report.signatures_bad:
        failures.append(f"{report.signatures_bad} of {report.records} records have no valid signature")
    if report.different:
        # lines that are not records are different, and not computed again
        checked = max(report.checked, report.different)
        failures.append(f"{report.different} of {checked} checked records differ from what this model computes")
    first = next((finding for finding in report.findings if finding.checked or finding.signature), None)
    failure = f"{path}: {', '.join(failures)}{f'; the first: {first}' if first else ''}" if failures else ""
    return Verification({"path": str(path), **document, **report.to_dict()}, failure, report.not_checked)


def _inference_options(run: dict[str, Any], model: Path, options: VerifyOptions, session: Session) -> InferenceOptions:
    """Return how the run prepared images, with defaults for what run.json does not state."""
    decode, max_pixels = run.get("decode"), run.get("max_pixels")
    decision = Decision.of(options).resolve(model, session.metadata, options.log)
    limits = {name: limit for name, limit in decision.limits.items() if limit is not None}
    return InferenceOptions(
        batch=default_batch(session),
        fixed_batch=True,
        workers=default_workers(),
        max_pixels=max_pixels if isinstance(max_pixels, int) and max_pixels > 0 else MAX_PIXELS,
        decision=replace(Decision.read(run), **limits),
        decode=Decoding(decode) if decode in list(Decoding) else Decoding.default,
        isolate=True,
    )


def _list_images(path: Path, options: VerifyOptions, lines: frozenset[int] | None, *, recursive: bool) -> GivenImages:
    """Return the images that the call lists, as far as they may belong to the records in `lines` (None: all)."""
    if not options.images:
        return GivenImages()
    images = [os.fspath(image) for image in options.images]
    discovery.check_inputs(images)
    names = {
        line.record.image
        for number, line in enumerate(scan_lines(path), 1)
        if line.record is not None and (lines is None or number in lines)
    }
    return GivenImages(discovery.discover(images, Skipped(), sys.stdin, recursive=recursive), names)


def _log_report(report: RecordsReport, log: Log) -> None:
    """Log what was compared, signatures, completeness, and the first findings."""
    if report.not_checked < report.checked:
        equal = max(report.checked - report.different - report.not_checked, 0)
        log(f"{equal} of {report.checked} records match the model")
    if report.not_checked:
        log(
            f"{report.not_checked} of {report.checked} records were not checked, as their images cannot be read here; "
            "give --root FOLDER, the folder that their names are relative to, or list the images after the results"
        )
    if report.signatures_valid:
        log(f"The signatures of {report.signatures_valid} of {report.records} records are valid")
    if report.signatures_unchecked:
        log(f"{report.signatures_unchecked} records are signed; their signatures were not checked: give --public-key")
    for note in report.run_notes:
        log(note)
    for finding in report.findings[:_LISTED]:
        log(one_line(f"{'DIFFERENT' if finding.checked or finding.signature else 'not checked'}: {finding}"))
    if (more := report.different + report.not_checked - _LISTED) > 0:
        log(f"and {more} more; --json lists them")
