"""The model of a measurement, opened as `infer` opens it."""

from __future__ import annotations

from pathlib import Path

from opal_deploy.bench.record import Subject
from opal_deploy.bench.subjects.names import head_name
from opal_deploy.bench.subjects.opening import Opened, Setup, open_file
from opal_deploy.runtime.select import CHECKPOINT_SUFFIXES


def open_as_infer_does(path: Path, *, device: str, threads: int | None) -> Opened:
    """An ONNX file or an engine in its runtime; a checkpoint in the reference session, normalised on the host.

    Raises:
        ArtifactError, CheckpointError: no such model, or not ours. MissingExtra: its runtime is not installed.
        UsageError: a device that is not there.
    """
    if path.suffix in CHECKPOINT_SUFFIXES and path.is_file():
        return _checkpoint(path, device, threads)
    return open_file(path, Setup(device=device, threads=threads))


def _checkpoint(path: Path, device: str, threads: int | None) -> Opened:
    from opal_deploy.runtime.select import open_sessions

    (session,) = open_sessions(path, device=device, threads=threads)
    import torch

    from opal_deploy.artifact.files import sha256_of_file
    from opal_deploy.runtime.torch_session import torch_device

    metadata = session.metadata
    subject = Subject(
        name=path.name,
        backbone=metadata.backbone,
        head=head_name(metadata.head),
        runtime="torch eager",
        runtime_version=torch.__version__,
        device=str(torch_device(device)),
        precision=metadata.precision,
        layout="uint8 NHWC, normalised on the host; convolutions NCHW",
        input_size=metadata.input_size,
        num_classes=metadata.num_classes,
        prototypes_per_class=metadata.prototypes_per_class,
        sha256=sha256_of_file(path),
    )
    return Opened(session, subject, torch.get_num_threads() if subject.device == "cpu" else None)
