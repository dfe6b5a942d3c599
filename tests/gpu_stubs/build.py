"""Stub libraries of CUDA, compiled from the symbols that the real onnxruntime-gpu wheel asks for.

With them ONNX Runtime's CUDA provider creates and runs sessions on a machine without a GPU. What it decides on the host
is real: options, the placement of nodes, memory arenas, bound memory, copies. Kernels do nothing, so that only outputs
that are copied mean anything; convolutions are placed but cannot run without cuDNN. `common.h` lists the settings.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
# the other libraries of the provider get functions that succeed and do nothing
SOURCES = {"libcudart": "cudart.c", "libcuda": "driver.c", "libnvidia-ml": "nvml.c"}


def build(provider, folder):
    """Compile the stubs that `libonnxruntime_providers_cuda.so` needs, and NVML's, into a folder."""
    for library, symbols in {**needed_symbols(provider), "libnvidia-ml.so.1": []}.items():
        source = SOURCES.get(library.partition(".")[0])
        code = f'#include "{HERE / source}"\n' if source else "#include <stdlib.h>\n"
        defined = set(re.findall(r"^[a-z][\w ]*\W+(\w+)\(", (HERE / source).read_text(), re.M)) if source else set()
        for symbol in sorted(set(symbols) - defined):
            creates = "Create" in symbol and not source
            code += f"int {symbol}(void **p) {{ {'if (p) *p = malloc(64);' * creates} return 0; }}\n"
        compile_library(folder, library, code, versioned="cuda.so" not in library and "nvidia" not in library)


def build_tensorrt(bindings, folder):
    """Compile the libraries that TensorRT's bindings need to be imported; nothing in them works."""
    listing = subprocess.check_output(["nm", "-D", "--undefined-only", bindings], text=True)
    symbols = re.findall(r" U (\w*(?:Infer|Nv|Registry)\w*)$", listing, re.M)
    code = "".join(f"void *{symbol}() {{ return 0; }}\n" for symbol in symbols)
    dynamic = subprocess.check_output(["readelf", "-d", bindings], text=True)
    for library in re.findall(r"\[(libnv[\w.]*)\]", dynamic):
        compile_library(folder, library, code, versioned=False)


def needed_symbols(provider):
    """Return the functions that a library takes from each of CUDA's libraries."""
    dynamic = subprocess.check_output(["readelf", "-d", provider], text=True)
    symbols = defaultdict(list, {library: [] for library in re.findall(r"\[(libcu[\w.]*)\]", dynamic)})
    listing = subprocess.check_output(["nm", "-D", "--undefined-only", "--with-symbol-versions", provider], text=True)
    for line in listing.splitlines():
        symbol, _, library = line.split()[-1].partition("@")
        if library.startswith("libcu"):
            symbols[library].append(symbol)
    return dict(symbols)


def compile_library(folder, library, code, *, versioned):
    source, versions = folder / "stub.c", folder / "stub.map"
    source.write_text(code)
    versions.write_text(f"{library} {{ global: *; }};\n")
    command = ["cc", "-w", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", folder / library, source]
    if versioned:
        command.append(f"-Wl,--version-script={versions}")
    subprocess.run([*command, "-ldl"], check=True)
