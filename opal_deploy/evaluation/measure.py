"""Measure a model: check everything first, then log each figure as soon as it is known, and return all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.api.model import Model
from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.files import model_kind
from opal_deploy.artifact.measurements import ReceptiveField, describe_risk
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import DataSet, describe_never_predicted, pluralize
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import interventions, record
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.attack import Attack, measure_attack
from opal_deploy.evaluation.calibration import CalibrationFigures, evaluate_calibration, format_calibration
from opal_deploy.evaluation.cells import GradCam, measure_receptive_field
from opal_deploy.evaluation.faithfulness import Faithfulness, measure_faithfulness
from opal_deploy.evaluation.inputs import EvaluationInputs, check_model, has_validation_images, read_inputs
from opal_deploy.evaluation.interventions import Interventions, Randomisation
from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.evaluation.parts import CONSISTENCY, PURITY, STABILITY, PartFigures
from opal_deploy.evaluation.pointing import PointingGame, play_pointing_game
from opal_deploy.evaluation.session import (
    EvaluationResult,
    UnusableImage,
    choose_samples,
    compare_presets,
    evaluate_session,
)
from opal_deploy.logs import as_progress
from opal_deploy.model import checkpoint
from opal_deploy.model.neighbours import Neighbours
from opal_deploy.model.network import OpalNetwork
from opal_deploy.options import StrPath
from opal_deploy.records.decision import describe_supported_rates
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import Session
from opal_deploy.runtime.torch_session import TorchSession, torch_device
from opal_deploy.synthetic import read_annotations

_PART_TITLES = {CONSISTENCY: "prototype consistency", STABILITY: "prototype stability", PURITY: "part purity"}
# attributes of a ModelEvaluation that its document leaves out where they were not measured
_OPTIONAL = (
    "calibration", "receptive_field", "pointing_game", "faithfulness", "attack", "randomisation", "interventions",
)  # fmt: skip


@dataclass(frozen=True)
class ModelEvaluation:
    """The figures of one model; None where something was not measured.

    Attributes:
        session: the runtime that ran the model: engine, device, threads, precision.
        split: of the data set.
        boxes: whether images were cropped to their boxes.
        evaluation: metrics, labels and outputs of the images.
        calibration: how far the probabilities are from the observed accuracy.
        receptive_field: of the model's cells.
        pointing_game: whether evidence lies on objects and parts.
        faithfulness: what removing evidence changes.
        attack: what changes outside the evidence do.
        randomisation: where the evidence lies when weights are shuffled.
        interventions: whether the evidence names the parts that matter.
        baseline: of the answers to validation images, for `--record`.
        neighbours: features of training images, for `--record` on a checkpoint without them.
        left_out: images of the data set that cannot be decoded.
    """

    path: Path
    session: str
    split: str
    boxes: bool
    metadata: Metadata
    evaluation: EvaluationResult
    calibration: CalibrationFigures | None = None
    receptive_field: ReceptiveField | None = None
    pointing_game: PointingGame | None = None
    faithfulness: Faithfulness | None = None
    attack: Attack | None = None
    randomisation: Randomisation | None = None
    interventions: Interventions | None = None
    baseline: Baseline | None = None
    neighbours: Neighbours | None = None
    left_out: int = 0

    @property
    def metrics(self) -> Evaluation:
        """Accuracy and the other metrics that need labels only."""
        return self.evaluation.metrics

    @property
    def accuracy(self) -> float:
        """The share of correctly classified images, 0 ... 1."""
        return self.metrics.accuracy

    @property
    def parts(self) -> PartFigures | None:
        """Prototype consistency, stability and part purity; None without part locations."""
        return self.evaluation.parts

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `opal-deploy evaluate --json` prints."""
        known = {"model": str(self.path), "session": self.session, "boxes": self.boxes, "left_out": self.left_out}
        figures = {name: getattr(self, name) for name in _OPTIONAL}
        measured = {name: figure.to_dict() for name, figure in figures.items() if figure is not None}
        return {**known, **self.evaluation.to_dict(self.split), **measured}

    def __repr__(self) -> str:
        metrics = self.metrics
        return (
            f"<ModelEvaluation {self.path}: accuracy {metrics.accuracy:.2%} of {metrics.images:,} {self.split} images>"
        )


def measure_model(model: StrPath | Model, data: Path, options: EvaluateOptions) -> ModelEvaluation:
    """Check everything first, then measure, and record what the options ask for; see `evaluate_model`."""
    path = model.path if isinstance(model, Model) else Path(model)
    if path is None or not path.is_file():
        raise UsageError(f"{path or model}: no such model; expected a file of `opal-deploy export`, or a checkpoint")
    own = model.sessions if isinstance(model, Model) else ()
    (session, *_) = own or open_sessions(path, device=options.device, threads=options.threads)
    check_model(path, session.metadata, options)
    inputs = read_inputs(data, path, session.metadata, options)
    try:
        measured = _measure(path, session, inputs, options)
    except UnusableImage:
        # found late, since nearly all data sets are whole, and reading every image twice takes long
        inputs = read_inputs(data, path, session.metadata, options, whole=True)
        measured = _measure(path, session, inputs, options)
    if options.record:
        options.log(_record(measured, inputs.data))
        if measured.baseline is not None:
            _log(options, describe_supported_rates(measured.metrics.risk or {}, measured.baseline))
    return measured


def _log(options: EvaluateOptions, lines: Iterable[str]) -> None:
    for line in lines:
        options.log(line)


def _measure(path: Path, session: Session, inputs: EvaluationInputs, options: EvaluateOptions) -> ModelEvaluation:
    """Return everything that the options ask for; each figure is logged as soon as it is known."""
    metadata, samples, annotations = session.metadata, inputs.samples, inputs.annotations
    is_checkpoint, set_aside = model_kind(path) == "checkpoint", has_validation_images(metadata, inputs, options)

    @cache
    def load_network() -> OpalNetwork:
        return checkpoint.load(path).network.to(torch_device(options.device))

    evaluation = evaluate_session(
        session, samples, boxes=options.boxes, batch=options.batch, parts=annotations.located,
        progress=as_progress(options.progress), model=str(path),
    )  # fmt: skip
    measured = ModelEvaluation(
        path, session.description, options.split, options.boxes, metadata, evaluation,
        left_out=len(inputs.data.skipped),
    )  # fmt: skip
    _log(options, _format_metrics(measured))

    # a model without a temperature gets one from the images that training set aside
    calibration = evaluate_calibration(evaluation.outputs.logits, evaluation.labels, metadata, fit=set_aside)
    options.log(format_calibration(calibration, metadata))
    if options.split == "val" and not set_aside and calibration.calibrated is None:
        options.log("no temperature fitted: these images or crops are not the ones that training set aside")

    field = ReceptiveField.from_dict(metadata.receptive_field)
    if (field is None or field.effective is None) and is_checkpoint:
        field = measure_receptive_field(load_network(), samples, boxes=options.boxes)
    missing = "receptive field: not stored in this model; evaluate its checkpoint, or export that again"
    _log(options, [missing] if field is None else field.describe(metadata.input_size))
    measured = replace(measured, calibration=calibration, receptive_field=field)
    if (risk := evaluation.metrics.risk) is not None:
        options.log(f"risk-coverage over the margin: {describe_risk({**risk, 'split': options.split})}")
    if metadata.head_kind == "additive":
        _log(options, compare_presets(session, samples, evaluation))
    if metadata.evidence != "exact":
        return measured
    if options.record and set_aside:
        measured = _measure_baseline(measured, inputs, options)

    def add(**measurement: Any) -> ModelEvaluation:
        for figures in measurement.values():
            _log(options, figures.describe())
        return replace(measured, **measurement)

    if annotations.known:
        if (game := play_pointing_game(evaluation, annotations, metadata)) is None:
            options.log("pointing game: skipped, no correctly classified image has an annotation")
        else:
            measured = add(pointing_game=game)
    chosen = choose_samples(samples, options.limit)
    # exported models have no gradients
    needs_heat_map = is_checkpoint and (options.faithfulness or options.interventions)
    heat_map = GradCam(load_network()) if needs_heat_map else None
    if options.faithfulness:
        measured = add(faithfulness=measure_faithfulness(session, samples, chosen, annotations, options, heat_map))
    if options.attack_outside:
        measured = add(attack=measure_attack(load_network(), metadata, samples, chosen, field, options))
    if options.randomise:
        known = replace(annotations, images=[annotations.images[index] for index in chosen])
        some = [samples[index] for index in chosen]
        measured = add(randomisation=interventions.measure_randomisation(checkpoint.load(path), some, known, options))
    if options.interventions:
        first = read_annotations(inputs.data.root)[0]
        taken = interventions.measure_interventions(session, (first.height, first.width), options, heat_map)
        measured = add(interventions=taken)
    return measured


def _measure_baseline(measured: ModelEvaluation, inputs: EvaluationInputs, options: EvaluateOptions) -> ModelEvaluation:
    """Return the evaluation with the baseline; a checkpoint without an OOD score gets neighbours that compute one."""
    metadata, path, train = measured.metadata, measured.path, inputs.data.train
    if metadata.has_output("ood_score") or model_kind(path) != "checkpoint" or not train:
        known = metadata.known_baseline
        baseline = record.baseline_of(measured.evaluation.outputs, metadata, known.background if known else 0)
        return replace(measured, baseline=baseline)
    loaded, boxes, progress = checkpoint.load(path), options.boxes, as_progress(options.progress)
    network = loaded.network.to(torch_device(options.device))
    network.neighbours = record.fit_neighbours(network, train, boxes=boxes, progress=progress)
    if network.neighbours is None:
        options.log("no features kept for --unknown: too few training images, or no spread within classes")
    session = TorchSession(loaded, device=options.device, threads=options.threads)
    answers = record.measure_baseline(session, inputs.samples, network.neighbours, boxes=boxes, progress=progress)
    return replace(measured, baseline=answers, neighbours=network.neighbours)


def _record(result: ModelEvaluation, data: DataSet) -> str:
    """Store an evaluation in the model's file; return a line on the change."""
    document, is_classifier = result.to_dict(), result.metadata.evidence == "regions"
    knows_risk = result.baseline is not None or (is_classifier and result.split == "val")
    changes = {
        "evaluation": record.build_evaluation(document, data, result.split),
        "receptive_field": document.get("receptive_field"),
        "calibration": document["calibration"].get("fitted"),
        "baseline": None if result.baseline is None else result.baseline.to_dict(),
        "neighbours": None if result.neighbours is None else result.neighbours.to_dict(),
        # a baseline, like a risk, is measured on the images that training set aside
        "risk": result.metrics.risk if knows_risk else None,
    }
    known = {name: value for name, value in changes.items() if value is not None}
    return record.record_measurements(result.path, known)


def _format_metrics(result: ModelEvaluation) -> Iterator[str]:
    """Yield the metrics of one model in a few lines."""
    metrics, parts, evaluation = result.metrics, result.parts, result.evaluation
    names, counts = result.metadata.class_names, np.bincount(evaluation.labels).tolist()
    predicted = {names[class_id] for class_id in evaluation.outputs.logits.argmax(axis=1)}
    if never := describe_never_predicted(dict(zip(names, counts, strict=False)), predicted):
        yield f"{result.path}: {never[0].lower()}{never[1:]}"
    images = pluralize(metrics.images, f"{result.split} image", f"{result.split} images")
    yield f"{result.path} in {result.session}, {images}{'' if result.boxes else ', not cropped to boxes'}"
    top5 = "" if metrics.top5 is None else f", top-5 {metrics.top5:.2%}"
    yield f"accuracy {metrics.accuracy:.2%}{top5}, macro F1 {metrics.macro_f1:.2%}, cross-entropy {metrics.loss:.4f}"
    if metrics.spatial_prototype_collapse is not None:
        spread = _percent(metrics.spatial_prototype_collapse, metrics.spatial_prototype_collapse_std)
        yield f"spatial prototype collapse {spread} % (mean and standard deviation over images)"
    for key, title in _PART_TITLES.items():
        if parts is not None and key in parts.unavailable:
            yield f"{title}: not measured, {parts.unavailable[key]}"
        elif parts is not None:
            yield f"{title} {_percent(getattr(parts, key), getattr(parts, f'{key}_std', None))} %"


def _percent(share: float, spread: float | None = None) -> str:
    """Return a share in percent with its standard deviation."""
    return f"{100 * share:.1f}" if spread is None else f"{100 * share:.1f}±{100 * spread:.1f}"
