"""Parts taken away: measures of known evidence, and a model whose label is the background."""

from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.cells import GradCam
from opal_deploy.evaluation.interventions import (
    EVIDENCE,
    GRAD_CAM,
    PARTS,
    format_interventions,
    measure_interventions,
    name_parts,
    rank_correlation,
)
from opal_deploy.model.checkpoint import build_metadata
from opal_deploy.model.config import PLAIN_CLASSIFIER
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.synthetic.creatures import list_species
from tests.builders import SMALL_BACKBONE, build_checkpoint

WORTH = np.array([4.0, 3.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("importance", "correlation", "named"),
    [
        ([0.6, 0.4, 0.05, 0.01, 0.0], 1.0, {0, 1}),
        # two of the parts have no evidence and share a rank
        ([0.0, 0.0, 0.1, 0.2, 0.7], -0.97, {2, 3, 4}),
        ([0.0] * 5, 0.0, set()),
    ],
)
def test_evidence_is_correlated_with_what_parts_are_worth_and_names_some(importance, correlation, named):
    assert rank_correlation(np.array(importance), WORTH) == pytest.approx(correlation, abs=0.01)
    assert name_parts(np.array(importance)) == named


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
    measured = measure_interventions(Oracle(by_background), (96, 96), 12)
    assert low <= measured.same_answer.mean <= high
    assert [row.method for row in measured.explained] == [EVIDENCE]
    # nothing that is taken away changes the answer
    assert measured.explained[0].deletion.mean == 0
    assert len(list(format_interventions(measured))) == 3


def test_a_network_without_prototypes_is_explained_by_grad_cam_alone():
    loaded = build_checkpoint(SMALL_BACKBONE, PLAIN_CLASSIFIER, (96, 96))
    loaded = replace(loaded, class_names=tuple(kind.name for kind in list_species(4)))
    session = TorchSession(loaded, device="cpu", threads=1)
    measured = measure_interventions(session, (96, 96), 2, heat_map=GradCam(loaded.network))
    assert [row.method for row in measured.explained] == [GRAD_CAM]
    assert len(list(format_interventions(measured))) == 3


def test_other_classes_are_refused():
    oracle = Oracle(by_background=False)
    oracle.metadata = replace(oracle.metadata, class_names=("Gull", "Tern", "Skua", "Albatross"))
    with pytest.raises(UsageError, match="the classes are Gull, Tern, Skua"):
        measure_interventions(oracle, (96, 96), 1)
    assert len(PARTS) == 5
