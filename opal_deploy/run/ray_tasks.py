"""Shards as tasks of a Ray cluster, with Ray's own placement, resources and retries. Ray is imported only here.

A task runs its shard in a process of its own, as on one machine, so that what ends that process does not end the task.
A node that is lost costs its shards' processes: Ray starts the tasks elsewhere, where they are resumed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from opal_deploy.artifact.engine_file import sidecar_path
from opal_deploy.artifact.files import model_kind
from opal_deploy.errors import OpalError, UsageError, first_line, require
from opal_deploy.records.run_files import RUN
from opal_deploy.remote import is_url
from opal_deploy.run.shards import POLL_SECONDS, ShardedRun, ShardJob, supervise_shard
from opal_deploy.worker_pool import WorkerPool

_CONNECT_SECONDS = 10.0
# default cores of a shard without a GPU: many small ones keep the cores busier than few large ones
_DEFAULT_CPUS = 4
# times that a task is started again after its node was lost
_RETRIES = 5


def run_on_ray(run: ShardedRun) -> None:
    """Run the shards on a cluster, and set their number if the call does not; see `run_shards`."""
    options, path = run.setup.options, run.setup.model.path
    with _connect(str(options.ray)) as ray:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus, run.cpus, places = choose_size(nodes, options.ray_cpus)
        run.devices = ("cuda" if gpus else "cpu",) * (options.shards or places)
        size = f"a GPU and {run.cpus} CPUs" if gpus else f"{run.cpus} CPUs"
        options.log(f"Ray {ray.__version__}: {len(run.devices)} shards, each with {size}; {places} fit at a time")
        files = [path, *([sidecar_path(path)] if model_kind(path) == "engine" else [])]
        model = ray.put({file.name: file.read_bytes() for file in files})
        task = ray.remote(_run_task).options(
            num_cpus=run.cpus, num_gpus=gpus, max_retries=_RETRIES, scheduling_strategy="SPREAD"
        )
        running = {task.remote(job, model, os.getcwd()): job for job in run.find_missing()}
        complete = True
        try:
            while running and not run.interrupt.requested:
                done, _ = ray.wait(list(running), timeout=POLL_SECONDS)
                for reference in done:
                    job = running.pop(reference)
                    try:
                        result = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        raise OpalError(f"{job.name}: {first_line(error)}") from error
                    if isinstance(result, OpalError):
                        raise result
                    complete &= result
                run.report_progress()
        finally:
            # what is left is interrupted: its records are whole, and the same call resumes it
            for reference in running:
                ray.cancel(reference, force=True)
        run.interrupt.stopped = bool(running) or not complete


def choose_size(nodes: list[dict[str, float]], cpus: int | None) -> tuple[int, int, int]:
    """Return GPUs and cores of a shard, and how many fit on the nodes at a time.

    Args:
        nodes: the resources of each living node, as Ray names them.
        cpus: cores of a shard without a GPU; None: a GPU with its share of the cores, or without GPUs four cores, or
            the smallest node's.

    Raises:
        UsageError: no node has room for a shard.
    """
    cores = [int(node.get("CPU", 0)) for node in nodes]
    with_gpu = [(int(node["GPU"]), int(node.get("CPU", 0))) for node in nodes if node.get("GPU") and node.get("CPU")]
    if cpus is None and with_gpu:
        share = max(1, min(cpu // gpu for gpu, cpu in with_gpu))
        return 1, share, sum(min(gpu, cpu // share) for gpu, cpu in with_gpu)
    cpus = cpus or min([_DEFAULT_CPUS, *filter(None, cores)])
    places = sum(count // cpus for count in cores)
    if not places:
        raise UsageError(
            f"--ray: the largest of {len(nodes)} nodes has {max(cores, default=0)} CPUs, and a shard takes {cpus}; "
            "start nodes first, or give a smaller --ray-cpus"
        )
    return 0, cpus, places


def _run_task(job: ShardJob, model: dict[str, bytes], folder: str) -> bool | OpalError:
    """Run a shard on a node; errors that a user can cause are returned, since Ray would wrap them in tracebacks."""
    try:
        with suppress(OSError):  # where all paths are absolute, it need not be there
            os.chdir(folder)
        if not is_url(str(job.options.out)) and not (Path(str(job.options.out)) / RUN).exists():
            raise UsageError(
                f"{job.options.out}: a node of the cluster does not see it; expected --out on storage that all nodes "
                "share, or a URL in a bucket"
            )
        with TemporaryDirectory(prefix="opal-deploy-") as local, WorkerPool(1) as pool:
            for name, data in model.items():
                (Path(local) / name).write_bytes(data)
            # the shard checks its digest
            job = replace(job, model=Path(local) / job.model.name)
            return supervise_shard(job, pool, threading.Event(), lambda _: None)
    except OpalError as error:
        return error


@contextmanager
def _connect(address: str) -> Iterator[Any]:
    """Connect this process to a cluster while the block runs, and yield the module `ray`.

    Args:
        address: `auto`, the cluster that this machine belongs to; or HOST:PORT of its head.

    Raises:
        UsageError: there is no such cluster. MissingExtra: Ray is not installed.
    """
    require("ray", "ray", "--ray")
    host, _, port = address.partition(":")
    if address != "auto" and not port.isdecimal():
        raise UsageError(
            f"--ray {address}: expected auto on a node of a cluster, or HOST:PORT of its head; from elsewhere, submit "
            "the command there: ray job submit -- opal-deploy infer ... --ray auto"
        )
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.CRITICAL}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if host.startswith("127."):
        # otherwise Ray replaces a loopback address by this machine's outer one, where such a cluster has no node
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        options["_node_ip_address"] = host
    import ray

    try:
        if port:
            # otherwise Ray prints and waits for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        with _signal_handlers_kept():
            ray.init(**options)
    except (OverflowError, RuntimeError, ValueError, OSError) as error:
        raise UsageError(
            f"--ray {address}: no connection ({first_line(error)}); expected auto on a node of a cluster, or "
            "HOST:PORT of its head from such a node, with RAY_AUTH_MODE=token where the cluster wants a token"
        ) from None
    try:
        yield ray
    finally:
        with _signal_handlers_kept():
            ray.shutdown()


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which Ray replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
