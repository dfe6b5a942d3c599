"""Calls that make no sense: one line that says why, and nothing is written."""

import os
import shutil

import pytest

from opal_deploy.runtime.tensorrt import TENSORRT_RTX, installed_version

ODD_NAME = os.fsdecode(b"a\nb\x1b(B\xff")
REFUSED = {
    "infer in misspelt": "misspelt: no such file or folder",
    f"infer {ODD_NAME}": "a\\nb\\x1b(B\\udcff: no such file",
    "infer in --shard 0/3": "shard '0/3': expected i/n",
    "infer in --boxes none.csv": "none.csv: cannot be read",
    "infer in --format xml": "--format 'xml'",
    "infer in c.onnx": "c.onnx: looks like a model, not an image; use --model c.onnx",
    "infer clip.mp4": "it is a video; choose its frames by `infer --every 1s`",
    "infer in --tpo 3": "--top); see opal-deploy infer --help",
    "infer in --batch y": "'y': input should be a valid integer; see opal-deploy infer --help",
    "predict a.jpg": "no such command 'predict'. Did you mean 'infer'? See opal-deploy --help",
    "train in --epochs -1": "greater than or equal to 0; see opal-deploy train --help",
    "inspect nowhere.onnx": "no such file; expected an ONNX file, an engine or a checkpoint",
    "inspect names.txt": "expected .onnx, .engine, .pt or .pth",
    "verify c.onnx in": "are only for results",
    "diff c.onnx c.onnx": "comparing models needs images",
    "diff c.onnx c.onnx in --fail-on x": "'x' is not one of 'error', 'class'",
    "bench latency --batch": "requires an argument; see opal-deploy --help",
    "bench nothing": "no such command 'nothing'; see opal-deploy bench --help",
    "explain in c.onnx": "c.onnx: looks like a model, not an image; use --model c.onnx",
    "explain in --out a.png": "--out a.png: is one file, but there may be several images",
    "explain in/000.png --out a.jpg": "expected a .png or .svg file",
    "explain in/000.png --out in/000.png --overwrite": "this call reads that file",
    "explain in/000.png --out in/001.png": "in/001.png: the file exists",
    "explain in/000.png --slot-names nowhere": "nowhere: cannot be read",
    "explain nowhere.png": "nowhere.png: no such file",
    "explain empty.png": "zero bytes",
    "export": "missing argument 'source'; see opal-deploy export --help",
    "export c.pt --classes names.txt": "2 class names for 4 classes",
    "export c.pt --distance l1": "--distance",
    "export c.onnx --target a100": "--target: only with --trt",
    "export c.onnx --precision fp16 --top-k 3": "--top-k: only for --outputs topk; add that",
    "export c.onnx --trt --out x.engine": "--out x.engine: expected a folder with --trt",
    "export c.onnx --trt --calibrate .": "only int8 is calibrated",
    "export c.onnx --trt --lean --builder tensorrt-rtx": "--lean: only TensorRT builds for",
    "export c.onnx --trt --precision fp32 --images nowhere": "built as it is; leave out --images",
    "export c.onnx --triton models --batch 1:8:16": "--batch",
    "export c.onnx --name birds": "only with --triton",
    "serve none.onnx": "none.onnx: no such model",
    "serve c.onnx --log-format xml": "'xml' is not one of 'text', 'json', 'off'",
    "serve c.onnx --host 192.0.2.1": "--host 192.0.2.1 --port 8000: cannot listen there",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, exact_model, make_pictures):
    """Two pictures in `in`, a model and its checkpoint, the names of two classes, and two files without a byte."""
    folder = tmp_path_factory.mktemp("refusals")
    make_pictures(folder / "in", 2)
    for suffix in (".onnx", ".pt"):
        shutil.copy(exact_model.with_suffix(suffix), folder / f"c{suffix}")
    (folder / "names.txt").write_text("a\nb\n")
    for name in ("clip.mp4", "empty.png"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_that_makes_no_sense_says_why_in_one_line_and_writes_nothing(opal, folder, call):
    if "--trt" in call and installed_version(TENSORRT_RTX) is None:
        pytest.skip("TensorRT for RTX is not installed")
    before = sorted(folder.rglob("*"))
    done = opal(*call.split(" "), cwd=folder)
    # an image that cannot be read is no wrong call
    assert done.returncode == (3 if "empty" in call else 2), done.stderr
    # by then the model may have been named
    *said, line = done.stderr.splitlines()
    assert [text for text in said if not text.startswith("Model: ")] == [] or "--trt" in call
    assert line.startswith("opal-deploy: ")
    assert REFUSED[call] in line
    assert sorted(folder.rglob("*")) == before
