"""CUDA's libraries are found by NVIDIA's own search, and nothing is printed where a machine reads stdout."""

import sys
from types import SimpleNamespace

import pytest

from opal_deploy.runtime.cuda_libraries import load_cuda_libraries


def test_every_library_is_looked_for_although_one_is_not_found(monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder")
    names = []

    def load(name):
        names.append(name)
        raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", load)
    load_cuda_libraries()
    # each before the one that needs it
    assert names.index("cublasLt") < names.index("cublas") < names.index("cudnn")
    assert {"cudart", "curand", "cufft", "nvrtc"} < set(names)


def test_without_the_search_onnx_runtimes_own_is_used_and_what_it_prints_is_no_output(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setattr("onnxruntime.preload_dlls", lambda: print("Failed to load libcublasLt.so.13"))
    load_cuda_libraries()
    assert capsys.readouterr() == ("", "Failed to load libcublasLt.so.13\n")
