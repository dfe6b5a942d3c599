"""Consistency, stability and part purity by hand, of a perfect detector, a network and its export."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.inputs import read_inputs
from opal_deploy.evaluation.parts import (
    TOP,
    PartProtocol,
    add_noise,
    explain_undefined,
    part_hits,
    patch_boxes,
    peak_locations,
    prototype_consistency,
    prototype_stability,
    purity_by_channel,
)
from opal_deploy.evaluation.session import evaluate_session
from opal_deploy.model.checkpoint import build_metadata
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.torch_session import TorchSession
from tests.builders import build_checkpoint, export_onnx
from tests.datasets.layouts import write_lines, write_parts

M = 3
GRID = (7, 7)
FIGURES = ("prototype_consistency", "prototype_stability", "part_purity")


def test_patches_are_cells_on_the_papers_grid_and_overlap_on_finer_ones():
    expected = [[0, 0, 32, 32], [64, 32, 96, 64], [192, 192, 224, 224]]
    assert patch_boxes(np.array([0, 9, 48]), GRID).tolist() == expected
    # round(192 / 27) = 7 pixels a step; 27 steps are 189, and the last patch ends at 224 all the same
    finer = patch_boxes(np.array([1 * 28 + 26, 27 * 28 + 27]), (28, 28))
    assert finer.tolist() == [[182, 7, 214, 39], [192, 192, 224, 224]]
    assert patch_boxes(np.array([0]), (1, 1)).tolist() == [[192, 192, 224, 224]]


IN, OUT = (5.0, 5.0), (-9.0, -9.0)
EYES = ("left eye", "right eye")


@pytest.mark.parametrize(
    ("points", "visible", "names", "scores", "cells", "expected"),
    [
        ([[(32.0, 32.0)]], True, ("beak",), None, None, 1.0),
        ([[(32.01, 0.0)]], True, ("beak",), None, None, 0.0),
        ([[(0.0, -0.01)]], True, ("beak",), None, None, 0.0),
        # beak: 2 of 4; tail: 2 of 3, being invisible on the last image
        (
            [[IN, OUT], [OUT, IN], [IN, IN], [OUT, IN]], [[True, True]] * 3 + [[True, False]], ("beak", "tail"),
            None, None, 2 / 3,
        ),
        ([[OUT]] * 5 + [[IN]] * TOP, True, ("beak",), [0.1] * 5 + [0.9] * TOP, None, 1.0),
        ([[IN]] * TOP + [[OUT]] * 5, True, ("beak",), None, None, 1.0),
        ([[(100.0, 40.0)], [(40.0, 100.0)]], True, ("beak",), None, [1 * 7 + 3, 3 * 7 + 1], 1.0),
        ([[IN, OUT], [OUT, IN]], True, EYES, None, None, 1.0),
        ([[IN, OUT], [OUT, IN]], True, ("left eye", "right leg"), None, None, 0.5),
        # the left eye's patch holds it, but it is hidden; the right one is visible elsewhere
        ([[IN, OUT]], [[False, True]], EYES, None, None, 0.0),
    ],
    ids=[
        "edge inside", "beyond the edge", "before the edge", "share where visible", "highest scores", "equal scores",
        "own cell", "sides merge", "other parts do not", "hidden side",
    ],
)  # fmt: skip
def test_purity(points, visible, names, scores, cells, expected):
    where = np.array(points)
    purity = purity_by_channel(
        np.array(scores or [1.0] * len(points), np.float32)[:, None],
        np.array(cells or [0] * len(points), np.int32)[:, None],
        GRID,
        where,
        np.broadcast_to(np.array(visible), where.shape[:2]),
        names,
    )
    assert purity.tolist() == pytest.approx([expected])


def _hot(cells):
    cell_map = np.zeros((1, 1, 7, 7), np.float32)
    for place, value in cells.items():
        cell_map[0, 0][place] = value
    return cell_map


@pytest.mark.parametrize(
    ("cells", "rows", "columns"),
    [
        # the centre lies between pixels 111 and 112; of the four equal ones the first counts
        ({(3, 3): 1}, (111, 111), (111, 111)),
        # two equal maxima: the first, row-major
        ({(5, 1): 1, (1, 5): 1}, (47, 47), (175, 175)),
        # a cell at the border peaks at the border and not at its centre
        ({(0, 6): 1}, (0, 7), (217, 223)),
        # a strong neighbour moves the peak
        ({(3, 3): 1, (3, 4): 0.95}, (111, 111), (116, 128)),
    ],
    ids=["one cell", "of equals the first", "border", "neighbour"],
)
def test_peaks(cells, rows, columns):
    y, x = peak_locations(_hot(cells))[0, 0]
    assert rows[0] <= y <= rows[1]
    assert columns[0] <= x <= columns[1]


def test_maps_are_upsampled_as_opencv_does():
    red = np.array([[0.0, 1.0, 0.5], [0.25, 0.0, 2.0], [1.0, 0.75, 0.125]], np.float32)
    # the largest value of cv2.resize(red, (8, 8), interpolation=cv2.INTER_CUBIC) of OpenCV 5.0.0
    assert peak_locations(red[None, None], 8)[0, 0].tolist() == [3, 7]


@pytest.mark.parametrize(
    ("centre", "point", "visible", "expected"),
    [
        ((100, 100), (100, 100), True, True),
        ((100, 100), (136, 64), True, True),  # (x, y): both edges are inside
        ((100, 100), (137, 64), True, False),
        ((100, 100), (136, 63), True, False),
        ((0, 0), (-1, 0), True, False),  # a part left of the box, within 36 pixels
        ((223, 223), (224, 187), True, True),  # regions end at 224
        ((223, 223), (225, 223), True, False),
        ((10, 200), (200, 10), True, True),  # the centre is (y, x), the part (x, y)
        ((100, 100), (100, 100), False, False),
    ],
)
def test_a_visible_part_in_the_region_is_hit(centre, point, visible, expected):
    hits = part_hits(np.array([[centre]]), np.array([[point]]), np.array([[visible]]))
    assert hits.tolist() == [[[expected]]]


ONE_CLASS = [0, 0, 0, 0, 0]
SEEN = [[True]] * 5


@pytest.mark.parametrize(
    ("hit", "visible", "labels", "expected"),
    [
        ([[[True]]] * 4 + [[[False]]], SEEN, ONE_CLASS, 1.0),
        ([[[True]]] * 3 + [[[False]]] * 2, SEEN, ONE_CLASS, 0.0),
        ([[[True]]] * 2 + [[[False]]] * 3, [[True]] * 2 + [[False]] * 3, ONE_CLASS, 1.0),
        ([[[False, False]]] * 4, [[False, False]] * 4, [0] * 4, 0.0),
        ([[[True, False]], [[False, True]]], [[True, True]] * 2, [0, 0], 0.0),
        # class 1 has one image and one good prototype of two; class 4 has three images and none
        ([[[False], [True]]] + [[[False], [False]]] * 3, [[True]] * 4, [1, 4, 4, 4], 0.25),
    ],
    ids=["4 of 5", "3 of 5", "where visible", "never visible", "one part only", "mean over prototypes"],
)
def test_consistency(hit, visible, labels, expected):
    slots = ClassMap.blocks(max(labels) + 1, len(hit[0]))
    assert prototype_consistency(np.array(hit), np.array(visible), np.array(labels), slots) == expected


def test_stability_counts_images_without_a_changed_hit_and_is_the_mean_over_prototypes():
    clean = np.ones((4, 1, 15), bool)
    noisy = clean.copy()
    noisy[2, 0, 14] = False
    zeros = np.zeros(4, np.int64), ClassMap.blocks(1, 1)
    assert prototype_stability(clean, clean, *zeros) == 1.0
    # a hit that noise adds is a change too
    assert prototype_stability(clean, noisy, *zeros) == prototype_stability(noisy, clean, *zeros) == 0.75
    clean = np.zeros((4, 2, 3), bool)
    noisy = clean.copy()
    noisy[0, :, 0] = True  # both prototypes on the only image of class 1
    assert prototype_stability(clean, noisy, np.array([1, 4, 4, 4]), ClassMap.blocks(5, 2)) == 0.5


def test_noise_is_clipped_gaussian_and_depends_on_the_image_not_on_the_batch():
    images = np.full((4, 3, 64, 64), 1.5, np.float32)
    whole = add_noise(images, range(4))
    assert np.array_equal(whole[2:], add_noise(images[2:], [2, 3]))
    assert len({noise.tobytes() for noise in whole}) == 4
    # N(0, 0.2) is beyond 1.25 standard deviations 21.1 % of the time
    noise = np.abs(whole - 1.5)
    assert noise.max() == pytest.approx(0.25, abs=1e-6)
    assert (noise > 0.2499).mean() == pytest.approx(0.211, abs=0.01)
    assert (noise < 0.2).mean() == pytest.approx(0.683, abs=0.01)


# whole models


class _Detector:
    """Channel k of a 7 x 7 map shines where part `k % m` is, whatever the noise."""

    metadata = Metadata(tuple("abcdef"), M, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", GRID, (224, 224))
    device, description = "cpu", "a rule"

    def __init__(self, parts, num_classes):
        cells = np.clip(parts.truncated_input_points(224)[:, :M] // 32, 0, 6)  # [N, m, (x, y)]
        self._attention = np.zeros((len(cells), num_classes * M, 7, 7), np.float32)
        for image, slots in enumerate(cells):
            for slot, (x, y) in enumerate(slots):
                self._attention[image, slot::M, y, x] = 1.0

    def run(self, images):
        cells = self._attention.reshape(*self._attention.shape[:2], -1)
        argmax = cells.argmax(2).astype(np.int32)
        return Outputs(np.zeros((len(images), 6), np.float32), argmax, cells.max(2), self._attention)

    run_with_attention = run_normalised = run


def test_a_perfect_detector_scores_a_hundred():
    rng = np.random.default_rng(0)
    names = ("beak", "tail", "back", "throat")
    points = rng.integers(0, 200, (40, 4, 2)).astype(np.float64)
    visible = rng.random((40, 4)) < 0.7
    parts = PartLocations(names, points, visible, np.tile([0.0, 0.0, 200.0, 200.0], (40, 1)))
    detector = _Detector(parts, num_classes=6)
    protocol, pixels = PartProtocol(detector, parts, np.arange(40) % 6), np.zeros((40, 224, 224, 3), np.uint8)
    outputs = detector.run(pixels)
    protocol.add(range(40), pixels, outputs)

    figures = protocol.summarize(outputs, [Geometry.whole(200, 200)] * 40)
    assert (figures.prototype_consistency, figures.prototype_stability) == (1.0, 1.0)
    assert (figures.part_purity, figures.part_purity_std) == (1.0, 0.0)
    assert (figures.part_prototypes, figures.part_images) == (18, 40)
    # the same boxes on images of 100 x 200 pixels: the model sees the left half of each, twice as wide
    clipped = protocol.summarize(outputs, [Geometry.whole(100, 200)] * 40)
    assert replace(clipped, part_purity=1.0, part_purity_std=0.0) == figures
    assert clipped.part_purity < 1.0


@pytest.mark.parametrize(
    ("changes", "cropped", "reason"),
    [
        ({"evidence": "none"}, True, "no prototypes"),
        ({"input_size": (224, 448)}, True, "its input is 224x448"),
        ({}, False, "leave --no-boxes out"),
    ],
)
def test_figures_that_are_not_defined_have_a_reason(changes, cropped, reason):
    assert reason in explain_undefined(replace(_Detector.metadata, **changes), cropped=cropped)


def test_an_export_has_the_purity_of_its_checkpoint_whatever_the_batch(tmp_path):
    root, rng = write_parts(tmp_path / "birds"), np.random.default_rng(0)
    for path in root.rglob("*.png"):
        Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).save(path)
    write_lines(root / "parts" / "parts.txt", [f"{part} part {part}" for part in range(1, 16)])
    places = {(image, part): rng.integers((2, 3), (12, 11)) for image in range(1, 9) for part in range(1, 16)}
    write_lines(root / "parts" / "part_locs.txt", [f"{i} {part} {x} {y} 1" for (i, part), (x, y) in places.items()])
    loaded = build_checkpoint(size=(224, 224), num_classes=2)
    names = ("001.Auk", "002.Jay")
    options = EvaluateOptions(split="all", log=lambda line: None)
    inputs = read_inputs(root, Path("c.pt"), replace(build_metadata(loaded), class_names=names), options)
    sessions = (
        TorchSession(loaded, device="cpu", threads=1),
        OnnxSession(export_onnx(loaded, tmp_path / "c.onnx", verify=False).path, device="cpu", threads=1),
    )
    results = [
        evaluate_session(session, inputs.samples, parts=inputs.annotations.located, batch=batch)
        for session, batch in zip(sessions, (16, 5), strict=True)
    ]
    reference, deployed = (result.parts for result in results)
    assert (deployed.part_purity, deployed.part_purity_std) == (reference.part_purity, reference.part_purity_std)
    # otherwise the agreement would be one of nothing with nothing
    assert 0.0 < reference.prototype_stability < 1.0
    assert reference.part_purity > 0.0
    assert (reference.unavailable, list(deployed.unavailable)) == ({}, [*FIGURES[:2]])
    document = results[0].to_dict("all")
    assert document["prototype_stability"] == reference.prototype_stability
    assert results[1].to_dict("all")["prototype_stability"] is None
