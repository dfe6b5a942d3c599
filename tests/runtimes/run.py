"""Run ONNX files in one runtime, in the environment that has it: numpy and that runtime are all that is needed.

    python run.py RUNTIME FOLDER

FOLDER has files KIND.onnx, `outputs.json` with the outputs of each kind, and `images.npz`, arrays uint8 [N, H0, W0, 3]
by number of images. Writes RUNTIME.npz, the outputs as KIND/N/OUTPUT, and RUNTIME.json: the runtime's version and, by
kind, the error if there is one.
"""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

PACKAGES = {
    "openvino_default": "openvino", "reference": "onnx", "opencv": "opencv-python-headless", "mnn": "MNN",
    "iree": "iree-base-runtime", "tvm": "apache-tvm",
}  # fmt: skip


# each returns a function from images to the outputs in the file's order, `names`


def onnxruntime(path, names):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(names, {"images": images})


def reference(path, names):
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(path))
    return lambda images: evaluator.run(names, {"images": images})


def openvino(path, names, **settings):
    import openvino

    compiled = openvino.Core().compile_model(str(path), "CPU", settings or {"INFERENCE_PRECISION_HINT": "f32"})

    def run(images):
        results = compiled({"images": images})
        return [results[name].copy() for name in names]

    return run


def openvino_default(path, names):
    return openvino(path, names, PERFORMANCE_HINT="LATENCY")


def opencv(path, names):
    import cv2

    network = cv2.dnn.readNetFromONNX(str(path))

    def run(images):
        network.setInput(images, "images")
        return network.forward(names)

    return run


def tract(path, names):
    import tract

    runnable = tract.onnx().load(str(path)).into_model().into_runnable()
    return lambda images: [value.to_numpy() for value in runnable.run([images])]


def mnn(path, names):
    import _tools
    import MNN

    converted = str(path.with_suffix(".mnn"))
    # the command of the same name installs packages
    _tools.mnnconvert(["mnnconvert", "-f", "ONNX", "--modelFile", str(path), "--MNNModel", converted])
    module = MNN.nn.load_module_from_file(converted, ["images"], names)

    def run(images):
        kind = MNN.numpy.uint8 if images.dtype == np.uint8 else MNN.numpy.float32
        given = MNN.expr.const(images, list(images.shape), MNN.expr.NCHW, kind)
        return [value.read().copy() for value in module.forward([given])]

    return run


def iree(path, names):
    import iree.compiler
    import iree.runtime

    imported = path.with_suffix(".mlir")
    command = [Path(sys.executable).parent / "iree-import-onnx", path, "-o", imported]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    target = ["--iree-llvmcpu-target-cpu=host"]
    binary = iree.compiler.compile_file(str(imported), target_backends=["llvm-cpu"], extra_args=target)
    module = iree.runtime.load_vm_flatbuffer(binary, driver="local-sync")
    # the graph's name
    return lambda images: [np.asarray(value) for value in module["opal"](images)]


def onnx2torch(path, names):
    import torch
    from onnx2torch import convert

    module = convert(str(path)).eval()

    def run(images):
        with torch.no_grad():
            return [value.numpy() for value in module(torch.from_numpy(images))]

    return run


def tvm(path, names):
    import onnx
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    module = relax.transform.LegalizeOps()(from_onnx(onnx.load(path), keep_params_in_input=False))
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    return lambda images: [value.numpy() for value in machine["main"](tvm.runtime.tensor(images))]


def main(runtime, folder):
    arrays, errors = {}, {}
    with np.load(folder / "images.npz") as stored:
        batches = dict(stored)
    for kind, names in json.loads((folder / "outputs.json").read_text()).items():
        try:
            run = globals()[runtime](folder / f"{kind}.onnx", names)
            for count, images in batches.items():
                if kind == "float32":
                    images = np.ascontiguousarray(images.transpose(0, 3, 1, 2).astype(np.float32) / 64 - 2)
                values = run(images)
                if len(values) < len(names):
                    raise RuntimeError(f"{len(values)} of {len(names)} outputs for {count} images")
                for name, value in zip(names, values, strict=True):
                    arrays[f"{kind}/{count}/{name}"] = np.asarray(value)
        # each runtime has its own; the table says which
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
            errors[kind] = f"{type(error).__name__}: {lines[0][:200]}"
    np.savez(folder / f"{runtime}.npz", **arrays)
    version = importlib.metadata.version(PACKAGES.get(runtime, runtime))
    (folder / f"{runtime}.json").write_text(json.dumps({"version": version, "errors": errors}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
