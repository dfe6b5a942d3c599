"""The images of an edit, with their scores and cells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.files import ModelKind
from opal_deploy.artifact.measurements import Calibration
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, IntArray
from opal_deploy.datasets.background import list_background
from opal_deploy.datasets.samples import Sample
from opal_deploy.editing.options import EditOptions
from opal_deploy.editing.scores import Scores
from opal_deploy.evaluation.annotations import Annotations
from opal_deploy.evaluation.calibration import calibrate
from opal_deploy.evaluation.inputs import read_inputs
from opal_deploy.evaluation.session import evaluate_session
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import Session


@dataclass(frozen=True)
class ScoredData:
    """N labelled images with what the model read in each.

    Attributes:
        scores: their scores and labels.
        cells: int32 [N, K], flat row-major cell of each channel's maximum.
        samples, geometries: N images, and how each became the model's input.
        annotations: objects and parts; may be empty.
        background: scores float32 [n, K] of images without an object; None without any.
        root: the data set's folder.
    """

    scores: Scores
    cells: IntArray
    samples: list[Sample]
    geometries: list[Geometry]
    annotations: Annotations
    background: FloatArray | None
    root: Path

    @property
    def metadata(self) -> Metadata:
        """The model's metadata."""
        return self.scores.metadata

    def calibrate(self, class_map: ClassMap) -> Calibration:
        """Return the calibration of the model with this map, fitted on the images."""
        return calibrate(self.scores.logits(class_map).astype(np.float32), self.scores.labels)


def score_data(path: Path, kind: ModelKind, metadata: Metadata, options: EditOptions, restore: list[int]) -> ScoredData:
    """Run the model, with the slots to restore, on the data set's images.

    Raises:
        UsageError: the data set does not fit the model or the options, or an image cannot be used.
    """
    assert options.data is not None
    reading = options.evaluate_options()
    unlabelled = None if options.background is None else list_background(options.background)
    inputs = read_inputs(Path(options.data), {path: metadata}, reading)
    session = _open(path, kind, metadata, options, restore)
    measured = evaluate_session(
        session, inputs.samples, boxes=options.boxes, batch=options.batch, progress=options.progress, model=str(path)
    )
    outputs = measured.outputs
    assert outputs.scores is not None  # evidence is exact
    assert outputs.argmax is not None
    background = None
    if unlabelled is not None:
        background = evaluate_session(
            session, unlabelled, batch=options.batch, progress=options.progress, model=str(path)
        ).outputs.scores
    return ScoredData(
        Scores(session.metadata, outputs.scores, measured.labels), outputs.argmax, inputs.samples, measured.geometries,
        inputs.annotations, background, inputs.data.root,
    )  # fmt: skip


def _open(path: Path, kind: ModelKind, metadata: Metadata, options: EditOptions, restore: list[int]) -> Session:
    if not restore:
        return open_sessions(path, device=options.device, threads=options.threads)[0]
    from opal_deploy.model import checkpoint
    from opal_deploy.runtime.torch_session import TorchSession

    dropped = tuple(sorted({*metadata.dropped} - {*restore}))
    restored = checkpoint.with_dropped_slots(checkpoint.load(path), dropped)
    return TorchSession(restored, device=options.device, threads=options.threads)
