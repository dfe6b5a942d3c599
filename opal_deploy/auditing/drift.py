"""The work of `opal-deploy drift`: whether a model's answers have shifted since its validation, or another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opal_deploy.artifact.baseline import Baseline, Observations
from opal_deploy.artifact.files import compute_sha256, without_folders
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.auditing.options import DriftOptions
from opal_deploy.auditing.results import find_results, read_records, read_run_options
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.options import StrPath, keywords
from opal_deploy.records.evidence import observe_records
from opal_deploy.records.record import Answered
from opal_deploy.runtime.select import read_model_metadata

if TYPE_CHECKING:
    from opal_deploy.records.drift import Shift

# images from which a sample can be compared at all
_MIN_SAMPLE = 20
# records that become observations together
_BLOCK = 1_000


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


@keywords(DriftOptions)
def find_drift(results: StrPath, options: DriftOptions) -> DriftReport:
    """Compare the answers of a run with a model's baseline, or with another run.

    Args:
        results: results.jsonl, or its folder; `against` takes the same.

    Raises:
        MissingExtra: SciPy, of the extra `drift`, is not installed.
        UsageError: a file cannot be read, the results are not the model's, or there are too few.
    """
    require("scipy", "drift", "drift")
    from opal_deploy.records.drift import Comparison, find_smallest_shift, interpret, select_shifts

    path = find_results(results)
    model = _find_model(path) if options.baseline is None else Path(options.baseline)
    metadata, sha256 = read_model_metadata(model), compute_sha256(model)
    if metadata.evidence != "exact":
        raise UsageError(f"{model}: evidence {metadata.evidence} found; expected a model with single cells as evidence")
    if options.against is not None:
        earlier, _ = _observe(find_results(options.against), metadata, sha256)
        baseline = Baseline.measure(earlier, "earlier", metadata.stride, metadata.class_map)
        reference = without_folders(str(options.against))
    else:
        baseline = _read_baseline(model, metadata)
        reference = f"the baseline of {model.name} ({baseline.split} images)"
    now, failed = _observe(path, metadata, sha256)
    tests = Comparison(now, baseline, metadata.class_map).list_tests()
    shifts = select_shifts(tests, options.max_q, options.min_effect)
    smallest = find_smallest_shift(tests, (baseline.images, len(now)), options.max_q, options.min_effect)
    return DriftReport(
        len(now), failed, baseline.images, reference, shifts, tests, smallest, metadata.class_names, interpret(shifts)
    )


def _find_model(results: Path) -> Path:
    """Return the file in the working directory with the name that the run recorded for its model."""
    model = read_run_options(results).get("model")
    name = model.get("file") if isinstance(model, dict) else None
    if not isinstance(name, str) or not Path(name).is_file():
        raise UsageError(f"{results}: give the model that gave these results as --baseline MODEL")
    return Path(name)


def _read_baseline(model: Path, metadata: Metadata) -> Baseline:
    if not metadata.is_opal:
        raise UsageError(
            f"{model}: its records list only the strongest prototypes of a class (head {metadata.head_kind}), which no "
            "baseline of all prototypes can be compared with; give --against earlier results"
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


def _observe(results: Path, metadata: Metadata, sha256: str) -> tuple[Observations, int]:
    """Return the observations of a run's answers, and the number of failed images.

    Raises:
        UsageError: too few answers, another model or missing evidence.
    """
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
    return Observations.concatenate(blocks), failed
