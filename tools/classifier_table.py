"""Export classifiers of other libraries to ONNX and explain them as they are: recognised, logits, sum, time.

    python tools/classifier_table.py [NAME ...] > table.md
    python tools/classifier_table.py --check          what `make test-classifiers` runs

With --check it exits with 1 unless the page says the same of which networks are recognised.

Weights are random: the recognition is of the graph. Times are medians of one image in ONNX Runtime on one thread, of
the original and of the file with shares, in turn. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from opal_deploy import export_model
from opal_deploy.artifact.onnx_file import read_metadata
from opal_deploy.errors import OpalError

PAGE = Path(__file__).parent.parent / "docs/reference/measurements-classifiers.md"
TORCHVISION = (
    "resnet18", "resnet50", "resnext50_32x4d", "regnet_y_400mf", "densenet121", "googlenet", "shufflenet_v2_x1_0",
    "efficientnet_b0", "efficientnet_v2_s", "mobilenet_v2", "mnasnet0_5", "convnext_tiny", "swin_t", "squeezenet1_1",
    "vgg11", "mobilenet_v3_small", "vit_b_16",
)  # fmt: skip
TIMM = (
    "resnet26", "repvgg_a0", "nfnet_l0", "fastvit_t8", "convnext_atto", "convnextv2_atto",
    "swin_tiny_patch4_window7_224", "efficientnet_lite0", "poolformer_s12", "deit3_small_patch16_224.avg",
    "mobilenetv4_conv_small", "efficientvit_b0", "deit_tiny_patch16_224",
)  # fmt: skip
ULTRALYTICS = ("yolov8n-cls", "yolo11n-cls")
KERAS = ("ResNet50", "MobileNetV2", "EfficientNetB0", "DenseNet121", "MobileNetV3Small")
HUGGING_FACE = ("ResNet", "ConvNext", "MobileNetV2", "Swin", "Beit", "ViT")
FORMS = ("half precision", "half precision, float32 inputs", "QDQ int8", "dynamic int8", "one sigmoid", "five sigmoids")
NAMES = (
    *TORCHVISION, *(f"timm:{name}" for name in TIMM), *(f"ultralytics:{name}" for name in ULTRALYTICS),
    *(f"keras:{name}" for name in KERAS), *(f"transformers:{name}" for name in HUGGING_FACE),
    *(f"resnet18: {form}" for form in FORMS),
)  # fmt: skip
# exported with PyTorch's old exporter, for batches of one
OLD = ("resnet18", "mobilenet_v2", "timm:convnext_atto")


def build(name: str) -> Any:
    """Return a classifier of torchvision or timm with random weights in evaluation mode."""
    if name.startswith("timm:"):
        import timm

        network, _, pooling = name.removeprefix("timm:").partition(".")
        return timm.create_model(network, pretrained=False, **({"global_pool": pooling} if pooling else {})).eval()
    import torchvision

    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    return torchvision.models.get_model(name, weights=None, **options).eval()


def export_torch(module: Any, path: Path, *, old: bool = False, dtype: torch.dtype = torch.float32) -> None:
    """Write a module's ONNX file, with one of PyTorch's two exporters."""
    example = torch.randn(1 if old else 2, 3, 224, 224, dtype=dtype)
    with torch.no_grad():
        if old:
            torch.onnx.export(module, (example,), str(path), dynamo=False, input_names=["x"], output_names=["y"])
        else:
            torch.onnx.export(
                module, (example,), str(path), dynamo=True, dynamic_shapes=({0: torch.export.Dim("N")},),
                external_data=False, verbose=False,
            )  # fmt: skip


def export_ultralytics(network: str, folder: Path) -> Path:
    """Return the file that Ultralytics' own export writes, of an untrained network with named classes."""
    os.environ.update(YOLO_CONFIG_DIR=str(folder), YOLO_AUTOINSTALL="false")
    from ultralytics import YOLO

    # it writes into the working directory
    with contextlib.chdir(folder):
        model = YOLO(f"{network}.yaml", verbose=False)
        model.model.names = {number: f"species {number}" for number in range(1000)}
        return folder / model.export(format="onnx", imgsz=224, verbose=False)


def export_keras(network: str, folder: Path) -> Path:
    """Return what tf2onnx makes of a Keras application."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    import keras

    getattr(keras.applications, network)(weights=None).export(folder / "saved", verbose=False)
    path = folder / "model.onnx"
    command = ["-m", "tf2onnx.convert", "--saved-model", folder / "saved", "--output", path, "--opset", "17"]
    subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True)
    return path


def export_hugging_face(network: str, folder: Path) -> Path:
    """Return what optimum makes of an untrained network of transformers in its default configuration."""
    import transformers
    from optimum.exporters.onnx import main_export

    config = getattr(transformers, f"{network}Config")()
    getattr(transformers, f"{network}ForImageClassification")(config).save_pretrained(folder / "source")
    main_export(str(folder / "source"), str(folder), task="image-classification", do_validation=False)
    return folder / "model.onnx"


def export_form(form: str, folder: Path) -> Path:
    """Return a ResNet-18 of five classes in another precision, or with another end."""
    import torchvision
    from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
    from onnxruntime.transformers.float16 import convert_float_to_float16

    module: Any = torchvision.models.resnet18(num_classes=1 if form == "one sigmoid" else 5).eval()
    path, out = folder / "model.onnx", folder / "form.onnx"
    if "sigmoid" in form:
        module = torch.nn.Sequential(module, torch.nn.Sigmoid())
    if form == "half precision":
        export_torch(module.half(), path, dtype=torch.float16)
        return path
    export_torch(module, path, old=True)
    if form.startswith("half precision"):
        onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), out)
    elif form == "dynamic int8":
        quantize_dynamic(path, out)
    elif form == "QDQ int8":

        class Noise(CalibrationDataReader):  # type: ignore[misc]
            left = 8

            def get_next(self) -> dict[str, Any] | None:
                self.left -= 1
                return {"x": torch.randn(1, 3, 224, 224).numpy()} if self.left >= 0 else None

        quantize_static(path, out, Noise(), per_channel=True)
    return out if out.exists() else path


def export(name: str, folder: Path) -> Path:
    """Return a new ONNX file of a classifier."""
    library, _, network = name.partition(":")
    exporters = {
        "ultralytics": export_ultralytics, "keras": export_keras, "transformers": export_hugging_face,
        "resnet18": export_form,
    }  # fmt: skip
    if network and library in exporters:
        return exporters[library](network.strip(), folder)
    export_torch(build(name), folder / "model.onnx", old=name in OLD)
    return folder / "model.onnx"


def measure(paths: list[Path], preprocessed: np.ndarray[Any, Any]) -> list[float]:
    """Return the median seconds of one image [1, 3, 224, 224] in each file, run in turn."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    sessions = [onnxruntime.InferenceSession(str(path), options) for path in paths]
    times: list[list[float]] = [[] for _ in paths]
    for _ in range(15):
        for session, kept in zip(sessions, times, strict=True):
            tensor = session.get_inputs()[0]
            feed = preprocessed.transpose(0, 2, 3, 1) if tensor.shape[3] == 3 else preprocessed
            feed = feed.astype(np.float16) if "float16" in tensor.type else feed
            began = time.perf_counter()
            session.run(None, {tensor.name: feed})
            kept.append(time.perf_counter() - began)
    return [statistics.median(kept) for kept in times]


def describe(name: str) -> str:
    """Return the row of one network."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder, lines = Path(temporary), list[str]()
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
                warnings.simplefilter("ignore")
                path = export(name, folder)
        except Exception as error:  # the network's own exporter failed
            return f"| {name} | not exported: {' '.join(str(error).split())[:80]} | | | |"
        preprocess = None if name.startswith("ultralytics") else "torchvision"
        try:
            out = export_model(path, preprocess=preprocess, out=folder / "out.onnx", threads=1, log=lines.append).path
        except OpalError as error:
            return f"| {name} | {str(error).partition(': ')[2].partition(';')[0]} | | | |"
        metadata = read_metadata(out)
        if name.startswith("ultralytics") and metadata.class_names[7] != "species 7":
            return f"| {name} | recognised, its class names are not | | | |"
        report = metadata.verification
        pixels = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
        before, after = measure([path, out], pixels)
        error = f"{report['sum_error']:.0e} of {report['largest_logit']:.2g}"
        exporter = " (old exporter, batch 1)" if name in OLD else ""
        return f"| {name}{exporter} | yes | {report['logits']} | {error} | {after / before:.2f} |"


def main() -> int:
    """Print the table of the networks named, or of all; with --check, compare it with the page."""
    names = [name for name in sys.argv[1:] if name != "--check"] or NAMES
    known = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in PAGE.read_text("utf-8").splitlines()}
    print("| network | recognised | logits | largest error of the sum | time |\n|---|---|---|---|---|", flush=True)
    different = []
    # libraries keep gigabytes: a process makes four rows. Where one dies, this ends instead of waiting for ever
    for start in range(0, len(names), 4):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            some = names[start : start + 4]
            for name, row in zip(some, pool.map(describe, some), strict=True):
                print(row, flush=True)
                if tuple(cell.strip() for cell in row.split("|")[1:3]) not in known:
                    different.append(name)
    if "--check" in sys.argv and different:
        print(f"not as {PAGE.name} says: {', '.join(different)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
