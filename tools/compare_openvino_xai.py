"""Compare exact shares with OpenVINO XAI's saliency maps: what is accepted, time, agreement, and what a map finds.

    python tools/compare_openvino_xai.py export FOLDER NAME=WEIGHTS ...   # with this project; WEIGHTS may be empty
    python tools/compare_openvino_xai.py compare FOLDER IMAGES            # with openvino-xai, onnxruntime and pillow

Two commands, since openvino-xai needs older packages than this project. NAME is a network of torchvision, or `timm:`
and one of timm; WEIGHTS a safetensors file with its keys. The map of either is enlarged bilinearly, its strongest tenth
of the pixels blurred, and the network asked again: the more answers change, the more the map had found.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

SIZE, BLUR, SHARE = 224, 12, 0.1
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def export(folder: Path, networks: list[str]) -> None:
    """Write NAME.onnx as PyTorch exports it, and NAME.opal.onnx with shares."""
    import torch
    from safetensors.torch import load_file

    from opal_deploy import export_model

    folder.mkdir(parents=True, exist_ok=True)
    for name, _, weights in (network.partition("=") for network in networks):
        torch.manual_seed(0)
        if name.startswith("timm:"):
            import timm

            network = timm.create_model(name.removeprefix("timm:"), pretrained=False).eval()
        else:
            import torchvision

            network = torchvision.models.get_model(name, weights=None).eval()
        if weights:
            network.load_state_dict({key: tensor.float() for key, tensor in load_file(weights).items()}, strict=True)
        path = folder / f"{name.replace(':', '_')}.onnx"
        torch.onnx.export(network, (torch.randn(1, 3, SIZE, SIZE),), str(path), dynamo=False, input_names=["images"])
        export_model(path, preprocess="torchvision", out=path.with_suffix(".opal.onnx"), overwrite=True)


def crop(path: Path) -> Image.Image:
    """Return a photograph as torchvision's preset crops it."""
    image = Image.open(path).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BILINEAR)
    left, top = ((side - SIZE) // 2 for side in image.size)
    return image.crop((left, top, left + SIZE, top + SIZE))


def normalise(image: Image.Image) -> Any:
    """Return float32 [1, 3, SIZE, SIZE]."""
    pixels = (np.asarray(image, np.float32) / 255 - np.float32(MEAN)) / np.float32(DEVIATION)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def blur_strongest(image: Image.Image, values: Any) -> Image.Image:
    """Return the image with the strongest tenth of a map's pixels blurred."""
    enlarged = np.asarray(Image.fromarray(values.astype(np.float32)).resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    mask = np.zeros(SIZE * SIZE, np.uint8)
    mask[np.argsort(-enlarged.ravel(), kind="stable")[: int(SHARE * SIZE * SIZE)]] = 255
    return Image.composite(
        image.filter(ImageFilter.GaussianBlur(BLUR)), image, Image.fromarray(mask.reshape(SIZE, SIZE))
    )


def feed(session: Any, image: Image.Image) -> dict[str, Any]:
    """Return the input of an exported file or of the classifier itself: uint8 [1, SIZE, SIZE, 3], or normalised."""
    own = session.get_inputs()[0]
    return {own.name: np.asarray(image)[None] if own.type == "tensor(uint8)" else normalise(image)}


def measure(calls: list[Callable[[], object]], rounds: int = 20) -> list[str]:
    """Return the median milliseconds of each call, made in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, kept in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            kept.append(1e3 * (time.perf_counter() - began))
    return [f"{statistics.median(kept):.1f}" for kept in times]


def describe(path: Path, crops: list[Image.Image]) -> str:
    """Return the row of one exported network."""
    import onnxruntime
    import openvino
    from openvino_xai.api.api import insert_xai
    from openvino_xai.common.parameters import Task

    core = openvino.Core()
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": 1})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    plain, ours = (onnxruntime.InferenceSession(str(file), options) for file in (path, path.with_suffix(".opal.onnx")))
    network = core.read_model(path)
    network.reshape([1, 3, SIZE, SIZE])
    compiled = core.compile_model(network, "CPU")
    inserted, shown = None, "accepted"
    try:
        inserted = core.compile_model(insert_xai(network.clone(), Task.CLASSIFICATION), "CPU")
    except Exception as error:  # whatever it refuses a network with
        shown = f"refused: {' '.join(str(error).split())[:90]}"

    def answer(image: Image.Image) -> int:
        return int(plain.run(None, feed(plain, image))[0].argmax())

    rng, changed, same = np.random.default_rng(0), np.zeros(3, int), 0
    for image in crops:
        label = answer(image)
        exact = ours.run(["shares"], feed(ours, image))[0][0, 0]
        maps = {1: exact, 2: rng.random(exact.shape)}
        if inserted is not None:
            saliency = np.asarray(inserted(normalise(image))["saliency_map"])[0]
            maps[0] = saliency[label] if saliency.ndim == 3 else saliency
            same += int(maps[0].shape == exact.shape and maps[0].argmax() == exact.argmax())
        for index, values in maps.items():
            changed[index] += answer(blur_strongest(image, values)) != label
    pixels, last = normalise(crops[-1]), crops[-1]
    calls: list[Callable[[], object]] = [
        lambda: compiled(pixels), lambda: plain.run(None, feed(plain, last)), lambda: ours.run(None, feed(ours, last)),
    ]  # fmt: skip
    if inserted is not None:
        calls.append(lambda: inserted(pixels))
    without, own, shares, *mapped = measure(calls)
    return (
        f"| {path.stem} | {shown} | {', '.join([without, *mapped])} ms | {own}, {shares} ms | "
        f"{', '.join(map(str, changed))} | {same} |"
    )


def compare(folder: Path, images: Path) -> None:
    """Print a row per exported network."""
    crops = [crop(path) for path in sorted(images.iterdir()) if path.suffix.lower() in (".jpeg", ".jpg")]
    print(f"{len(crops)} photographs; milliseconds are medians of one image on one thread, in turn")
    print(
        "| network | OpenVINO XAI | its time without, with a map | ours without, with shares | answers changed by "
        "blurring: its map, ours, at random | same strongest cell |\n|---|---|---|---|---|---|"
    )
    for path in sorted(folder.glob("*.onnx")):
        if not path.name.endswith(".opal.onnx"):
            print(describe(path, crops), flush=True)


if __name__ == "__main__":
    command, folder, *others = sys.argv[1:]
    if command == "export":
        export(Path(folder), others)
    else:
        compare(Path(folder), Path(others[0]))
