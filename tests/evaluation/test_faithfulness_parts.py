"""What faithfulness is made of: which images, which cells, what they become, and how models agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.faithfulness.measure import choose_samples
from opal_deploy.evaluation.faithfulness.perturbation import BASELINES, baseline_image, replace_cells
from opal_deploy.evaluation.faithfulness.rankings import build_rankings, choose_foreground, evidence_cells
from opal_deploy.evaluation.metrics import compare_outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.synthetic.dataset import Annotation, encode_runs

METADATA = Metadata(
    ("shown", "rival", "other"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (4, 4), (32, 32)
)


def _samples(labels: list[int], **options: object) -> list[Sample]:
    return [Sample(Path(f"{number}.png"), label, **options) for number, label in enumerate(labels)]  # type: ignore[arg-type]


class TestChoice:
    @pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 11])
    def test_as_many_as_asked_for_and_evenly_over_classes(self, limit: int) -> None:
        labels = [0] * 10 + [1] * 3 + [2] * 10
        chosen = choose_samples(_samples(labels), limit)

        assert len(chosen) == len(set(chosen)) == limit
        assert chosen == sorted(chosen)
        counts = Counter(labels[index] for index in chosen)
        open_classes = [counts[label] for label, size in ((0, 10), (1, 3), (2, 10)) if counts[label] < size]
        assert max(counts.values()) - min(open_classes) <= 1

    def test_a_larger_limit_takes_all(self) -> None:
        assert choose_samples(_samples([1, 0, 1]), 10) == [0, 1, 2]

    def test_within_a_class_they_lie_evenly(self) -> None:
        assert choose_samples(_samples([0] * 12), 4) == [0, 3, 6, 9]


def _outputs(argmax: list[int], scores: list[float], logits: list[float]) -> Outputs:
    return Outputs(np.array([logits], np.float32), np.array([argmax], np.int32), np.array([scores], np.float32))


EVERYWHERE = np.ones(16, np.bool_)


class TestOrders:
    def test_cells_are_by_what_their_slots_add_and_shared_ones_count_together(self) -> None:
        metadata = replace(METADATA, class_names=("a", "b"), prototypes_per_class=3)
        outputs = _outputs([7, 2, 7, 1, 1, 1], [0.3, 0.5, 0.3, 0.1, 0.2, 0.3], [-0.1, -0.2])

        assert evidence_cells(0, outputs, 0, metadata) == (7, 2)
        assert evidence_cells(1, outputs, 0, metadata) == (1,)

    def test_the_controls(self) -> None:
        outputs = _outputs([5, 10, 5, 2, 3, 3], [0.4, 0.9, 0.3, 0.2, 0.1, 0.1], [-0.1, -0.2, -0.3])
        heat = np.zeros(16, np.float32)
        heat[[6, 10]] = 2.0, 1.0
        found = build_rankings(outputs, 0, METADATA, EVERYWHERE, seed=0, index=0, heat=heat)

        assert found.predicted == 0
        assert found.cells["contribution"] == found.evidence == (10, 5)
        assert found.cells["reverse"] == (5, 10)
        assert found.cells["runner-up"] == (5, 2)
        assert found.cells["grad-cam"] == (6, 10)
        # one cell of its own, then a random one that is no evidence
        first, second = found.cells["another class"]
        assert first == 3
        assert second not in (3, 5, 10)
        assert len(found.cells["random"]) == 2
        assert not {5, 10} & {*found.cells["random"]}

    def test_random_cells_are_foreground_and_no_more_than_there_are(self) -> None:
        outputs = _outputs([5, 10, 0, 1, 2, 3], [0.4, 0.9, 0.3, 0.2, 0.1, 0.1], [-0.1, -0.2, -0.3])
        few, none = np.zeros(16, np.bool_), np.zeros(16, np.bool_)
        few[[5, 8]] = True
        none[[5, 10]] = True

        for index in range(5):
            assert build_rankings(outputs, 0, METADATA, few, seed=0, index=index).cells["random"] == (8,)
        assert "random" not in build_rankings(outputs, 0, METADATA, none, seed=0, index=0).cells

    def test_random_cells_reach_every_cell_that_is_no_evidence(self) -> None:
        outputs = _outputs([5, 10, 0, 1, 2, 3], [0.4, 0.9, 0.3, 0.2, 0.1, 0.1], [-0.1, -0.2, -0.3])
        drawn = Counter(
            cell
            for index in range(200)
            for cell in build_rankings(outputs, 0, METADATA, EVERYWHERE, seed=0, index=index).cells["random"]
        )

        assert set(drawn) == set(range(16)) - {5, 10}
        assert max(drawn.values()) < 3 * min(drawn.values())

    def test_one_cell_has_no_reverse_and_two_classes_no_third(self) -> None:
        metadata = replace(METADATA, class_names=("a", "b"))
        found = build_rankings(
            _outputs([4, 4, 1, 2], [0.9, 0.9, 0.1, 0.1], [-0.1, -0.2]), 0, metadata, EVERYWHERE, seed=0, index=0
        )

        assert set(found.cells) == {"contribution", "random", "runner-up"}
        assert found.cells["runner-up"] in {(1,), (2,)}


class TestFills:
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)

    def test_only_the_rectangles_of_the_cells_change(self) -> None:
        paint = np.full_like(self.image, 7)
        changed = replace_cells(self.image, paint, frozenset({0, 6}), (4, 4))

        assert (changed[:8, :12] == 7).all()
        assert (changed[8:16, 24:36] == 7).all()
        changed[:8, :12], changed[8:16, 24:36] = self.image[:8, :12], self.image[8:16, 24:36]
        assert (changed == self.image).all()

    def test_all_cells_are_the_paint_and_none_the_picture(self) -> None:
        paint = np.full_like(self.image, 7)
        assert (replace_cells(self.image, paint, frozenset(range(16)), (4, 4)) == paint).all()
        assert (replace_cells(self.image, paint, frozenset(), (4, 4)) == self.image).all()

    @pytest.mark.parametrize("fill", BASELINES)
    def test_a_fill_keeps_the_mean_colour_and_is_the_same_every_time(self, fill: str) -> None:
        smooth = (self.image // 4 + np.array([90, 40, 120], np.uint8)).astype(np.uint8)
        first, again = (baseline_image(smooth, fill, (4, 4), seed=3, index=5) for _ in range(2))  # type: ignore[arg-type]

        assert first.dtype == np.uint8
        assert (first == again).all()
        assert first.mean(axis=(0, 1)) == pytest.approx(smooth.mean(axis=(0, 1)), abs=2.5)
        if fill == "mean":
            assert (first == first[0, 0]).all()
        if fill == "noise":
            assert first.std(axis=(0, 1)) == pytest.approx(smooth.std(axis=(0, 1)), rel=0.1)
            assert (first != baseline_image(smooth, fill, (4, 4), seed=4, index=5)).any()
        if fill == "blur":
            assert (first.std(axis=(0, 1)) < 0.5 * smooth.std(axis=(0, 1))).all()


class TestForeground:
    whole = Geometry.whole(80, 40)

    def test_without_masks_and_boxes_every_cell_counts_and_it_is_said(self) -> None:
        found = choose_foreground(_samples([0]), None, (4, 4), boxes=True)
        assert "no foreground is known" in found.name
        assert found.cells(0, self.whole).all()

    def test_cropped_to_boxes_every_cell_counts(self) -> None:
        found = choose_foreground(_samples([0], box=(20, 0, 60, 40)), None, (4, 4), boxes=True)
        assert "cropped to their boxes" in found.name
        assert found.cells(0, self.whole).all()

    def test_of_whole_pictures_the_cells_in_the_box_count(self) -> None:
        # cells of 20 x 10; the third column has a quarter of itself in the box, the fourth nothing
        found = choose_foreground(_samples([0], box=(20, 10, 45, 40)), None, (4, 4), boxes=False)
        assert "annotated box" in found.name
        assert found.cells(0, self.whole).reshape(4, 4).astype(int).tolist() == [
            [0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0],
        ]  # fmt: skip

    def test_drawn_masks_come_first(self) -> None:
        mask = np.zeros((40, 80), np.bool_)
        mask[:20, :20] = True
        annotation = Annotation("a.png", "x", 80, 40, {}, encode_runs(mask))
        found = choose_foreground(_samples([0], box=(0, 0, 80, 40)), [annotation], (4, 4), boxes=False)
        assert "drawn masks" in found.name
        assert np.flatnonzero(found.cells(0, self.whole)).tolist() == [0, 4]


class TestAgreement:
    ours = Outputs(
        np.array([[-0.1, -0.5], [-0.6, -0.2]], np.float32),
        np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32),
        np.array([[0.6, 0.6, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], np.float32),
    )
    metadata = replace(METADATA, class_names=("a", "b"))

    def test_a_model_agrees_with_itself(self) -> None:
        found = compare_outputs((self.ours, self.metadata), (self.ours, self.metadata))
        assert (found.images, found.same_class, found.same_cells, found.largest_cosine_difference) == (2, 1.0, 1.0, 0.0)

    def test_differences_are_counted_in_the_first_models_answers(self) -> None:
        theirs = Outputs(
            np.array([[-0.1, -0.5], [-0.1, -0.2]], np.float32),
            # of the block of class 0 one cell moved; the second image's block is that of class 1
            np.array([[1, 9, 9, 9], [9, 9, 7, 8]], np.int32),
            np.array([[0.6, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], np.float32),
        )
        found = compare_outputs((self.ours, self.metadata), (theirs, self.metadata))
        assert (found.same_class, found.same_cells) == (0.5, 0.75)
        assert found.largest_cosine_difference == pytest.approx(1 - 0.5**0.5, abs=1e-6)

    def test_slots_of_another_number_or_grid_are_not_compared(self) -> None:
        for other in (replace(self.metadata, prototypes_per_class=1), replace(self.metadata, grid=(3, 3))):
            theirs = Outputs(self.ours.logits, self.ours.argmax, np.abs(self.ours.scores))  # type: ignore[arg-type]
            if other.prototypes_per_class == 1:
                theirs = Outputs(self.ours.logits, self.ours.argmax[:, :2], self.ours.scores[:, :2])  # type: ignore[index]
            assert compare_outputs((self.ours, self.metadata), (theirs, other)).same_cells is None

    def test_a_model_without_slots_agrees_on_answers_only(self) -> None:
        found = compare_outputs((self.ours, self.metadata), (Outputs(self.ours.logits), self.metadata))
        assert (found.same_class, found.same_cells, found.largest_cosine_difference) == (1.0, None, None)


def test_grad_cam_is_the_gradients_mean_times_the_features() -> None:
    import torch

    from opal_deploy.evaluation.faithfulness.gradcam import GradCam
    from opal_deploy.model.config import HeadConfig, NetworkConfig
    from opal_deploy.model.network import OpalNetwork
    from opal_deploy.preprocess.resize import normalise

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = OpalNetwork(
            NetworkConfig("shufflenet_v2_x0_5", 3, (64, 64), HeadConfig(prototypes_per_class=2))
        ).eval()
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    classes = np.array([2, 0])
    heat = GradCam(network)(images, classes)

    assert heat.shape == (2, 4)
    # in double precision, from the whole Jacobian
    with torch.no_grad():
        features = network.backbone(torch.from_numpy(normalise(images, METADATA.mean, METADATA.std))).double()
    head = network.head.double()
    for row, class_id in enumerate(classes):
        point = features[row : row + 1].clone().requires_grad_()
        jacobian = torch.autograd.functional.jacobian(
            lambda x, c=class_id: head.classify(head.pool(head.attend(head.projection(x))))[0, c], point
        )
        expected = (jacobian.mean(dim=(2, 3), keepdim=True) * features[row : row + 1]).sum(1).flatten()
        assert heat[row] == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-6)
