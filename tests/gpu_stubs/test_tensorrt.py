"""TensorRT's lean runtime, and TensorRT's own bindings, which need only names of its libraries to be imported."""

import importlib.util
from pathlib import Path

from tests.gpu_stubs import build

PROGRAM = """
import tensorrt_bindings
from opal_deploy.runtime.tensorrt import load
from tests.runtime.bindings import NAMES, RUNTIME_NAMES, find_missing
# an export with --lean has both in one process
lean = load("tensorrt-lean", "a test").module
for module, names in ((tensorrt_bindings, NAMES), (lean, RUNTIME_NAMES)):
    print(module.__version__.split(".")[0], find_missing(module, names), callable(module.nptype))
print(hasattr(lean, "Builder"))
"""


def test_tensorrt_and_its_lean_runtime_have_every_name_that_we_use(stub_folder, run_process):
    # found, not imported: that would load its libraries
    origin = importlib.util.find_spec("tensorrt_bindings").origin
    build.build_tensorrt(Path(origin).with_name("tensorrt.so"), stub_folder)
    assert run_process(PROGRAM).stdout == "11 [] True\n11 [] True\nFalse\n"
