"""Measure a model: check everything first, then log each figure as soon as it is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.api.model import Model
from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.files import model_kind, write_json
from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import attack, faithfulness, interventions, pointing, randomise, result
from opal_deploy.evaluation.calibration import evaluate_calibration, format_calibration
from opal_deploy.evaluation.cells import GradCam, measure_receptive_field
from opal_deploy.evaluation.inputs import EvaluationInputs, check_model, has_validation_images, read_inputs
from opal_deploy.evaluation.metrics import TargetMargin
from opal_deploy.evaluation.options import EvaluateOptions
from opal_deploy.evaluation.record import baseline_of, fit_neighbours, measure_baseline, record_evaluation
from opal_deploy.evaluation.result import ModelEvaluation
from opal_deploy.evaluation.session import EvaluationResult, choose_samples, evaluate_session
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


def measure_model(model: StrPath | Model, data: Path, options: EvaluateOptions) -> ModelEvaluation:
    """Check everything first, then measure, and write what the options ask for; see `evaluate_model`."""
    path = model.path if isinstance(model, Model) else Path(model)
    if path is None:
        raise UsageError("this Model has no file; give one that `opal_deploy.load` returned, or a path")
    if not path.is_file():
        raise UsageError(f"{path}: no such model; expected a file of `opal-deploy export`, or a checkpoint")
    out = None if options.out is None else Path(options.out)
    if out is not None:
        result.check_folder(out, data, overwrite=options.overwrite)
    if isinstance(model, Model):
        session = model.sessions[0]
    else:
        session = open_sessions(path, device=options.device, threads=options.threads)[0]
    check_model(path, session.metadata, options)
    inputs = read_inputs(data, path, session.metadata, options)
    if out is not None:
        result.create_folder(out)
    measured = _measure_evidence(_measure(path, session, inputs, options), session, inputs, options)
    if options.record:
        options.log(record_evaluation(measured, inputs.data))
        if measured.baseline is not None:
            _log(options, describe_supported_rates(measured.metrics.risk or {}, measured.baseline))
    if out is not None:
        write_json(out / result.EVALUATION, measured.to_dict())
        options.log(str(out))
    return measured


def _log(options: EvaluateOptions, lines: Iterable[str]) -> None:
    for line in lines:
        options.log(line)


def _measure(path: Path, session: Session, inputs: EvaluationInputs, options: EvaluateOptions) -> ModelEvaluation:
    """Return what is measured whatever the options."""
    metadata, samples = session.metadata, inputs.samples
    set_aside = has_validation_images(metadata, inputs, options)
    if inputs.background and not set_aside:
        raise UsageError(
            f"{path}: --background: these images or crops are not the ones that training set aside; give the data set "
            "that the model was trained on, with its --boxes or --no-boxes"
        )
    evaluation = evaluate_session(
        session, samples, boxes=options.boxes, batch=options.batch, parts=inputs.part_locations, seed=options.seed,
        progress=as_progress(options.progress), model=str(path),
    )  # fmt: skip
    out = None if options.out is None else Path(options.out)
    if out is not None:
        result.write_predictions(out / result.PREDICTIONS, evaluation, metadata, samples, inputs.data.root)
    measured = ModelEvaluation(path, session.description, options.split, options.boxes, metadata, evaluation, out=out)
    _log(options, result.format_metrics(measured))

    # a model without a temperature gets one from the images that training set aside
    calibration = evaluate_calibration(evaluation.outputs.logits, evaluation.labels, metadata, fit=set_aside)
    _log(options, format_calibration(calibration, metadata))
    if options.split == "val" and not set_aside and calibration.calibrated is None:
        options.log("no temperature fitted: these images or crops are not the ones that training set aside")

    field = ReceptiveField.from_dict(metadata.receptive_field)
    if (field is None or field.effective is None) and model_kind(path) == "checkpoint":
        network = checkpoint.load(path).network.to(torch_device(options.device))
        field = measure_receptive_field(network, samples, boxes=options.boxes)
    missing = "receptive field: not stored in this model; evaluate its checkpoint, or export that again"
    _log(options, [missing] if field is None else field.describe(metadata.input_size))
    measured = replace(measured, calibration=calibration, receptive_field=field)
    if (risk := evaluation.evaluation.risk) is not None:
        options.log(result.format_curve(risk))
        if options.target_error is not None:
            margin = TargetMargin.choose(risk, options.target_error)
            options.log(result.format_threshold(margin, risk))
            measured = replace(measured, threshold=margin)
    if options.record and set_aside:
        baseline, neighbours = _measure_baseline(path, session, inputs, evaluation, options)
        measured = replace(measured, baseline=baseline, neighbours=neighbours)
    if inputs.annotations.known and metadata.evidence == "exact":
        game = pointing.play_pointing_game(evaluation, inputs.annotations, metadata)
        _log(options, pointing.format_game(game))
        measured = replace(measured, pointing_game=game)
    return measured


def _measure_evidence(
    measured: ModelEvaluation, session: Session, inputs: EvaluationInputs, options: EvaluateOptions
) -> ModelEvaluation:
    """Return the evaluation with what only some options measure, on a choice of the images."""
    path, metadata, field = measured.path, measured.metadata, measured.receptive_field
    samples, annotations, progress = inputs.samples, inputs.annotations, as_progress(options.progress)
    is_checkpoint = model_kind(path) == "checkpoint"
    chosen = choose_samples(samples, options.limit)

    @cache
    def load_network() -> OpalNetwork:
        return checkpoint.load(path).network.to(torch_device(options.device))

    def add(name: str, figures: Any, lines: Iterable[str]) -> ModelEvaluation:
        _log(options, lines)
        return replace(measured, **{name: figures})

    if options.faithfulness:
        effective = None if field is None else field.in_cells(metadata.grid)
        removed = faithfulness.measure_faithfulness(
            session, samples, chosen, annotations, options,
            # exported models have no gradients
            heat_map=GradCam(load_network()) if is_checkpoint else None,
            center=0.5 if effective is None else effective.center, progress=progress,
        )  # fmt: skip
        measured = add("faithfulness", removed, faithfulness.format_faithfulness(removed))
    if options.attack_outside:
        attacked = attack.measure_attack(
            load_network(), metadata, samples, chosen, options, field=field, progress=progress
        )
        measured = add("attack", attacked, attack.format_attack(attacked))
    if options.randomise:
        shuffled = randomise.measure_randomisation(
            checkpoint.load(path), [samples[i] for i in chosen], annotations.select(chosen), options, progress=progress
        )
        measured = add("randomisation", shuffled, randomise.format_randomisation(shuffled))
    if options.interventions:
        heat_map = random_head = None
        if is_checkpoint:
            heat_map, loaded = GradCam(load_network()), checkpoint.load(path)
            if metadata.evidence == "exact":
                randomise.shuffle_weights(loaded.network.head, np.random.default_rng(options.seed))
                random_head = TorchSession(loaded, device=options.device, threads=options.threads)
        first = read_annotations(inputs.data.root)[0]
        without_parts = interventions.measure_interventions(
            session, (first.height, first.width), options.limit, random_head=random_head, heat_map=heat_map,
            seed=options.seed, progress=progress,
        )  # fmt: skip
        lines = interventions.format_interventions(without_parts)
        measured = add("interventions", without_parts, lines)
    return measured


def _measure_baseline(
    path: Path, session: Session, inputs: EvaluationInputs, evaluation: EvaluationResult, options: EvaluateOptions
) -> tuple[Baseline | None, Neighbours | None]:
    """Return the baseline on validation images, and neighbours fitted to a checkpoint if it needs new ones."""
    metadata, data, background = session.metadata, inputs.data, inputs.background
    has_neighbours = metadata.has_output("ood_score") and not background
    if has_neighbours or model_kind(path) != "checkpoint" or not data.train:
        known = metadata.known_baseline
        return baseline_of(evaluation.outputs, metadata, known.background if known else 0), None
    loaded = checkpoint.load(path)
    network = loaded.network.to(torch_device(options.device))
    boxes, progress = options.boxes, as_progress(options.progress)
    network.neighbours = fit_neighbours(network, data.train, background, boxes=boxes, progress=progress)
    if network.neighbours is None:
        options.log("no features kept for --unknown: too few training images, or no spread within classes")
    else:
        images = f"{network.neighbours.bank.shape[1]:,} training and {network.neighbours.num_background:,}"
        options.log(f"kept features of {images} background images for --unknown")
    session = TorchSession(loaded, device=options.device, threads=options.threads)
    return measure_baseline(session, inputs.samples, network.neighbours, boxes=boxes, progress=progress), (
        network.neighbours
    )
