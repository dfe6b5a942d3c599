"""Write a Triton model repository: the tensor model and the explain model, both or neither."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import check_engine
from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.artifact.metadata import check_fixed_size
from opal_deploy.errors import UsageError
from opal_deploy.predict.explain_tensors import EXPLAIN_SUFFIX
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.triton.explain_model import METADATA_FILE
from opal_deploy.triton.model_config import MODEL_SHA256, ONNX_BATCH, TensorModel, explain_config, tensor_config

CONFIG = "config.pbtxt"
_VERSION = "1"
_MODEL_FILES = {"onnxruntime": "model.onnx", "tensorrt": "model.plan"}
_MODEL_PY = '''"""Image files in, the records of `opal-deploy infer` out, through this server's model {name}.

Triton's Python needs opal-deploy {version} or later: pip install opal-deploy
"""

from opal_deploy.triton.explain_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class Repository:
    """Two models of a Triton model repository, `NAME` and `NAME_explain`; its folder may hold others.

    With `overwrite`, models of these names are replaced if `export --triton` wrote them.
    """

    folder: Path
    name: str = "opal"
    overwrite: bool = False

    def check(self) -> None:
        """Raise UsageError unless the models can be written, before a long export."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise UsageError(f"--name {self.name}: invalid model name; use letters, digits, _ . -, such as birds")
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder}: found a file; --triton expects the folder of a model repository")
        for path in (self.folder / model for model in self.models):
            if path.exists() and not _is_ours(path):
                raise UsageError(f"{path}: exists, and opal-deploy did not write it; give another --name or folder")
            if path.exists() and not self.overwrite:
                raise UsageError(f"{path}: the model exists; pass --overwrite to replace it, or give another --name")

    @property
    def models(self) -> tuple[str, str]:
        """The names of the two models."""
        return self.name, self.name + EXPLAIN_SUFFIX

    def write(self, path: Path, options: InferenceOptions | None = None) -> WrittenRepository:
        """Write both models.

        Args:
            path: an exported ONNX file or TensorRT engine, which the caller has verified.
            options: of decoding and records; None: the defaults.

        Raises:
            ArtifactError: the file was not exported by opal-deploy, or is damaged.
            UsageError: Triton cannot serve the file, the models exist and `overwrite` is off, or the disk refuses them;
                nothing was changed.
        """
        self.check()
        model = _read_tensor_model(path)
        tensor, explain = self.models
        texts = {
            f"{tensor}/{CONFIG}": tensor_config(tensor, model),
            f"{explain}/{CONFIG}": explain_config(tensor, model, options or InferenceOptions()),
            f"{explain}/{_VERSION}/{METADATA_FILE}": model.metadata.to_json(),
            f"{explain}/{_VERSION}/model.py": _MODEL_PY.format(name=tensor, version=__version__),
        }
        with _staging(self.folder) as staging:
            for name in self.models:
                (staging / name / _VERSION).mkdir(parents=True)
            shutil.copyfile(path, staging / tensor / _VERSION / _MODEL_FILES[model.backend])
            for name, text in texts.items():
                (staging / name).write_text(text, "utf-8")
            _swap(staging, self.folder, self.models)
        return WrittenRepository(self.folder, self.models, model)


@dataclass(frozen=True)
class WrittenRepository:
    """The tensor model and the names of both models in a repository."""

    folder: Path
    models: tuple[str, str]
    model: TensorModel

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `opal-deploy export --triton --json`."""
        model = self.model
        document = {"repository": str(self.folder), "models": list(self.models), "backend": model.backend}
        return {**document, "max_batch_size": model.batch.max, MODEL_SHA256: model.sha256}


def _read_tensor_model(path: Path) -> TensorModel:
    """Check a model file's digest, and return its description for Triton; see `Repository.write` for errors."""
    if model_kind(path) == "engine":
        sidecar = check_engine(path)
        if sidecar.builder["name"] != "tensorrt" or sidecar.batch.min > 1:
            kind = f"{sidecar.builder['name']} and batches from {sidecar.batch.min} found"
            advice = "give the ONNX file, or build an engine with --builder tensorrt and batches from 1"
            raise UsageError(f"{path}: Triton cannot serve the engine: {kind}; {advice}")
        details = {"tensorrt": str(sidecar.builder["version"]), "target": str(sidecar.target["sm"])}
        return TensorModel("tensorrt", sidecar.batch, sidecar.metadata, str(sidecar.engine["sha256"]), details)
    metadata = onnx_file.read_metadata(path)
    onnx_file.check_digest(path, metadata)
    check_fixed_size(metadata, str(path), "Triton")
    if metadata.precision == "bf16":
        advice = "give the fp32 or fp16 file, or an engine (export --trt)"
        raise UsageError(f"{path}: ONNX Runtime has no bfloat16 convolutions; {advice}")
    return TensorModel("onnxruntime", ONNX_BATCH, metadata, compute_sha256(path), {})


def _is_ours(model: Path) -> bool:
    try:
        return f'key: "{MODEL_SHA256}"' in (model / CONFIG).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder in a repository; raise UsageError if it cannot be written, or the disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".opal-", suffix=".part") as staging:
            yield Path(staging)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror or error}); choose another folder") from None


def _swap(staging: Path, folder: Path, names: Sequence[str]) -> None:
    """Exchange the models of a repository for those in `staging`, all or none."""
    with ExitStack() as undo:
        for name in names:
            new, final, old = staging / name, folder / name, staging / f"{name}.old"
            if final.exists():
                final.rename(old)
                undo.callback(old.rename, final)
            new.rename(final)
            undo.callback(final.rename, new)
        undo.pop_all()
