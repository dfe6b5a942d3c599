"""The images of an edit, with their scores and cells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from opal_deploy.artifact.heads import drop_slots, find_values
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, IntArray, Outputs
from opal_deploy.datasets.background import list_background
from opal_deploy.datasets.samples import Sample
from opal_deploy.editing.options import EditOptions
from opal_deploy.editing.scores import Scores
from opal_deploy.evaluation.annotations import Annotations
from opal_deploy.evaluation.calibration import calibrate
from opal_deploy.evaluation.inputs import has_validation_images, read_inputs
from opal_deploy.evaluation.metrics import margins, summarize_risk
from opal_deploy.evaluation.record import baseline_of
from opal_deploy.evaluation.session import evaluate_session
from opal_deploy.logs import as_progress
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import Session


@dataclass(frozen=True)
class ScoredData:
    """N labelled images with the model's scores and cells.

    Attributes:
        scores: their scores and labels.
        cells: int32 [N, K], flat row-major cell of each channel's maximum.
        samples, geometries: N images, and how each became the model's input.
        annotations: objects and parts; may be empty.
        background: scores float32 [n, K] of images without an object; None without any.
        root: the data set's folder.
        ood_scores: float32 [N]; None where the model computes none.
        set_aside: whether these are the images that training set aside.
    """

    scores: Scores
    cells: IntArray
    samples: list[Sample]
    geometries: list[Geometry]
    annotations: Annotations
    background: FloatArray | None
    root: Path
    ood_scores: FloatArray | None = None
    set_aside: bool = False

    @property
    def metadata(self) -> Metadata:
        """The model's metadata."""
        return self.scores.metadata

    def measure(self, edited: Metadata, background: int) -> Metadata:
        """Return the edited model's metadata with calibration, risk and baseline from validation images.

        Args:
            background: number of background images among the model's neighbours.
        """
        scores, labels = self.scores.values, self.scores.labels
        logits = np.empty((len(labels), 0), np.float32)
        outputs = drop_slots(Outputs(logits, self.cells, scores, ood_score=self.ood_scores), edited)
        assert outputs.scores is not None
        best_two = margins(outputs.logits, find_values(outputs.scores, edited), edited.class_map)
        risk = summarize_risk(best_two, outputs.logits.argmax(axis=1) == labels)
        return replace(
            edited,
            calibration=calibrate(outputs.logits, labels).to_dict(),
            risk={"split": "val", **risk},
            baseline=baseline_of(outputs, edited, background).to_dict(),
        )


def score_data(path: Path, metadata: Metadata, options: EditOptions, restore: list[int]) -> ScoredData:
    """Run the model, with the slots to restore, on the data set's images.

    Raises:
        UsageError: the data set does not fit the model or the options, or an image cannot be used.
    """
    assert options.data is not None
    reading, unlabelled = options.evaluate_options(), None
    if options.background is not None:
        unlabelled = list_background(options.background)
    inputs = read_inputs(Path(options.data), path, metadata, reading)
    session = _open(path, metadata, options, restore)
    progress = as_progress(options.progress)
    measured = evaluate_session(
        session, inputs.samples, boxes=options.boxes, batch=options.batch, progress=progress, model=str(path)
    )
    outputs, background = measured.outputs, None
    assert outputs.scores is not None  # evidence is exact
    assert outputs.argmax is not None
    if unlabelled is not None:
        empty = evaluate_session(session, unlabelled, batch=options.batch, progress=progress, model=str(path))
        background = empty.outputs.scores
    return ScoredData(
        Scores(session.metadata, outputs.scores, measured.labels), outputs.argmax, inputs.samples, measured.geometries,
        inputs.annotations, background, inputs.data.root, outputs.ood_score,
        has_validation_images(metadata, inputs, reading),
    )  # fmt: skip


def _open(path: Path, metadata: Metadata, options: EditOptions, restore: list[int]) -> Session:
    if not restore:
        return open_sessions(path, device=options.device, threads=options.threads)[0]
    from opal_deploy.model import checkpoint
    from opal_deploy.runtime.torch_session import TorchSession

    restored = checkpoint.with_dropped_slots(checkpoint.load(path), tuple(sorted({*metadata.dropped} - {*restore})))
    return TorchSession(restored, device=options.device, threads=options.threads)
