"""Consistency and stability by hand, and upsampling against OpenCV's numbers."""

import numpy as np
import pytest

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.evaluation import parts

RED = np.array([[0.0, 1.0, 0.5], [0.25, 0.0, 2.0], [1.0, 0.75, 0.125]], np.float32)
# cv2.resize(RED, (8, 8), interpolation=cv2.INTER_CUBIC) of OpenCV 5.0.0
OPENCV = np.array(
    [
        [-0.15381344, 0.031001588, 0.5243702, 0.9965424, 1.089285, 0.7597022, 0.37555945, 0.24776256],
        [-0.09353837, 0.057970226, 0.44324067, 0.8289445, 0.9749907, 0.8138293, 0.6005619, 0.5388425],
        [-0.004371304, 0.06772014, 0.1822707, 0.3608663, 0.6813321, 0.99544406, 1.2583157, 1.3832463],
        [0.14447719, 0.13215703, -0.028185451, -0.06880126, 0.39015025, 1.1363916, 1.8372552, 2.1317384],
        [0.43653068, 0.37284446, 0.09311044, -0.077465676, 0.29099983, 1.0280818, 1.7417687, 2.0319872],
        [0.7367066, 0.678458, 0.4900558, 0.33888054, 0.42974043, 0.72061026, 1.016021, 1.1301299],
        [0.9914997, 0.95217305, 0.89387953, 0.7967544, 0.60662675, 0.41143548, 0.24580975, 0.1682461],
        [1.1107788, 1.0731788, 1.0495816, 0.95902544, 0.6599633, 0.29071957, -0.037897855, -0.18416086],
    ],
    np.float32,
)


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
        ({(3, 5): 1, (3, 1): 1}, (111, 111), (47, 47)),
        # a cell at the border peaks at the border and not at its centre
        ({(0, 6): 1}, (0, 7), (217, 223)),
        # a strong neighbour moves the peak
        ({(3, 3): 1, (3, 4): 0.95}, (111, 111), (116, 128)),
    ],
    ids=["one cell", "of equals the first", "in one row", "border", "neighbour"],
)
def test_peaks(cells, rows, columns):
    y, x = parts.peak_locations(_hot(cells))[0, 0]
    assert rows[0] <= y <= rows[1]
    assert columns[0] <= x <= columns[1]


def test_maps_are_upsampled_as_opencv_does():
    assert parts.upsample(RED[None, None], 8)[0, 0] == pytest.approx(OPENCV, abs=3e-7)
    assert parts.peak_locations(RED[None, None], 8)[0, 0].tolist() == [3, 7]


@pytest.mark.parametrize(
    ("centre", "point", "visible", "expected"),
    [
        ((100, 100), (100, 100), True, True),
        ((100, 100), (136, 64), True, True),  # (x, y): both edges are inside
        ((100, 100), (137, 64), True, False),
        ((100, 100), (136, 63), True, False),
        ((100, 100), (64, 136), True, True),
        ((100, 100), (63, 136), True, False),
        ((0, 0), (0, 36), True, True),
        ((0, 0), (-1, 0), True, False),  # a part left of the box, within 36 pixels
        ((223, 223), (224, 187), True, True),  # regions end at 224
        ((223, 223), (225, 223), True, False),
        ((10, 200), (200, 10), True, True),  # the centre is (y, x), the part (x, y)
        ((10, 200), (10, 200), True, False),
        ((100, 100), (100, 100), False, False),
    ],
)
def test_a_visible_part_in_the_region_is_hit(centre, point, visible, expected):
    hits = parts.part_hits(np.array([[centre]]), np.array([[point]]), np.array([[visible]]))
    assert hits.tolist() == [[[expected]]]


ONE_CLASS = [0, 0, 0, 0, 0]
SEEN = [[True]] * 5


@pytest.mark.parametrize(
    ("hit", "visible", "labels", "expected"),
    [
        ([[[True]]] * 5, SEEN, ONE_CLASS, 100.0),
        ([[[True]]] * 4 + [[[False]]], SEEN, ONE_CLASS, 100.0),
        ([[[True]]] * 3 + [[[False]]] * 2, SEEN, ONE_CLASS, 0.0),
        ([[[True]]] * 2 + [[[False]]] * 3, [[True]] * 2 + [[False]] * 3, ONE_CLASS, 100.0),
        ([[[False, False]]] * 4, [[False, False]] * 4, [0] * 4, 0.0),
        ([[[True, False]], [[False, True]]], [[True, True]] * 2, [0, 0], 0.0),
        # class 1 has one image and one good prototype of two; class 4 has three images and none
        ([[[False], [True]]] + [[[False], [False]]] * 3, [[True]] * 4, [1, 4, 4, 4], 25.0),
    ],
    ids=["5 of 5", "4 of 5", "3 of 5", "where visible", "never visible", "one part only", "mean over prototypes"],
)
def test_consistency(hit, visible, labels, expected):
    slots = ClassMap.blocks(max(labels) + 1, len(hit[0]))
    assert parts.prototype_consistency(np.array(hit), np.array(visible), np.array(labels), slots) == expected


def test_stability_counts_images_without_a_changed_hit_and_is_the_mean_over_prototypes():
    clean = np.ones((4, 1, 15), bool)
    noisy = clean.copy()
    noisy[2, 0, 14] = False
    zeros = np.zeros(4, np.int64), ClassMap.blocks(1, 1)
    assert parts.prototype_stability(clean, clean, *zeros) == 100.0
    # a hit that noise adds is a change too
    assert parts.prototype_stability(clean, noisy, *zeros) == parts.prototype_stability(noisy, clean, *zeros) == 75.0
    clean = np.zeros((4, 2, 3), bool)
    noisy = clean.copy()
    noisy[0, :, 0] = True  # both prototypes on the only image of class 1
    assert parts.prototype_stability(clean, noisy, np.array([1, 4, 4, 4]), ClassMap.blocks(5, 2)) == 50.0


def test_noise_depends_on_seed_and_image_not_on_the_batch():
    images = np.zeros((5, 3, 8, 8), np.float32)
    whole = parts.add_noise(images, 0, seed=7)
    batches = [parts.add_noise(images[:2], 0, seed=7), parts.add_noise(images[2:], 2, seed=7)]
    assert np.array_equal(whole, np.concatenate(batches))
    assert not np.array_equal(whole, parts.add_noise(images, 0, seed=8))
    assert len({noise.tobytes() for noise in whole}) == 5


def test_noise_is_clipped_gaussian_and_added():
    images = np.full((2, 3, 64, 64), 1.5, np.float32)
    noise = parts.add_noise(images, 0, seed=0) - 1.5
    assert np.abs(noise).max() == pytest.approx(0.25, abs=1e-6)
    # N(0, 0.2) is beyond 1.25 standard deviations 21.1 % of the time
    assert (np.abs(noise) > 0.2499).mean() == pytest.approx(0.211, abs=0.01)
    assert (np.abs(noise) < 0.2).mean() == pytest.approx(0.683, abs=0.01)
    assert (images == 1.5).all()
