"""Write a Triton model repository: the tensor model and the explain model, both or neither."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import check_engine
from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.artifact.metadata import Metadata, check_fixed_size
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.predict.explain_tensors import EXPLAIN_SUFFIX
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.triton.explain_model import METADATA_FILE
from opal_deploy.triton.model_config import (
    LABELS_FILE,
    MODEL_SHA256,
    ONNX_BATCH,
    TensorModel,
    explain_config,
    labels_text,
    tensor_config,
)

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
        """Raise UsageError unless the models can be written."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise UsageError(f"--name {self.name}: invalid model name; use letters, digits, _ . -, such as birds")
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder}: found a file; --triton expects the folder of a model repository")
        for model in self.models:
            path = self.folder / model
            if path.exists() and not _is_ours(path):
                raise UsageError(f"{path}: exists, and opal-deploy did not write it; give another --name or folder")

    def read_existing(self) -> Metadata | None:
        """Return the metadata of the existing models; None if there are none, or they are damaged."""
        path = self.folder / self.models[1] / _VERSION / METADATA_FILE
        try:
            return Metadata.from_json(path.read_text("utf-8"), str(path))
        except (OSError, UnicodeDecodeError, ArtifactError):
            return None

    @property
    def models(self) -> tuple[str, str]:
        """The names of the two models."""
        return self.name, self.name + EXPLAIN_SUFFIX

    def write(self, path: Path, options: InferenceOptions | None = None) -> WrittenRepository:
        """Write both models, or keep existing ones that are equal.

        Args:
            path: an exported ONNX file or TensorRT engine, which the caller has verified.
            options: of decoding and records; None: the defaults.

        Raises:
            ArtifactError: the file was not exported by opal-deploy, or is damaged.
            UsageError: Triton cannot serve the file, other models exist and `overwrite` is off, or the disk refuses
                them; nothing was changed.
        """
        self.check()
        model = _read_tensor_model(path)
        tensor, explain = self.models
        texts = {
            f"{tensor}/{CONFIG}": tensor_config(tensor, model),
            f"{tensor}/{LABELS_FILE}": labels_text(model.metadata.class_names),
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
            different = _find_difference(staging, self.folder)
            if different and not self.overwrite and any((self.folder / name).exists() for name in self.models):
                raise self._conflict(model, different)
            kept = not different and not self.overwrite
            if not kept:
                _swap(staging, self.folder, self.models)
        return WrittenRepository(self.folder, self.models, model, kept=kept)

    def _conflict(self, model: TensorModel, different: str) -> UsageError:
        found = self.read_existing()
        origin = "from an interrupted or edited export"
        if found is not None:
            is_same = found.file_sha256 == model.metadata.file_sha256 and found.source == model.metadata.source
            relation = f"the same model, but {different} differs" if is_same else "a different model"
            origin = f"from {found.checkpoint_name} in {found.precision}: {relation}"
        return UsageError(
            f"{self.folder / self.name}: already exists, {origin}; replace it with --overwrite, or give another --name"
        )


@dataclass(frozen=True)
class WrittenRepository:
    """The tensor model and the names of both models in a repository; `kept` if equal models existed."""

    folder: Path
    models: tuple[str, str]
    model: TensorModel
    kept: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `opal-deploy export --triton --json`."""
        return {
            "repository": str(self.folder),
            "models": list(self.models),
            "backend": self.model.backend,
            "max_batch_size": self.model.batch.max,
            MODEL_SHA256: self.model.sha256,
        }


def _read_tensor_model(path: Path) -> TensorModel:
    """Check a model file's digest, and return its description for Triton; see `Repository.write` for errors."""
    if model_kind(path) == "engine":
        return _read_engine(path)
    metadata = onnx_file.read_metadata(path)
    onnx_file.check_digest(path, metadata)
    check_fixed_size(metadata, str(path), "Triton")
    if metadata.precision == "bf16":
        raise UsageError(
            f"{path}: ONNX Runtime has no bfloat16 convolutions; build an engine from it where Triton will run "
            "(opal-deploy export --trt), or give the fp32 or fp16 file"
        )
    return TensorModel("onnxruntime", ONNX_BATCH, metadata, compute_sha256(path), {})


def _read_engine(path: Path) -> TensorModel:
    sidecar = check_engine(path)
    if sidecar.builder["name"] != "tensorrt":
        raise UsageError(
            f"{path}: Triton's tensorrt backend does not run engines of TensorRT for RTX; give the ONNX file, or a "
            "TensorRT engine (export --trt --builder tensorrt)"
        )
    if sidecar.batch.min > 1:
        raise UsageError(
            f"{path}: the engine's smallest batch is {sidecar.batch.min}, and Triton also sends single images; build "
            f"one with --batch 1:{sidecar.batch.opt}:{sidecar.batch.max}"
        )
    details = {"tensorrt": str(sidecar.builder["version"]), "target": str(sidecar.target["sm"])}
    return TensorModel("tensorrt", sidecar.batch, sidecar.metadata, str(sidecar.engine["sha256"]), details)


def _is_ours(model: Path) -> bool:
    try:
        return f'key: "{MODEL_SHA256}"' in (model / CONFIG).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _find_difference(staging: Path, folder: Path) -> str:
    """Return the first file of `staging` that `folder` lacks or that differs there; empty if there is none."""
    for path in sorted(staging.rglob("*")):
        other = folder / path.relative_to(staging)
        if path.is_file() and not (other.is_file() and filecmp.cmp(path, other, shallow=False)):
            return str(path.relative_to(staging))
    return ""


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside a repository; remove it afterwards, and a new repository that stayed empty.

    Raises:
        UsageError: the folder cannot be written, or the disk is full.
    """
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder, prefix=".opal-", suffix=".part"))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror or error}); choose another folder") from None
    finally:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def _swap(staging: Path, folder: Path, names: Sequence[str]) -> None:
    """Exchange the models of a repository for those in `staging`, all or none."""
    for path in staging.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    with ExitStack() as undo:
        for name in names:
            new, final, old = staging / name, folder / name, staging / f"{name}.old"
            if final.exists():
                final.rename(old)
                undo.callback(old.rename, final)
            new.rename(final)
            undo.callback(final.rename, new)
        undo.pop_all()
