"""The connection to a Ray cluster, quiet on the terminal, and the size of the actors that its nodes take."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opal_deploy.errors import UsageError, first_line
from opal_deploy.logs import Log
from opal_deploy.run.options import InferOptions
from opal_deploy.runtime.devices import CPU_BATCH, GPU_BATCH

LOCAL = "local"
_CONNECT_SECONDS = 10.0
# default cores of a CPU actor: many small actors keep the cores busier than few large ones
_DEFAULT_CPUS = 4


@dataclass(frozen=True)
class Node:
    """A living node: its id in Ray, its IP address, and the cores and GPUs that Ray may assign there, taken or not."""

    key: str
    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class ActorPlan:
    """The size of every actor of a run: 0 or 1 GPUs, and CPU cores."""

    gpus: int
    cpus: int

    def count_places(self, node: Node) -> int:
        """Return how many actors a node takes."""
        if self.gpus:
            return min(node.gpus, node.cpus // self.cpus)
        return node.cpus // self.cpus

    @property
    def default_batch(self) -> int:
        """The default batch size of an actor."""
        return GPU_BATCH if self.gpus else CPU_BATCH

    def __str__(self) -> str:
        return f"a GPU and {self.cpus} CPUs" if self.gpus else f"{self.cpus} CPUs"


def check_ray_options(options: InferOptions) -> None:
    """Raise UsageError for options that contradict `ray`."""
    if options.ray is None and options.ray_cpus is not None:
        raise UsageError("--ray-cpus without --ray: it is the size of a Ray actor; give --ray local, auto or HOST:PORT")
    if options.ray is not None and options.device != "auto":
        raise UsageError(
            f"--device {options.device} with --ray: every actor has one GPU, or with --ray-cpus N that many CPUs; "
            "leave out --device"
        )
    if options.ray is not None and options.every is not None:
        raise UsageError("--every with --ray: videos are decoded on one machine; leave out --ray")


@dataclass
class NodeStatistics:
    """The work of one node's actors.

    Attributes:
        address, runtime: of the node, and the runtime and device of its actors.
        started: when its first actor had opened, by `time.monotonic`.
        images, seconds: images done, and the time from `started` to the last of them.
        lost: actors that died.
    """

    address: str
    runtime: str
    started: float
    images: int = 0
    seconds: float = 0.0
    lost: int = 0

    @property
    def images_per_second(self) -> float:
        """The rate from the first actor's start to the last answer."""
        return self.images / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class OpenCluster:
    """A connected cluster: Ray's version, its head as HOST:PORT, and the size of the actors."""

    version: str
    head: str
    plan: ActorPlan


@dataclass(frozen=True)
class ClusterProgress:
    """The nodes that returned results, sorted by address, and the actors started and chunks retried so far."""

    nodes: Sequence[NodeStatistics] = ()
    actors_started: int = 0
    chunks_retried: int = 0


@contextmanager
def open_cluster(address: str, cpus: int | None, log: Log) -> Iterator[ActorPlan]:
    """Connect to a cluster while the block runs, and yield the size of its actors; see `connect` and `plan_actors`."""
    with connect(address):
        nodes = list_nodes()
        plan = plan_actors(nodes, cpus)
        places = [plan.count_places(node) for node in nodes]
        no_gpu = "no GPU in the cluster: " if cpus is None and not plan.gpus else ""
        log(f"Ray: {no_gpu}{sum(places)} actors of {plan} on {sum(map(bool, places))} of {len(nodes)} nodes")
        yield plan


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Connect this process to a cluster while the block runs; Ray must not have been imported.

    Args:
        address: `local` starts Ray on this machine's loopback address until the end of the block; `auto` uses the
            cluster that this machine belongs to; else HOST:PORT of its head.

    Raises:
        UsageError: there is no such cluster.
    """
    if "://" in address:
        raise UsageError(
            f"--ray {address}: Ray Client holds no run of this kind; run opal-deploy on a node of the cluster with "
            "--ray auto, for instance as `ray job submit -- opal-deploy infer ... --ray auto`"
        )
    _keep_quiet()
    host, _, port = address.partition(":")
    if port:
        _check_reachable(address)
    environment = {}
    if address == LOCAL:
        # other users of this machine can reach its ports
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if address == LOCAL or (port and _listens_on_loopback_only(host, int(port))):
        # read when Ray is imported; without it, Ray replaces a loopback address by this machine's outer one
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": True, "logging_level": logging.CRITICAL}
    if address == LOCAL:
        options |= {"address": "local", "include_dashboard": False}
    else:
        options["address"] = address
        if host.startswith("127."):
            # otherwise Ray uses this machine's outer address, where such a cluster has no node
            options["_node_ip_address"] = host
    try:
        with _signal_handlers_kept():
            ray.init(**options)
    except (RuntimeError, ValueError, OSError) as error:
        raise no_connection(address, first_line(error)) from None
    try:
        yield
    finally:
        with _signal_handlers_kept():
            ray.shutdown()


def list_nodes() -> list[Node]:
    """Return the living nodes of the connected cluster, sorted by address."""
    import ray

    nodes = [
        Node(
            str(node["NodeID"]),
            str(node["NodeManagerAddress"]),
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address, node.key))


def plan_actors(nodes: list[Node], cpus: int | None) -> ActorPlan:
    """Return the size of the actors; raise UsageError if no node has room for one.

    `cpus`: cores of a CPU actor; None: one actor per GPU with its share of the cores, or without GPUs actors of four
    cores, or of the smallest node's.
    """
    largest = max((node.cpus for node in nodes), default=0)
    with_gpu = [node for node in nodes if node.gpus and node.cpus]
    if cpus is None and with_gpu:
        return ActorPlan(1, max(1, min(node.cpus // node.gpus for node in with_gpu)))
    if cpus is None and largest:
        cpus = min(_DEFAULT_CPUS, *(node.cpus for node in nodes if node.cpus))
    if cpus is None or cpus > largest:
        found = f"the largest of {len(nodes)} nodes has {largest} CPUs"
        wanted = "neither a GPU nor a CPU to give" if cpus is None else f"no room for actors of {cpus} CPUs"
        raise UsageError(f"--ray: the cluster has {wanted} ({found}); start nodes first, or give a smaller --ray-cpus")
    return ActorPlan(0, cpus)


def is_reachable(address: str) -> bool:
    """Return whether something listens at HOST:PORT."""
    try:
        _check_reachable(address)
    except UsageError:
        return False
    return True


def _check_reachable(address: str) -> None:
    """Raise UsageError unless something listens at an address: Ray would print and wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (ValueError, OverflowError, OSError) as error:
        raise no_connection(address, first_line(error)) from None


def _listens_on_loopback_only(host: str, port: int) -> bool:
    """Return whether a port of this machine is open at a loopback address, but not at its outer address."""
    if not (host.startswith("127.") or host == "localhost"):
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # sends nothing: it only asks for the route
            probe.connect(("192.0.2.1", 9))
            outer = probe.getsockname()[0]
        socket.create_connection((outer, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return True
    return False


def no_connection(address: str, reason: str) -> UsageError:
    """Return the error of a cluster that cannot be joined."""
    return UsageError(
        f"--ray {address}: no connection ({reason}); expected local, auto on a node of a cluster, or "
        "HOST:PORT of its head from such a node, with RAY_AUTH_MODE=token where the cluster wants a token"
    )


def _keep_quiet() -> None:
    """Tell Ray, before it is imported, to print nothing: the run itself informs the user."""
    # pages of a dead node's log, on stdout
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which Ray replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
