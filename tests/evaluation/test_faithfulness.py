"""Faithfulness of models whose evidence is known: curves by hand, and controls that must show nothing."""

import math

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import cosines
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.cells import blur_image
from opal_deploy.evaluation.faithfulness import measure_faithfulness
from opal_deploy.evaluation.inputs import Annotations, ImageAnnotation

GRID, CELL = (4, 4), 8
INPUT_SIZE = (GRID[0] * CELL, GRID[1] * CELL)
CLASSES = ("shown", "rival", "other")
METADATA = Metadata(CLASSES, 2, {"distance": "l2", "epsilon": 0.0}, "exact", "none", GRID, INPUT_SIZE)


class KnownSession:
    """Three classes of two slots, decided by a rule from the brightness of the cells to scores and cells [N, 6]."""

    metadata = METADATA
    device, description = "cpu", "a rule"

    def __init__(self, rule):
        self._rule = rule

    def run(self, images):
        """See `Session.run`."""
        assert images.dtype == np.uint8
        assert images.shape[1:] == (*INPUT_SIZE, 3)
        scores, cells = self._rule(brightness(images))
        narrow = scores.astype(np.float32)
        cosine = cosines(narrow, ClassMap.blocks(narrow.shape[1] // 2, 2), 0.0)
        logits = -np.sqrt(np.maximum(2 - 2 * cosine, 0)).astype(np.float32)
        return Outputs(logits, cells.astype(np.int32), narrow)


def brightness(images):
    """float64 [N, 16], 0 ... 1, of each cell."""
    cells = images.reshape(len(images), GRID[0], CELL, GRID[1], CELL, 3).mean(axis=(2, 4, 5))
    return np.asarray(cells.reshape(len(images), -1) / 255, np.float64)


# the evidence of class 0, the stronger first
STRONG, WEAK = 5, 10


def two_cells(bright):
    """The class `shown` depends on the cells STRONG and WEAK; everything else is constant."""
    n = len(bright)
    scores = np.tile([0.0, 0.0, 0.45, 0.45, 0.4, 0.4], (n, 1))
    scores[:, 0], scores[:, 1] = 0.8 * bright[:, STRONG] + 0.001, 0.3 * bright[:, WEAK] + 0.001
    return scores, np.tile([STRONG, WEAK, 0, 15, 3, 12], (n, 1))


def shown_cosine(strong, weak):
    """What `two_cells` answers, by hand, for these brightnesses."""
    a, b = 0.8 * strong + 0.001, 0.3 * weak + 0.001
    return (a + b) / math.sqrt(2) / math.sqrt(a * a + b * b + 2 * 0.45**2 + 2 * 0.4**2)


def painted(folder, cells):
    """Grey images of 32 x 32 on black: of each, cell -> grey value; labelled 0."""
    samples = []
    for number, greys in enumerate(cells):
        pixels = np.zeros((*INPUT_SIZE, 3), np.uint8)
        for cell, grey in greys.items():
            row, col = divmod(cell, GRID[1])
            pixels[row * CELL : (row + 1) * CELL, col * CELL : (col + 1) * CELL] = grey
        path = folder / f"{number:03}.png"
        Image.fromarray(pixels).save(path)
        samples.append(Sample(path, 0))
    return samples


def _measure(session, samples, *, chosen=None, **options):
    annotations = Annotations([ImageAnnotation("shown")] * len(samples), "cells")
    chosen = list(range(len(samples)) if chosen is None else chosen)
    settings = EvaluateOptions(faithfulness=True, **options)
    return measure_faithfulness(session, samples, chosen, annotations, settings)


def _by_ranking(measured):
    return {figures.ranking: figures for figures in measured.rankings}


@pytest.fixture(scope="module")
def greys():
    generator = np.random.default_rng(0)
    return [(int(a), int(b)) for a, b in generator.integers(230, 256, (12, 2))]


@pytest.fixture(scope="module")
def two_cell_images(greys, tmp_path_factory):
    return painted(tmp_path_factory.mktemp("two"), [{STRONG: a, WEAK: b} for a, b in greys])


@pytest.fixture(scope="module")
def measured(two_cell_images):
    return _measure(KnownSession(two_cells), two_cell_images, batch=5)


def test_the_curve_is_what_the_rule_says_by_hand(measured, two_cell_images, greys):
    evidence = _by_ranking(measured)["contribution"]
    steps = []
    for sample, (a, b) in zip(two_cell_images, greys, strict=True):
        # a removed cell has its blurred brightness
        blurred = blur_image(np.asarray(Image.open(sample.path)), CellGrid(*GRID))
        paint = brightness(blurred[None])[0]
        strong, weak = a / 255, b / 255
        steps.append([
            shown_cosine(strong, weak), shown_cosine(paint[STRONG], weak), shown_cosine(paint[STRONG], paint[WEAK]),
        ])  # fmt: skip
    expected = np.mean(steps, axis=0)

    assert evidence.deletion == pytest.approx(expected, abs=1e-6)
    assert evidence.drop.mean == pytest.approx(expected[0] - expected[2], abs=1e-6)
    assert evidence.deletion_area.mean == pytest.approx(np.trapezoid(expected, dx=0.5), abs=1e-6)


def test_the_evidence_beats_random_cells_which_show_nothing(measured):
    evidence, other = (_by_ranking(measured)[name] for name in ("contribution", "random"))
    # the class is lost with its evidence only
    assert evidence.class_kept == 0.0
    assert other.deletion == pytest.approx([other.deletion[0]] * 3, abs=1e-12)
    assert other.class_kept == 1.0
    assert other.advantage.drop.mean == pytest.approx(evidence.drop.mean, abs=1e-12)
    assert other.advantage.deletion_area.low > 0.1


def test_evidence_that_is_made_up_is_no_better_than_controls(tmp_path):
    def everywhere(bright):
        # the evidence it names is made up from the image, the score is its mean
        named = (bright * np.arange(1, 17) * 1000).sum(axis=1).astype(int) % 16
        scores = np.tile([0.0, 0.0, 0.3, 0.3, 0.2, 0.2], (len(bright), 1))
        scores[:, 0] = scores[:, 1] = bright.mean(axis=1)
        cells = np.tile([0, 0, 0, 15, 3, 12], (len(bright), 1))
        cells[:, 0], cells[:, 1] = named, (named + 7) % 16
        return scores, cells

    generator = np.random.default_rng(1)
    images = painted(tmp_path, [dict(enumerate(row.tolist())) for row in generator.integers(100, 256, (40, 16))])
    rankings = _by_ranking(_measure(KnownSession(everywhere), images))

    advantage = rankings["random"].advantage
    for difference in (advantage.deletion_area, advantage.drop):
        assert difference.low < 0 < difference.high


def test_an_image_depends_on_its_index_not_on_the_others(two_cell_images):
    whole, alone, batched = (
        _measure(KnownSession(two_cells), two_cell_images, **options)
        for options in ({"chosen": [7], "batch": 1}, {"chosen": [7]}, {"batch": 3})
    )
    assert whole == alone
    assert batched == _measure(KnownSession(two_cells), two_cell_images, batch=12)


def test_logits_that_are_not_finite_are_refused(tmp_path):
    def broken(bright):
        scores, cells = two_cells(bright)
        scores[bright[:, STRONG] < 0.5] = np.nan
        return scores, cells

    with pytest.raises(UsageError, match="are not finite numbers"):
        _measure(KnownSession(broken), painted(tmp_path, [{STRONG: 255, WEAK: 255}]))
