"""The comparison of a model's outputs with a reference, by the gates of `gates`.

`compare_outputs` measures and judges; `verify_test_vectors` checks an artifact against the vectors that it carries.

If a graph lists only its best classes, these are compared with the reference's values of the same classes. A class that
beats a listed one by more than twice the gate must not be missing from the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.heads import find_contributions, find_strongest, to_norms
from opal_deploy.artifact.metadata import TOP_OUTPUTS, Metadata
from opal_deploy.artifact.outputs import OUTPUT_SPECS, PER_IMAGE, FloatArray, IntArray, Outputs, TopOutputs, select_top
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import VerificationError
from opal_deploy.logs import Log, WarningLine, log_line
from opal_deploy.runtime.gates import (
    NEAR_TIE,
    Agreement,
    Gate,
    compute_totals,
    logit_slack,
    score_differences,
    total_scale,
)
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.session import Session

# float32 logits do not tell classes apart that are nearer than this, even where both sides' scores are the same
_RESOLUTION = 1e-6


@dataclass(frozen=True)
class Comparison:
    """The differences between a candidate and the reference over `images` images; true if the candidate passed.

    Attributes:
        max_cosine, max_logit, max_score: largest absolute differences (None where the model has no such output); for a
            linear head `max_cosine` is that of the logits relative to their scale, see `gates.total_scale`.
        max_others: largest absolute differences of the outputs with one number per image, by name.
        cells, cells_tied, cells_different: of all K channels of all images: compared, left out as ties, different.
        block_cells, block_cells_different: the same within the reference's predicted class, ties left out.
        block_near_ties: cells within the predicted class that differ and lead by less than NEAR_TIE.
        classes_different: images whose predicted class differs although the margin is large enough to tell.
        worst: index of the image that is furthest from the reference.
        agreement: the share of block_cells that agree with its bounds; None where the plain share is judged.
        failures: one sentence for each gate that failed; empty if the candidate passed.
    """

    images: int
    max_logit: float
    max_cosine: float | None = None
    max_score: float | None = None
    cells: int = 0
    cells_tied: int = 0
    cells_different: int = 0
    block_cells: int = 0
    block_cells_different: int = 0
    block_near_ties: int = 0
    classes_different: int = 0
    worst: int = 0
    max_others: Mapping[str, float] = field(default_factory=dict)
    agreement: Agreement | None = None
    failures: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for the verification report in the metadata."""
        return {**asdict(self), "failures": list(self.failures), "passed": bool(self)}


def compare_outputs(
    reference: Reference, candidate: Outputs, metadata: Metadata, gate: Gate, confidence: float | None = None
) -> Comparison:
    """Compare a candidate's outputs with the reference, on the reference's images.

    With a confidence, the share of the predicted classes' cells is refused only if it is shown, at this confidence, to
    be too small. Without one, every share that is too small is refused.
    """
    expected = reference.outputs
    failures = _shape_failures(expected, candidate, metadata)
    if failures:
        return Comparison(len(expected), float("nan"), failures=failures)
    if candidate.top is not None and candidate.scores is None:
        return _compare_others(_compare_top(reference, candidate.top, metadata, gate), expected, candidate, gate)
    logit, logit_failure = _logits(expected.logits, candidate.logits, gate)
    other_class = expected.logits.argmax(1) != candidate.logits.argmax(1)
    if expected.scores is None or candidate.scores is None:
        flipped = other_class & _decided(expected.logits, logit)
        worst = _worst(flipped, np.abs(expected.logits - candidate.logits).max(axis=1))
        messages = [logit_failure, _classes_failure(int(flipped.sum()))]
        failures = tuple(message for message in messages if message)
        return Comparison(len(expected), logit, classes_different=int(flipped.sum()), worst=worst, failures=failures)
    comparison = _compare_evidence(
        reference, candidate, compute_totals(candidate, metadata), candidate.logits.argmax(1), metadata, gate,
        confidence=confidence,
    )  # fmt: skip
    return _compare_others(comparison, expected, candidate, gate)


def _compare_others(comparison: Comparison, expected: Outputs, candidate: Outputs, gate: Gate) -> Comparison:
    """Return the comparison with the outputs that have one number per image."""
    computed, failures = candidate.per_image(), comparison.failures
    differences = {
        name: float(np.abs(values - computed[name]).max())
        for name, values in expected.per_image().items()
        if name in computed
    }
    for name, difference in differences.items():
        if difference > gate.others[name]:
            failures += (f"a {name} differs by {difference:.3g}, more than {gate.others[name]:g}",)
    return replace(comparison, max_others=differences, failures=failures)


def _compare_top(reference: Reference, top: TopOutputs, metadata: Metadata, gate: Gate) -> Comparison:
    """Compare the listed classes; all others count as equal, and none of their cells as compared."""
    expected, class_map = reference.outputs, metadata.class_map
    place = np.arange(len(expected))[:, None], top.classes
    logits, after = expected.logits.copy(), compute_totals(expected, metadata)
    scores, argmax = cast(FloatArray, expected.scores).copy(), cast(IntArray, expected.argmax).copy()
    listed = np.zeros(scores.shape, np.bool_)
    logits[place] = top.logits
    channels = np.arange(len(expected))[:, None, None], class_map.channel_table[top.classes]
    scores[channels], argmax[channels], listed[channels] = top.scores, top.cells, True
    norms = to_norms(top.norm, metadata)
    after[place] = class_map.totals(top.scores / norms[:, None, None], top.classes) / total_scale(metadata)
    comparison = _compare_evidence(
        reference, Outputs(logits, argmax, scores), after, top.classes[:, 0], metadata, gate, listed
    )
    selection = _selection_failures(expected.logits, top, gate)
    return replace(comparison, failures=comparison.failures + selection)


def _selection_failures(logits: FloatArray, top: TopOutputs, gate: Gate) -> tuple[str, ...]:
    """Return the faults of the list of the best classes, given the reference's logits [N, C]."""
    failures = []
    before, after = top.logits[:, :-1], top.logits[:, 1:]
    ordered = (before > after) | ((before == after) & (top.classes[:, :-1] < top.classes[:, 1:]))
    if not ordered.all():
        failures.append(f"the best classes of {int((~ordered.all(axis=1)).sum())} images are not in their order")
    worst_listed = np.take_along_axis(logits, top.classes, axis=1).min(axis=1)
    others = logits.copy()
    np.put_along_axis(others, top.classes, -np.inf, axis=1)
    excess = (others.max(axis=1) - worst_listed) / np.maximum(1.0, np.abs(worst_listed))
    if excess.max() > 2 * gate.logit:
        failures.append(
            f"a class that is not listed is better by {excess.max():.3g} than one that is, more than {2 * gate.logit:g}"
        )
    return tuple(failures)


def _compare_evidence(
    reference: Reference,
    candidate: Outputs,
    after: Any,
    predicted: Any,
    metadata: Metadata,
    gate: Gate,
    listed: Any = True,
    confidence: float | None = None,
) -> Comparison:
    """Compare outputs with scores: of all classes, with totals `after` [N, C] and predicted classes [N].

    Only the cells of the channels `listed`, bool [N, K], are compared; True: all.
    """
    expected = reference.outputs
    slack = logit_slack(expected, metadata, gate.score)
    logit, logit_failure = _logits(expected.logits, candidate.logits, gate, slack)
    score = float(score_differences(expected, candidate, metadata).max())
    before = compute_totals(expected, metadata)
    distance = np.maximum(np.abs(before - after) - slack / total_scale(metadata), 0.0).max(axis=1)
    cosine = float(distance.max())
    cells, moved = _cells(reference, candidate, metadata, gate, listed)
    agreement = None
    if confidence is not None and cells and gate.cells < 1.0:
        count = cells["block_cells"]
        agreement = Agreement.of(count - cells["block_cells_different"], count, gate.cells, confidence)
    flipped = (expected.logits.argmax(1) != predicted) & _decided(before, cosine)
    messages = [
        logit_failure,
        "" if cosine <= gate.cosine else f"a cosine differs by {cosine:.3g}, more than {gate.cosine:g}",
        "" if score <= gate.score else f"a score differs by {score:.3g}, more than {gate.score:g}",
        *_find_cell_failures(cells, gate, agreement),
        _classes_failure(int(flipped.sum())),
    ]
    counts: dict[str, Any] = {**cells}
    return Comparison(
        len(expected), logit, cosine, score, **counts, classes_different=int(flipped.sum()),
        worst=_worst(flipped, moved, distance), agreement=agreement, failures=tuple(f for f in messages if f),
    )  # fmt: skip


def _worst(*criteria: Any) -> int:
    """Return the image that is largest by the first criterion [N]; the next one breaks ties."""
    return int(np.lexsort(criteria[::-1])[-1])


def _shape_failures(expected: Outputs, candidate: Outputs, metadata: Metadata) -> tuple[str, ...]:
    failures = []
    names = [name for name, spec in OUTPUT_SPECS.items() if spec.in_test_vectors]
    pairs = {name: (getattr(expected, name), getattr(candidate, name)) for name in names}
    if candidate.top is not None and candidate.scores is None and expected.scores is not None:
        selected = select_top(expected, metadata.class_map, metadata.max_top)
        listed = zip(TOP_OUTPUTS, zip(selected, candidate.top, strict=True), strict=True)
        pairs = {**dict(listed), **{name: pairs[name] for name in PER_IMAGE}}
    for name, (before, after) in pairs.items():
        if before is None:
            continue
        if after is None or before.shape != after.shape or before.dtype != after.dtype:
            actual = "nothing" if after is None else f"{after.dtype} {list(after.shape)}"
            failures.append(f"{name}: {actual}, expected {before.dtype} {list(before.shape)}")
        elif not np.isfinite(after).all():
            failures.append(f"{name}: {int((~np.isfinite(after)).sum())} values are NaN or infinite")
        elif not np.isfinite(before).all():
            failures.append(f"{name}: {int((~np.isfinite(before)).sum())} values of the reference are NaN or infinite")
        elif name == "top_classes" and _invalid_classes(after, metadata.num_classes):
            failures.append("top_classes: a class is listed twice, or there is no such class")
    return tuple(failures)


def _invalid_classes(classes: IntArray, num_classes: int) -> bool:
    ordered = np.sort(classes, axis=1)
    return bool((ordered < 0).any() or (ordered >= num_classes).any() or (np.diff(ordered, axis=1) == 0).any())


def _logits(expected: FloatArray, candidate: FloatArray, gate: Gate, slack: Any = 0.0) -> tuple[float, str]:
    """Return the largest difference and its fault, if any; differences up to `slack` [N, C] are allowed."""
    comparable = np.abs(expected) > 1e-2  # the root magnifies rounding near zero
    difference = np.where(comparable, np.maximum(np.abs(expected - candidate) - slack, 0.0), 0.0)
    relative = float((difference / np.maximum(1.0, np.abs(expected))).max())
    failure = f"a logit differs by {relative:.3g} (relative), more than {gate.logit:g}"
    return float(difference.max()), "" if relative <= gate.logit else failure


def _decided(values: FloatArray, difference: float) -> Any:
    """Return bool [N]: the images whose best class leads by more than twice the measured difference."""
    best = np.sort(values, axis=1)
    return best[:, -1] - best[:, -2] > 2 * max(difference, _RESOLUTION)


def _cells(
    reference: Reference, candidate: Outputs, metadata: Metadata, gate: Gate, listed: Any
) -> tuple[dict[str, int], Any]:
    """Return the counts for the report, and how many of the cells that the gate counts differ in each image [N]."""
    expected, margin = reference.outputs, reference.top2_margin
    if expected.argmax is None or candidate.argmax is None or margin is None:
        return {}, np.zeros(len(expected))
    untied = (margin >= gate.tie) & listed
    unequal = expected.argmax != candidate.argmax
    differs = unequal & untied
    in_block, class_map = np.zeros(unequal.shape, np.bool_), metadata.class_map
    predicted = expected.logits.argmax(axis=1)
    if not metadata.shares_prototypes or expected.scores is None:
        np.put_along_axis(in_block, class_map.channel_table[predicted], True, axis=1)
    else:
        # of shared prototypes those that a record lists
        parts = find_contributions(expected.scores, predicted, metadata)
        np.put_along_axis(in_block, *find_strongest(parts, class_map.kept[predicted]), axis=1)
    counts = {
        "cells": int(untied.sum()),
        "cells_tied": int(((margin < gate.tie) & listed).sum()),
        "cells_different": int(differs.sum()),
        "block_cells": int((untied & in_block).sum()),
        "block_cells_different": int((differs & in_block).sum()),
        "block_near_ties": int((unequal & listed & in_block & (margin < NEAR_TIE)).sum()),
    }
    return counts, (differs if gate.cells >= 1.0 else differs & in_block).sum(axis=1)


def _find_cell_failures(cells: dict[str, int], gate: Gate, agreement: Agreement | None) -> Iterator[str]:
    if not cells:
        yield "there are no cells to compare"
        return
    everywhere, moved = cells["cells"], cells["cells_different"]
    if gate.cells >= 1.0:
        if moved:
            yield f"{moved} of {everywhere} cells differ; none may"
        return
    count, different = cells["block_cells"], cells["block_cells_different"]
    if agreement.refuted if agreement else different > (1.0 - gate.cells) * count:
        agree = f"{100.0 * (1.0 - different / count):.2f} % of the predicted classes' {count} cells agree"
        at_most = f" (in all such images at most {100 * agreement.high:.2f} %)" if agreement else ""
        yield f"{agree}{at_most}; at least {100 * gate.cells:g} % must"
    if moved > (1.0 - gate.all_cells) * everywhere:
        agree = f"{100.0 * (1.0 - moved / everywhere):.1f} % of all classes' {everywhere} cells agree"
        yield f"{agree}; at least {100 * gate.all_cells:g} % must"


def _classes_failure(different: int) -> str:
    return f"the predicted class differs on {different} images with a clear margin" if different else ""


def wide_batch(metadata: Metadata) -> int:
    """Return a number of images beyond the model's classes and prototypes, 64 at most.

    Some runtimes read a constant per class by an image's place in the batch, which only such a batch shows.
    """
    return min(max(metadata.num_classes, metadata.num_prototypes) + 1, 64)


def verify_test_vectors(session: Session, origin: str, batch: int | None = None) -> Comparison:
    """Run the test vectors that a model carries and compare the outputs with the stored ones.

    Args:
        origin: names the file in errors.
        batch: images that run at once, the vectors in turn; None: each vector once.

    Raises:
        ArtifactError: the model carries no vectors.
        VerificationError: an output is beyond the gate of the model's precision.
    """
    metadata = session.metadata
    reference = test_vectors.unpack(metadata.test_vectors, origin)
    if batch is not None:
        reference = reference.repeat(batch)
    gate = Gate.of_model(metadata).relaxed_for_machine()
    comparison = compare_outputs(reference, session.run(reference.images), metadata, gate)
    if not comparison:
        raise VerificationError(
            f"{origin} does not reproduce its own test vectors in {session.description}, {len(reference.images)} "
            f"at once: {'; '.join(comparison.failures)}; export it in another precision, or use another runtime"
        )
    return comparison


def verify_file(path: Path, *, verify: bool = True, threads: int | None = None, log: Log = log_line) -> None:
    """Check an exported ONNX file before it is used as it is: its digest and, with `verify`, its test vectors.

    A file that was never verified is named in the log.

    Raises:
        ArtifactError: the file is damaged. MissingExtra: onnxruntime is not installed.
        VerificationError: the file does not reproduce its own test vectors here.
    """
    metadata = onnx_file.read_metadata(path)
    onnx_file.check_digest(path, metadata)
    if metadata.unverified:
        log(WarningLine(f"NOT VERIFIED: {path.name} was {metadata.unverified}"))
    # ONNX Runtime has no bfloat16 convolutions
    if verify and metadata.precision != "bf16":
        log(f"Checking {path.name} against its own test vectors")
        verify_test_vectors(OnnxSession(path, device="cpu", threads=threads), str(path))
