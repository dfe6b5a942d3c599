"""The gates on outputs made by hand: what passes, what fails, and what is left out as undecidable."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import cosines
from opal_deploy.artifact.outputs import Outputs, select_top
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.runtime.gates import GATES, NEAR_TIE, WIDEST, Gate, Rounding
from opal_deploy.runtime.verification import compare_outputs

CLASSES, M, CELLS = 4, 5, 49
METADATA = Metadata(tuple("abcd"), M, {"distance": "l2", "epsilon": 1e-8}, "exact", "resnet18", (7, 7), (224, 224))
FP32, FP16 = GATES["fp32"], GATES["fp16"]


def compute_logits(scores):
    return -np.sqrt(2 - 2 * cosines(scores, METADATA.class_map, 1e-8)).astype(np.float32)


def build_reference(n=10):
    """Return consistent outputs: logits follow from scores, every best cell is well ahead."""
    rng = np.random.default_rng(0)
    scores = rng.uniform(0.01, 0.3, (n, CLASSES * M)).astype(np.float32)
    scores.reshape(n, CLASSES, M)[np.arange(n), np.arange(n) % CLASSES] += 0.4
    argmax = rng.integers(0, CELLS, scores.shape).astype(np.int32)
    outputs = Outputs(compute_logits(scores), argmax, scores)
    return Reference(np.zeros((n, 2, 2, 3), np.uint8), outputs, np.full(scores.shape, 0.5, np.float32))


def test_a_recorded_gate_may_have_other_keys_than_this_versions():
    recorded = {"cosine": 1e-6, "logit": 1e-5, "score": 1e-6, "tie": 1e-4, "cells": 1.0}
    expected = Gate(**recorded)
    assert Gate.of_model(replace(METADATA, verification={"gate": {**recorded, "invented": 0.5}})) == expected
    assert Gate.of_model(METADATA) == FP32


REFERENCE = build_reference()
OUTPUTS = REFERENCE.outputs
BARE = Outputs(OUTPUTS.logits)


def compare(gate, *, reference=REFERENCE, **changes):
    """Compare the reference with its own outputs, some of them changed."""
    return compare_outputs(reference, replace(reference.outputs, **changes), METADATA, gate)


def with_scores(scores):
    scores = scores.astype(np.float32)
    return {"scores": scores, "logits": compute_logits(scores)}


def set_value(array, place, value):
    changed = array.copy()
    changed[place] = value
    return changed


def flip(count, *, block, reference=REFERENCE):
    """Return `argmax` with `count` cells changed, inside or outside the predicted class's block."""
    argmax = reference.outputs.argmax.copy()
    inside = np.arange(CLASSES * M)[None] // M == reference.outputs.logits.argmax(1)[:, None]
    rows, columns = np.nonzero(inside if block else ~inside)
    argmax[rows[:count], columns[:count]] += 1
    return argmax


def test_equal_outputs_pass_with_no_difference():
    report = compare(FP32)
    assert report
    assert (report.max_logit, report.max_cosine, report.max_score) == (0.0, 0.0, 0.0)
    assert (report.images, report.cells, report.cells_different, report.classes_different) == (10, 200, 0, 0)
    # a model without evidence is judged by its logits
    report = compare(FP32, reference=Reference(REFERENCE.images, BARE))
    assert report
    assert (report.max_cosine, report.max_score, report.cells) == (None, None, 0)


class TestCosinesAndScores:
    @pytest.mark.parametrize(("movement", "passes"), [(1e-7, True), (2e-5, False), (1e-3, False)])
    def test_fp32_allows_a_cosine_one_millionth(self, movement, passes):
        scores = OUTPUTS.scores.copy()
        scores[:, 0] += movement
        assert bool(compare(FP32, **with_scores(scores))) is passes

    def test_a_common_factor_moves_no_cosine_but_the_scores_show_it(self):
        report = compare(FP32, scores=1.001 * OUTPUTS.scores)
        assert report.max_cosine < 1e-6
        assert any("score" in failure for failure in report.failures)

    def test_logits_that_do_not_follow_from_the_scores_fail(self):
        # the cosines agree; the graph's own last step is wrong
        report = compare(FP32, logits=OUTPUTS.logits * np.float32(1.01))
        assert any("logit" in failure for failure in report.failures)

    def test_logits_near_zero_are_not_compared(self):
        # the root magnifies rounding there
        near = set_value(OUTPUTS.logits, (0, 0), -1e-3)
        reference = replace(REFERENCE, outputs=replace(OUTPUTS, logits=near))
        assert compare(FP32, reference=reference, logits=set_value(near, (0, 0), -5e-3))


class TestCells:
    @pytest.mark.parametrize("block", [True, False])
    def test_fp32_allows_no_untied_cell_to_differ_in_any_block(self, block):
        report = compare(FP32, argmax=flip(1, block=block))
        assert report.cells_different == 1
        assert "1 of 200 cells differ" in report.failures[0]
        document = report.to_dict()
        assert json.loads(json.dumps(document)) == document
        assert document["passed"] is False

    @pytest.mark.parametrize(("lead", "passes"), [(0.0, True), (9e-5, True), (1.1e-4, False)])
    def test_a_tie_is_a_lead_under_a_ten_thousandth(self, lead, passes):
        argmax = flip(1, block=True)
        leads = set_value(REFERENCE.top2_margin, argmax != OUTPUTS.argmax, lead)
        report = compare(FP32, reference=replace(REFERENCE, top2_margin=leads), argmax=argmax)
        assert bool(report) is passes
        assert report.cells_tied == (1 if passes else 0)

    @pytest.mark.parametrize(("flips", "passes"), [(0, True), (5, True), (6, False)])
    def test_fp16_allows_half_a_percent_of_the_predicted_blocks(self, flips, passes):
        reference = build_reference(n=200)
        report = compare(FP16, reference=reference, argmax=flip(flips, block=True, reference=reference))
        assert (report.block_cells, report.block_cells_different) == (1000, flips)
        assert bool(report) is passes

    @pytest.mark.parametrize(
        ("cells", "flips", "passes", "shown"),
        [(300, 0, True, False), (300, 3, True, False), (300, 5, False, False), (1000, 0, True, True)],
    )
    def test_a_share_is_refused_only_where_it_is_shown_to_be_too_small(self, cells, flips, passes, shown):
        reference = build_reference(n=cells // M)
        changed = replace(reference.outputs, argmax=flip(flips, block=True, reference=reference))
        report = compare_outputs(reference, changed, METADATA, FP16, confidence=0.95)
        assert (bool(report), report.agreement.shown) == (passes, shown)

    def test_a_near_tie_counts_as_a_difference_in_no_share_but_is_reported(self):
        argmax = flip(2, block=True)
        leads = set_value(REFERENCE.top2_margin, argmax != OUTPUTS.argmax, 0.9 * NEAR_TIE)
        report = compare(FP16, reference=replace(REFERENCE, top2_margin=leads), argmax=argmax)
        assert report
        assert (report.block_cells, report.block_cells_different, report.block_near_ties) == (48, 0, 2)

    def test_fp16_counts_other_blocks_only_against_what_no_rounding_explains(self):
        assert compare(FP16, argmax=flip(18, block=False))
        report = compare(FP16, argmax=flip(22, block=False))
        assert report.cells == 200
        assert "of all classes'" in report.failures[0]
        assert "at least 90 % must" in report.failures[0]

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
    def test_cells_that_are_all_zero_fail_every_gate_here_and_elsewhere(self, precision):
        for gate in (GATES[precision], GATES[precision].relaxed_for_machine()):
            assert not compare(gate, argmax=np.zeros_like(OUTPUTS.argmax))

    def test_cells_without_a_lead_on_record_are_refused(self):
        assert "no cells" in compare(FP32, reference=replace(REFERENCE, top2_margin=None)).failures[0]


class TestClasses:
    @pytest.mark.parametrize(("lead", "different"), [(1e-7, 0), (0.2, 1)], ids=["within rounding", "clear"])
    def test_a_flip_counts_where_the_margin_is_clear(self, lead, different):
        # equal scores on both sides: only the last step, in float32, ordered two classes the other way
        scores = np.full((1, CLASSES * M), 0.2, np.float32)
        scores[0, :M] += np.float32(lead)
        logits = compute_logits(scores)
        logits[0, 0] = np.nextafter(logits.max(), np.float32(0))
        outputs = Outputs(logits, np.zeros((1, 20), np.int32), scores)
        reference = Reference(np.zeros((1, 2, 2, 3), np.uint8), outputs, np.ones((1, 20), np.float32))
        assert compare(FP16, reference=reference, logits=logits[:, [1, 0, 2, 3]]).classes_different == different

    def test_a_clear_flip_fails_whatever_else_passes(self):
        loose = Gate(cosine=9, logit=9, score=9, tie=1e-4, cells=0.0)
        report = compare(loose, logits=np.roll(OUTPUTS.logits, 1, axis=1))
        assert report.classes_different == 10
        assert report.failures == ("the predicted class differs on 10 images with a clear margin",)


class TestMalformedOutputs:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("logits", np.zeros((10, 3), np.float32)), ("logits", np.zeros((9, 4), np.float32)),
            ("logits", np.zeros((10, 4), np.float64)), ("argmax", np.zeros((10, 20), np.int64)), ("argmax", None),
            ("scores", None), ("logits", set_value(OUTPUTS.logits, (3, 2), np.nan)),
            ("scores", set_value(OUTPUTS.scores, (3, 2), -np.inf)),
        ],
    )  # fmt: skip
    def test_another_shape_or_type_or_a_value_that_is_not_finite_fails_by_name(self, name, value):
        assert compare(WIDEST, **{name: value}).failures[0].startswith(f"{name}: ")

    def test_a_reference_that_is_not_finite_proves_nothing(self):
        for name in ("logits", "scores"):
            spoilt = replace(OUTPUTS, **{name: set_value(getattr(OUTPUTS, name), (3, 2), np.nan)})
            assert not compare_outputs(replace(REFERENCE, outputs=spoilt), OUTPUTS, METADATA, WIDEST)


class TestRelaxedForAnotherMachine:
    def test_rounding_has_ten_times_the_room(self):
        gate = FP32.relaxed_for_machine()
        assert (gate.cosine, gate.score, gate.tie) == pytest.approx((1e-5, 1e-4, 1e-3))
        assert (gate.logit, gate.cells) == (FP32.logit, FP32.cells)
        widest = FP32.widened_by(Rounding(3e-5, 3e-5, 3e-3)).relaxed_for_machine()
        assert (widest.cosine, widest.score, widest.tie) == (WIDEST.cosine, WIDEST.score, WIDEST.tie)

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
    def test_a_lower_precision_is_judged_by_all_cells_without_near_ties(self, precision):
        own, gate = GATES[precision], GATES[precision].relaxed_for_machine()
        assert (gate.cosine, gate.score, gate.logit) == (own.cosine, own.score, own.logit)
        assert gate.tie == NEAR_TIE
        assert 0.3 <= gate.all_cells == gate.cells < own.cells


class TestWidenedByRounding:
    @pytest.mark.parametrize(
        ("gate", "rounding", "expected"),
        [
            pytest.param(FP32, (3e-7, 2e-6, 4e-5), (9.6e-6, 6.4e-5, 1.28e-3), id="32 times the error"),
            pytest.param(FP32, (0.0, 0.0, 0.0), (FP32.cosine, FP32.score, FP32.tie), id="never narrower"),
            pytest.param(FP32, (1.0, 1.0, 1.0), (WIDEST.cosine, WIDEST.score, WIDEST.tie), id="not beyond the widest"),
        ],
    )
    def test_the_gate_widens(self, gate, rounding, expected):
        widened = gate.widened_by(Rounding(*rounding))
        assert (widened.cosine, widened.score, widened.tie) == pytest.approx(expected)
        assert (widened.cells, widened.all_cells) == (gate.cells, gate.all_cells)

    def test_movement_is_measured_between_two_runs(self):
        score = OUTPUTS.scores[0, 0]
        moved = with_scores(set_value(OUTPUTS.scores, (0, 0), score * np.float32(1.001)))
        rounding = Rounding.between(OUTPUTS, [OUTPUTS, replace(OUTPUTS, **moved)], METADATA)
        assert rounding.score == pytest.approx(1e-3 * score, rel=1e-2)
        assert rounding.relative_score == pytest.approx(1e-3, rel=1e-2)
        assert 0 < rounding.cosine < 1e-3
        assert Rounding.between(BARE, [BARE], METADATA) == Rounding()


TOP = select_top(OUTPUTS, METADATA.class_map, 2)


def swap(array):
    return array[:, ::-1].copy()


class TestBestClassesAlone:
    def compare(self, gate=FP32, **changes):
        metadata = replace(METADATA, top_k=2)
        outputs = Outputs(np.empty((10, 0), np.float32), top=TOP._replace(**changes))
        return compare_outputs(REFERENCE, outputs, metadata, gate)

    def test_equal_ones_pass_and_only_their_cells_are_counted(self):
        report = self.compare()
        assert report
        assert report.max_cosine < 1e-7
        assert (report.max_logit, report.max_score) == (0.0, 0.0)
        assert (report.cells, report.cells_tied, report.block_cells) == (10 * 2 * M, 0, 10 * M)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"classes": (TOP.classes + 1) % CLASSES}, "a class that is not listed is better by"),
            ({"classes": swap(TOP.classes)}, "100 of 100 cells differ"),
            ({"classes": TOP.classes * 0}, "listed twice"),
            ({"logits": TOP.logits + np.float32(1e-3)}, "a logit differs"),
            ({"logits": TOP.logits * np.float32(np.nan)}, "top_logits: 20 values are NaN"),
            ({"scores": TOP.scores * np.float32(1.01)}, "a score differs"),
            ({"cells": TOP.cells + 1}, "100 of 100 cells differ"),
            ({"norm": TOP.norm * np.float32(1.0001)}, "a cosine differs"),
            ({"norm": TOP.norm[:, None]}, r"score_norm: float32 \[10, 1\], expected float32 \[10\]"),
        ],
    )
    def test_what_differs_fails(self, changes, message):
        report = self.compare(**changes)
        assert not report
        assert re.search(message, "; ".join(report.failures))
