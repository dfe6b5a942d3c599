"""Measure networks that `train.py` trained, and our checkpoints: the table in docs/howto/other-networks.md.

    PYTHONPATH=. .venv/bin/python tests/cabrnet/measure.py runs/pipnet1/final runs/opal1/best.pt --limit 40

Prints per network a line of JSON: accuracy, consistency, stability and purity (percent), prototypes per answer (those
that contribute more than 0.001, as PIP-Net counts them), the share of answers that change without the strongest 2 % of
the image and without as much taken at random, and what attacks outside the evidence do. Networks without prototypes are
explained by Grad-CAM.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact.heads import find_contributions, find_values
from opal_deploy.datasets import cub
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.attack import measure_attack
from opal_deploy.evaluation.cells import GradCam, blur_image, evidence_cells, measure_receptive_field, replace_cells
from opal_deploy.evaluation.options import EvaluateOptions
from opal_deploy.evaluation.session import choose_samples, evaluate_session, prepared_batches
from opal_deploy.model import checkpoint
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.prototype_checkpoint import load_network
from opal_deploy.model.state_dicts import load_torch_file
from opal_deploy.runtime.torch_session import TorchSession

# of the image, blurred: four cells of 16 pixels or one of 32
REMOVED = 0.02
BIRDS = Path(__file__).parents[2].parent / "shared/data/cub_mini"


def load(path: Path, names: tuple[str, ...]) -> Checkpoint:
    """Return one of our checkpoints, or a network of CaBRNet's in a folder."""
    if path.is_file():
        return checkpoint.load(path)
    state = path / "model_state.pth"
    network = load_network(state, load_torch_file(state), str(path / "model_arch.yml"), (224, 224))
    return Checkpoint(network, names, crop="boxes")


def measure_removal(loaded: Checkpoint, session: TorchSession, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the shares of answers that change without the strongest cells, and without random ones."""
    metadata, rng = session.metadata, np.random.default_rng(0)
    cells = metadata.grid[0] * metadata.grid[1]
    count = round(REMOVED * cells)
    heat_map = None if metadata.evidence == "exact" else GradCam(loaded.network)
    changed: dict[str, list[bool]] = {"strongest": [], "random": []}
    for pixels, _ in prepared_batches(samples, metadata.input_size, boxes=True, batch=16):
        outputs = session.run(pixels)
        predicted = outputs.logits.argmax(axis=1)
        heat = None if heat_map is None else heat_map(pixels, predicted)
        for row, class_id in enumerate(predicted.tolist()):
            blurred = blur_image(pixels[row], metadata.grid)
            ranked = evidence_cells(class_id, outputs, row, metadata) if heat is None else np.argsort(-heat[row])
            removed = [frozenset(map(int, each)) for each in (ranked[:count], rng.permutation(cells)[:count])]
            images = np.stack([replace_cells(pixels[row], blurred, each, metadata.grid) for each in removed])
            answers = session.run(images).logits.argmax(axis=1)
            for name, answer in zip(changed, answers, strict=True):
                changed[name].append(bool(answer != class_id))
    return {name: float(np.mean(values)) for name, values in changed.items()}


def main() -> None:
    """Measure each network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=40, help="images to attack")
    arguments = parser.parse_args()
    data = read_dataset(BIRDS)
    samples = data.select("test")
    for path in arguments.networks:
        loaded = load(path, tuple(data.class_names))
        session = TorchSession(loaded, device="cpu")
        metadata = session.metadata
        parts_of = cub.read_parts(data.root, samples) if metadata.evidence == "exact" else None
        result = evaluate_session(session, samples, parts=parts_of)
        own: dict[str, Any] = {}
        if metadata.evidence == "exact":
            predicted = result.outputs.logits.argmax(axis=1)
            values = metadata.class_map.take(find_values(result.outputs.scores, metadata), predicted)
            contributions = np.abs(find_contributions(values, predicted, metadata)) * metadata.class_map.kept[predicted]
            parts = result.parts
            own = {
                "consistency": parts.consistency,
                "stability": parts.stability,
                "purity": parts.purity,
                "per_answer": float((contributions > 1e-3).sum(axis=1).mean()),
                "prototypes": int((metadata.class_map.matrix > 0).any(axis=0).sum()),
            }
        # of a linear head each of hundreds of slots would take a gradient
        field = measure_receptive_field(loaded.network, samples) if metadata.is_opal else None
        attack = measure_attack(
            loaded.network, metadata, samples, choose_samples(samples, arguments.limit),
            EvaluateOptions(), field=field,
        )  # fmt: skip
        figures = {
            "network": str(path),
            "accuracy": result.evaluation.accuracy,
            **own,
            "changed": measure_removal(loaded, session, samples),
            "field": None if field is None else field.effective,
            "attack": attack.to_dict()["outside"],
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
