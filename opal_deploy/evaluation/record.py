"""What a model's own file stores: its baseline, the neighbours among its training images, and an evaluation's figures.

Training stores the first two, which are measured on a bounded number of images, evenly over the classes, so that they
cost minutes at most; `evaluate --record` stores all, and `artifact.measurements` reads them.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from opal_deploy._version import __version__
from opal_deploy.artifact import engine_file, onnx_file
from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.evaluation.cells import CONTRIBUTION, RANDOM
from opal_deploy.evaluation.parts import CONSISTENCY, PURITY, STABILITY
from opal_deploy.evaluation.session import choose_samples, evaluate_session, photographs
from opal_deploy.logs import Progress, no_progress
from opal_deploy.model import checkpoint
from opal_deploy.model.neighbours import Neighbours, max_images
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.records.evidence import observe_outputs
from opal_deploy.runtime.session import ImageBatch, Session

# validation images of a baseline
_MAX_VALIDATION = 5_000


def fit_neighbours(
    network: OpalNetwork, samples: Sequence[Sample], *, boxes: bool = True, progress: Progress = no_progress
) -> Neighbours | None:
    """Return the neighbours of a trained network: features of training images, not augmented; None for too few images.

    Up to 2,000 images are taken, or five per class.

    Args:
        network: left in evaluation mode; computes on its device.
        samples: the training images.
        boxes: crop images to the samples' boxes, as in training.
    """
    known = [samples[index] for index in choose_samples(samples, max_images(network.config.num_classes))]
    features = pool_features(network, known, boxes=boxes, progress=progress)
    neighbours = Neighbours.fit(features, torch.tensor([sample.label for sample in known]))
    return None if neighbours is None else neighbours.to(next(network.parameters()).device)


def pool_features(
    network: OpalNetwork, samples: Sequence[Sample], *, boxes: bool = True, progress: Progress = no_progress
) -> torch.Tensor:
    """Return the features' means over the cells of n images, perhaps none: float32 [n, D] on the CPU.

    Images are not augmented, and with `boxes` cropped. The network is left in evaluation mode.
    """
    config, device = network.config, next(network.eval().parameters()).device

    def pool(pixels: ImageBatch) -> torch.Tensor:
        inputs = torch.from_numpy(normalise(pixels, config.mean, config.std)).to(device)
        with torch.inference_mode():
            features: torch.Tensor = network.backbone(inputs)
        return features.float().mean((2, 3)).cpu()

    batches = photographs(pool, samples, config.form, boxes=boxes, progress=progress, note="keeping features of images")
    parts = [images.outputs for images in batches]
    # of inference mode, whose tensors a module cannot keep
    return torch.cat(parts).clone() if parts else torch.zeros(0, network.backbone.num_features)


def measure_baseline(
    session: Session, samples: list[Sample], neighbours: Neighbours | None, *, boxes: bool = True,
    progress: Progress = no_progress,
) -> Baseline | None:  # fmt: skip
    """Return the baseline of a model on up to 5,000 validation images; None unless single cells are its evidence.

    The model's OOD score is computed with `neighbours`.
    """
    metadata = session.metadata
    if metadata.evidence != "exact":
        return None
    chosen = [samples[index] for index in choose_samples(samples, _MAX_VALIDATION)]
    measured = evaluate_session(session, chosen, boxes=boxes, progress=progress, note="measuring the baseline")
    return baseline_of(measured.outputs, metadata, 0 if neighbours is None else neighbours.num_background)


def baseline_of(outputs: Outputs, metadata: Metadata, background: int, split: str = "val") -> Baseline:
    """Return the baseline of a model with `exact` evidence from its outputs for images that it was not fitted to."""
    observed = observe_outputs(outputs, metadata)
    return Baseline.measure(observed, split, metadata.stride, metadata.class_map, background)


def build_evaluation(document: Mapping[str, Any], data: DataSet, split: str) -> dict[str, Any]:
    """Return the document that a model's metadata stores, from that of `ModelEvaluation.to_dict`."""
    evaluation: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "opal_deploy": __version__,
        "model": Path(document["model"]).name,
        "runtime": document["session"],
        "data": data.root.resolve().name,
        "split": split,
        "images": document[f"{split}_images"],
        "boxes": document["boxes"] and data.crop is not None,
        "accuracy": document[f"{split}_accuracy"],
    }
    if figures := document.get("faithfulness"):
        rows = {row["ranking"]: row for row in figures["rankings"]}
        own, random = rows[CONTRIBUTION], rows.get(RANDOM)
        removal = {"fill": own["fill"], "changed": 1 - own["class_kept"]}
        removal["changed_random"] = None if random is None else 1 - random["class_kept"]
        removal["drop_beyond_random"] = None if random is None else random["advantage"]["drop"]
        # version 0.1.0 expects shares of cells that stay under a change of the image
        kept = {key: figures[key] for key in ("images", "random_control")}
        evaluation["faithfulness"] = {**kept, "removal": [removal], "same_cell": {}}
    copied = (CONSISTENCY, STABILITY, PURITY, "pointing_game", "attack", "randomisation", "interventions")
    return evaluation | {key: document[key] for key in copied if document.get(key) is not None}


def record_measurements(path: Path, changes: dict[str, dict[str, Any]]) -> str:
    """Store measurements in a model's file, atomically; return a line on the change.

    Args:
        changes: values of `evaluation`, `calibration`, `baseline` and `risk`, and for a checkpoint also of
            `receptive_field` and `neighbours`; all else stays as it is.

    Raises:
        ArtifactError: the file is damaged or not one of ours.
        UsageError: it cannot be written.
    """
    kind, changed, effect = model_kind(path), path, "later exports carry it"
    kept: dict[str, Any] = {k: changes[k] for k in ("evaluation", "calibration", "baseline") if k in changes}
    if "risk" in changes:
        kept["risk"] = {"split": "val", **changes["risk"]}
    if kind == "onnx":
        metadata = onnx_file.read_metadata(path)
        onnx_file.check_digest(path, metadata)
        digest = onnx_file.rewrite_metadata(path, replace(metadata, **kept))
        effect = (
            f"its digest changed from {metadata.file_sha256[:16]}... to {digest[:16]}...; `verify` needs the old file "
            f"for records made before; `opal-deploy export {path} --trt` updates its engines without building"
        )
    elif kind == "engine":
        sidecar = engine_file.read_sidecar(path)
        engine_file.write_sidecar(path, replace(sidecar, metadata=replace(sidecar.metadata, **kept)))
        changed, effect = engine_file.sidecar_path(path), "the engine is unchanged"
    else:
        checkpoint.record_measurements(path, changes)
    return f"recorded in {changed}: its sha256 is {compute_sha256(changed)}; {effect}"
