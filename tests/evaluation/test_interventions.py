"""Interventions: weights that are shuffled, parts that are taken away, and a label that is the background."""

from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.inputs import Annotations, ImageAnnotation
from opal_deploy.evaluation.interventions import (
    EVIDENCE,
    measure_interventions,
    measure_randomisation,
    rank_correlation,
)
from opal_deploy.model.checkpoint import build_metadata
from opal_deploy.synthetic.creatures import list_species
from tests.builders import build_checkpoint

WORTH = np.array([4.0, 3.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("importance", "correlation"),
    # in the second, two of the parts have no evidence and share a rank
    [([0.6, 0.4, 0.05, 0.01, 0.0], 1.0), ([0.0, 0.0, 0.1, 0.2, 0.7], -0.97), ([0.0] * 5, 0.0)],
)
def test_evidence_is_correlated_with_what_parts_are_worth(importance, correlation):
    assert rank_correlation(np.array(importance), WORTH) == pytest.approx(correlation, abs=0.01)


class Oracle:
    """A session whose answer is the colour of a corner, or a constant; its evidence is one cell."""

    def __init__(self, by_background):
        loaded = build_checkpoint(size=(96, 96))
        names = tuple(kind.name for kind in list_species(4))
        self.metadata = replace(build_metadata(loaded), class_names=names)
        self.by_background = by_background

    def run(self, images):
        count, logits = len(images), np.zeros((len(images), 4), np.float32)
        answers = images[:, :4, :4].reshape(count, -1, 3).mean(axis=1).astype(int).sum(axis=1) % 4
        logits[np.arange(count), answers if self.by_background else 0] = 1
        prototypes = self.metadata.num_prototypes
        return Outputs(logits, np.zeros((count, prototypes), np.int32), np.ones((count, prototypes), np.float32))


@pytest.mark.parametrize(("by_background", "low", "high"), [(False, 1, 1), (True, 0, 0.6)])
def test_a_label_that_is_the_background_fails(by_background, low, high):
    measured = measure_interventions(Oracle(by_background), (96, 96), EvaluateOptions(limit=12))
    assert low <= measured.same_answer.mean <= high
    assert [row.method for row in measured.explained] == [EVIDENCE]
    assert len(list(measured.describe())) == 2


def test_what_was_learned_goes_and_chance_is_told(make_pictures, tmp_path):
    loaded = build_checkpoint(size=(96, 96))
    samples = [Sample(path, number % 4) for number, path in enumerate(make_pictures(tmp_path, 12))]
    # the object is the right column of cells
    annotations = Annotations([ImageAnnotation("a", boxes=((64, 0, 96, 96),))] * len(samples), "cells of the boxes")
    measured = measure_randomisation(loaded, samples, annotations, EvaluateOptions(device="cpu", threads=1))
    names = [stage.shuffled for stage in measured.stages]
    assert names == ["nothing", "the head", "second", "first"]
    assert measured.stages[0].same_cell.mean == 1.0
    # of nine cells some stay by chance, more than a ninth since the background of pictures is even
    assert measured.stages[-1].same_cell.mean < 0.6
    assert measured.stages[0].object.random == pytest.approx(1 / 3)
    assert len(list(measured.describe())) == 2 + len(names)
