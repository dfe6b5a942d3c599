"""Compare exported files in other runtimes with ONNX Runtime, and with the table in docs/reference/runtimes.md.

    make test-runtimes                    # exit code 1 where a runtime is right no more, or wrong no more
    make test-runtimes ARGUMENTS=--write  # write the table

Files of a small network, of each kind that `export` writes, answer 1 to 32 images: more than its 5 classes and 15
prototypes. Random weights, sharpened: what is compared are operators, not answers.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from opal_deploy.model.config import HeadConfig
from opal_deploy.synthetic import draw_example
from tests.browser import ORT_WEB
from tests.builders import SMALL_BACKBONE, build_checkpoint, export_onnx

ROOT = Path(__file__).parents[2]
PAGE, MARKERS = ROOT / "docs/reference/runtimes.md", ("<!-- runtimes -->\n", "<!-- /runtimes -->")
ENVIRONMENT = ROOT / ".venv-runtimes"
OTHERS = str(ENVIRONMENT / "bin/python")
SIZE, CLASSES, SLOTS = (64, 96), 5, 3
BATCHES = (1, 2, 3, CLASSES + 1, 8, CLASSES * SLOTS + 1, 32)
# the file's kind, with the largest difference of a number and share of other cells that count as right
KINDS = {
    "fp32": (1e-4, 0.0), "float32": (1e-4, 0.0), "topk": (1e-4, 0.0), "image": (1e-4, 0.0), "fp16": (2e-2, 0.02),
    "int8": (5e-2, 0.03),
}  # fmt: skip
# a name for people, the function of `run.py`, and the interpreter that has the runtime
RUNTIMES = (
    ("ONNX Runtime", "onnxruntime", sys.executable),
    ("ONNX Runtime of 2023,", "onnxruntime", "oldest"),
    ("ONNX Runtime Web (wasm)", "web", "node"),
    ("ONNX's reference evaluator", "reference", sys.executable),
    ("OpenVINO (float32)", "openvino", sys.executable),
    ("OpenVINO (its own precision)", "openvino_default", sys.executable),
    ("OpenCV", "opencv", OTHERS),
    ("tract", "tract", OTHERS),
    ("TVM", "tvm", OTHERS),
    ("IREE", "iree", OTHERS),
    ("MNN", "mnn", OTHERS),
    ("onnx2torch", "onnx2torch", OTHERS),
)


def write_files(folder):
    """Write the exported files, and the images that they answer."""
    checkpoint = build_checkpoint(SMALL_BACKBONE, HeadConfig(prototypes_per_class=SLOTS), SIZE, CLASSES)
    for place, first, count in (("calibrate", 200, 40), ("verify", 300, 70)):
        (folder / place).mkdir()
        for number in range(count):
            Image.fromarray(draw_example(first + number, *SIZE)).save(folder / place / f"{number}.png")
    options = {
        "fp32": {}, "float32": {"input": "float32"}, "topk": {"outputs": "topk", "top_k": 3},
        "image": {"input": "image"}, "fp16": {},
        "int8": {"calibrate": folder / "calibrate", "images": folder / "verify"},
    }  # fmt: skip
    outputs = {}
    for kind, given in options.items():
        precision = kind if kind in ("fp16", "int8") else "fp32"
        outputs[kind] = export_onnx(checkpoint, folder / f"{kind}.onnx", precision, **given).metadata.outputs
    (folder / "outputs.json").write_text(json.dumps(outputs))
    images = np.stack([draw_example(number, *SIZE) for number in range(max(BATCHES))])
    np.savez(folder / "images.npz", **{str(count): images[:count] for count in BATCHES})
    (folder / "images.bin").write_bytes(images.tobytes())
    (folder / "images.json").write_text(json.dumps({count: [count, *SIZE, 3] for count in BATCHES}))


def run(folder, function, python):
    """Return a runtime's version, its outputs by FILE/N/OUTPUT, and its errors by file."""
    if python == "node":
        module = ORT_WEB / "dist/ort.node.min.mjs"
        subprocess.run(["node", Path(__file__).with_name("web.mjs"), module, folder], check=True)
        document = json.loads((folder / "web.results.json").read_text())
        arrays = {name: np.array(each["data"]).reshape(each["shape"]) for name, each in document["results"].items()}
        return document["version"], arrays, document["errors"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if python == "oldest":
        python, environment["PYTHONPATH"] = sys.executable, str(ENVIRONMENT / "oldest")
    command = [python, Path(__file__).with_name("run.py"), function, folder]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    document = json.loads((folder / f"{function}.json").read_text())
    with np.load(folder / f"{function}.npz") as arrays:
        return document["version"], dict(arrays), document["errors"]


def judge(kind, expected, actual, error):
    """Return what the table says of one file in one runtime."""
    if error:
        return "refused"
    difference, cells = 0.0, 0.0
    for name, values in expected.items():
        if name.split("/")[0] != kind:
            continue
        found = actual[name]
        if found.shape != values.shape or not np.isfinite(found).all():
            return "**wrong**"
        if values.dtype.kind == "i":
            cells = max(cells, float((found != values).mean()))
        else:
            difference = max(difference, float(np.abs(found.astype(np.float64) - values).max()))
    most, share = KINDS[kind]
    if difference > most or cells > share:
        return "**wrong**"
    return f"{difference:.0e}".replace("e-0", "e-").replace("0e+00", "0")


def main():
    """Run all, and write or compare the table; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    folder = Path(tempfile.mkdtemp(prefix="opal-runtimes-"))
    write_files(folder)
    rows, errors, expected = [], [], None
    for name, function, python in RUNTIMES:
        print(name, flush=True)
        version, actual, refused = run(folder, function, python)
        expected = actual if expected is None else expected
        rows.append([f"{name} {version}", *(judge(kind, expected, actual, refused.get(kind)) for kind in KINDS)])
        errors += [f"- {name}, {kind}: `{reason}`" for kind, reason in refused.items()]
    header = ["", *(f"`{kind}`" for kind in KINDS)]
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    shutil.rmtree(folder)
    text = PAGE.read_text("utf-8")
    (before, _, rest), (start, end) = text.partition(MARKERS[0]), MARKERS
    found, _, after = rest.partition(end)
    table = "\n".join([*lines, "", *errors, ""]) if errors else "\n".join([*lines, ""])
    print(table)
    if write:
        PAGE.write_text(f"{before}{start}{table}{end}{after}", "utf-8")
        return 0
    written = [line for line in found.splitlines() if line.startswith("|")]
    if list(map(states, lines)) == list(map(states, written)):
        return 0
    print("docs/reference/runtimes.md says:", *written, sep="\n", file=sys.stderr)
    return 1


def states(row):
    """Return what a row says without its version and figures."""
    return [cell if "*" in cell or cell == "refused" else "right" for cell in row.strip("| ").split(" | ")[1:]]


if __name__ == "__main__":
    sys.exit(main())
