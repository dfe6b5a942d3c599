"""Consistency and stability by hand, and against OpenCV's own numbers."""

from __future__ import annotations

import numpy as np
import pytest

from opal_deploy.evaluation import consistency

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


def _hot(*cells: tuple[int, int]) -> np.ndarray:
    cell_map = np.zeros((1, 1, 7, 7), np.float32)
    for row, col in cells:
        cell_map[0, 0, row, col] = 1.0
    return cell_map


def _peak(*cells: tuple[int, int]) -> tuple[int, int]:
    y, x = consistency.peak_locations(_hot(*cells))[0, 0]
    return int(y), int(x)


class TestPeaks:
    def test_maps_are_upsampled_as_opencv_does(self) -> None:
        assert consistency.upsample(RED[None, None], 8)[0, 0] == pytest.approx(OPENCV, abs=3e-7)

    def test_the_peak_is_opencvs(self) -> None:
        assert consistency.peak_locations(RED[None, None], 8)[0, 0].tolist() == [3, 7]

    def test_a_single_hot_cell_peaks_next_to_its_centre(self) -> None:
        # the centre lies between pixels 111 and 112; of the four equal ones the first counts
        assert _peak((3, 3)) == (111, 111)

    def test_a_hot_cell_at_the_border_peaks_at_the_border_and_not_at_its_centre(self) -> None:
        y, x = _peak((0, 6))
        assert y < 8
        assert x > 224 - 8

    def test_a_strong_neighbour_moves_the_peak(self) -> None:
        cell_map = _hot((3, 3))
        cell_map[0, 0, 3, 4] = 0.95
        y, x = consistency.peak_locations(cell_map)[0, 0]
        assert y == 111
        assert 116 <= x <= 128

    def test_of_two_equal_maxima_the_first_row_major_counts(self) -> None:
        assert _peak((5, 1), (1, 5)) == _peak((1, 5))
        assert _peak((3, 5), (3, 1)) == _peak((3, 1))

    def test_each_picture_shows_the_maps_of_its_own_class(self) -> None:
        attention = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 2, 2)
        chosen = consistency.true_class_maps(attention, np.array([2, 0]), 2)
        assert chosen.tolist() == [attention[0, 4:6].tolist(), attention[1, 0:2].tolist()]


class TestHits:
    @pytest.mark.parametrize(
        ("point", "expected"),
        [
            ((100, 100), True),
            ((136, 64), True),  # (x, y): both edges are inside
            ((137, 64), False),
            ((136, 63), False),
            ((64, 136), True),
            ((63, 136), False),
        ],
    )
    def test_edges_are_inside(self, point: tuple[int, int], expected: bool) -> None:
        assert self._hit((100, 100), point) is expected

    @pytest.mark.parametrize(
        ("centre", "point", "expected"),
        [
            ((0, 0), (0, 36), True),
            ((0, 0), (-1, 0), False),  # a part left of the box, within 36 pixels
            ((223, 223), (224, 187), True),  # regions end at 224
            ((223, 223), (225, 223), False),
            ((10, 200), (200, 10), True),  # the centre is (y, x), the part (x, y)
            ((10, 200), (10, 200), False),
        ],
    )
    def test_regions_end_at_the_picture(self, centre: tuple[int, int], point: tuple[int, int], expected: bool) -> None:
        assert self._hit(centre, point) is expected

    def test_what_is_not_visible_is_not_hit(self) -> None:
        assert self._hit((100, 100), (100, 100), visible=False) is False

    @staticmethod
    def _hit(centre: tuple[int, int], point: tuple[int, int], *, visible: bool = True) -> bool:
        found = consistency.part_hits(np.array([[centre]]), np.array([[point]]), np.array([[visible]]))
        assert found.shape == (1, 1, 1)
        return bool(found[0, 0, 0])


class TestConsistency:
    @pytest.mark.parametrize(("count", "expected"), [(5, 100.0), (4, 100.0), (3, 0.0)])
    def test_four_of_five_are_enough(self, count: int, expected: float) -> None:
        hit = np.arange(5)[:, None, None] < count  # one prototype, one part
        assert consistency.consistency(hit, np.ones((5, 1), bool), np.zeros(5, np.int64)) == expected

    def test_only_pictures_that_show_the_part_count(self) -> None:
        visible = np.array([[True], [True], [False], [False], [False]])
        hit = visible[:, None, :]
        assert consistency.consistency(hit, visible, np.zeros(5, np.int64)) == 100.0

    def test_a_part_that_is_never_visible_is_never_hit(self) -> None:
        nothing = np.zeros((4, 1, 2), bool)
        assert consistency.consistency(nothing, np.zeros((4, 2), bool), np.zeros(4, np.int64)) == 0.0

    def test_it_must_be_one_and_the_same_part(self) -> None:
        # on every image some part is hit, but no part on more than half of them
        hit = np.array([[[True, False]], [[False, True]]])
        assert consistency.consistency(hit, np.ones((2, 2), bool), np.zeros(2, np.int64)) == 0.0

    def test_it_is_the_mean_over_prototypes_not_over_pictures(self) -> None:
        # class 1 has one image and one good prototype of two; class 4 has three images and none
        hit = np.zeros((4, 2, 1), bool)
        hit[0, 1, 0] = True
        assert consistency.consistency(hit, np.ones((4, 1), bool), np.array([1, 4, 4, 4])) == 25.0


class TestStability:
    def test_one_changed_hit_changes_its_picture(self) -> None:
        clean = np.ones((4, 1, 15), bool)
        noisy = clean.copy()
        noisy[2, 0, 14] = False
        labels = np.zeros(4, np.int64)
        assert consistency.stability(clean, clean, labels) == 100.0
        assert consistency.stability(clean, noisy, labels) == 75.0
        # a hit that noise adds is a change too
        assert consistency.stability(noisy, clean, labels) == 75.0

    def test_it_is_the_mean_over_prototypes_not_over_pictures(self) -> None:
        clean = np.zeros((4, 2, 3), bool)
        noisy = clean.copy()
        noisy[0, :, 0] = True  # class 1's only image: both of its prototypes
        assert consistency.stability(clean, noisy, np.array([1, 4, 4, 4])) == 50.0


class TestNoise:
    def test_noise_depends_on_seed_and_picture_not_on_the_batch(self) -> None:
        images = np.zeros((5, 3, 8, 8), np.float32)
        whole = consistency.add_noise(images, 0, seed=7)
        parts = [consistency.add_noise(images[:2], 0, seed=7), consistency.add_noise(images[2:], 2, seed=7)]
        assert np.array_equal(whole, np.concatenate(parts))
        assert not np.array_equal(whole, consistency.add_noise(images, 0, seed=8))
        assert len({noise.tobytes() for noise in whole}) == 5

    def test_noise_is_clipped_gaussian_and_added(self) -> None:
        images = np.full((2, 3, 64, 64), 1.5, np.float32)
        noise = consistency.add_noise(images, 0, seed=0) - 1.5
        assert np.abs(noise).max() == pytest.approx(0.25, abs=1e-6)
        # N(0, 0.2) is beyond 1.25 standard deviations 21.1 % of the time
        assert (np.abs(noise) > 0.2499).mean() == pytest.approx(0.211, abs=0.01)
        assert (np.abs(noise) < 0.2).mean() == pytest.approx(0.683, abs=0.01)
        assert (images == 1.5).all()
