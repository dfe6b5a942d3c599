"""Risk over coverage in `evaluate`: the curve over the margin, and the threshold for an error rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.statistics import RiskCurve, Threshold, clopper_pearson_bound, compute_risk_curve, explain_too_few


def compute_margin_curve(result: EvaluationResult) -> RiskCurve | None:
    """Return the risk-coverage curve over the margin; None for a model without anchors, which has no margins."""
    if result.margins is None:
        return None
    return compute_risk_curve(result.margins, result.outputs.logits.argmax(axis=1) == result.labels)


def check_support(images: int, target: float) -> None:
    """Check that so many images can support an error rate, before any model runs.

    Raises:
        UsageError: too few images, whatever the model.
    """
    reason = explain_too_few(images, target)
    if reason:
        least = math.ceil(1000 * clopper_pearson_bound(0, images)) / 10
        raise UsageError(
            f"--target-error {100 * target:g}%: {reason}; give more images, or a rate of {least:g}% or more"
        )


def format_curve(curve: RiskCurve) -> Iterator[str]:
    """Yield the curve as a line of text."""
    summary = curve.summary()
    shares = ", ".join(
        f"{share:.1%} at {100 * float(rate):g} %" for rate, share in summary["coverage_at_error"].items()
    )
    yield (
        f"risk-coverage over the margin: error {curve.error:.2%} where all {curve.images:,} are answered, AURC "
        f"{curve.aurc:.4f}; coverage by error rate, as seen here: {shares}"
    )


def format_threshold(threshold: Threshold, smallest: float | None = None) -> Iterator[str]:
    """Yield the threshold chosen for an error rate, or the reason why there is none.

    Args:
        threshold: as chosen.
        smallest: the smallest error rate that these images support, named where there is no threshold; None if none.
    """
    target = f"an error rate of at most {100 * threshold.target:g} %"
    if threshold.min_margin is None:
        advice = (
            "no rate works" if smallest is None else f"--target-error {100 * smallest:g}% is the smallest that works"
        )
        yield f"no --min-margin is known to give {target}: {threshold.reason}; {advice}"
        return
    yield (
        f"--min-margin {threshold.min_margin!r} for {target}: answers {threshold.coverage:.1%} of "
        f"{threshold.images:,} images, {threshold.wrong} of {threshold.answered:,} wrong; with "
        f"{threshold.confidence:.0%} confidence at most {100 * threshold.bound:.2f} % (Clopper and Pearson's one-sided "
        "bound), on images such as these"
    )


def curve_table(curve: RiskCurve) -> tuple[list[str], list[list[str | int | float]]]:
    """Return header and rows of risk_coverage.csv, one row per threshold, the strictest first."""
    numbers = zip(curve.margins.tolist(), curve.answered.tolist(), curve.wrong.tolist(), strict=True)
    table: list[list[str | int | float]] = [[t, k, k / curve.images, e, e / k] for t, k, e in numbers]
    return ["min_margin", "answered", "coverage", "wrong", "error"], table


def draw_curve(curve: RiskCurve, threshold: Threshold | None, path: Path) -> None:
    """Write a PNG of the error rate over coverage, with the chosen threshold."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    coverage: NDArray[np.float64] = curve.answered / curve.images
    axes.plot(
        coverage, curve.wrong / curve.answered, color="#0072B2", drawstyle="steps-post", label="error, as seen here"
    )
    if threshold is not None:
        axes.axhline(threshold.target, color="#D55E00", linestyle="--", label=f"target: {100 * threshold.target:g} %")
        if threshold.min_margin is not None:
            label = f"margin {threshold.min_margin:.3g}: at most {100 * threshold.bound:.2g} %"
            axes.plot([threshold.coverage], [threshold.bound], "o", color="#D55E00", label=label)
    axes.set_xlabel("coverage: share of images answered")
    axes.set_ylabel("share of wrong answers among them")
    axes.set_xlim(0, 1.01)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(f"Risk and coverage over the margin, {curve.images:,} images, AURC {curve.aurc:.4f}")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
