"""Measure models one after another; log each figure and write each file as soon as it is known."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.files import model_kind, write_json
from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import files
from opal_deploy.evaluation.attack import Attack, format_attack, measure_attack
from opal_deploy.evaluation.baseline import baseline_of, fit_neighbours, measure_baseline
from opal_deploy.evaluation.calibration import CalibrationFigures, evaluate_calibration, format_calibration
from opal_deploy.evaluation.faithfulness import (
    Faithfulness,
    format_faithfulness,
    max_forward_passes,
    measure_faithfulness,
)
from opal_deploy.evaluation.inputs import (
    EvaluatedModel,
    EvaluationInputs,
    check_model,
    has_validation_images,
    read_inputs,
)
from opal_deploy.evaluation.interventions import Interventions, format_interventions, measure_interventions
from opal_deploy.evaluation.metrics import measure_agreement
from opal_deploy.evaluation.options import EvaluateOptions
from opal_deploy.evaluation.pointing import PointingGame, format_game, play_pointing_game
from opal_deploy.evaluation.randomise import (
    Randomisation,
    format_randomisation,
    measure_randomisation,
    shuffle_weights,
)
from opal_deploy.evaluation.rankings import GradCam
from opal_deploy.evaluation.receptive_field import measure_receptive_field
from opal_deploy.evaluation.result import ModelEvaluation, format_curve, format_metrics, format_table, format_threshold
from opal_deploy.evaluation.session import EvaluationResult, choose_samples, evaluate_session
from opal_deploy.logs import Progress, as_progress
from opal_deploy.model import checkpoint
from opal_deploy.model.neighbours import Neighbours
from opal_deploy.model.network import OpalNetwork
from opal_deploy.records.decision import describe_supported_rates
from opal_deploy.records.names import escape_name
from opal_deploy.runtime.session import Session
from opal_deploy.runtime.torch_session import TorchSession, torch_device
from opal_deploy.statistics import Threshold, choose_threshold, compute_risk_curve, smallest_target
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
    metadata = {path: model.read_metadata() for path, model in zip(paths[1:], models[1:], strict=True)}
    metadata = {paths[0]: sessions[0].metadata, **metadata}
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
        results.append(_ModelMeasurement(model.path, session, inputs, options, folder).run())
        del session
    if len(results) > 1:
        if options.faithfulness:
            results = _compare(results, options)
        for line in format_table(results):
            options.log(line)
    documents = [result.to_dict() for result in results]
    if options.record:
        for result, measured in zip(results, documents, strict=True):
            changes = {
                "evaluation": files.build_evaluation(measured, inputs.data, options.split),
                "receptive_field": measured.get("receptive_field"),
                "calibration": measured["calibration"].get("fitted"),
                "baseline": None if result.baseline is None else result.baseline.to_dict(),
                "neighbours": None if result.neighbours is None else result.neighbours.to_dict(),
                # a baseline, like a risk, is measured on the images that training set aside
                "risk": None if result.baseline is None else result.evaluation.evaluation.risk,
            }
            changed = {name: value for name, value in changes.items() if value is not None}
            options.log(files.record_measurements(result.path, changed))
            if result.baseline is not None:
                for line in describe_supported_rates(changed["risk"], result.baseline):
                    options.log(line)
    if out is not None:
        write_json(out / files.EVALUATION, documents[0] if len(documents) == 1 else documents)
        options.log(str(out))
    return results


def _compare(results: Sequence[ModelEvaluation], options: EvaluateOptions) -> list[ModelEvaluation]:
    """Return the results with each model's agreement with each model before it."""
    compared = []
    for number, result in enumerate(results):
        agreements = []
        for earlier in results[:number]:
            agreement = measure_agreement(
                (earlier.evaluation.outputs, earlier.metadata), (result.evaluation.outputs, result.metadata)
            )
            agreements.append((earlier.path, agreement))
            same_cells, difference = agreement.same_cells, agreement.largest_cosine_difference
            cells = "cells not comparable" if same_cells is None else f"{same_cells:.2%} same cells"
            cosine = "" if difference is None else f", largest cosine difference {difference:.3g}"
            options.log(
                f"{result.path} and {earlier.path}: {agreement.same_class:.2%} same class, {cells}{cosine} "
                f"({agreement.images:,} images)"
            )
        compared.append(replace(result, agreements=agreements))
    return compared


@dataclass(frozen=True)
class _ModelMeasurement:
    """The measurement of one model; its files go to `folder`, if any."""

    path: Path
    session: Session
    inputs: EvaluationInputs
    options: EvaluateOptions
    folder: Path | None

    def run(self) -> ModelEvaluation:
        """Measure the model, log each figure as soon as it is known, and write the files."""
        options, inputs, metadata = self.options, self.inputs, self.session.metadata
        if inputs.background and not self._has_validation_images():
            raise UsageError(
                f"{self.path}: --background: these images or crops are not the ones that training set aside; give the "
                "data set that the model was trained on, with its --boxes or --no-boxes"
            )
        evaluation = evaluate_session(
            self.session,
            inputs.samples,
            boxes=options.boxes,
            batch=options.batch,
            parts=inputs.part_locations,
            seed=options.seed,
            progress=self._with_estimate(None if inputs.part_locations is None else "--no-parts takes about half"),
            model=str(self.path),
        )
        if self.folder is not None:
            files.write_model(self.folder, evaluation, metadata, inputs.samples, inputs.data.root)
        result = ModelEvaluation(
            self.path, self.session.description, options.split, options.boxes, metadata, evaluation, out=self.folder
        )
        self._log(format_metrics(result))
        calibration = self._measure_calibration(evaluation)
        field = self._find_receptive_field()
        threshold = self._measure_risk(evaluation)
        baseline, neighbours = self._measure_baseline(evaluation) if options.record else (None, None)
        return replace(
            result,
            threshold=threshold,
            calibration=calibration,
            receptive_field=field,
            baseline=baseline,
            neighbours=neighbours,
            pointing_game=self._play_pointing_game(evaluation),
            faithfulness=self._measure_faithfulness(field) if options.faithfulness else None,
            attack=self._attack(field) if options.attack_outside else None,
            randomisation=self._randomise() if options.randomise else None,
            interventions=self._intervene() if options.interventions else None,
        )

    def _log(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.options.log(line)

    def _measure_calibration(self, evaluation: EvaluationResult) -> CalibrationFigures:
        """Measure the calibration, and fit one on validation images for a model that has none."""
        metadata, fit = self.session.metadata, self._has_validation_images()
        figures = evaluate_calibration(evaluation.outputs.logits, evaluation.labels, metadata, fit=fit)
        self._log(format_calibration(figures, metadata))
        if self.options.split == "val" and not fit and figures.calibrated is None:
            self._log(["no temperature fitted: these images or crops are not the ones that training set aside"])
        return figures

    def _has_validation_images(self) -> bool:
        return has_validation_images(self.session.metadata, self.inputs, self.options)

    def _measure_baseline(self, evaluation: EvaluationResult) -> tuple[Baseline | None, Neighbours | None]:
        """Return the baseline on validation images, and neighbours fitted to a checkpoint if it needs new ones."""
        if not self._has_validation_images():
            return None, None
        metadata, data, background = self.session.metadata, self.inputs.data, self.inputs.background
        has_neighbours = metadata.has_output("ood_score") and not background
        if has_neighbours or model_kind(self.path) != "checkpoint" or not data.train:
            known = metadata.known_baseline
            return baseline_of(evaluation.outputs, metadata, known.background if known else 0), None
        loaded = checkpoint.load(self.path)
        network = loaded.network.to(torch_device(self.options.device))
        boxes, progress = self.options.boxes, as_progress(self.options.progress)
        network.neighbours = fit_neighbours(network, data.train, background, boxes=boxes, progress=progress)
        if network.neighbours is None:
            self._log(["no features kept for --unknown: too few training images, or no spread within classes"])
        else:
            images = f"{network.neighbours.bank.shape[1]:,} training and {network.neighbours.num_background:,}"
            self._log([f"kept features of {images} background images for --unknown"])
        session = TorchSession(loaded, device=self.options.device, threads=self.options.threads)
        baseline = measure_baseline(session, self.inputs.samples, network.neighbours, boxes=boxes, progress=progress)
        return baseline, network.neighbours

    def _measure_risk(self, evaluation: EvaluationResult) -> Threshold | None:
        if evaluation.margins is None:
            return None
        curve = compute_risk_curve(evaluation.margins, evaluation.outputs.logits.argmax(axis=1) == evaluation.labels)
        self._log(format_curve(curve))
        threshold = None
        if self.options.target_error is not None:
            threshold = choose_threshold(curve.summary(), self.options.target_error)
            self._log([format_threshold(threshold, smallest_target(curve.summary()))])
        if self.folder is not None:
            files.write_risk(self.folder, curve, threshold)
        return threshold

    def _find_receptive_field(self) -> ReceptiveField | None:
        """Return the receptive field that the model's file stores; measure a checkpoint's if it is not stored."""
        metadata = self.session.metadata
        field = ReceptiveField.from_dict(metadata.receptive_field)
        if (field is None or field.effective is None) and model_kind(self.path) == "checkpoint":
            field = measure_receptive_field(self._load_network(), self.inputs.samples, boxes=self.options.boxes)
        if field is None:
            self._log(["receptive field: not stored in this model; evaluate its checkpoint, or export that again"])
            return None
        self._log(field.describe(metadata.input_size))
        return field

    def _load_network(self) -> OpalNetwork:
        return checkpoint.load(self.path).network.to(torch_device(self.options.device))

    def _play_pointing_game(self, evaluation: EvaluationResult) -> PointingGame | None:
        metadata = self.session.metadata
        if not self.inputs.annotations.known or metadata.evidence != "exact":
            return None
        game = play_pointing_game(evaluation, self.inputs.annotations, metadata)
        if game is None:
            self._log(["pointing game: skipped, no correctly classified image has an annotation"])
            return None
        self._log(format_game(game))
        if self.folder is not None and game.part is not None:
            files.write_slot_parts(self.folder, game)
        return game

    def _measure_faithfulness(self, field: ReceptiveField | None) -> Faithfulness:
        session, inputs, options = self.session, self.inputs, self.options
        chosen = choose_samples(inputs.samples, options.limit)
        effective = None if field is None else field.in_cells(session.metadata.grid)
        passes = max_forward_passes(len(chosen), session.metadata, options.fill)
        self._log([f"faithfulness: {len(chosen):,} images, at most {passes:,} forward passes (see --limit and --fill)"])
        # exported models have no gradients
        heat_map = GradCam(self._load_network()) if model_kind(self.path) == "checkpoint" else None
        faithfulness = measure_faithfulness(
            session,
            inputs.samples,
            chosen,
            inputs.annotations,
            boxes=options.boxes,
            fills=options.fill,
            heat_map=heat_map,
            batch=options.batch,
            seed=options.seed,
            center=0.5 if effective is None else effective.center,
            progress=self._with_estimate("use --limit or --fill to shorten this"),
        )
        self._log(format_faithfulness(faithfulness))
        if self.folder is not None:
            files.write_faithfulness(self.folder, faithfulness, escape_name(self.path.name))
        return faithfulness

    def _attack(self, field: ReceptiveField | None) -> Attack:
        inputs, options = self.inputs, self.options
        attack = measure_attack(
            self._load_network(),
            self.session.metadata,
            inputs.samples,
            choose_samples(inputs.samples, options.limit),
            levels=options.attack_levels,
            margin=options.attack_margin,
            steps=options.attack_steps,
            field=field,
            boxes=options.boxes,
            seed=options.seed,
            progress=self._with_estimate("use --limit or --attack-steps to shorten this"),
        )
        self._log(format_attack(attack))
        return attack

    def _randomise(self) -> Randomisation:
        inputs, options = self.inputs, self.options
        chosen = choose_samples(inputs.samples, options.limit)
        randomisation = measure_randomisation(
            checkpoint.load(self.path),
            [inputs.samples[index] for index in chosen],
            inputs.annotations.select(chosen),
            device=options.device,
            threads=options.threads,
            boxes=options.boxes,
            seed=options.seed,
            progress=self._with_estimate("use --limit to shorten this"),
        )
        self._log(format_randomisation(randomisation))
        return randomisation

    def _intervene(self) -> Interventions:
        options, random_head, heat_map = self.options, None, None
        if model_kind(self.path) == "checkpoint":
            heat_map = GradCam(self._load_network())
            if self.session.metadata.evidence == "exact":
                loaded = checkpoint.load(self.path)
                shuffle_weights(loaded.network.head, np.random.default_rng(options.seed))
                random_head = TorchSession(loaded, device=options.device, threads=options.threads)
        first = read_annotations(self.inputs.data.root)[0]
        interventions = measure_interventions(
            self.session,
            (first.height, first.width),
            options.limit,
            random_head=random_head,
            heat_map=heat_map,
            seed=options.seed,
            progress=self._with_estimate("use --limit to shorten this"),
        )
        self._log(format_interventions(interventions))
        return interventions

    def _with_estimate(self, advice: str | None) -> Progress:
        """Return a progress callback that logs once how long a slow measurement takes, with advice to shorten it."""
        first: tuple[float, int] | None = None
        estimated = False

        def progress(done: int, total: int | None, note: str) -> None:
            nonlocal first, estimated
            as_progress(self.options.progress)(done, total, note)
            now = time.monotonic()
            # the first batch includes loading and warming up
            if first is None:
                first = now, done
            elif not estimated:
                estimated = True
                if total is not None:
                    left = (now - first[0]) * (total - done) / max(done - first[1], 1)
                    if advice and left > _MAX_SILENT_S:
                        self._log([f"about {left / 60:.0f} more minutes; {advice}"])

        return progress
