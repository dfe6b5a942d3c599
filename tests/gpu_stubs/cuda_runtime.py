"""`cuda.bindings.runtime` over the stub of CUDA's runtime.

The real module has CUDA's runtime linked in, which calls only a driver that proves to be NVIDIA's. Its enums are used
here, and its convention: a tuple of an error and the results, which are None after a failure.
"""

import ctypes
import functools
from types import ModuleType, SimpleNamespace

# arguments of each function: (i)nteger, (p)ointer, and in capitals what it returns, (F)loat too
FUNCTIONS = {
    "cudaGetDeviceCount": "I", "cudaGetDevice": "I", "cudaSetDevice": "i", "cudaGetLastError": "",
    "cudaMalloc": "Pp", "cudaFree": "p", "cudaHostAlloc": "Ppi", "cudaFreeHost": "p",
    "cudaHostRegister": "ppi", "cudaHostUnregister": "p", "cudaMemcpyAsync": "pppip", "cudaMemsetAsync": "pipp",
    "cudaStreamCreateWithFlags": "Pi", "cudaStreamDestroy": "p", "cudaStreamSynchronize": "p",
    "cudaStreamWaitEvent": "ppi", "cudaEventCreateWithFlags": "Pi", "cudaEventDestroy": "p", "cudaEventRecord": "pp",
    "cudaEventSynchronize": "p",
}  # fmt: skip
_TYPES = {"i": ctypes.c_int, "p": ctypes.c_void_p, "f": ctypes.c_float}


def make(real, library):
    """Return a module with the names of `real`, whose functions call the loaded library."""
    module = ModuleType(real.__name__)
    vars(module).update(vars(real))
    for name, arguments in FUNCTIONS.items():
        assert hasattr(real, name)
        setattr(module, name, functools.partial(_call, real, getattr(library, name), arguments))
    module.cudaGetDeviceProperties = functools.partial(_read_properties, real, library)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    module.cudaGetErrorString = lambda error: (real.cudaError_t(0), library.cudaGetErrorString(int(error)))
    return module


def make_driver(library):
    """Return the functions of `cuda.bindings.driver` for the devices' contexts."""
    return SimpleNamespace(
        cuDeviceGet=lambda index: (0, index),
        cuDevicePrimaryCtxGetState=lambda device: (0, 0, library.stubIsInUse(device)),
    )


def _call(real, function, arguments, *values):
    rest, passed, returned = iter(values), [], []
    for kind in arguments:
        if kind.isupper():
            returned.append(_TYPES[kind.lower()]())
            passed.append(ctypes.byref(returned[-1]))
        else:
            passed.append(_TYPES[kind](int(next(rest))))
    assert next(rest, None) is None
    code = function(*passed)
    return real.cudaError_t(code), *(None if code else result.value for result in returned)


def _read_properties(real, library, device):
    content = ctypes.create_string_buffer(4096)
    code = library.cudaGetDeviceProperties(content, ctypes.c_int(device))
    raw = content.raw
    return real.cudaError_t(code), SimpleNamespace(
        name=raw[:256].rstrip(b"\0"), uuid=SimpleNamespace(bytes=raw[256:272]),
        totalGlobalMem=int.from_bytes(raw[288:296], "little"), major=9, minor=0,
    )  # fmt: skip
