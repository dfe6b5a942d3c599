"""A machine without CUDA's libraries or their bindings, and its processor; `tests/gpu_stubs` has GPUs."""

import inspect
import re

import pytest

from opal_deploy.errors import MissingExtra
from opal_deploy.runtime import cuda
from opal_deploy.runtime.cuda import Cuda, load_cuda_libraries
from opal_deploy.runtime.devices import has_vnni, read_cpu_quota


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n", True),
        ("flags : avx2 avx512f\nnote : avx512_vnni\n", False),
        (None, False),
    ],
)
def test_a_processor_with_vnni_is_told_by_its_flags(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert has_vnni(tmp_path / "cpuinfo") is expected


def test_every_function_exists_in_the_bindings():
    real = pytest.importorskip("cuda.bindings.runtime")
    source = inspect.getsource(cuda)
    names = set(re.findall(r"\bcuda[A-Z]\w+", source))
    assert len(names) > 20
    enums = (real.cudaMemcpyKind, real.cudaStreamCaptureMode, real.cudaError_t)
    assert names - {*dir(real), *(name for enum in enums for name in dir(enum))} == set()


def test_without_the_bindings_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"cuda-bindings.*opal-deploy\[trt-rtx\]"):
        Cuda(0, "trt-rtx")


def test_a_library_that_is_not_found_does_not_keep_the_others_from_loading(monkeypatch):
    pathfinder, names = pytest.importorskip("cuda.pathfinder"), []

    def search(name):
        names.append(name)
        if name != "cublas":
            raise pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", search)
    load_cuda_libraries()
    # each before the one that needs it
    assert names.index("cublasLt") < names.index("cublas") < names.index("cudnn")


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2.5),
        ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("3:memory:/x\n4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu,cpuacct:/x\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (None, {}, None),
    ],
)
def test_a_containers_quota_of_cpus_is_read(tmp_path, groups, files, cpus):
    own = tmp_path / "own"
    if groups is not None:
        own.write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert read_cpu_quota(tmp_path / "root", own) == cpus
