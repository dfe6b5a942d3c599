"""Measure networks that `train.py` trained, and our checkpoints: the table in docs/howto/other-networks.md.

    PYTHONPATH=. .venv/bin/python tests/cabrnet/measure.py runs/pipnet1/final runs/opal1/best.pt --limit 40

Prints per network a line of JSON: accuracy, consistency, stability and purity (percent), prototypes per answer (those
that contribute more than 0.001, as PIP-Net counts them), and what attacks outside the evidence do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from opal_deploy.artifact.heads import find_contributions, find_values
from opal_deploy.datasets import cub
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.evaluation.attack import measure_attack
from opal_deploy.evaluation.receptive_field import measure_receptive_field
from opal_deploy.evaluation.session import choose_samples, evaluate_session
from opal_deploy.model import checkpoint
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.prototype_checkpoint import load_network
from opal_deploy.model.state_dicts import load_torch_file
from opal_deploy.runtime.torch_session import TorchSession

BIRDS = Path(__file__).parents[2].parent / "shared/data/cub_mini"


def load(path: Path, names: tuple[str, ...]) -> Checkpoint:
    """Return one of our checkpoints, or a network of CaBRNet's in a folder."""
    if path.is_file():
        return checkpoint.load(path)
    state = path / "model_state.pth"
    network = load_network(state, load_torch_file(state), str(path / "model_arch.yml"), (224, 224))
    return Checkpoint(network, names, crop="boxes")


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
        result = evaluate_session(session, samples, parts=cub.read_parts(data.root, samples))
        predicted = result.outputs.logits.argmax(axis=1)
        values = metadata.class_map.take(find_values(result.outputs.scores, metadata), predicted)
        contributions = np.abs(find_contributions(values, predicted, metadata)) * metadata.class_map.kept[predicted]
        # of a linear head each of hundreds of slots would take a gradient
        field = measure_receptive_field(loaded.network, samples) if metadata.is_opal else None
        attack = measure_attack(
            loaded.network, metadata, samples, choose_samples(samples, arguments.limit),
            levels=6, margin=10, steps=20, field=field,
        )  # fmt: skip
        parts = result.parts
        figures = {
            "network": str(path),
            "accuracy": result.evaluation.accuracy,
            "consistency": parts.consistency,
            "stability": parts.stability,
            "purity": parts.purity,
            "per_answer": float((contributions > 1e-3).sum(axis=1).mean()),
            "prototypes": int((metadata.class_map.matrix > 0).any(axis=0).sum()),
            "field": None if field is None else field.effective,
            "attack": attack.to_dict()["outside"],
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
