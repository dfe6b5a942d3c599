"""Export classifiers of torchvision and timm to ONNX and explain them as they are: recognised, logits, sum, time.

    python tools/classifier_table.py [NAME ...] > table.md

Weights are random: the recognition is of the graph. Times are medians of one image in ONNX Runtime on one thread, of
the original and of the file with shares, in turn.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from opal_deploy import export_model
from opal_deploy.artifact.onnx_file import read_metadata
from opal_deploy.errors import OpalError

TORCHVISION = (
    "resnet18", "resnet50", "resnext50_32x4d", "regnet_y_400mf", "densenet121", "googlenet", "shufflenet_v2_x1_0",
    "efficientnet_b0", "efficientnet_v2_s", "mobilenet_v2", "mnasnet0_5", "convnext_tiny", "swin_t", "vgg11",
    "mobilenet_v3_small", "squeezenet1_1", "vit_b_16",
)  # fmt: skip
TIMM = (
    "resnet26", "repvgg_a0", "nfnet_l0", "fastvit_t8", "convnext_atto", "convnextv2_atto",
    "swin_tiny_patch4_window7_224", "efficientnet_lite0", "mobilenetv4_conv_small", "efficientvit_b0",
    "deit_tiny_patch16_224",
)  # fmt: skip


def build(name: str) -> Any:
    """Return a classifier with random weights in evaluation mode."""
    torch.manual_seed(0)
    if name.startswith("timm:"):
        import timm

        return timm.create_model(name.removeprefix("timm:"), pretrained=False).eval()
    import torchvision

    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    return torchvision.models.get_model(name, weights=None, **options).eval()


def measure(paths: list[Path], feeds: list[np.ndarray[Any, Any]]) -> list[float]:
    """Return the median seconds of one image in each file, run in turn."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = [onnxruntime.InferenceSession(str(path), options) for path in paths]
    times: list[list[float]] = [[] for _ in paths]
    for _ in range(15):
        for session, feed, kept in zip(sessions, feeds, times, strict=True):
            began = time.perf_counter()
            session.run(None, {session.get_inputs()[0].name: feed})
            kept.append(time.perf_counter() - began)
    return [statistics.median(kept) for kept in times]


def describe(name: str, folder: Path) -> str:
    """Return the row of one network."""
    path = folder / "model.onnx"
    old = name in ("resnet18", "mobilenet_v2", "timm:convnext_atto")
    example = torch.randn(1 if old else 2, 3, 224, 224)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if old:
            torch.onnx.export(build(name), (example,), str(path), dynamo=False)
        else:
            shapes = ({0: torch.export.Dim("N")},)
            torch.onnx.export(
                build(name), (example,), str(path), dynamo=True, dynamic_shapes=shapes, external_data=False,
                verbose=False,
            )  # fmt: skip
    try:
        options: dict[str, Any] = {"threads": 1, "log": lambda line: None}
        out = export_model(path, preprocess="torchvision", out=folder / "out.onnx", overwrite=True, **options).path
    except OpalError as error:
        return f"| {name} | {str(error).partition(': ')[2].partition(';')[0]} | | | |"
    report = read_metadata(out).verification
    pixels = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    before, after = measure([path, out], [pixels, pixels])
    error = f"{report['sum_error']:.0e} of {report['largest_logit']:.2g}"
    exporter = " (old exporter, batch 1)" if old else ""
    return f"| {name}{exporter} | yes | {report['logits']} | {error} | {after / before:.2f} |"


def main() -> None:
    """Print the table of the networks named, or of all."""
    torch.set_num_threads(1)
    print("| network | recognised | logits | largest error of the sum | time |\n|---|---|---|---|---|", flush=True)
    for name in sys.argv[1:] or (*TORCHVISION, *(f"timm:{name}" for name in TIMM)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = describe(name, Path(folder))
            except Exception as error:  # the network's own exporter failed
                row = f"| {name} | not exported: {' '.join(str(error).split())[:80]} | | | |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
