"""`infer --ray` on a cluster of three nodes on this machine: its files are those of one machine, whatever dies."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from opal_deploy.errors import UsageError
from tests.cli.calls import one_line, read_results
from tests.runs import KILLER, SLOWER, Infer, make_killer

ray = pytest.importorskip("ray")

IMAGES = 40
# a dead node is noticed within seconds
HEALTH = {"period_ms": "500", "timeout_ms": "500", "initial_delay_ms": "500", "failure_threshold": "3"}


class Nodes:
    """The cluster: a head that only keeps the books, and nodes of one CPU each."""

    def __init__(self, folder):
        from ray.cluster_utils import Cluster

        self.folder, self.slow = folder, folder / "slow"
        self._cluster = Cluster()
        self._last = 1
        self._add(num_cpus=0)
        self.nodes = [self.add() for _ in range(3)]

    @property
    def address(self):
        return str(self._cluster.address)

    def add(self):
        return self._add(num_cpus=1)

    def _add(self, num_cpus):
        self._last += 1
        return self._cluster.add_node(
            wait=False, node_ip_address=f"127.0.0.{self._last}", num_cpus=num_cpus, include_dashboard=False,
            object_store_memory=80 << 20,
        )  # fmt: skip

    def kill(self, node):
        """Kill a node's raylet, and with it everything that runs there."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def shut_down(self):
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    modules = tmp_path_factory.mktemp("modules")
    (modules / "sitecustomize.py").write_text(KILLER + SLOWER)
    # the path of a socket has 107 characters at most
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("SLOW", str(folder / "slow"))
        patch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
        for name, value in HEALTH.items():
            patch.setenv(f"RAY_health_check_{name}", value)
        cluster = Nodes(folder)
        try:
            yield cluster
        finally:
            cluster.shut_down()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def images(tmp_path_factory, make_pictures):
    """Images, one of them broken."""
    folder = tmp_path_factory.mktemp("images")
    make_pictures(folder, IMAGES)[7].write_bytes(b"no")
    return folder


@pytest.fixture
def infer(tmp_path, exact_model, images):
    infer = Infer(tmp_path, exact_model, images)
    yield infer
    infer.end()


def test_a_cluster_writes_the_files_of_one_machine_and_prints_as_much(infer, nodes):
    drawings = ("--explain", "--sheets", "--format", "csv", "--shard", "2/2")
    one, ray = infer("one", *drawings), infer("ray", *drawings, "--ray", nodes.address, "--ray-cpus", "1")
    assert (one.returncode, ray.returncode) == (3, 3), ray.stderr
    assert infer.files("ray") == infer.files("one")
    assert (infer.cwd / "ray/report.html").read_text().count("<article") == IMAGES // 2
    lines = [[line for line in done.stderr.splitlines() if not line.startswith("images: ")] for done in (one, ray)]
    # the cluster at its start, the nodes' rates at its end
    assert len(lines[1]) == len(lines[0]) + 2, ray.stderr
    assert not ray.stdout
    assert sum(node["images"] for node in infer.summary("ray")["ray"]["nodes"]) == IMAGES // 2
    assert not list(nodes.folder.glob("opal-deploy-*/*"))


def test_a_node_that_is_killed_costs_no_record(infer, nodes):
    infer("one")
    nodes.slow.touch()
    process = infer.start("ray", "--ray", nodes.address, "--ray-cpus", "1")
    infer.wait_for("ray", 4, process)
    nodes.kill(nodes.nodes[0])
    nodes.slow.unlink()
    nodes.nodes.append(nodes.add())
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 3, stderr
    assert infer.files("ray") == infer.files("one")
    assert not stdout


def test_an_image_that_kills_its_actor_gets_a_record_and_the_others_their_answers(infer, nodes, images):
    infer("one")
    folder = infer.cwd / "in"
    folder.unlink()
    shutil.copytree(images, folder)
    make_killer(folder / "021.png")
    done = infer("ray", "--no-isolate", "--ray", nodes.address, "--ray-cpus", "1")
    assert done.returncode == 3, done.stderr
    records, expected = read_results(infer.cwd / "ray"), read_results(infer.cwd / "one")
    assert records[21]["error"]["code"] == "worker_died"
    assert (records[21]["image"], records[21]["image_index"]) == ("in/021.png", 21)
    assert records[:21] + records[22:] == expected[:21] + expected[22:]
    # its chunk of 8 twice, then 4, 2 and 1
    assert sum(node["actors_lost"] for node in infer.summary("ray")["ray"]["nodes"]) == 5


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_whose_driver_ended_goes_on(infer, nodes, end):
    # where a signal ends it in good order, six times the same images: more than are read ahead of a slow chunk
    images = (*["in"] * 5, "--explain") if end is signal.SIGTERM else ("--explain",)
    infer("one", *images)
    nodes.slow.touch()
    process = infer.start("ray", *images, "--ray", nodes.address, "--ray-cpus", "1")
    infer.wait_for("ray", 3, process)
    process.send_signal(end)
    nodes.slow.unlink()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if end is signal.SIGTERM else -end), stderr
    done = infer("ray", *images, "--ray", nodes.address, "--ray-cpus", "1")
    assert done.returncode == 3, done.stderr
    assert " records are there already" in done.stderr
    assert infer.files("ray") == infer.files("one")


def find_process(caller, title):
    """Return the id of a process with these words in its command line, in the session of a caller's Ray driver."""
    children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children")
    drivers = set(map(int, children.read_text().split()))
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(folder.name)) in drivers and title in (folder / "cmdline").read_bytes():
                return int(folder.name)
    raise AssertionError(f"no process {title}")


@pytest.mark.parametrize(
    ("address", "victim"),
    [
        (None, b"cluster.driver import"),
        # without its agent a raylet ends, and without its raylet a driver
        pytest.param("local", b"ray::DashboardAgent", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_ray_ended_stops_early_and_goes_on(infer, nodes, address, victim):
    arguments = ("in", "in", "--explain", "--ray", address or nodes.address, "--ray-cpus", "1")
    infer("one", *arguments[:3])
    nodes.slow.touch()
    process = infer.start("ray", *arguments)
    infer.wait_for("ray", 3, process)
    os.kill(find_process(process, victim), signal.SIGKILL)
    nodes.slow.unlink()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 5, stderr
    # a busy machine may be waiting for its actors
    usual = ("Ray: ", "Explaining", "Evidence", "Still waiting", "images: ", "127.0.0")
    lines = [line for line in stderr.splitlines() if not line.startswith(usual)]
    assert len(lines) == 1, stderr
    assert "processes on this machine ended" in lines[0]
    assert "; the same command resumes: opal-deploy infer in" in lines[0]
    done = infer("ray", *arguments)
    assert done.returncode == 3, done.stderr
    assert infer.files("ray") == infer.files("one")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ray", "ray://head:10001"], "ray job submit"),
        (["--ray", "local", "--device", "cpu"], "leave out --device"),
        (["--ray-cpus", "2"], "--ray-cpus without --ray"),
        (["--ray", "127.0.0.77:9"], "no connection ([Errno 111] Connection refused)"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(infer, arguments, says):
    assert says in one_line(infer("out", *arguments))
    assert not (infer.cwd / "out").exists()


def test_a_node_of_another_version_is_one_line(infer, nodes):
    (infer.cwd / "sitecustomize.py").write_text("import opal_deploy._version as v; v.__version__ = '9.9'")
    path = os.pathsep.join([str(infer.cwd), os.environ["PYTHONPATH"]])
    process = infer.start("out", "--ray", nodes.address, "--ray-cpus", "1", PYTHONPATH=path)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2, stderr
    assert "and this is 9.9; install the same version" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


def test_a_node_that_does_not_see_a_path_says_which(tmp_path):
    from opal_deploy.cluster.actor import ActorConfig, ChunkActor
    from opal_deploy.parallel.predictor import SessionOptions
    from opal_deploy.predict.types import InferenceOptions
    from opal_deploy.run.run import RunOptions

    missing = str(tmp_path / "photos/a.jpg")
    options = RunOptions(tmp_path, InferenceOptions())
    sessions = SessionOptions("cpu", 1, "auto", False, False)
    config = ActorConfig({}, None, sessions, options, os.getcwd(), [str(tmp_path), missing], None)
    refused = ChunkActor().open(config)
    assert isinstance(refused, UsageError)
    assert str(refused).startswith(f"{missing}: not there; expected images, --out and --atlas on storage that all")


LISTENERS = """
import os, sys
from opal_deploy.cluster.connection import connect
with connect(sys.argv[1]):
    import ray
    print(ray.get(ray.remote(lambda: 3).remote()), os.environ.get("RAY_AUTH_MODE"), flush=True)
    sys.stdin.readline()
"""


def listening_addresses():
    """Return the addresses, as the kernel writes them, and inodes of all sockets of this machine that listen."""
    tables = [Path("/proc/net", kind).read_text() for kind in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {row[9]: row[1].partition(":")[0] for row in rows if row[3] == "0A"}


def sockets_of_ray():
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if b"ray" in (folder.parent / "cmdline").read_bytes():
                yield from (os.readlink(file)[8:-1] for file in folder.iterdir() if os.readlink(file)[:8] == "socket:[")


def test_ray_on_this_machine_alone_listens_on_its_loopback_address_with_a_token():
    before = set(sockets_of_ray())
    command = [sys.executable, "-c", LISTENERS, "local"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "3 token\n"
        ours, addresses = set(sockets_of_ray()) - before, listening_addresses()
        process.communicate("\n")
    open_to = {addresses[inode] for inode in ours if inode in addresses}
    # 127.0.0.1, as IPv4 and as IPv6
    assert open_to <= {"0100007F", "0000000000000000FFFF00000100007F"}, open_to
    assert open_to


def test_a_cluster_at_the_loopback_address_is_reached_there(tmp_path):
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    head = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
    options = [f"--port={port}", "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={folder}"]
    with subprocess.Popen(
        [*head, *options], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as ray:
        try:
            command = [sys.executable, "-c", LISTENERS, f"127.0.0.1:{port}"]
            for _ in range(60):
                done = subprocess.run(command, input="\n", capture_output=True, text=True, timeout=120)
                if "no connection" not in done.stderr:
                    break
                time.sleep(1)
            assert done.stdout == "3 None\n", done.stderr
        finally:
            ray.terminate()
            ray.wait(60)
            shutil.rmtree(folder, ignore_errors=True)


def test_a_damaged_model_is_the_one_line_of_the_node_that_opens_it(infer, nodes, exact_model):
    data = bytearray(exact_model.read_bytes())
    data[len(data) // 2] ^= 1
    (infer.cwd / "damaged.onnx").write_bytes(data)
    done = infer("out", "--model", "damaged.onnx", "--ray", nodes.address, "--ray-cpus", "1")
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("opal-deploy: node 127.0.0.")
    assert "Traceback" not in done.stderr
