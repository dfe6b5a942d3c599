"""Open the model of a command or a run, and check that it supports the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opal_deploy.artifact.engine_file import Sidecar
from opal_deploy.artifact.files import check_sha256, compute_sha256
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.logs import Log, WarningLine, log_line
from opal_deploy.options import RuntimeName
from opal_deploy.runtime.devices import parse_device, split_devices
from opal_deploy.runtime.onnx_session import cuda_is_usable
from opal_deploy.runtime.select import find_model, find_newest_run, open_sessions, read_model_metadata
from opal_deploy.runtime.session import Session
from opal_deploy.runtime.tensorrt import find_incompatibility_here


@dataclass(frozen=True)
class LoadedModel:
    """A model file, its sessions (one per device; none on a cluster), its name and digest, and its metadata."""

    path: Path
    sessions: list[Session]
    fingerprint: dict[str, str]
    metadata: Metadata


def load_model(
    path: Path | None,
    *,
    device: str = "auto",
    threads: int | None = None,
    cuda_graphs: bool = False,
    expect_sha256: str | None = None,
    runtime: RuntimeName = "auto",
    log: Log = log_line,
    elsewhere: bool = False,
) -> LoadedModel:
    """Open the model on its devices; without a path, the best one of the working directory.

    With `elsewhere`, other processes open it, and it gets no sessions here.

    Raises:
        ArtifactError: the model does not exist, is damaged, or its digest is not `expect_sha256`.
        UsageError: the device does not exist, or the runtime does not support the model.
        MissingExtra: the runtime is not installed.
    """
    path = path or find_default_model(device, runtime, log)
    if elsewhere and not path.is_file():
        raise ArtifactError(f"{path}: no such model; expected a file of `opal-deploy export`, or a checkpoint")
    if expect_sha256 is not None:
        check_sha256(path, expect_sha256)
    if elsewhere:
        return LoadedModel(path, [], fingerprint_model(path), read_model_metadata(path))
    sessions = open_sessions(path, device=device, threads=threads, cuda_graphs=cuda_graphs, runtime=runtime)
    return LoadedModel(path, sessions, fingerprint_model(path), sessions[0].metadata)


def find_default_model(
    device: str, runtime: RuntimeName = "auto", log: Log = log_line, *, folder: Path = Path(), option: str = "--model"
) -> Path:
    """Return the best model that this machine and runtime can run, and log which one and why.

    Searches the folder or, if it has no model, the newest run below its `runs` that has one. Errors name `option` as
    the way to give a model.
    """
    # the first device decides: a session refuses devices of different kinds
    _, index = parse_device(split_devices(device)[0])

    def check_engine(sidecar: Sidecar) -> str:
        if device == "cpu":
            return "an engine runs on a GPU, and --device is cpu"
        return find_incompatibility_here(sidecar, index)

    gpu = device != "cpu" and cuda_is_usable()
    run = find_newest_run(folder, runtime)
    folder, prefix, origin = (folder, "", "") if run is None else (run, "best.", "of the newest exported run in runs; ")
    choice = find_model(folder, gpu=gpu, check_engine=check_engine, runtime=runtime, prefix=prefix, option=option)
    log(f"Model: {choice.path} ({origin}{choice.reason})")
    return choice.path


def check_model(path: Path, metadata: Metadata, *, explain: bool, boxed: bool, top: int, log: Log = log_line) -> None:
    """Check that the model supports the call, and log what limits its use.

    `explain`: overlays are drawn. `boxed`: images are cropped to boxes. `top`: classes to list in each record.

    Raises:
        UsageError: the model has no evidence, or lists fewer classes than asked for.
    """
    if metadata.max_top < min(top, metadata.num_classes):
        raise UsageError(
            f"{path}: it lists {metadata.max_top} of {metadata.num_classes} classes; give --top {metadata.max_top}, or "
            f"a file that lists more: opal-deploy export {metadata.checkpoint_name} --outputs topk --top-k {top}"
        )
    if metadata.evidence == "none" and explain:
        raise UsageError(
            f"{path}: it has no anchors, so a dense layer mixes all channels and no evidence can be shown; "
            "leave out --explain, or train the OPAL head"
        )
    if metadata.evidence == "map" and explain:
        log("This model averages over cells: no single cell is its evidence, so overlays show no boxes")
    log_cautions(metadata, boxed=boxed, crop_hint="--boxes FILE", log=log)


def log_cautions(metadata: Metadata, *, boxed: bool, crop_hint: str, log: Log = log_line) -> None:
    """Log that the model is unverified or was trained on crops, if so; `crop_hint` says how to give them."""
    if metadata.unverified:
        unverified = f"this model was {metadata.unverified}; its outputs were never compared with the reference"
        log(WarningLine(f"NOT VERIFIED: {unverified}"))
    if metadata.crop == "boxes" and not boxed:
        log("This model was trained on images cropped to boxes; expect lower accuracy without them: give " + crop_hint)


def fingerprint_model(path: Path) -> dict[str, str]:
    """Return the name and sha256 of a model file."""
    return {"file": path.name, "sha256": compute_sha256(path)}
