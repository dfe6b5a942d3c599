"""Measure models: metrics, risk over coverage, pointing game and faithfulness, reported and written in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opal_deploy.artifact.files import model_kind
from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.evaluation import pointing, risk
from opal_deploy.evaluation import report as files
from opal_deploy.evaluation.calibration import CalibrationReport, format_calibration, report_calibration
from opal_deploy.evaluation.faithfulness.gradcam import GradCam
from opal_deploy.evaluation.faithfulness.measure import (
    Faithfulness,
    choose_samples,
    max_forward_passes,
    measure_faithfulness,
)
from opal_deploy.evaluation.faithfulness.rankings import choose_foreground
from opal_deploy.evaluation.faithfulness.tables import format_lines
from opal_deploy.evaluation.inputs import (
    EvaluateOptions,
    EvaluationInputs,
    EvaluationTarget,
    check_evidence,
    read_inputs,
)
from opal_deploy.evaluation.metrics import measure_agreement
from opal_deploy.evaluation.pointing import PointingGame
from opal_deploy.evaluation.receptive_field import measure_receptive_field
from opal_deploy.evaluation.record import build_evaluation, check_recordable, record_evaluation
from opal_deploy.evaluation.result import ModelEvaluation, format_metrics, format_table
from opal_deploy.evaluation.session import EvaluationResult, evaluate_session
from opal_deploy.logs import Log, Progress
from opal_deploy.model import checkpoint
from opal_deploy.records.names import escape_name
from opal_deploy.runtime.session import Session
from opal_deploy.runtime.torch_session import torch_device
from opal_deploy.statistics import Threshold, choose_threshold, smallest_target

# a measurement that takes longer than this prints an estimate of its time
_MAX_SILENT_S = 60.0


def measure_models(
    targets: Sequence[EvaluationTarget],
    data: Path,
    options: EvaluateOptions,
    *,
    out: Path | None,
    overwrite: bool,
    record: bool,
    log: Log,
    report: Progress,
) -> list[ModelEvaluation]:
    """Check all that can be checked first, then measure one model after the other; see `evaluate_model`."""
    paths = [target.path for target in targets]
    if out is not None:
        files.check_folder(out, data, overwrite=overwrite)
    # a list to pop from, so that the session of a measured model is freed
    sessions = [targets[0].open(options)]
    metadata = {target.path: target.read_metadata() for target in targets[1:]} | {paths[0]: sessions[0].metadata}
    for path in paths:
        check_evidence(path, metadata[path], options)
        if record:
            check_recordable(path, metadata[path])
    inputs = read_inputs(data, {path: metadata[path] for path in paths}, options, log, report)
    folders: list[Path | None] = [None] * len(paths)
    if out is not None:
        files.create_folder(out)
        folders = [*files.model_folders(out, paths)]

    results: list[ModelEvaluation] = []
    for target, folder in zip(targets, folders, strict=True):
        session = sessions.pop() if sessions else target.open(options)
        results.append(_ModelMeasurement(target.path, session, inputs, options, folder, log, report).run())
        del session
    if len(results) > 1:
        if options.faithfulness:
            results = _compare(results, log)
        for line in format_table(results):
            log(line)
    documents = [result.to_dict() for result in results]
    if record:
        for path, measured in zip(paths, documents, strict=True):
            evaluation = build_evaluation(measured, inputs.data, options.split)
            fitted = measured["calibration"].get("fitted")
            log(record_evaluation(path, evaluation, measured.get("receptive_field"), fitted))
    if out is not None:
        files.write_evaluation(out, documents[0] if len(documents) == 1 else documents)
        log(str(out))
    return results


def _compare(results: Sequence[ModelEvaluation], log: Log) -> list[ModelEvaluation]:
    """Return the results with how far each model agrees with each model before it, and report that."""
    compared = []
    for number, result in enumerate(results):
        agreements = []
        for earlier in results[:number]:
            pair = [(each.evaluation.outputs, each.metadata) for each in (earlier, result)]
            agreement = measure_agreement(*pair)
            agreements.append((earlier.path, agreement))
            same_cells, difference = agreement.same_cells, agreement.largest_cosine_difference
            cells = "no comparable cells" if same_cells is None else f"{same_cells:.2%} of its cells"
            cosine = "" if difference is None else f", largest cosine difference {difference:.3g}"
            log(
                f"{result.path} and {earlier.path} agree on {agreement.same_class:.2%} of {agreement.images:,} "
                f"answers and {cells}{cosine}"
            )
        compared.append(replace(result, agreements=agreements))
    return compared


@dataclass(frozen=True)
class _ModelMeasurement:
    """The measurement of one model, whose files go to `folder`; None writes none."""

    path: Path
    session: Session
    inputs: EvaluationInputs
    options: EvaluateOptions
    folder: Path | None
    log: Log
    report: Progress

    def run(self) -> ModelEvaluation:
        """Measure the model, report each figure once it is known, and write the files."""
        options, inputs, metadata = self.options, self.inputs, self.session.metadata
        advice = None if inputs.part_locations is None else "--no-parts needs about half of that"
        evaluation = evaluate_session(
            self.session,
            inputs.samples,
            boxes=options.boxes,
            batch=options.batch,
            parts=inputs.part_locations,
            seed=options.seed,
            report=self._with_estimate(advice),
            model=str(self.path),
        )
        if self.folder is not None:
            files.write_model(self.folder, evaluation, metadata, inputs.samples, inputs.data.root)
        result = ModelEvaluation(
            self.path, self.session.description, options.split, options.boxes, metadata, evaluation, out=self.folder
        )
        for line in format_metrics(result):
            self.log(line)
        calibration = self._measure_calibration(evaluation)
        field = self._find_receptive_field()
        threshold = self._measure_risk(evaluation)
        game = self._play_pointing_game(evaluation)
        return replace(
            result,
            threshold=threshold,
            calibration=calibration,
            receptive_field=field,
            pointing_game=game,
            faithfulness=self._measure_faithfulness(field) if options.faithfulness else None,
        )

    def _measure_calibration(self, evaluation: EvaluationResult) -> CalibrationReport:
        """Measure the calibration, and fit one on validation images for a model that has none."""
        inputs, metadata = self.inputs, self.session.metadata
        data = metadata.training.get("data")
        # of other images than training set aside, it may have been trained on some
        same_images = not isinstance(data, dict) or data.get("val") in (None, len(inputs.samples))
        same_crop = metadata.crop == (inputs.data.crop if self.options.boxes else None)
        fit = self.options.split == "val" and same_images and same_crop
        report = report_calibration(evaluation.outputs.logits, evaluation.labels, metadata, fit=fit)
        for line in format_calibration(report, metadata):
            self.log(line)
        if self.options.split == "val" and not fit and report.calibrated is None:
            self.log("no temperature was fitted: these are not the images, or not the crops, that training set aside")
        return report

    def _measure_risk(self, evaluation: EvaluationResult) -> Threshold | None:
        curve = risk.compute_margin_curve(evaluation)
        if curve is None:
            return None
        for line in risk.format_curve(curve):
            self.log(line)
        threshold = None
        if self.options.target_error is not None:
            threshold = choose_threshold(curve.summary(), self.options.target_error)
            for line in risk.format_threshold(threshold, smallest_target(curve.summary())):
                self.log(line)
        if self.folder is not None:
            files.write_risk(self.folder, curve, threshold)
        return threshold

    def _find_receptive_field(self) -> ReceptiveField | None:
        """Return what a cell sees: as the model remembers it, or measured where a checkpoint does not."""
        metadata = self.session.metadata
        field = ReceptiveField.from_dict(metadata.receptive_field)
        if (field is None or field.effective is None) and model_kind(self.path) == "checkpoint":
            network = checkpoint.load(self.path).network.to(torch_device(self.options.device))
            field = measure_receptive_field(network, self.inputs.samples, boxes=self.options.boxes)
        if field is None:
            self.log("receptive field: not recorded in this model; evaluate its checkpoint, or export that again")
            return None
        for line in field.describe(metadata.input_size):
            self.log(line)
        return field

    def _play_pointing_game(self, evaluation: EvaluationResult) -> PointingGame | None:
        """Play the pointing game where objects or parts are known."""
        metadata = self.session.metadata
        if not self.inputs.annotations.known or metadata.evidence != "exact":
            return None
        game = pointing.play_pointing_game(evaluation, self.inputs.annotations, metadata)
        if game is None:
            self.log("pointing game: not played, no right prediction has an annotation")
            return None
        for line in pointing.format_game(game):
            self.log(line)
        if self.folder is not None and game.part is not None:
            files.write_slot_parts(self.folder, game)
        return game

    def _measure_faithfulness(self, field: ReceptiveField | None) -> Faithfulness:
        """Measure faithfulness; reports first how many forward passes it may take."""
        session, inputs, options = self.session, self.inputs, self.options
        chosen = choose_samples(inputs.samples, options.limit)
        effective = None if field is None else field.in_cells(session.metadata.grid)
        passes = max_forward_passes(len(chosen), session.metadata, options.baselines)
        self.log(
            f"faithfulness: {len(chosen):,} images, at most {passes:,} forward passes (--limit and --fill make it "
            "fewer)"
        )
        # exported models have no gradients
        heat_map = None
        if model_kind(self.path) == "checkpoint":
            heat_map = GradCam(checkpoint.load(self.path).network.to(torch_device(options.device)))
        faithfulness = measure_faithfulness(
            session,
            inputs.samples,
            chosen,
            choose_foreground(inputs.annotations, session.metadata.grid),
            boxes=options.boxes,
            baselines=options.baselines,
            heat_map=heat_map,
            batch=options.batch,
            seed=options.seed,
            center=0.5 if effective is None else effective.center,
            report=self._with_estimate("fewer with --limit or --fill"),
        )
        for line in format_lines(faithfulness):
            self.log(line)
        if self.folder is not None:
            files.write_faithfulness(self.folder, faithfulness, escape_name(self.path.name))
        return faithfulness

    def _with_estimate(self, advice: str | None) -> Progress:
        """Return a callback that reports, and once how long a slow measurement takes, with `advice` to shorten it."""
        first: tuple[float, int] | None = None
        estimated = False

        def report(done: int, total: int | None, note: str) -> None:
            nonlocal first, estimated
            self.report(done, total, note)
            now = time.monotonic()
            # the first batch also pays for loading and warming up
            if first is None:
                first = now, done
            elif not estimated:
                estimated = True
                if total is not None:
                    left = (now - first[0]) * (total - done) / max(done - first[1], 1)
                    if advice and left > _MAX_SILENT_S:
                        self.log(f"about {left / 60:.0f} more minutes; {advice}")

        return report
