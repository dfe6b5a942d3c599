"""Measures the fp32 gate: which sound networks it refuses and which faults it accepts on one setting of a processor.

Run it by hand, once per setting of ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, --threads and --no-onednn:

    ATEN_CPU_CAPABILITY=default python -m tests.export.rounding_sweep out.jsonl runs/*/best.pt --threads 1 --faults

It appends one JSON line per network and exits with 1 if a sound network was refused or a fault accepted.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.verification import verify_candidate
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.authors_checkpoint import PAPER_BACKBONES
from opal_deploy.model.config import HeadConfig
from opal_deploy.runtime.gates import GATES
from tests.builders import build_checkpoint

TIMM = ("timm:resnet18", "timm:resnet50d", "timm:tf_efficientnet_lite0", "timm:mobilenetv3_small_050")


def weights(graph):
    """Return the convolutions' weights, in the graph's order."""
    return [tensor for tensor in graph.initializer if len(tensor.dims) == 4]


def change(pick, edit):
    """Return a fault that edits one convolution's weights: those that `pick` chooses."""

    def fault(graph):
        tensor = pick(weights(graph))
        array = edit(numpy_helper.to_array(tensor).copy())
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))

    return fault


def add(amount):
    def edit(array):
        array.flat[np.abs(array).argmax()] += amount
        return array

    return edit


def bfloat16(array):
    return torch.from_numpy(array).to(torch.bfloat16).float().numpy()


def drop_activation(graph):
    """Bypass an activation in the middle of the body."""
    activations = [node for node in graph.node if node.op_type in ("Relu", "Clip", "HardSwish", "Sigmoid", "Erf")]
    node = activations[len(activations) // 2]
    for other in graph.node:
        other.input[:] = [node.input[0] if name == node.output[0] else name for name in other.input]
    graph.node.remove(node)


def first(tensors):
    return tensors[0]


def middle(tensors):
    return tensors[len(tensors) // 2]


def largest(tensors):
    return max(tensors, key=lambda tensor: np.prod(tensor.dims))


FAULTS = {
    "first layer: a weight + 1e-3": change(first, add(1e-3)),
    "middle layer: a weight - 1e-3": change(middle, add(-1e-3)),
    "largest layer: a weight + 1e-3": change(largest, add(1e-3)),
    "middle layer: a weight set to 1": change(middle, add(1.0)),
    "largest layer in bf16": change(largest, bfloat16),
    "middle layer in fp16": change(middle, lambda w: w.astype(np.float16).astype(np.float32)),
    "middle layer: another BatchNorm epsilon": change(middle, lambda w: w * np.float32((1 + 1e-5) ** 0.5 / 1.001**0.5)),
    "an activation dropped": drop_activation,
}
# what only the runtime does: the graph is right, its outputs are not
RUNTIME_FAULTS = ("largest layer in bf16", "middle layer in fp16")


def judge(candidate, folder, threads):
    """Return whether the fp32 gate passes, with its report."""
    verification = verify_candidate(candidate, folder / "m.onnx", threads, log=lambda line: None)
    return bool(verification.comparison), verification.document


def spoil(candidate, fault):
    """Return a copy of a candidate with a fault in its graph."""
    model = onnx.ModelProto()
    model.CopyFrom(candidate.model)
    FAULTS[fault](model.graph)
    return replace(candidate, model=model)


def measure(checkpoint, threads, folder, faults):
    """Return the verdict on a network and, with `faults`, on each of its faulty graphs."""
    options = ExportOptions(threads=threads, log=lambda line: None)
    candidate = CheckpointSource(checkpoint, Path("c.pt")).build_candidate(["fp32"], options)
    own = candidate.compare_in_float64(candidate.model)
    passed, document = judge(candidate, folder, threads)
    line = {
        "sound_passes": passed,
        "plain_gate_passes": "float64" not in document,
        "pytorch_to_runtime": document["max_cosine"],
        "graph_to_float64": own.graph.cosine,
        "pytorch_to_float64": own.float32.cosine,
        "failures": document["failures"],
        "faults": {},
    }
    for name in FAULTS if faults else ():
        faulty = spoil(candidate, name)
        effect = candidate.compare_in_float64(faulty.model).graph.cosine
        line["faults"][name] = {"effect": effect, "passes": judge(faulty, folder, threads)[0]}
        if name in RUNTIME_FAULTS:
            hidden = replace(faulty, compare_in_float64=lambda model: own)
            line["faults"][f"{name}, in the runtime only"] = {
                "effect": effect,
                "passes": judge(hidden, folder, threads)[0],
            }
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "checkpoints", type=Path, nargs="*", help="trained networks; default: the paper's and timm's, random"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-onednn", action="store_true")
    parser.add_argument("--faults", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.backends.mkldnn.set_flags(not arguments.no_onednn)
    setting = {
        "aten": os.environ.get("ATEN_CPU_CAPABILITY", "native"),
        "onednn": "off" if arguments.no_onednn else os.environ.get("ONEDNN_MAX_CPU_ISA", "native"),
        "threads": arguments.threads,
    }
    networks = {str(path): lambda path=path: checkpoints.load(path) for path in arguments.checkpoints}
    if not arguments.checkpoints:
        networks = {
            name: lambda name=name: build_checkpoint(name, HeadConfig(epsilon=0.1), (128, 128), 10)
            for name in (*PAPER_BACKBONES, *TIMM)
        }
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, arguments.out.open("a") as out:
        for name, build in networks.items():
            line = {"network": name, **setting, **measure(build(), arguments.threads, Path(folder), arguments.faults)}
            limit = GATES["fp32"].cosine
            accepted = [f for f, seen in line["faults"].items() if seen["passes"] and seen["effect"] > limit]
            wrong += bool(accepted) or not line["sound_passes"]
            print(json.dumps(line), file=out, flush=True)
            print(name, "refused" if not line["sound_passes"] else "passes", *accepted, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
