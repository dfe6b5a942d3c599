"""`infer --ray` on a cluster of two nodes on this machine writes the files of one process, whatever dies."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.run.ray_tasks import choose_size
from tests.cli.calls import check
from tests.runs import SLOWER, Infer

pytest.importorskip("ray")

IMAGES = 40
# a dead node is noticed within seconds
HEALTH = {"period_ms": "500", "timeout_ms": "500", "initial_delay_ms": "500", "failure_threshold": "3"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head that only keeps the books, and nodes of one CPU each, on different loopback addresses."""
    from ray.cluster_utils import Cluster

    modules = tmp_path_factory.mktemp("modules")
    (modules / "sitecustomize.py").write_text(SLOWER)
    # the path of a socket has 107 characters at most
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_TMPDIR", "TMPDIR"):
            patch.setenv(name, str(folder))
        patch.setenv("SLOW", str(folder / "slow"))
        patch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
        for name, value in HEALTH.items():
            patch.setenv(f"RAY_health_check_{name}", value)
        cluster = Cluster()
        try:
            for number in range(3):
                add_node(cluster, number)
            yield cluster
        finally:
            cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def add_node(cluster, number):
    cluster.add_node(
        wait=False, node_ip_address=f"127.0.0.{number + 2}", num_cpus=min(number, 1), include_dashboard=False,
        object_store_memory=80 << 20,
    )  # fmt: skip


@pytest.fixture
def infer(tmp_path, exact_model, make_pictures):
    make_pictures(tmp_path / "images", IMAGES)[7].write_bytes(b"no")
    infer = Infer(tmp_path, exact_model, tmp_path / "images")
    yield infer
    infer.end()


@pytest.mark.slow
def test_a_cluster_writes_the_files_of_one_process(infer, cluster):
    drawings = ("--explain", "--format", "csv")
    check(infer("one", *drawings), 3)
    check(infer("ray", *drawings, "--ray", cluster.address, "--ray-cpus", "1"), 3)
    assert infer.files("ray") == infer.files("one")
    assert infer.summary("ray")["shards"] == 2


@pytest.mark.slow
def test_a_node_that_is_killed_costs_no_record(infer, cluster):
    # more images than a shard reads before it waits
    images, slow = ("in", "in"), Path(os.environ["SLOW"])
    check(infer("one", *images), 3)
    slow.touch()
    process = infer.start("ray", *images, "--no-isolate", "--ray", cluster.address, "--ray-cpus", "1")
    for number in (1, 2):
        infer.wait_for(f"ray/shards/{number}-of-2", 4, process)
    # its raylet, and with it everything that runs there
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    add_node(cluster, 3)
    slow.unlink()
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 3, stderr
    assert infer.files("ray") == infer.files("one")


@pytest.mark.parametrize(
    ("address", "word"), [("ray://head:10001", "submit"), ("local", "HOST:PORT"), ("127.0.0.77:9", "refused")]
)
def test_an_address_without_a_cluster_is_a_wrong_call(infer, address, word):
    assert word in check(infer("out", "--ray", address), 2).stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("nodes", "cpus", "size"),
    [
        ([(8, 0), (2, 0)], None, (0, 2, 5)),
        ([(64, 0), (0, 0)], None, (0, 4, 16)),
        ([(64, 0)], 16, (0, 16, 4)),
        ([(64, 8), (12, 2), (32, 0)], None, (1, 6, 10)),
        ([(64, 8)], 8, (0, 8, 8)),
        ([(0, 0)], None, None),
        ([(2, 0), (3, 0)], 4, None),
    ],
)
def test_shards_are_as_large_as_the_nodes_allow(nodes, cpus, size):
    resources = [{"CPU": float(cpu), "GPU": float(gpu)} for cpu, gpu in nodes]
    with contextlib.nullcontext() if size else pytest.raises(UsageError, match="CPUs"):
        assert choose_size(resources, cpus) == size
