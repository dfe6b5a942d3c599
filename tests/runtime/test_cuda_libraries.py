"""CUDA's libraries are found by NVIDIA's own search, and nothing is printed where a machine reads stdout."""

import sys
from types import SimpleNamespace

import pytest

from opal_deploy.runtime.cuda_libraries import load_cuda_libraries


def test_what_the_search_does_not_find_is_loaded_from_wherever_python_imports_from(monkeypatch, tmp_path):
    pathfinder = pytest.importorskip("cuda.pathfinder")
    names, loaded = [], []

    def search(name):
        names.append(name)
        if name != "cublas":
            raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", search)
    monkeypatch.setattr("ctypes.CDLL", loaded.append)
    # as of `pip install --target`
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10"):
        (folder / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    load_cuda_libraries()
    assert [path for path in loaded if path.startswith(str(tmp_path))] == [
        str(folder / "libcublasLt.so.13"), str(folder / "libcurand.so.10"),
    ]  # fmt: skip
    # each before the one that needs it
    assert names.index("cublasLt") < names.index("cublas") < names.index("cudnn")


def test_without_the_search_onnx_runtimes_own_is_used_and_what_it_prints_is_no_output(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setattr("onnxruntime.preload_dlls", lambda: print("Failed to load libcublasLt.so.13"))
    load_cuda_libraries()
    assert capsys.readouterr() == ("", "Failed to load libcublasLt.so.13\n")
