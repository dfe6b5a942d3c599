"""The work of `opal-deploy drift`: whether a model's answers have shifted since its validation, or another run.

Light to import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from opal_deploy.errors import UsageError, require
from opal_deploy.options import Option, Options, StrPath, keywords
from opal_deploy.records.record import Record

if TYPE_CHECKING:
    from opal_deploy.artifact.baseline import Baseline
    from opal_deploy.auditing.observed import Layout
    from opal_deploy.auditing.results import Results
    from opal_deploy.records.shifts import Shift


@dataclass(frozen=True, kw_only=True)
class DriftOptions(Options):
    """The options of `find_drift` and `opal-deploy drift`."""

    baseline: Annotated[
        StrPath | None,
        Option("Model whose baseline to compare with.", default="the run's model, where it is found", cli=Path),
    ] = None
    against: Annotated[
        StrPath | Sequence[Record | Mapping[str, Any]] | None,
        Option("Earlier results of the same model, to compare with instead.", cli=str),
    ] = None
    max_q: Annotated[float, Option("Largest false discovery rate of a shift.", min=0, max=1)] = 0.01
    min_effect: Annotated[float, Option("Smallest effect of a shift, 0 to 1.", min=0, max=1)] = 0.1
    fail_on: Annotated[
        Literal["any", "evidence"] | None,
        Option("Exit with 4 on `any` shift, or only on shifts in the `evidence`."),
    ] = None
    html: Annotated[StrPath | None, Option("Write an HTML page of the ten strongest shifts.", cli=Path)] = None
    overwrite: Annotated[bool, Option("Replace --html if it exists.")] = False
    root: Annotated[StrPath, Option("--html: folder that the results' image names are relative to.", cli=Path)] = Path()


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
    """

    images: int
    failed: int
    baseline_images: int
    reference: str
    shifts: Sequence[Shift]
    tests: Sequence[Shift]
    smallest_shift: float
    class_names: Sequence[str]

    def has(self, kind: Literal["any", "evidence"]) -> bool:
        """Return whether there is a shift; for `evidence`, shifts of class shares do not count."""
        return any(kind == "any" or shift.kind != "label" for shift in self.shifts)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON, without the comparisons that are no shifts."""
        return {
            "images": self.images,
            "failed": self.failed,
            "baseline_images": self.baseline_images,
            "reference": self.reference,
            "tests": len(self.tests),
            "smallest_shift": self.smallest_shift,
            "shifts": [shift.to_dict(self.class_names) for shift in self.shifts],
        }


@keywords(DriftOptions)
def find_drift(results: StrPath | Sequence[Record | Mapping[str, Any]], options: DriftOptions) -> DriftReport:
    """Compare the answers of a run with a model's baseline, or with another run, and write the page if `html` is given.

    Args:
        results: results.jsonl, its folder, or its results.parquet or results.csv; the URL of a run in a bucket; or
            records in memory, including `Model.predict`'s, which need `baseline` or `against`. `against` takes the
            same.

    Raises:
        MissingExtra: SciPy, of the extra `drift`, is not installed.
        UsageError: a file cannot be read, the results are not the model's, or there are too few.
    """
    require("scipy", "drift", "drift")
    from opal_deploy.artifact.files import check_output
    from opal_deploy.auditing.observed import Observed
    from opal_deploy.auditing.results import Results
    from opal_deploy.records.drift import DriftCounts
    from opal_deploy.records.shifts import Limits, Share

    require("scipy", "drift", "drift")
    if options.html is not None:
        named = (results, options.baseline, options.against)
        inputs = [source for source in named if isinstance(source, str | os.PathLike)]
        check_output("--html", Path(options.html), [".html"], inputs=inputs, overwrite=options.overwrite)
    now = Results(results)
    earlier = None if options.against is None else Results(options.against)
    baseline, layout, sha256, reference = _find_reference(now, earlier, options)
    counts, observed = DriftCounts(baseline, layout.class_map), Observed(now, layout, sha256)
    for _, observations in observed:
        counts.add(observations)
    observed.check_enough(counts.images)
    tests, limits = counts.compare(), Limits(options.max_q, options.min_effect)
    report = DriftReport(
        counts.images, observed.failed, baseline.images, reference, limits.select(tests), tests,
        limits.smallest_shift(tests, Share(counts.images, baseline.images)), layout.class_names,
    )  # fmt: skip
    if options.html is not None:
        from opal_deploy.auditing.drift_page import write_page

        write_page(Path(options.html), report, counts, (now, earlier), layout, options)
    return report


def _find_reference(
    now: Results, earlier: Results | None, options: DriftOptions
) -> tuple[Baseline, Layout, str | None, str]:
    """Return the baseline, the model's layout, its digest if known, and a description of the baseline."""
    from opal_deploy.artifact.files import compute_sha256, without_folders
    from opal_deploy.auditing.observed import Layout, Observed, find_model
    from opal_deploy.errors import ArtifactError
    from opal_deploy.runtime.select import read_model_metadata

    path = Path(options.baseline) if options.baseline is not None else find_model(now)
    metadata = None if path is None else read_model_metadata(path)
    sha256 = None if path is None else compute_sha256(path)
    if earlier is not None:
        layout = Layout.of_results(now) if metadata is None else Layout.of_model(metadata)
        observed = Observed(now, layout, sha256)
        if metadata is None:
            # finds the classes that only these results have
            for _ in observed:
                pass
        baseline = Observed(earlier, layout, sha256 or observed.model_sha256).sample_baseline()
        return baseline, layout, sha256, without_folders(earlier.shown)
    if path is None or metadata is None:
        missing = "no model given" if now.in_memory else "its model is neither next to it, in this folder nor in runs/"
        raise UsageError(f"{now.shown}: {missing}; give --baseline MODEL, or --against earlier results")
    if metadata.evidence != "exact":
        raise UsageError(
            f"{path}: no single cell is its evidence (evidence {metadata.evidence}); expected an OPAL model"
        )
    if not metadata.is_opal:
        raise UsageError(
            f"{path}: its records list only the strongest prototypes of a class (head {metadata.head_kind}), which no "
            "baseline of all prototypes can be compared with; give --against earlier results"
        )
    try:
        known = metadata.known_baseline
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from None
    if known is None:
        raise UsageError(
            f"{path}: it has no baseline; measure it with `opal-deploy evaluate DATA --split val --record --model "
            f"{path}`, or give --against earlier results"
        )
    return known, Layout.of_model(metadata), sha256, f"the baseline of {path.name} ({known.split} images)"
