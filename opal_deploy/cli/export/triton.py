"""`opal-deploy export --triton`: a model repository for NVIDIA Triton."""

from __future__ import annotations

from pathlib import Path

from opal_deploy.artifact.files import model_kind
from opal_deploy.cli.console import print_json, print_message
from opal_deploy.errors import UsageError, require
from opal_deploy.triton.model_config import MODEL_SHA256
from opal_deploy.triton.repository import Repository


def plan_repository(
    folder: Path | None, name: str | None, *, overwrite: bool, trt: bool, precision: str | None
) -> Repository | None:
    """Return the repository that `--triton` names, once it is known that it can be written; None without the option.

    Raises:
        UsageError: models of these names are there, or other options do not go with it.
    """
    if folder is None:
        if name is not None:
            raise UsageError("--name: of a Triton repository; add --triton")
        return None
    if trt:
        raise UsageError("--triton: build the engine first (--trt), then export the .engine with --triton")
    if precision == "bf16":
        raise UsageError("--triton: ONNX Runtime has no bfloat16 convolutions; give fp32 or fp16, or an engine")
    repository = Repository(folder, name or "opal", overwrite=overwrite)
    repository.check()
    return repository


def verify_model(path: Path, threads: int | None) -> None:
    """Run the test vectors of an ONNX file that is served as it is.

    An engine needs its GPU for that: its digest is checked when it is written, and the rest by the server.

    Raises:
        VerificationError: it does not reproduce them.
    """
    if model_kind(path) != "onnx":
        return
    require("onnxruntime", "cpu", "opal-deploy export --triton, to verify what it serves,")
    from opal_deploy.runtime.onnx_session import OnnxSession
    from opal_deploy.runtime.verification import verify_test_vectors

    print_message(f"Checking {path.name} against its own test vectors")
    session = OnnxSession(path, device="cpu", threads=threads)
    if session.metadata.unverified:
        print_message(f"NOT VERIFIED: {path.name} was {session.metadata.unverified}")
    verify_test_vectors(session, str(path))


def write_repository(repository: Repository, path: Path, *, as_json: bool) -> None:
    """Write the repository of one model file, and print what to do with it; with `as_json` to stdout as JSON too."""
    model = repository.write(path)
    tensor, explain = repository.models
    print_message(
        f"Wrote {repository.folder / tensor} ({model.backend}, {model.metadata.precision}, batches up to "
        f"{model.batch.max}) and {repository.folder / explain} (image files to records)"
    )
    print_message(f"Next: tritonserver --model-repository={repository.folder.absolute()}")
    if as_json:
        print_json({
            "repository": str(repository.folder), "models": list(repository.models), "backend": model.backend,
            "max_batch_size": model.batch.max, MODEL_SHA256: model.sha256,
        })  # fmt: skip
