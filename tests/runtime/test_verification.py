"""The gates on outputs made by hand: what passes, what fails, and what is left out as undecidable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs, cosines
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.runtime.verification import GATES, NEAR_TIE, WIDEST, Gate, Rounding, compare_outputs

CLASSES, M, CELLS = 4, 5, 49
METADATA = Metadata(tuple("abcd"), M, {"distance": "l2", "epsilon": 1e-8}, "exact", "resnet18", (7, 7), (224, 224))
FP32, FP16 = GATES["fp32"], GATES["fp16"]


def _reference(n: int = 10, seed: int = 0) -> Reference:
    """Consistent answers: logits follow from scores, every best cell is well ahead."""
    rng = np.random.default_rng(seed)
    scores = rng.uniform(0.01, 0.3, (n, CLASSES * M)).astype(np.float32)
    scores.reshape(n, CLASSES, M)[np.arange(n), np.arange(n) % CLASSES] += 0.4
    argmax = rng.integers(0, CELLS, scores.shape).astype(np.int32)
    return Reference(
        np.zeros((n, 2, 2, 3), np.uint8),
        Outputs(_logits(scores), argmax, scores),
        np.full(scores.shape, 0.5, np.float32),
    )


def _logits(scores: Any) -> Any:
    return -np.sqrt(2 - 2 * cosines(scores, M, 1e-8)).astype(np.float32)


def _with_scores(reference: Reference, scores: Any) -> Outputs:
    return replace(reference.outputs, scores=scores.astype(np.float32), logits=_logits(scores.astype(np.float32)))


def _flipped(reference: Reference, count: int, *, block: bool) -> Outputs:
    """`count` cells changed, inside or outside the predicted class's block."""
    outputs = reference.outputs
    assert outputs.argmax is not None
    argmax = outputs.argmax.copy()
    predicted = outputs.logits.argmax(1)
    inside = np.arange(CLASSES * M)[None] // M == predicted[:, None]
    rows, columns = np.nonzero(inside if block else ~inside)
    argmax[rows[:count], columns[:count]] += 1
    return replace(outputs, argmax=argmax)


class TestEqualOutputs:
    @pytest.mark.parametrize("gate", [FP32, FP16, WIDEST], ids=["fp32", "fp16", "widest"])
    def test_they_pass_with_no_difference(self, gate):
        reference = _reference()
        found = compare_outputs(reference, reference.outputs, METADATA, gate)
        assert found
        assert (found.max_logit, found.max_cosine, found.max_score) == (0.0, 0.0, 0.0)
        assert (found.images, found.cells, found.cells_different, found.classes_different) == (10, 200, 0, 0)

    def test_a_model_without_evidence_is_judged_by_its_logits(self):
        reference = _reference()
        bare = Reference(reference.images, Outputs(reference.outputs.logits))
        found = compare_outputs(bare, bare.outputs, METADATA, FP32)
        assert found
        assert (found.max_cosine, found.max_score, found.cells) == (None, None, 0)


class TestCosinesAndScores:
    @pytest.mark.parametrize(("movement", "passes"), [(1e-7, True), (2e-5, False), (1e-3, False)])
    def test_fp32_allows_a_cosine_one_millionth(self, movement, passes):
        reference = _reference()
        assert reference.outputs.scores is not None
        scores = reference.outputs.scores.copy()
        scores[:, 0] += movement
        assert bool(compare_outputs(reference, _with_scores(reference, scores), METADATA, FP32)) is passes

    def test_a_common_factor_moves_no_cosine_but_the_scores_show_it(self):
        reference = _reference()
        scores = 1.001 * reference.outputs.scores
        found = compare_outputs(reference, replace(reference.outputs, scores=scores), METADATA, FP32)
        assert found.max_cosine is not None
        assert found.max_cosine < 1e-6
        assert any("score" in failure for failure in found.failures)

    def test_logits_that_do_not_follow_from_the_scores_fail(self):
        # the cosines agree; the graph's own last step is wrong
        reference = _reference()
        wrong = replace(reference.outputs, logits=reference.outputs.logits * np.float32(1.01))
        found = compare_outputs(reference, wrong, METADATA, FP32)
        assert [failure for failure in found.failures if "logit" in failure]

    def test_logits_near_zero_are_not_compared(self):
        # the root magnifies rounding there
        reference = _reference()
        near = reference.outputs.logits.copy()
        near[0, 0] = -1e-3
        moved = near.copy()
        moved[0, 0] = -5e-3
        one = replace(reference, outputs=replace(reference.outputs, logits=near))
        assert compare_outputs(one, replace(one.outputs, logits=moved), METADATA, FP32)


class TestCells:
    def test_fp32_allows_no_untied_cell_to_differ_in_any_block(self):
        reference = _reference()
        for block in (True, False):
            found = compare_outputs(reference, _flipped(reference, 1, block=block), METADATA, FP32)
            assert found.cells_different == 1
            assert "1 of 200 cells differ" in found.failures[0]

    @pytest.mark.parametrize(("lead", "passes"), [(0.0, True), (9e-5, True), (1.1e-4, False)])
    def test_a_tie_is_a_lead_under_a_ten_thousandth(self, lead, passes):
        reference = _reference()
        assert reference.top2_margin is not None
        flipped = _flipped(reference, 1, block=True)
        gap = reference.top2_margin.copy()
        gap[flipped.argmax != reference.outputs.argmax] = lead
        found = compare_outputs(replace(reference, top2_margin=gap), flipped, METADATA, FP32)
        assert bool(found) is passes
        assert found.cells_tied == (1 if passes else 0)

    @pytest.mark.parametrize(("flips", "passes"), [(0, True), (5, True), (6, False)])
    def test_fp16_allows_half_a_percent_of_the_predicted_blocks(self, flips, passes):
        reference = _reference(n=200)
        found = compare_outputs(reference, _flipped(reference, flips, block=True), METADATA, FP16)
        assert (found.block_cells, found.block_cells_different) == (1000, flips)
        assert bool(found) is passes

    def test_fp16_counts_other_blocks_only_against_what_no_rounding_explains(self):
        reference = _reference()
        count = compare_outputs(reference, reference.outputs, METADATA, FP16).cells
        few, many = int(0.09 * count), int(0.11 * count)
        assert compare_outputs(reference, _flipped(reference, few, block=False), METADATA, FP16)
        found = compare_outputs(reference, _flipped(reference, many, block=False), METADATA, FP16)
        assert "of all classes'" in found.failures[0]
        assert "at least 90 % must" in found.failures[0]

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
    def test_cells_that_are_all_zero_fail_every_gate_here_and_elsewhere(self, precision):
        reference = _reference()
        nowhere = replace(reference.outputs, argmax=np.zeros_like(reference.outputs.argmax))
        for gate in (GATES[precision], GATES[precision].relaxed_for_machine()):
            assert not compare_outputs(reference, nowhere, METADATA, gate)

    def test_cells_without_a_lead_on_record_are_refused(self):
        reference = replace(_reference(), top2_margin=None)
        assert "no cells" in compare_outputs(reference, reference.outputs, METADATA, FP32).failures[0]


class TestClasses:
    @pytest.mark.parametrize(("lead", "different"), [(1e-7, 0), (0.2, 1)], ids=["within rounding", "clear"])
    def test_a_flip_counts_where_the_margin_is_clear(self, lead, different):
        # equal scores on both sides: only the last step, in float32, ordered two classes the other way
        scores = np.full((1, CLASSES * M), 0.2, np.float32)
        scores[0, :M] += np.float32(lead)
        logits = _logits(scores)
        logits[0, 0] = np.nextafter(logits.max(), np.float32(0))
        reference = Reference(
            np.zeros((1, 2, 2, 3), np.uint8),
            Outputs(logits, np.zeros((1, 20), np.int32), scores),
            np.ones((1, 20), np.float32),
        )
        candidate = replace(reference.outputs, logits=logits[:, [1, 0, 2, 3]])
        assert compare_outputs(reference, candidate, METADATA, FP16).classes_different == different

    def test_a_clear_flip_fails_whatever_else_passes(self):
        loose = Gate(cosine=9, logit=9, score=9, tie=1e-4, cells=0.0)
        reference = _reference()
        candidate = replace(reference.outputs, logits=np.roll(reference.outputs.logits, 1, axis=1))
        found = compare_outputs(reference, candidate, METADATA, loose)
        assert found.classes_different == 10
        assert found.failures == ("the predicted class differs on 10 images with a clear margin",)


class TestMalformedOutputs:
    @pytest.mark.parametrize(
        ("change", "names"),
        [
            ({"logits": np.zeros((10, 3), np.float32)}, "logits"),
            ({"logits": np.zeros((9, 4), np.float32)}, "logits"),
            ({"logits": np.zeros((10, 4), np.float64)}, "logits"),
            ({"argmax": np.zeros((10, 20), np.int64)}, "argmax"),
            ({"argmax": None}, "argmax"),
            ({"scores": None}, "scores"),
            ({"scores": np.zeros((10, 20, 1), np.float32)}, "scores"),
        ],
        ids=str,
    )
    def test_another_shape_or_type_fails_by_name(self, change, names):
        reference = _reference()
        found = compare_outputs(reference, replace(reference.outputs, **change), METADATA, WIDEST)
        assert not found
        assert found.failures[0].startswith(f"{names}: ")

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("name", ["logits", "scores"])
    def test_a_value_that_is_not_finite_fails(self, name, value):
        reference = _reference()
        spoilt = getattr(reference.outputs, name).copy()
        spoilt[3, 2] = value
        found = compare_outputs(reference, replace(reference.outputs, **{name: spoilt}), METADATA, WIDEST)
        assert "1 values are NaN or infinite" in found.failures[0]

    @pytest.mark.parametrize("bare", [False, True], ids=["with evidence", "logits alone"])
    @pytest.mark.parametrize("name", ["logits", "scores"])
    def test_a_reference_that_is_not_finite_proves_nothing(self, name, bare):
        reference = _reference()
        spoilt = getattr(reference.outputs, name).copy()
        spoilt[3, 2] = np.nan
        outputs = Outputs(spoilt) if bare else replace(reference.outputs, **{name: spoilt})
        candidate = Outputs(reference.outputs.logits) if bare else reference.outputs
        assert not compare_outputs(replace(reference, outputs=outputs), candidate, METADATA, WIDEST)


class TestRelaxedForAnotherMachine:
    def test_rounding_has_ten_times_the_room(self):
        gate = FP32.relaxed_for_machine()
        assert (gate.cosine, gate.score, gate.tie) == pytest.approx((1e-5, 1e-4, 1e-3))
        assert (gate.logit, gate.cells) == (FP32.logit, FP32.cells)

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
    def test_a_lower_precision_is_judged_by_all_cells_without_near_ties(self, precision):
        own, gate = GATES[precision], GATES[precision].relaxed_for_machine()
        assert (gate.cosine, gate.score, gate.logit) == (own.cosine, own.score, own.logit)
        assert gate.tie == NEAR_TIE
        assert 0.3 <= gate.all_cells == gate.cells < own.cells

    def test_a_widened_gate_stays_within_the_widest(self):
        gate = FP32.widened_by(Rounding(3e-5, 3e-5, 3e-3)).relaxed_for_machine()
        assert (gate.cosine, gate.score, gate.tie) == (WIDEST.cosine, WIDEST.score, WIDEST.tie)


class TestWidenedByRounding:
    @pytest.mark.parametrize(
        ("gate", "rounding", "expected"),
        [
            pytest.param(FP32, (3e-6, 2e-5, 4e-4), (1.2e-5, 8e-5, 1.6e-3), id="four times the movement"),
            pytest.param(FP32, (0.0, 0.0, 0.0), (FP32.cosine, FP32.score, FP32.tie), id="never narrower"),
            pytest.param(FP16, (1e-9, 1e-9, 1e-9), (FP16.cosine, FP16.score, FP16.tie), id="never narrower, fp16"),
            pytest.param(FP32, (1.0, 1.0, 1.0), (WIDEST.cosine, WIDEST.score, WIDEST.tie), id="not beyond the widest"),
        ],
    )
    def test_the_gate_widens(self, gate, rounding, expected):
        widened = gate.widened_by(Rounding(*rounding))
        assert (widened.cosine, widened.score, widened.tie) == pytest.approx(expected)
        assert (widened.logit, widened.cells, widened.all_cells) == (gate.logit, gate.cells, gate.all_cells)

    def test_movement_is_measured_between_two_runs(self):
        reference = _reference()
        scores = reference.outputs.scores.copy()
        scores[0, 0] *= np.float32(1.001)
        found = Rounding.between(reference.outputs, _with_scores(reference, scores), METADATA)
        assert found.score == pytest.approx(1e-3 * scores[0, 0], rel=1e-2)
        assert found.relative_score == pytest.approx(1e-3, rel=1e-2)
        assert 0 < found.cosine < 1e-3
        bare = Outputs(reference.outputs.logits)
        assert Rounding.between(bare, bare, METADATA) == Rounding(0.0, 0.0, 0.0)


def test_a_report_is_plain_data():
    import json

    reference = _reference()
    document = compare_outputs(reference, _flipped(reference, 1, block=True), METADATA, FP32).to_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["passed"] is False
