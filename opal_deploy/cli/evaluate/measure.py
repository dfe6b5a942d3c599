"""Measure one model: metrics, risk over coverage, pointing game and faithfulness, printed and written in turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.cli.console import Advance, one_line, print_message, progress
from opal_deploy.cli.evaluate.inputs import EvaluateOptions, EvaluationInputs
from opal_deploy.cli.evaluate.output import ModelResult, print_metrics

if TYPE_CHECKING:
    from opal_deploy.artifact.receptive_field import ReceptiveField
    from opal_deploy.evaluation.faithfulness.gradcam import HeatMap
    from opal_deploy.runtime.session import Session

# a measurement that takes longer than this prints an estimate of its time
_MAX_SILENT_S = 60.0


def measure_model(
    path: Path, session: Session, inputs: EvaluationInputs, options: EvaluateOptions, folder: Path | None
) -> ModelResult:
    """Measure a model, print its metrics, and write its files into `folder`; None writes none."""
    from opal_deploy.evaluation import report
    from opal_deploy.evaluation.session import evaluate_session

    advice = None if inputs.part_locations is None else "--no-parts needs about half of that"
    with progress("evaluating") as advance:
        evaluation = evaluate_session(
            session,
            inputs.samples,
            boxes=options.boxes,
            batch=options.batch,
            parts=inputs.part_locations,
            seed=options.seed,
            report=_with_estimate(advance, advice),
            model=str(path),
        )
    result = ModelResult(path, session.description, session.metadata, evaluation)
    if folder is not None:
        report.write_model(folder, evaluation, result.metadata, inputs.samples, inputs.root)
    print_metrics(result, options)
    field = _add_receptive_field(result, inputs, options)
    _add_risk(result, options, folder)
    _add_pointing(result, inputs, folder)
    if options.faithfulness:
        _add_faithfulness(result, session, inputs, options, field, folder)
    return result


def add_agreements(results: list[ModelResult]) -> None:
    """Add to each result how far its model agrees with each model before it, and print that."""
    from opal_deploy.evaluation.metrics import measure_agreement

    for number, result in enumerate(results):
        outputs = result.evaluation.outputs, result.metadata
        result.extra["agreement"] = []
        for earlier in results[:number]:
            agreement = measure_agreement((earlier.evaluation.outputs, earlier.metadata), outputs)
            result.extra["agreement"].append({"with": str(earlier.path), **agreement.to_dict()})
            same_cells, difference = agreement.same_cells, agreement.largest_cosine_difference
            cells = "no comparable cells" if same_cells is None else f"{same_cells:.2%} of its cells"
            cosine = "" if difference is None else f", largest cosine difference {difference:.3g}"
            print_message(
                one_line(
                    f"{result.path} and {earlier.path} agree on {agreement.same_class:.2%} of {agreement.images:,} "
                    f"answers and {cells}{cosine}"
                )
            )


def _add_risk(result: ModelResult, options: EvaluateOptions, folder: Path | None) -> None:
    from opal_deploy.evaluation import report, risk
    from opal_deploy.statistics.risk import choose_threshold, smallest_target

    curve = risk.compute_margin_curve(result.evaluation)
    if curve is None:
        return
    for line in risk.format_curve(curve):
        print_message(line)
    threshold = None
    if options.target_error is not None:
        threshold = choose_threshold(curve.summary(), options.target_error)
        for line in risk.format_threshold(threshold, smallest_target(curve.summary())):
            print_message(line)
        result.extra["threshold"] = threshold.to_dict()
    if folder is not None:
        report.write_risk(folder, curve, threshold)


def _add_receptive_field(
    result: ModelResult, inputs: EvaluationInputs, options: EvaluateOptions
) -> ReceptiveField | None:
    """Add and return what a cell sees: as the model remembers it, or measured where a checkpoint does not."""
    from opal_deploy.artifact.files import model_kind
    from opal_deploy.artifact.receptive_field import ReceptiveField

    metadata = result.metadata
    field = ReceptiveField.from_dict(metadata.receptive_field)
    if (field is None or field.effective is None) and model_kind(result.path) == "checkpoint":
        from opal_deploy.evaluation.receptive_field import measure_receptive_field
        from opal_deploy.model import checkpoint
        from opal_deploy.runtime.torch_session import torch_device

        network = checkpoint.load(result.path).network.to(torch_device(options.device))
        field = measure_receptive_field(network, inputs.samples, boxes=options.boxes)
    if field is None:
        print_message("receptive field: not recorded in this model; evaluate its checkpoint, or export that again")
        return None
    for line in field.describe(metadata.input_size):
        print_message(line)
    result.extra["receptive_field"] = field.to_dict()
    return field


def _add_pointing(result: ModelResult, inputs: EvaluationInputs, folder: Path | None) -> None:
    """Add the pointing game, where objects or parts are known."""
    from opal_deploy.evaluation import pointing, report

    if not inputs.annotations.known or result.metadata.evidence != "exact":
        return
    game = pointing.play_pointing_game(result.evaluation, inputs.annotations, result.metadata)
    if game is None:
        print_message("pointing game: not played, no right prediction has an annotation")
        return
    for line in pointing.format_game(game):
        print_message(one_line(line))
    result.extra[pointing.POINTING] = game.to_dict()
    if folder is not None and game.part is not None:
        report.write_slot_parts(folder, game)


def _add_faithfulness(
    result: ModelResult,
    session: Session,
    inputs: EvaluationInputs,
    options: EvaluateOptions,
    field: ReceptiveField | None,
    folder: Path | None,
) -> None:
    """Add faithfulness; prints first how many forward passes it may take."""
    from opal_deploy.evaluation import report
    from opal_deploy.evaluation.faithfulness.measure import choose_samples, max_forward_passes, measure_faithfulness
    from opal_deploy.evaluation.faithfulness.rankings import choose_foreground
    from opal_deploy.evaluation.faithfulness.tables import format_lines

    chosen = choose_samples(inputs.samples, options.limit)
    effective = None if field is None else field.in_cells(session.metadata.grid)
    passes = max_forward_passes(len(chosen), session.metadata, options.baselines)
    print_message(
        f"faithfulness: {len(chosen):,} images, at most {passes:,} forward passes (--limit and --fill make it fewer)"
    )
    with progress("faithfulness") as advance:
        faithfulness = measure_faithfulness(
            session,
            inputs.samples,
            chosen,
            choose_foreground(inputs.annotations, session.metadata.grid),
            boxes=options.boxes,
            baselines=options.baselines,
            heat_map=_grad_cam(result.path, options.device),
            batch=options.batch,
            seed=options.seed,
            center=0.5 if effective is None else effective.center,
            report=_with_estimate(advance, "fewer with --limit or --fill"),
        )
    for line in format_lines(faithfulness):
        print_message(line)
    result.extra["faithfulness"] = faithfulness.to_dict()
    if folder is not None:
        report.write_faithfulness(folder, faithfulness, one_line(result.path.name))


def _grad_cam(path: Path, device: str) -> HeatMap | None:
    """Return Grad-CAM for a checkpoint, None for exported models, which have no gradients."""
    from opal_deploy.artifact.files import model_kind

    if model_kind(path) != "checkpoint":
        return None
    from opal_deploy.evaluation.faithfulness.gradcam import GradCam
    from opal_deploy.model import checkpoint
    from opal_deploy.runtime.torch_session import torch_device

    return GradCam(checkpoint.load(path).network.to(torch_device(device)))


def _with_estimate(advance: Advance, advice: str | None) -> Advance:
    """Return an `advance` that once prints how long a slow measurement will take, with `advice` to shorten it."""
    first: tuple[float, int] | None = None
    estimated = False

    def report(done: int, total: int | None = None, note: str = "") -> None:
        nonlocal first, estimated
        advance(done, total, note)
        now = time.monotonic()
        # the first batch also pays for loading and warming up
        if first is None:
            first = now, done
        elif not estimated:
            estimated = True
            if total is not None:
                left = (now - first[0]) * (total - done) / max(done - first[1], 1)
                if advice and left > _MAX_SILENT_S:
                    print_message(f"about {left / 60:.0f} more minutes; {advice}")

    return report
