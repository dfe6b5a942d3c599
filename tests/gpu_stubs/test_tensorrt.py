"""The bindings of TensorRT itself, whose wheel needs only names of its libraries to be imported."""

import importlib.util
from pathlib import Path

import pytest

from tests.gpu_stubs import build

PROGRAM = """
import tensorrt_bindings
from tests.runtime.bindings import CALLS, NAMES, find_mismatches
mismatches = find_mismatches(tensorrt_bindings, CALLS, NAMES)
print(tensorrt_bindings.__version__, mismatches, callable(tensorrt_bindings.nptype))
"""


def test_tensorrt_has_every_call_and_enum_with_our_arguments(stub_folder, run_process):
    # found, not imported: that would load its libraries
    spec = importlib.util.find_spec("tensorrt_bindings")
    if spec is None:
        pytest.skip("no tensorrt-cu13-bindings: `make gpu-stubs-venv` installs it")
    build.build_tensorrt(Path(spec.origin).with_name("tensorrt.so"), stub_folder)
    version, rest = run_process(PROGRAM).stdout.split(maxsplit=1)
    assert version.startswith("11.")
    assert rest.strip() == "[] True"
