"""Write a Triton model repository: the tensor model and the explain model, whole or not at all."""

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
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.inference.types import InferenceOptions
from opal_deploy.triton.explain_model import METADATA_FILE
from opal_deploy.triton.model_config import (
    EXPLAIN_SUFFIX,
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
_MODEL_PY = '''"""Image files in, records out: what `opal-deploy infer` does, by the model {name} of this server.

Triton's Python needs opal-deploy {version} or later: pip install opal-deploy
"""

from opal_deploy.triton.explain_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class Repository:
    """The place of two models, `NAME` and `NAME_explain`, in a Triton model repository.

    Attributes:
        folder: of the repository, which may hold other models too.
        name: of the tensor model.
        overwrite: replace models of these names that an earlier export wrote.
    """

    folder: Path
    name: str = "opal"
    overwrite: bool = False

    def check(self) -> None:
        """Raise UsageError unless the models can be written."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise UsageError(f"--name {self.name}: a model's name has letters, digits, `_`, `-` and `.`, such as birds")
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder}: a file; --triton takes the folder of a model repository")
        for model in self.models:
            path = self.folder / model
            if not path.exists():
                continue
            if not _is_ours(path):
                raise UsageError(f"{path}: a model that opal-deploy did not write; give another --name or folder")

    def read_existing(self) -> Metadata | None:
        """Return the metadata of the models that are there; None where none are, or not both as they were written."""
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
        """Write the models of a file; a server that is running reads them when it is started again or told to.

        Models that are there already as they would be written are kept.

        Args:
            path: an ONNX file of ours, or an engine of TensorRT; the caller has verified it.
            options: of decoding and records; None for the defaults.

        Raises:
            ArtifactError: the file is not ours, or damaged.
            UsageError: Triton cannot serve the file, other models are there and `overwrite` is off, or the disk refuses
                them; nothing was changed.
        """
        self.check()
        model = read_tensor_model(path)
        tensor, explain = self.models
        with _staging(self.folder) as staging:
            for folder in (staging / tensor / _VERSION, staging / explain / _VERSION):
                folder.mkdir(parents=True)
            shutil.copyfile(path, staging / tensor / _VERSION / _MODEL_FILES[model.backend])
            texts = {
                f"{tensor}/{CONFIG}": tensor_config(tensor, model),
                f"{tensor}/{LABELS_FILE}": labels_text(model.metadata.class_names),
                f"{explain}/{CONFIG}": explain_config(tensor, model, options or InferenceOptions()),
                f"{explain}/{_VERSION}/{METADATA_FILE}": model.metadata.to_json(),
                f"{explain}/{_VERSION}/model.py": _MODEL_PY.format(name=tensor, version=__version__),
            }
            for name, text in texts.items():
                (staging / name).write_text(text, "utf-8")
            is_there = any((self.folder / name).exists() for name in self.models)
            different = _find_differences(staging, self.folder)
            if different and is_there and not self.overwrite:
                raise self._in_the_way(model, different)
            kept = not different and not self.overwrite
            if not kept:
                _swap(staging, self.folder, self.models)
        return WrittenRepository(self.folder, self.models, model, kept=kept)

    def _in_the_way(self, model: TensorModel, different: list[str]) -> UsageError:
        found = self.read_existing()
        origin = "of an export that was cut short or changed"
        if found is not None:
            is_same = found.file_sha256 == model.metadata.file_sha256 and found.source == model.metadata.source
            relation = f"the same model, but {different[0]} is another" if is_same else "another model than this one"
            origin = f"of {found.checkpoint_name} in {found.precision}, {relation}"
        return UsageError(
            f"{self.folder / self.name}: it is there already, {origin}; replace it with --overwrite, or give another "
            "--name"
        )


@dataclass(frozen=True)
class WrittenRepository:
    """Two models in a repository.

    Attributes:
        folder: of the repository.
        models: the names of the tensor model and of the one that takes image files.
        model: what is served.
        kept: the models were there already as they would have been written.
    """

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


def read_tensor_model(path: Path) -> TensorModel:
    """Return what Triton has to know of a model file, once its digest was checked.

    Raises:
        ArtifactError: the file is not ours, or damaged. UsageError: none of Triton's backends runs it.
    """
    if model_kind(path) == "engine":
        return _read_engine(path)
    metadata = onnx_file.read_metadata(path)
    onnx_file.check_digest(path, metadata)
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
            f"{path}: an engine of TensorRT for RTX, which Triton's tensorrt backend does not run; give the ONNX file, "
            "or an engine of TensorRT (export --trt --builder tensorrt)"
        )
    if sidecar.options.get("strip_weights"):
        raise UsageError(f"{path}: its weights were left out; give an engine built without --strip-weights")
    if sidecar.batch.min > 1:
        raise UsageError(
            f"{path}: it takes no batch under {sidecar.batch.min}, and Triton sends single images too; build one with "
            f"--batch 1:{sidecar.batch.opt}:{sidecar.batch.max}"
        )
    details = {"tensorrt": str(sidecar.builder["version"]), "target": str(sidecar.target["sm"])}
    return TensorModel("tensorrt", sidecar.batch, sidecar.metadata, str(sidecar.engine["sha256"]), details)


def _is_ours(model: Path) -> bool:
    try:
        return f'key: "{MODEL_SHA256}"' in (model / CONFIG).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _find_differences(staging: Path, folder: Path) -> list[str]:
    """Return the files of `staging`, relative to it, that `folder` has otherwise or not at all."""
    files = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
    return [
        str(file)
        for file in files
        if not (folder / file).is_file() or not filecmp.cmp(staging / file, folder / file, shallow=False)
    ]


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Yield a new hidden folder inside a repository; it is removed when the block ends, with the repository if empty.

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
        raise UsageError(f"{folder}: cannot be written ({error.strerror or error}); choose another place") from None
    finally:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def _swap(staging: Path, folder: Path, names: Sequence[str]) -> None:
    """Move finished models to where they belong, and those that are there into `staging`; all of them or none."""
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
