"""`evaluate --faithfulness` and the agreement of several models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.cli.console import Advance, one_line, print_message

if TYPE_CHECKING:
    from opal_deploy.cli.evaluate.output import Run
    from opal_deploy.datasets.samples import Sample
    from opal_deploy.evaluation.faithfulness.gradcam import HeatMap
    from opal_deploy.evaluation.faithfulness.measure import Faithfulness
    from opal_deploy.evaluation.faithfulness.perturbation import Baseline
    from opal_deploy.runtime.session import Session
    from opal_deploy.synthetic import Annotation


def run_faithfulness(
    path: Path,
    session: Session,
    samples: list[Sample],
    annotations: list[Annotation] | None,
    *,
    boxes: bool,
    limit: int,
    baselines: Sequence[Baseline],
    batch: int,
    device: str,
    seed: int,
    report: Advance,
) -> Faithfulness:
    """Measure a model's faithfulness; prints first how many forward passes it may take."""
    from opal_deploy.evaluation.faithfulness.measure import choose_samples, max_forward_passes, measure_faithfulness
    from opal_deploy.evaluation.faithfulness.rankings import choose_foreground

    chosen = choose_samples(samples, limit)
    passes = max_forward_passes(len(chosen), session.metadata, baselines)
    print_message(
        f"faithfulness: {len(chosen):,} images, at most {passes:,} forward passes (--limit and --fill make it fewer)"
    )
    return measure_faithfulness(
        session,
        samples,
        chosen,
        choose_foreground(samples, annotations, session.metadata.grid, boxes=boxes),
        boxes=boxes,
        baselines=baselines,
        heat_map=_grad_cam(path, device),
        batch=batch,
        seed=seed,
        report=report,
    )


def _grad_cam(path: Path, device: str) -> HeatMap | None:
    """Return Grad-CAM for a checkpoint, None for exported models, which have no gradients."""
    from opal_deploy.artifact.files import model_kind

    if model_kind(path) != "checkpoint":
        return None
    from opal_deploy.evaluation.faithfulness.gradcam import GradCam
    from opal_deploy.model import checkpoint
    from opal_deploy.runtime.torch_session import torch_device

    return GradCam(checkpoint.load(path).network.to(torch_device(device)))


def print_agreements(runs: list[Run]) -> list[list[dict[str, Any]]]:
    """Print and return, for each model, how far it agrees with each model before it."""
    from opal_deploy.evaluation.metrics import compare_outputs

    documents: list[list[dict[str, Any]]] = []
    for number, run in enumerate(runs):
        documents.append([])
        for earlier in runs[:number]:
            found = compare_outputs((earlier.measured.outputs, earlier.metadata), (run.measured.outputs, run.metadata))
            documents[-1].append({"with": str(earlier.path), **found.to_dict()})
            cells = "no comparable cells" if found.same_cells is None else f"{found.same_cells:.2%} of its cells"
            gap = found.largest_cosine_difference
            cosine = "" if gap is None else f", largest cosine difference {gap:.3g}"
            print_message(
                one_line(
                    f"{run.path} and {earlier.path} agree on {found.same_class:.2%} of {found.images:,} answers and "
                    f"{cells}{cosine}"
                )
            )
    return documents
