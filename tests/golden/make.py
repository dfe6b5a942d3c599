"""Write new golden files for a new version, into a folder with its name; never edit existing ones.

    python tests/golden/make.py

Every later version opens these files (docs/reference/compatibility.md), which tests/test_golden.py checks. The network
has random weights and 8,000 parameters; the images are generated creatures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shutil import copy, copytree, ignore_patterns, rmtree
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from PIL import Image

from opal_deploy import __version__
from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import write_sidecar
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.bench.networks import update_batch_norms
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.synthetic import example_images, generate_dataset

FOLDER = Path(__file__).parent / __version__
SIDE = 64
CPU = ("--device", "cpu", "--threads", "1")
# models that a CPU runs, each with the records of its answers; bf16 needs a GPU
RUNNABLE = ("model.pt", "model.onnx", "model.fp16.onnx", "model.int8.onnx", "early.onnx", "pip.onnx", "proto.onnx")
# keys that files of the first versions of schema 1 lack
ADDED_LATER = (
    "risk", "calibration", "edits", "evaluation", "receptive_field", "baseline", "keep_layers", "top_k"
)  # fmt: skip
ORT_WEB = Path(__file__).parents[2] / ".ort-web/node_modules/onnxruntime-web"
TRAINING = (
    "train", "data", "--backbone", "shufflenet_v2_x0_5", "--weights", "none", "--stride", "8", "--prototypes", "2",
    "--size", str(SIDE), "--epochs", "3", "--batch-size", "8", "--workers", "0", "--device", "cpu", "--out", "training",
)  # fmt: skip
_MAIN = "import sys; sys.argv[0] = 'opal-deploy'; from opal_deploy.cli import main; main()"


class EarlyMetadata(Metadata):
    """Metadata as the first versions of schema 1 wrote it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document without the keys that came later."""
        return {name: value for name, value in super().to_dict().items() if name not in ADDED_LATER}


def opal(folder: Path, *arguments: str) -> None:
    """Run `opal-deploy` in a folder, so that files hold no path of this machine."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", _MAIN, *arguments], cwd=folder, env=environment, check=True)


def make_models(folder: Path) -> None:
    """Write a checkpoint with neighbours, calibration and baseline, its exports, and the sidecar of an engine."""
    counts = {"train_per_class": 8, "val_per_class": 10, "test_per_class": 1}
    classes = generate_dataset(folder / "data", num_species=3, size=(SIDE, SIDE), **counts)
    torch.manual_seed(0)
    head = HeadConfig(prototypes_per_class=2)
    network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 3, (SIDE, SIDE), head, stride=8))
    update_batch_norms(network, example_images(32, SIDE, SIDE))
    save(folder / "model.pt", Checkpoint(network, classes))
    opal(folder, "evaluate", "data", "--model", "model.pt", "--split", "val", "--record", *CPU)
    for precision in ("fp32", "fp16", "bf16", "int8"):
        calibrate = ("--calibrate", "data") if precision == "int8" else ()
        opal(folder, "export", "model.pt", "--precision", precision, "--threads", "1", *calibrate)
    metadata = onnx_file.read_metadata(folder / "model.onnx")
    copy(folder / "model.onnx", folder / "early.onnx")
    onnx_file.rewrite_metadata(folder / "early.onnx", EarlyMetadata(**vars(metadata)))
    make_sidecar(folder / "model.engine", metadata)
    make_other_heads(folder)


def make_other_heads(folder: Path) -> None:
    """Write the files of a PIP-Net and a ProtoPNet of CaBRNet's, whose body has 2,600 parameters."""
    from tests.export.test_other_heads import Theirs

    for kind in ("pip", "proto"):
        Theirs(kind).save_cabrnet(folder)
        arguments = ("--arch", "model_arch.yml", "--size", str(SIDE), "--threads", "1", "--out", f"{kind}.onnx")
        opal(folder, "export", "model_state.pth", *arguments)


def make_sidecar(engine: Path, metadata: Metadata) -> None:
    """Write the sidecar of an engine, and in the engine's place a file that no runtime loads."""
    from tests.builders import build_sidecar

    engine.write_bytes(b"stands for an engine")
    write_sidecar(engine, build_sidecar(engine, metadata))


def make_runs(folder: Path) -> None:
    """Write the records of each model, a signed run, its public key, and a run that was interrupted."""
    (folder / "images").mkdir()
    for number, image in enumerate(example_images(3, 80, 96)):
        Image.fromarray(image).save(folder / f"images/{number}.png", optimize=True)
    for name in RUNNABLE:
        opal(folder, "infer", "images", "--model", name, *CPU, "--out", "plain", "--overwrite")
        copy(folder / "plain/results.jsonl", folder / f"{name}.jsonl")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(private)
    (folder / "key.pem").chmod(0o600)
    (folder / "public.pem").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    model = ("--model", "model.onnx", *CPU)
    opal(folder, "infer", "images", *model, "--out", "run", "--explain", "--sign", "key.pem", "--format", "csv")
    opal(folder, "infer", "images", *model, "--out", "unfinished")
    (folder / "unfinished/summary.json").unlink()
    results = folder / "unfinished/results.jsonl"
    results.write_bytes(b"".join(results.read_bytes().splitlines(keepends=True)[:2]))


def make_folders(folder: Path) -> None:
    """Write a page without ONNX Runtime Web's 12 MB, and a training run that was interrupted."""
    opal(folder, "export", "model.onnx", "--web", "page", "--ort-web", str(ORT_WEB), "--no-verify")
    rmtree(folder / "page/ort")
    command = [sys.executable, "-c", _MAIN, *TRAINING]
    with subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}) as training:
        while training.poll() is None and not _has_epochs(folder / "training/metrics.csv"):
            time.sleep(0.01)
        training.kill()


def _has_epochs(path: Path) -> bool:
    return path.exists() and path.read_text("utf-8").count("\n") > 2


def main() -> None:
    """Write the golden files of this version."""
    if FOLDER.exists():
        sys.exit(f"{FOLDER} exists; golden files are never changed")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_models(folder)
        make_runs(folder)
        make_folders(folder)
        FOLDER.mkdir()
        kept = ["model.bf16.onnx", "model.engine", "model.engine.json", "public.pem", "images", "run", "unfinished"]
        kept += ["data", "page", "training"]
        for name in (*kept, *RUNNABLE, *(f"{name}.jsonl" for name in RUNNABLE)):
            if (folder / name).is_dir():
                copytree(folder / name, FOLDER / name, ignore=ignore_patterns(".*"))
            else:
                copy(folder / name, FOLDER / name)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
