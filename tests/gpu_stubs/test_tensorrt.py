"""The bindings of TensorRT itself, whose wheel needs only names of its libraries to be imported."""

import importlib.util
from pathlib import Path

from tests.gpu_stubs import build

PROGRAM = """
import tensorrt_bindings
from tests.runtime.bindings import NAMES, find_missing
missing = find_missing(tensorrt_bindings, NAMES)
print(tensorrt_bindings.__version__.split(".")[0], missing, callable(tensorrt_bindings.nptype))
"""


def test_tensorrt_has_every_name_that_we_use(stub_folder, run_process):
    # found, not imported: that would load its libraries
    origin = importlib.util.find_spec("tensorrt_bindings").origin
    build.build_tensorrt(Path(origin).with_name("tensorrt.so"), stub_folder)
    assert run_process(PROGRAM).stdout == "11 [] True\n"
