"""Attention maps of a model: from a network in PyTorch, or from a session of a checkpoint or exported model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import torch

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, Outputs
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import AttentionSession, ImageBatch, Session
from opal_deploy.runtime.torch_session import to_outputs

CONSISTENCY, STABILITY, PURITY = "prototype_consistency", "prototype_stability", "part_purity"
# the protocols state their regions and patches in pixels of this input
INPUT_SIZE = (224, 224)


@dataclass(frozen=True)
class MapSource:
    """A model as consistency, stability and purity are measured on it.

    Attributes:
        prototypes_per_class: m.
        grid: (H, W) of the feature map.
        input_size: (H0, W0) in pixels.
        mean, std: per channel R, G, B.
        run: uint8 [N, H0, W0, 3] to outputs, with `attention` wherever the model can give it.
        run_normalised: the same for float32 [N, 3, H0, W0], normalised; None where normalisation is in the graph.
        unavailable: figure -> one line with the reason why this model has none, and a remedy.
    """

    prototypes_per_class: int
    grid: tuple[int, int]
    input_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    run: Callable[[ImageBatch], Outputs]
    run_normalised: Callable[[FloatArray], Outputs] | None
    unavailable: dict[str, str] = field(default_factory=dict)


def from_network(network: OpalNetwork) -> MapSource:
    """Return the source of a network on its device; leaves the network in eval mode."""
    network.eval()
    device = next(network.parameters()).device
    config = network.config

    def run_normalised(images: FloatArray) -> Outputs:
        with torch.inference_mode():
            return to_outputs(network.explain(torch.from_numpy(images).to(device)), attention=True)

    def run(images: ImageBatch) -> Outputs:
        return run_normalised(normalise(images, config.mean, config.std))

    return MapSource(
        config.head.prototypes_per_class,
        network.grid,
        config.input_size,
        config.mean,
        config.std,
        run,
        run_normalised,
        _explain_undefined(config.head.evidence, config.input_size),
    )


def from_session(session: Session) -> MapSource:
    """Return the source of a session.

    A checkpoint always gives attention maps; an exported model only if it has them as an output.
    """
    metadata = session.metadata
    run, run_normalised = session.run, None
    unavailable = _explain_undefined(metadata.evidence, metadata.input_size)
    if isinstance(session, AttentionSession):
        run, run_normalised = session.run_with_attention, session.run_normalised
    else:
        if metadata.input_kind == "float32":
            run_normalised = cast(_NormalisedRunner, session).run_normalised
        unavailable = unavailable or _explain_missing_outputs(metadata)
    return MapSource(
        metadata.prototypes_per_class,
        metadata.grid,
        metadata.input_size,
        metadata.mean,
        metadata.std,
        run,
        run_normalised,
        unavailable,
    )


class _NormalisedRunner(Protocol):
    def run_normalised(self, images: FloatArray) -> Outputs: ...


def _explain_undefined(evidence: str, input_size: tuple[int, int]) -> dict[str, str]:
    """Return the reason why no figure is defined for this model; empty if they are."""
    reason = ""
    if evidence == "none":
        reason = "the model has no prototypes (evidence none); only models with anchors have"
    elif input_size != INPUT_SIZE:
        size = "x".join(map(str, input_size))
        reason = f"its input is {size} and the protocol's regions are defined on 224x224; train it with --size 224"
    return dict.fromkeys((CONSISTENCY, STABILITY, PURITY), reason) if reason else {}


def _explain_missing_outputs(metadata: Metadata) -> dict[str, str]:
    """Return, per figure, which output an exported model lacks and what has it."""
    source = metadata.source.get("file", "CHECKPOINT")
    # another file, since the one evaluated may be in use and earlier results name its digest
    command = f"opal-deploy export {source} --out {Path(source).stem}.attention.onnx --outputs attention"
    instead = f"evaluate {source} itself, or a file that has them: {command}"
    reasons = {}
    if "attention" not in metadata.outputs:
        reasons[CONSISTENCY] = f"the model has no output attention; {instead}"
    if "attention" not in metadata.outputs or metadata.input_kind != "float32":
        missing = [] if "attention" in metadata.outputs else ["output attention"]
        missing += [] if metadata.input_kind == "float32" else ["float32 input, which noise is added to"]
        reasons[STABILITY] = f"the model has no {' and no '.join(missing)}; {instead} --input float32"
    return reasons
