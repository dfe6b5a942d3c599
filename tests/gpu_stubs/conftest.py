"""Stub CUDA libraries for the real onnxruntime-gpu wheel, which `make gpu-stubs-venv` installs.

These tests run in that environment's Python (`make test-all`); elsewhere they are skipped. A setting in the
environment (`common.h`) changes the machine of the running test.
"""

import ctypes
import math
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu_stubs import build, cuda_runtime

ROOT = Path(__file__).resolve().parents[2]
Call = namedtuple("Call", "thread device text")
VARIABLES = ("STUB_DEVICES", "STUB_DRIVER", "STUB_MEMORY", "STUB_ERRORS", "STUB_LOG", "CUDA_VISIBLE_DEVICES")


def _provider():
    import onnxruntime

    return Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory):
    """The folder of the compiled stubs."""
    if not _provider().is_file():
        pytest.skip(
            "no onnxruntime-gpu: `make gpu-stubs-venv`, then .venv-gpu-stubs/bin/python -m pytest tests/gpu_stubs"
        )
    missing = [program for program in ("cc", "nm", "readelf") if not shutil.which(program)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} to compile the stubs with")
    folder = tmp_path_factory.mktemp("stubs")
    build.build(_provider(), folder)
    return folder


@pytest.fixture(scope="session")
def loaded_stubs(stub_folder):
    """Load the stubs into this process, where everybody who asks for CUDA's libraries by name gets them."""
    import cuda.bindings
    from cuda.bindings import runtime

    # no library is there twice: PyTorch would bring the real ones
    assert "torch" not in sys.modules
    libraries = {path.name: ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in sorted(stub_folder.glob("lib*"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda.bindings, "runtime", cuda_runtime.make(runtime, libraries["libcudart.so.13"]))
        patch.setitem(sys.modules, "cuda.bindings.runtime", cuda.bindings.runtime)
        patch.setattr(cuda.bindings, "driver", cuda_runtime.make_driver(libraries["libcudart.so.13"]))
        yield libraries["libcudart.so.13"]


@pytest.fixture
def gpu(loaded_stubs, monkeypatch, tmp_path):
    """A machine with one GPU; `set(devices=2, ...)` changes it, `calls()` returns what was logged."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    log = tmp_path / "calls.log"
    # the libraries are loaded, and no real cuDNN may join them
    monkeypatch.setattr("opal_deploy.runtime.cuda_session.load_cuda_libraries", lambda: None)
    loaded_stubs.cudaSetDevice(0)
    loaded_stubs.stubForgetContexts()
    log.touch()
    monkeypatch.setenv("STUB_LOG", str(log))

    def change(**settings):
        for name, value in settings.items():
            monkeypatch.setenv(f"STUB_{name.upper()}", str(value))

    def calls(prefix=""):
        lines = [line.split(" ", 2) for line in log.read_text().splitlines()]
        return [Call(int(thread), int(device), text) for thread, device, text in lines if text.startswith(prefix)]

    return SimpleNamespace(set=change, calls=calls, library=loaded_stubs)


SIZE = (64, 128)
CLASS_NAMES = ("a", "b", "c")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """An ONNX file without convolutions, so that the stubs run it; its twelve values take 1.2 MB per image."""
    return write_model(tmp_path_factory.mktemp("model") / "stub.onnx")


@pytest.fixture(scope="session")
def shape_model(tmp_path_factory):
    """The same with a shape that ONNX Runtime computes on the CPU."""
    return write_model(tmp_path_factory.mktemp("shape") / "stub.onnx", with_shape=True)


def write_model(path, *, with_shape=False):
    from onnx import TensorProto, helper

    from opal_deploy.artifact import onnx_file
    from opal_deploy.artifact.metadata import Metadata

    shape = ["N", *SIZE, 3]
    size = math.prod(shape[1:])
    nodes = [helper.make_node("Cast", ["images"], ["value_0"], to=TensorProto.FLOAT)]
    for number in range(12):
        operator = "Exp" if number % 2 else "Sigmoid"
        nodes.append(helper.make_node(operator, [f"value_{number}"], [f"value_{number + 1}"]))
    values = [f"value_{number}" for number in range(1, 13)]
    if with_shape:
        nodes += [
            helper.make_node("Shape", ["images"], ["batch"], start=0, end=1),
            helper.make_node("Squeeze", ["batch"], ["count"]),
            helper.make_node("Cast", ["count"], ["as_float"], to=TensorProto.FLOAT),
        ]
        values.append("as_float")
    nodes += [
        helper.make_node("Sum", values, ["sum"]),
        helper.make_node("Reshape", ["sum", "shape"], ["row"]),
        helper.make_node("MatMul", ["row", "weight"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "stub", [helper.make_tensor_value_info("images", TensorProto.UINT8, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [
            helper.make_tensor("shape", TensorProto.INT64, [2], [0, size]),
            helper.make_tensor("weight", TensorProto.FLOAT, [size, 3], [0.0] * size * 3),
        ],
    )  # fmt: skip
    metadata = Metadata(
        CLASS_NAMES, 1, {"distance": "l2", "epsilon": 0.0}, "none", "none", (2, 4), SIZE, outputs=("logits",)
    )
    opsets = [helper.make_opsetid("", 20)]
    onnx_file.write_model(helper.make_model(graph, opset_imports=opsets, ir_version=10), metadata, path)
    onnx_file.embed_digest(path)
    return path


@pytest.fixture
def run_process(stub_folder):
    """Run a Python program in a process that finds the stubs, with the real cuda-bindings; return what it prints."""

    def run(program, **settings):
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment |= {"LD_LIBRARY_PATH": str(stub_folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment |= {name if name.isupper() else f"STUB_{name.upper()}": str(settings[name]) for name in settings}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    return run
