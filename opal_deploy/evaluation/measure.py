"""Measure models one after another; log each figure and write each file as soon as it is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.files import model_kind, write_json
from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import attack, faithfulness, files, interventions, pointing, randomise, record, result
from opal_deploy.evaluation.baseline import baseline_of, fit_neighbours, measure_baseline
from opal_deploy.evaluation.calibration import evaluate_calibration, format_calibration
from opal_deploy.evaluation.cells import GradCam
from opal_deploy.evaluation.inputs import (
    EvaluatedModel,
    EvaluationInputs,
    check_model,
    has_validation_images,
    read_inputs,
)  # fmt: skip
from opal_deploy.evaluation.metrics import measure_agreement
from opal_deploy.evaluation.options import EvaluateOptions
from opal_deploy.evaluation.receptive_field import measure_receptive_field
from opal_deploy.evaluation.result import ModelEvaluation
from opal_deploy.evaluation.session import EvaluationResult, choose_samples, evaluate_session
from opal_deploy.logs import Progress, as_progress
from opal_deploy.model import checkpoint
from opal_deploy.model.neighbours import Neighbours
from opal_deploy.model.network import OpalNetwork
from opal_deploy.records.decision import describe_supported_rates
from opal_deploy.runtime.session import Session
from opal_deploy.runtime.torch_session import TorchSession, torch_device
from opal_deploy.statistics import choose_threshold, compute_risk_curve, smallest_target
from opal_deploy.synthetic import read_annotations

# a measurement that takes longer than this logs an estimate of its time
_MAX_SILENT_S = 60.0


def measure_models(models: Sequence[EvaluatedModel], data: Path, options: EvaluateOptions) -> list[ModelEvaluation]:
    """Check everything first, then measure one model after another; see `evaluate_model`."""
    paths = [model.path for model in models]
    out = None if options.out is None else Path(options.out)
    if out is not None:
        files.check_folder(out, data, overwrite=options.overwrite)
    # a list to pop from, so that the session of a measured model is freed
    sessions = [models[0].open(options)]
    metadata = {paths[0]: sessions[0].metadata}
    metadata |= {model.path: model.read_metadata() for model in models[1:]}
    for path in paths:
        check_model(path, metadata[path], options)
    inputs = read_inputs(data, metadata, options)
    folders: list[Path | None] = [None] * len(paths)
    if out is not None:
        files.create_folder(out)
        folders = [*files.model_folders(out, paths)]

    results: list[ModelEvaluation] = []
    for model, folder in zip(models, folders, strict=True):
        session = sessions.pop() if sessions else model.open(options)
        results.append(_measure(model.path, session, inputs, options, folder))
        del session
    if len(results) > 1:
        if options.faithfulness:
            results = _compare(results, options)
        _log(options, result.format_table(results))
    if options.record:
        for measured in results:
            _log(options, [record.record_evaluation(measured, inputs.data)])
            if measured.baseline is not None:
                _log(options, describe_supported_rates(measured.metrics.risk or {}, measured.baseline))
    if out is not None:
        documents = [measured.to_dict() for measured in results]
        write_json(out / files.EVALUATION, documents[0] if len(documents) == 1 else documents)
        options.log(str(out))
    return results


def _log(options: EvaluateOptions, lines: Iterable[str]) -> None:
    for line in lines:
        options.log(line)


def _compare(results: Sequence[ModelEvaluation], options: EvaluateOptions) -> list[ModelEvaluation]:
    """Return the results with each model's agreement with each model before it."""
    compared = []
    for number, later in enumerate(results):
        agreements = []
        for earlier in results[:number]:
            agreement = measure_agreement(
                (earlier.evaluation.outputs, earlier.metadata), (later.evaluation.outputs, later.metadata)
            )
            agreements.append((earlier.path, agreement))
            options.log(f"{later.path} and {earlier.path}: {agreement.describe()}")
        compared.append(replace(later, agreements=agreements))
    return compared


def _measure(
    path: Path, session: Session, inputs: EvaluationInputs, options: EvaluateOptions, folder: Path | None
) -> ModelEvaluation:
    """Measure one model; its files go to `folder`, if any."""
    metadata, log = session.metadata, partial(_log, options)
    set_aside = has_validation_images(metadata, inputs, options)
    if inputs.background and not set_aside:
        raise UsageError(
            f"{path}: --background: these images or crops are not the ones that training set aside; give the data set "
            "that the model was trained on, with its --boxes or --no-boxes"
        )
    advice = None if inputs.part_locations is None else "--no-parts takes about half"
    evaluation = evaluate_session(
        session, inputs.samples, boxes=options.boxes, batch=options.batch, parts=inputs.part_locations,
        seed=options.seed, progress=_estimate(options, advice), model=str(path),
    )  # fmt: skip
    if folder is not None:
        files.write_model(folder, evaluation, metadata, inputs.samples, inputs.data.root)
    measured = ModelEvaluation(
        path, session.description, options.split, options.boxes, metadata, evaluation, out=folder
    )
    log(result.format_metrics(measured))
    # a model without a temperature gets one from the images that training set aside
    calibration = evaluate_calibration(evaluation.outputs.logits, evaluation.labels, metadata, fit=set_aside)
    log(format_calibration(calibration, metadata))
    if options.split == "val" and not set_aside and calibration.calibrated is None:
        log(["no temperature fitted: these images or crops are not the ones that training set aside"])

    @cache
    def load_network() -> OpalNetwork:
        return checkpoint.load(path).network.to(torch_device(options.device))

    is_checkpoint = model_kind(path) == "checkpoint"
    field = ReceptiveField.from_dict(metadata.receptive_field)
    if (field is None or field.effective is None) and is_checkpoint:
        field = measure_receptive_field(load_network(), inputs.samples, boxes=options.boxes)
    missing = "receptive field: not stored in this model; evaluate its checkpoint, or export that again"
    log([missing] if field is None else field.describe(metadata.input_size))
    measured = replace(measured, calibration=calibration, receptive_field=field)
    if (margins := evaluation.margins) is not None:
        curve = compute_risk_curve(margins, evaluation.outputs.logits.argmax(axis=1) == evaluation.labels)
        summary, threshold = curve.summary(), None
        log([result.format_curve(summary)])
        if options.target_error is not None:
            threshold = choose_threshold(summary, options.target_error)
            log([result.format_threshold(threshold, smallest_target(summary))])
        if folder is not None:
            files.write_risk(folder, curve, threshold)
        measured = replace(measured, threshold=threshold)
    if options.record and set_aside:
        baseline, neighbours = _measure_baseline(path, session, inputs, evaluation, options)
        measured = replace(measured, baseline=baseline, neighbours=neighbours)

    samples, annotations = inputs.samples, inputs.annotations
    if annotations.known and metadata.evidence == "exact":
        game = pointing.play_pointing_game(evaluation, annotations, metadata)
        skipped = ["pointing game: skipped, no correctly classified image has an annotation"]
        log(skipped if game is None else pointing.format_game(game))
        measured = replace(measured, pointing_game=game)
        if folder is not None and game is not None and game.part is not None:
            files.write_table(folder / files.SLOT_PARTS, *pointing.slot_table(game))

    def add(name: str, figures: Any, describe: Callable[[Any], Iterable[str]]) -> ModelEvaluation:
        log(describe(figures))
        return replace(measured, **{name: figures})

    chosen = choose_samples(samples, options.limit)
    if options.faithfulness:
        passes = faithfulness.max_forward_passes(len(chosen), metadata, options.fill)
        log([f"faithfulness: {len(chosen):,} images, at most {passes:,} forward passes (see --limit and --fill)"])
        effective = None if field is None else field.in_cells(metadata.grid)
        figures = faithfulness.measure_faithfulness(
            session, samples, chosen, annotations, options,
            # exported models have no gradients
            heat_map=GradCam(load_network()) if is_checkpoint else None,
            center=0.5 if effective is None else effective.center,
            progress=_estimate(options, "use --limit or --fill to shorten this"),
        )  # fmt: skip
        measured = add("faithfulness", figures, faithfulness.format_faithfulness)
        if folder is not None:
            files.write_faithfulness(folder, figures, path.name)
    if options.attack_outside:
        progress = _estimate(options, "use --limit or --attack-steps to shorten this")
        attacked = attack.measure_attack(
            load_network(), metadata, samples, chosen, options, field=field, progress=progress
        )
        measured = add("attack", attacked, attack.format_attack)
    progress = _estimate(options, "use --limit to shorten this")
    if options.randomise:
        shuffled = randomise.measure_randomisation(
            checkpoint.load(path), [samples[i] for i in chosen], annotations.select(chosen), options, progress=progress
        )
        measured = add("randomisation", shuffled, randomise.format_randomisation)
    if options.interventions:
        heat_map, random_head = None, None
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
        measured = add("interventions", without_parts, interventions.format_interventions)
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
    baseline = measure_baseline(session, inputs.samples, network.neighbours, boxes=boxes, progress=progress)
    return baseline, network.neighbours


def _estimate(options: EvaluateOptions, advice: str | None) -> Progress:
    """Return a progress callback that logs once how long a slow measurement takes, with advice to shorten it."""
    calls: list[tuple[float, int]] = []

    def progress(done: int, total: int | None, note: str) -> None:
        as_progress(options.progress)(done, total, note)
        calls.append((time.monotonic(), done))
        # the first batch includes loading and warming up
        if len(calls) == 2 and total is not None and advice:
            left = (calls[1][0] - calls[0][0]) * (total - done) / max(done - calls[0][1], 1)
            if left > _MAX_SILENT_S:
                options.log(f"about {left / 60:.0f} more minutes; {advice}")

    return progress
