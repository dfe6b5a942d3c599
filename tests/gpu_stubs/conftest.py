"""Stub CUDA libraries for the real onnxruntime-gpu wheel, which `make gpu-stubs-venv` installs.

These tests run in that environment's Python (`make test-all`); elsewhere they are skipped. A setting in the
environment (`common.h`) changes the machine of the running test.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest
from onnx import helper, parser

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import Metadata
from tests.cli.calls import check
from tests.gpu_stubs import build, cuda_runtime

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory):
    """The folder of the compiled stubs."""
    provider = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not (provider.is_file() and all(map(shutil.which, ("cc", "nm", "readelf")))):
        pytest.skip("needs cc, nm, readelf, and the Python of `make gpu-stubs-venv`, which has onnxruntime-gpu")
    folder = tmp_path_factory.mktemp("stubs")
    build.build(provider, folder)
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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
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
        return [line for line in log.read_text().splitlines() if line.startswith(prefix)]

    return SimpleNamespace(set=change, calls=calls, library=loaded_stubs)


VALUES = "\n".join(f"v{number + 1} = {'Exp' if number % 2 else 'Sigmoid'} (v{number})" for number in range(12))
GRAPH = f"""
stub (uint8[N, 64, 128, 3] images) => (float[N, 3] logits)
<int64[2] shape = {{0, 24576}}, int64[1] start = {{0}}, int64[1] end = {{3}}, int64[1] axis = {{1}}> {{
    v0 = Cast <to = 1> (images)
    {VALUES}
    sum = Sum ({", ".join(f"v{number}" for number in range(1, 13))})
    row = Reshape (sum, shape)
    logits = Slice (row, start, end, axis)
}}
"""
COPYING_GRAPH = """
copying (float[N, 3, 2, 4] images) => (float[N, 24] logits) <int64[2] shape = {0, 24}> {
    logits = Reshape (images, shape)
}
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """An ONNX file without convolutions, so that the stubs run it; its twelve values take 1.2 MB per image."""
    return write_model(tmp_path_factory.mktemp("model") / "stub.onnx", GRAPH, 3, (64, 128), "uint8")


@pytest.fixture(scope="session")
def copying_model(tmp_path_factory):
    """An ONNX file whose logits are the normalised images, which ONNX Runtime copies: the stubs give right outputs."""
    return write_model(tmp_path_factory.mktemp("copying") / "copying.onnx", COPYING_GRAPH, 24, (2, 4), "float32")


def write_model(path, graph, classes, size, input_kind):
    head, names = {"distance": "l2", "epsilon": 0.0}, tuple(map(str, range(classes)))
    metadata = Metadata(names, 1, head, "none", "none", (1, 2), size, outputs=("logits",), input_kind=input_kind)
    graph, opsets = parser.parse_graph(graph), [helper.make_opsetid("", 20)]
    onnx_file.write_model(helper.make_model(graph, opset_imports=opsets, ir_version=10), metadata, path)
    onnx_file.embed_digest(path)
    return path


@pytest.fixture
def sessions(gpu, monkeypatch):
    """The sessions that ONNX Runtime makes from now on; they know which provider took which node."""
    made, make = [], onnxruntime.InferenceSession

    def keep(path, options, **arguments):
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        made.append(make(path, options, **arguments))
        return made[-1]

    monkeypatch.setattr(onnxruntime, "InferenceSession", keep)
    return made


@pytest.fixture
def run_process(stub_folder):
    """Run a Python program in a process that finds the stubs, with the real cuda-bindings; return what it prints."""

    def run(program, **settings):
        places = {"LD_LIBRARY_PATH": str(stub_folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program]
        return check(subprocess.run(command, env=places | settings, capture_output=True, text=True, timeout=240))

    return run
