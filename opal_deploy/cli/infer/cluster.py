"""What `infer --ray` has of its own: the cluster, a model that only its actors open, and their batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.artifact.files import check_sha256
from opal_deploy.cli.console import print_message
from opal_deploy.cli.infer.setup import LoadedModel, find_default_model, fingerprint_model
from opal_deploy.cli.options import CPU_BATCH, GPU_BATCH
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.options import RuntimeName

if TYPE_CHECKING:
    from opal_deploy.inference.cluster.backend import RayBackend
    from opal_deploy.inference.cluster.connection import ActorPlan


def check_options(ray: str | None, ray_cpus: int | None, device: str) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: there are such.
    """
    if ray is None and ray_cpus is not None:
        raise UsageError("--ray-cpus without --ray: it is the size of a Ray actor; give --ray local, auto or HOST:PORT")
    if ray is not None and device != "auto":
        raise UsageError(
            f"--device {device} with --ray: every actor has one GPU, or with --ray-cpus N that many CPUs; leave out "
            "--device"
        )


@contextmanager
def open_cluster(address: str, cpus: int | None) -> Iterator[ActorPlan]:
    """Connect to a cluster while the block runs, and yield the size of its actors.

    Raises:
        MissingExtra: ray is not installed. UsageError: there is no such cluster, or it has no room for such actors.
    """
    from opal_deploy.inference.cluster.connection import connect, list_nodes, plan_actors

    with connect(address):
        nodes = list_nodes()
        plan = plan_actors(nodes, cpus)
        places = [plan.count_places(node) for node in nodes]
        no_gpu = "no GPU in the cluster: " if cpus is None and not plan.gpus else ""
        print_message(f"Ray: {no_gpu}{sum(places)} actors of {plan} on {sum(map(bool, places))} of {len(nodes)} nodes")
        yield plan


def describe_model(path: Path | None, plan: ActorPlan, expect_sha256: str | None, runtime: RuntimeName) -> LoadedModel:
    """Return a model that is not opened here, only described; without a path, the best of the working directory.

    Raises:
        ArtifactError: there is no such model, it is damaged, or its digest is not `expect_sha256`.
    """
    from opal_deploy.runtime.select import read_model_metadata

    path = path or find_default_model("auto" if plan.gpus else "cpu", runtime)
    if not path.is_file():
        raise ArtifactError(f"{path}: no such model; expected a file of `opal-deploy export`, or a checkpoint")
    if expect_sha256 is not None:
        check_sha256(path, expect_sha256)
    return LoadedModel(path, [], fingerprint_model(path), read_model_metadata(path))


def default_batch(plan: ActorPlan) -> int:
    """Return the default number of images per forward pass of an actor."""
    return GPU_BATCH if plan.gpus else CPU_BATCH


def open_backend(
    plan: ActorPlan,
    model: LoadedModel,
    runtime: RuntimeName,
    threads: int | None,
    cuda_graphs: bool,
    heatmap: bool,
    atlas: Path | None,
) -> RayBackend:
    """Return the backend of the cluster that this process is connected to; see `infer` for the arguments."""
    from opal_deploy.inference.cluster.backend import ModelOptions, RayBackend

    options = ModelOptions(model.path, model.fingerprint["sha256"], runtime, threads, cuda_graphs, heatmap)
    return RayBackend(plan, options, [] if atlas is None else [atlas])
