"""The pool of worker processes: a crash, a hang or an exception costs one call, and nothing outlives the caller."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.worker_pool import WorkerCrashed, WorkerPool, WorkerTimeout
from tests.bright import wait_until


def ended(pid):
    """Return whether a process has ended; its parent may not have noticed yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert not [child for child in psutil.Process().children() if "worker_pool" in " ".join(child.cmdline())]


@pytest.fixture
def blocked(tmp_path):
    """A file whose reader waits until it is written to."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_a_call_returns_the_result_or_raises_the_exception():
    with WorkerPool(1) as pool:
        assert pool.call(divmod, 7, 2) == (3, 1)
        assert pool.call(sorted, [1, 2], reverse=True) == [2, 1]
        with pytest.raises(UsageError, match="batch"):
            pool.call(InferenceOptions, batch=0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            pool.call(divmod, 1, 0)


def test_one_process_serves_calls_that_follow_each_other_and_ctrl_c_does_not_reach_it():
    with WorkerPool(8) as pool:
        assert len({pool.call(os.getpid) for _ in range(4)}) == 1
        assert pool.call(os.getpgid, 0) != os.getpgid(0)


def test_prints_are_no_results():
    with WorkerPool(1) as pool:
        assert pool.call(print, "a library prints", flush=True) is None
        assert pool.call(os.write, 2, b"x" * 1_000_000) == 1_000_000


def fork_and_end():
    """End this process as a library does that has forked."""
    if os.fork():
        os._exit(7)
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "arguments", "end"),
    [(os._exit, (7,), "exit code 7"), (os.abort, (), "SIGABRT"), (fork_and_end, (), "exit code 7")],
)
def test_a_crash_costs_its_call_only(blocked, function, arguments, end):
    with WorkerPool(2, timeout=20) as pool, ThreadPoolExecutor(1) as threads:
        other = threads.submit(pool.call, Path.read_text, blocked)
        with blocked.open("w") as stream:
            with pytest.raises(WorkerCrashed, match=end):
                pool.call(function, *arguments)
            assert pool.call(abs, -1) == 1
            stream.write("unharmed")
        assert other.result() == "unharmed"


def test_a_call_that_takes_too_long_is_killed(blocked):
    with WorkerPool(1, timeout=1) as pool:
        pid = pool.call(os.getpid)
        with pytest.raises(WorkerTimeout, match="1 s"):
            pool.call(Path.read_text, blocked)
        assert ended(pid)
        assert pool.call(abs, -1) == 1


def test_a_process_that_is_killed_between_calls_costs_nothing():
    with WorkerPool(1) as pool:
        pid = pool.call(os.getpid)
        os.kill(pid, signal.SIGKILL)
        # all its threads, without taking the exit status from the pool
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert pool.call(abs, -1) == 1


def test_an_interrupt_reaches_the_processes_that_run_calls(blocked):
    with WorkerPool(2) as pool, ThreadPoolExecutor(1) as threads:
        busy = threads.submit(pool.call, Path.read_text, blocked)
        with blocked.open("w"):
            idle = pool.call(os.getpid)
            pool.interrupt()
            with pytest.raises(WorkerCrashed, match="SIGTERM"):
                busy.result()
        assert not ended(idle)


def test_closing_ends_what_a_process_started():
    with WorkerPool(1) as pool:
        pid = pool.call(os.posix_spawn, "/bin/sleep", ["sleep", "600"], {})
    wait_until(lambda: ended(pid))


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("executable", "/nowhere/python", "No such file"),
        ("executable", "false", "exit code 1"),
        ("path", ["/nowhere"], "ModuleNotFoundError"),
    ],
)
def test_a_process_that_cannot_be_started_stops_the_run_in_one_line(monkeypatch, attribute, value, reason):
    monkeypatch.setattr(sys, attribute, value)
    with WorkerPool(1) as pool, pytest.raises(StoppedEarly, match=reason) as caught:
        pool.call(abs, -1)
    assert "--no-isolate" in str(caught.value)
    assert "\n" not in str(caught.value)


# without a guard: a process that imported the caller's main module would start others for ever
SCRIPT = """
import os, pathlib, sys
from concurrent.futures import ThreadPoolExecutor
from opal_deploy.worker_pool import WorkerPool

print("main", flush=True)
pool = WorkerPool(2)
threads = ThreadPoolExecutor(1)
busy = threads.submit(pool.call, pathlib.Path.write_text, pathlib.Path(sys.argv[1]), "blocks until somebody reads")
print(pool.call(os.getpid), flush=True)
"""


def test_no_process_outlives_a_killed_caller_or_imports_its_main_module(blocked, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", blocked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout.readline() == "main\n"
        idle = int(caller.stdout.readline())
        wait_until(lambda: len(psutil.Process(caller.pid).children()) == 2)
        workers = {child.pid for child in psutil.Process(caller.pid).children()}
        assert idle in workers
        caller.kill()
        assert caller.stdout.read() == ""
    for pid in workers:
        wait_until(lambda pid=pid: ended(pid))
