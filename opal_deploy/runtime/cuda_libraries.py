"""Loading of CUDA's libraries for ONNX Runtime, wherever pip or the system put them.

Nothing of this package is imported here: `doctor` runs this file alone in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

# in the order in which they need one another; cuDNN is opened by ONNX Runtime at the first convolution
_LIBRARIES = ("cudart", "nvJitLink", "nvrtc", "cublasLt", "cublas", "curand", "cufft", "cudnn")


def load_cuda_libraries() -> None:
    """Load the libraries of ONNX Runtime's CUDA provider into this process; print nothing on stdout.

    NVIDIA's `cuda.pathfinder` finds them in any site-packages, in Conda, in CUDA_PATH and where the system looks; what
    it does not find is looked for in every other folder that Python imports from, such as one of `pip install
    --target`. ONNX Runtime's own `preload_dlls`, which looks beside itself only, is the substitute where pathfinder is
    not installed. What is not found is not an error here: ONNX Runtime names the library that it misses.
    """
    try:
        from cuda import pathfinder
    except ImportError:
        import onnxruntime

        # it prints what it does not find
        with contextlib.redirect_stdout(sys.stderr):
            onnxruntime.preload_dlls()
        return
    for name in _LIBRARIES:
        try:
            pathfinder.load_nvidia_dynamic_lib(name)
        except (RuntimeError, OSError, ValueError):  # not found, does not load, or not known to this version
            _load_from_packages(name)


def _load_from_packages(name: str) -> None:
    # not the import system's own search: some of NVIDIA's packages make `nvidia` a package of one folder
    for folder in sys.path:
        for path in sorted(Path(folder, "nvidia").glob(f"*/lib/lib{name}.so.*")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))
