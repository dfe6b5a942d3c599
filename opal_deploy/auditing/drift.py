"""The work of `opal-deploy drift`: whether a model's answers have shifted since its validation, or another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from opal_deploy.artifact.baseline import Baseline, Observations
from opal_deploy.artifact.files import check_output, compute_sha256, without_folders
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.auditing.options import DriftOptions
from opal_deploy.auditing.results import find_results, load_photograph, read_records, read_run_options
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.options import StrPath, keywords
from opal_deploy.records.evidence import observe_records
from opal_deploy.records.record import Answered
from opal_deploy.runtime.select import read_model_metadata
from opal_deploy.visualization.overlay import draw_evidence, embed_jpeg
from opal_deploy.visualization.pages import Picture, render_page, save_page

if TYPE_CHECKING:
    from opal_deploy.records.drift import Comparison, Shift

# images from which a sample can be compared at all
_MIN_SAMPLE = 20
# records that become observations together
_BLOCK = 1_000
# shifts on the page, pictures of each before and after, and the longest side of a picture in pixels
_SHOWN, _PICTURES, _PICTURE_SIDE = 10, 4, 240


@dataclass(frozen=True)
class DriftReport:
    """The outcome of `find_drift`.

    Attributes:
        images: images with an answer that were compared; `failed` ones have none.
        failed: images with an error record.
        baseline_images: images of the baseline.
        reference: what the results were compared with.
        shifts: the strongest first.
        tests: all comparisons, shifts included.
        smallest_shift: distance from which a shift of cosine or margin would have been found.
        class_names: the model's.
        causes: likely causes of the shifts, by the section of docs/howto/drift.md that says what to do.
    """

    images: int
    failed: int
    baseline_images: int
    reference: str
    shifts: Sequence[Shift]
    tests: Sequence[Shift]
    smallest_shift: float
    class_names: Sequence[str]
    causes: Mapping[str, str]

    def has(self, kind: Literal["any", "evidence"]) -> bool:
        """Return whether there is a shift; for `evidence`, shifts of class shares do not count."""
        return any(kind == "any" or shift.kind != "label" for shift in self.shifts)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON, without the comparisons that are no shifts."""
        names = ("images", "failed", "baseline_images", "reference", "smallest_shift")
        shifts = [shift.to_dict(self.class_names) for shift in self.shifts]
        return {**{name: getattr(self, name) for name in names}, "tests": len(self.tests), "shifts": shifts}


class ObservedRun(NamedTuple):
    """A results.jsonl with the observations of its answers, in their order, and the number of failed images."""

    path: Path
    observations: Observations
    failed: int


@keywords(DriftOptions)
def find_drift(results: StrPath, options: DriftOptions) -> DriftReport:
    """Compare the answers of a run with a model's baseline, or with another run, and write the page if `html` is given.

    Args:
        results: results.jsonl, or its folder; `against` takes the same.

    Raises:
        MissingExtra: SciPy, of the extra `drift`, is not installed.
        UsageError: a file cannot be read, the results are not the model's, or there are too few.
    """
    require("scipy", "drift", "drift")
    from opal_deploy.records.drift import Comparison, find_smallest_shift, interpret, select_shifts

    path = find_results(results)
    if options.html is not None:
        inputs = [source for source in (path, options.baseline, options.against) if source is not None]
        check_output("--html", Path(options.html), [".html"], inputs=inputs, overwrite=options.overwrite)
    model = _find_model(path) if options.baseline is None else Path(options.baseline)
    metadata, sha256 = read_model_metadata(model), compute_sha256(model)
    if metadata.evidence != "exact":
        raise UsageError(f"{model}: evidence {metadata.evidence} found; expected a model with single cells as evidence")
    earlier = None
    if options.against is not None:
        earlier = _observe(find_results(options.against), metadata, sha256)
        baseline = Baseline.measure(earlier.observations, "earlier", metadata.stride, metadata.class_map)
        reference = without_folders(str(options.against))
    else:
        baseline = _read_baseline(model, metadata)
        reference = f"the baseline of {model.name} ({baseline.split} images)"
    now = _observe(path, metadata, sha256)
    comparison = Comparison(now.observations, baseline, metadata.class_map)
    tests, images = comparison.list_tests(), len(now.observations)
    shifts = select_shifts(tests, options.max_q, options.min_effect)
    smallest = find_smallest_shift(tests, (baseline.images, images), options.max_q, options.min_effect)
    report = DriftReport(
        images, now.failed, baseline.images, reference, shifts, tests, smallest, metadata.class_names,
        interpret(shifts),
    )  # fmt: skip
    if options.html is not None:
        _write_page(report, comparison, now, earlier, options)
    return report


def _find_model(results: Path) -> Path:
    """Return the file in the working directory with the name that the run recorded for its model."""
    match read_run_options(results):
        case {"model": {"file": str(name)}} if Path(name).is_file():
            return Path(name)
    raise UsageError(f"{results}: give the model that gave these results as --baseline MODEL")


def _read_baseline(model: Path, metadata: Metadata) -> Baseline:
    if metadata.shares_prototypes:
        raise UsageError(
            f"{model}: records with head {metadata.head_kind} list only a class's strongest prototypes, and a baseline "
            "all; give --against earlier results"
        )
    try:
        baseline = metadata.known_baseline
    except ArtifactError as error:
        raise ArtifactError(f"{model}: {error}") from None
    if baseline is None:
        raise UsageError(
            f"{model}: it has no baseline; measure it with `opal-deploy evaluate DATA --split val --record --model "
            f"{model}`, or give --against earlier results"
        )
    return baseline


def _observe(results: Path, metadata: Metadata, sha256: str) -> ObservedRun:
    """Return the observations of a run; raise UsageError for too few answers, another model or missing evidence."""
    blocks, failed = list[Observations](), 0
    records = read_records(results)
    while block := list(islice(records, _BLOCK)):
        answered = [record for record in block if isinstance(record, Answered)]
        failed += len(block) - len(answered)
        for record in answered:
            if record.model_sha256 not in (None, sha256):
                raise UsageError(
                    f"{results}: records of another model (sha256 {record.model_sha256[:12]}..., expected "
                    f"{sha256[:12]}...); give results of one model, and that model's file"
                )
        try:
            if answered:
                blocks.append(observe_records(answered, metadata))
        except (ValueError, OverflowError) as error:
            raise UsageError(f"{results}: its records have {error}; expected results of this model") from None
    if (count := sum(map(len, blocks))) < _MIN_SAMPLE:
        raise UsageError(f"{results}: images with an answer: {count}; expected at least {_MIN_SAMPLE} to compare")
    return ObservedRun(results, Observations.concatenate(blocks), failed)


def _write_page(
    report: DriftReport, comparison: Comparison, now: ObservedRun, earlier: ObservedRun | None, options: DriftOptions
) -> None:
    """Write the page of the strongest shifts since the run `earlier` or, if None, the baseline.

    It needs no other file and no network. Raises UsageError if it cannot be written, or a run cannot be read again.
    """
    assert options.html is not None
    shifts, root, names = report.shifts[:_SHOWN], Path(options.root), report.class_names
    if shifts:
        after = _draw_examples(now, shifts, root, is_now=True)
        before = [[] for _ in shifts] if earlier is None else _draw_examples(earlier, shifts, root, is_now=False)
        shown = [
            (shift, shift.describe(names), old, new) for shift, old, new in zip(shifts, before, after, strict=True)
        ]
    else:
        # what was compared of all images
        of_all = {test.kind: test for test in report.tests if test.slot is None}.values()
        shown = [(test, f"Compared: {test.subject}", [], []) for test in of_all]
    sections = [
        {"shift": shift, "text": text, "bars": comparison.list_bars(shift, names), "before": old, "after": new}
        for shift, text, old, new in shown
    ]
    results = without_folders(str(now.path))
    text = render_page(__package__, "drift", report=report, results=results, earlier=earlier, sections=sections)
    save_page(Path(options.html), text, overwrite=options.overwrite)


def _draw_examples(run: ObservedRun, shifts: Sequence[Shift], root: Path, *, is_now: bool) -> list[list[Picture]]:
    """Return pictures of random images for each shift: now of those that show it, before of others of its class."""
    random, chosen = np.random.default_rng(0), []
    for shift in shifts:
        # slots that left a place showed it before; a class is shown at both times
        shows = shift.kind == "label" or is_now != (shift.kind == "place" and not shift.rose)
        chosen.append(random.permutation(shift.find_images(run.observations, shows=shows))[:_PICTURES].tolist())
    wanted = {row for rows in chosen for row in rows}
    answered = (record for record in read_records(run.path) if isinstance(record, Answered))
    records = {row: record for row, record in enumerate(answered) if row in wanted}
    examples: list[list[Picture]] = [[] for _ in shifts]
    for shift, rows, pictures in zip(shifts, chosen, examples, strict=True):
        for record in map(records.__getitem__, rows):
            # images that are gone or have changed are left out
            if (photograph := load_photograph(record, root, _PICTURE_SIDE)) is not None:
                slots = tuple(entry for entry in record.evidence if shift.slot in (None, entry.slot))
                draw_evidence(photograph, replace(record, evidence=slots))
                pictures.append(Picture(embed_jpeg(photograph), record.image or ""))
    return examples
