"""The decoder pool: the same images from threads and processes, and the cost of a crash, a hang or a kill."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from PIL import Image

from opal_deploy.errors import ImageError, StoppedEarly
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER, StageTimer
from opal_deploy.workers import pool as pool_module
from tests.bright import wait_until
from tests.predict.prepared import (
    INPUT,
    assert_alike,
    code,
    open_decoders,
    photograph,
    prepare_all,
    submit,
    with_pixels,
)

# a Pillow plugin in the worker processes: a file's own text says how its decoder misbehaves
PLUGIN = """
import os, pathlib, signal, struct, sys, time
from PIL import Image

hoard = []
deaths = pathlib.Path(__file__).with_name("deaths")
if deaths.exists() and (left := int(deaths.read_text())):
    deaths.write_text(str(left - 1))
    os.kill(os.getpid(), signal.SIGKILL)

def misbehave(file, name):
    _, action, path = file.read().decode().split(" ", 2)
    path = pathlib.Path(path)
    if action == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "quit":
        os._exit(7)
    if action == "fork" and not os.fork():
        time.sleep(600)
    if action == "fork":
        os._exit(7)
    if action == "cut":
        for descriptor in range(3, 32):
            try:
                os.ftruncate(descriptor, 0)
            except OSError:
                pass
    if action == "count":
        frame = sys._getframe()
        while "position" not in frame.f_locals:
            frame = frame.f_back
        for number in range(10**9):
            frame.f_locals["position"][:] = struct.pack("<Q", number % 1000)
            time.sleep(0.01)
    if action == "chatter":
        os.write(1, b"a library prints")
        print("and so does Python")
        os.write(2, b"x" * 1_000_000)
    if action == "hoard":
        hoard.append(b"1" * (300 << 20))
    if action == "modules":
        path.write_text(" ".join(sys.modules))
    if action in ("pid", "slow"):
        path.write_text(str(os.getpid()))
    if action == "slow" and not path.with_suffix(".awake").exists():
        time.sleep(600)
    return Image.new("RGB", (90, 70))

Image.register_open("MISBEHAVING", misbehave, lambda prefix: prefix.startswith(b"MISBEHAVING "))
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)


def misbehaving(path, action):
    """Write a file whose decoder crashes, hangs, ...; a file with the suffix .txt gets its process id or modules."""
    path.write_text(f"MISBEHAVING {action} {path.with_suffix('.txt')}")
    return path


@pytest.fixture
def image(tmp_path):
    return photograph(tmp_path / "a.jpg")


def open_pool(timer=NO_OP_TIMER, rows=1, **options):
    options = {"workers": 1, "isolate": True, **options}
    return open_decoders(InferenceOptions(**options), INPUT, timer, rows=rows)


def decode(pool, path):
    return code(submit(pool, InputImage("a", path)).result(60))


def children():
    return [child for child in psutil.Process().children() if "workers.worker" in " ".join(child.cmdline())]


def read_pid(path):
    wait_until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert children() == []


@pytest.mark.parametrize(
    ("decoding", "keep"), [(Decoding.default, False), (Decoding.exact, True), (Decoding.fast, True)]
)
def test_processes_give_what_threads_give(tmp_path, image, decoding, keep):
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with Image.open(image) as opened:
        opened.load()
    requests = [
        *(InputImage("kind", source) for source in (image, str(image), image.read_bytes(), opened, np.asarray(opened))),
        *(InputImage("size", photograph(tmp_path / f"{n}.jpg", (60 + 40 * n, 50 + 31 * n))) for n in range(4)),
        InputImage("reduced", photograph(tmp_path / "large.jpg", (5000, 50))),
        InputImage("crop", image, (10, 5, 60, 50)),
        InputImage("no box", image, error=ImageError("no_box", "none is listed")),
        InputImage("broken", tmp_path / "broken.jpg"),
        InputImage("gone", tmp_path / "gone.jpg"),
        InputImage("too large", photograph(tmp_path / "huge.jpg", (1800, 1400))),
    ]
    options = {"workers": 2, "keep_images": keep, "decode": decoding, "max_pixels": 2_400_000}
    found = prepare_all(open_pool(**options, rows=9), requests)
    expected = prepare_all(open_pool(**options, isolate=False), requests)
    assert_alike(found, expected)
    assert [code(one) for one in found] == [None] * 11 + ["no_box", "not_an_image", "not_found", "too_many_pixels"]
    assert [None if found[n].image is None else found[n].image.size for n in (0, 9)] == (
        [(90, 70), (4096, 40)] if keep else [None, None]
    )
    assert found[10].geometry.crop == (10, 5, 60, 50)
    for entry in found[:5]:
        assert np.abs(entry.pixels.astype(int) - found[0].pixels).max() <= 1


# ---- decoders that fail


@pytest.mark.parametrize(
    ("action", "message"), [("crash", "SIGSEGV"), ("quit", "exit code 7"), ("fork", "exit code 7")]
)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_decoder_that_ends_costs_its_image_alone(tmp_path, image, plugin, action, message, rows):
    paths = [image] * 6
    paths[2:2] = paths[4:4] = [misbehaving(tmp_path / "bad.jpg", action)]
    found = prepare_all(open_pool(workers=2, decode_timeout=None, rows=rows), paths)
    assert [code(entry) for entry in found] == ["decoder_crashed" if path != image else None for path in paths]
    assert found[2].input.source == paths[2]
    assert message in str(found[2].error)


def test_a_decoder_that_hangs_costs_its_image_alone_and_an_idle_one_has_no_limit(tmp_path, image, plugin):
    with open_pool(decode_timeout=2) as pool:
        assert decode(pool, image) is None
        first = children()
        time.sleep(2.3)
        assert children() == first
        found = submit(pool, InputImage("hang", misbehaving(tmp_path / "slow.jpg", "slow"))).result(60)
        assert read_pid(tmp_path / "slow.txt") == first[0].pid
        assert code(found) == "decode_timeout"
        assert "2 s" in str(found.error)
        assert decode(pool, image) is None


def test_the_time_for_which_the_whole_run_was_stopped_does_not_count(tmp_path, plugin, monkeypatch):
    with open_pool(decode_timeout=300) as pool:
        waiting = submit(pool, InputImage("slow", misbehaving(tmp_path / "slow.jpg", "slow")))
        pid = read_pid(tmp_path / "slow.txt")
        with monkeypatch.context() as patch:
            patch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 600))
            # three rounds of the watch
            time.sleep(0.3)
        (tmp_path / "slow.awake").touch()
        # it is tried again, as it would not be after its time was up
        os.kill(pid, signal.SIGKILL)
        assert code(waiting.result(60)) is None


def test_a_decoder_that_hangs_or_damages_shared_memory_in_a_group_costs_its_image_alone(tmp_path, image, plugin):
    cut, slow, count = (misbehaving(tmp_path / f"{action}.jpg", action) for action in ("cut", "slow", "count"))
    found = prepare_all(open_pool(decode_timeout=2, rows=5), [cut, image, slow, image, count])
    assert [code(entry) for entry in found] == [None, None, "decode_timeout", None, "decoder_crashed"]


@pytest.mark.parametrize(("kills", "expected"), [(1, None), (2, "decoder_crashed")])
def test_an_image_is_blamed_for_the_second_kill_of_its_worker(tmp_path, image, plugin, kills, expected):
    paths = [image, misbehaving(tmp_path / "slow.jpg", "slow"), image, image]
    with open_pool(decode_timeout=None, rows=4) as pool:
        batch = pool.submit([InputImage(path.name, path) for path in paths])
        for _ in range(kills):
            pid = read_pid(tmp_path / "slow.txt")
            (tmp_path / "slow.txt").unlink()
            if kills == 1:
                (tmp_path / "slow.awake").touch()
            os.kill(pid, signal.SIGKILL)
        found = with_pixels(batch.result(60))
    assert [code(entry) for entry in found] == [None, expected, None, None]
    assert expected is None or "SIGKILL, each of 2 times" in str(found[1].error)


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_worker_killed_while_it_starts_is_started_again_up_to_a_bound(tmp_path, image, plugin, deaths):
    (tmp_path / "modules" / "deaths").write_text(str(deaths))
    with open_pool() as pool:
        if deaths == 3:
            with pytest.raises(StoppedEarly, match="cannot be started: it was ended by SIGKILL; --no-isolate"):
                decode(pool, image)
        # the next one starts, whatever became of those before
        assert decode(pool, image) is None


def test_an_idle_worker_that_is_killed_costs_nothing(image):
    with open_pool() as pool:
        assert decode(pool, image) is None
        (child,) = children()
        child.kill()
        # all its threads, and without taking its exit status from who started it
        wait_until(lambda: os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        assert decode(pool, image) is None


def test_ctrl_c_does_not_reach_the_only_worker_of_a_short_run(image):
    with open_pool(workers=8) as pool:
        assert children() == []
        assert [decode(pool, image) for _ in range(5)] == [None] * 5
        (child,) = children()
        assert os.getpgid(child.pid) != os.getpgid(0)
        os.kill(child.pid, signal.SIGINT)
        assert decode(pool, image) is None
        assert children() == [child]


def test_a_worker_that_keeps_memory_is_replaced(tmp_path, image, plugin):
    with open_pool() as pool:
        assert decode(pool, image) is None
        (first,) = children()
        assert decode(pool, misbehaving(tmp_path / "hoard.jpg", "hoard")) is None
        assert decode(pool, image) is None
        (second,) = children()
    assert first.pid != second.pid


def test_a_bug_is_raised_not_recorded(image):
    request = InputImage("bug", image, crop="no crop at all")
    with open_pool() as pool, pytest.raises(RuntimeError, match="in a worker process"):
        submit(pool, request).result(60)


def test_a_worker_imports_no_runtime_and_prints_of_a_library_do_not_end_up_in_a_response(tmp_path, image, plugin):
    paths = [misbehaving(tmp_path / "chatter.jpg", "chatter"), misbehaving(tmp_path / "m.jpg", "modules"), image]
    assert [code(entry) for entry in prepare_all(open_pool(), paths)] == [None] * 3
    modules = (tmp_path / "m.txt").read_text().split()
    assert "opal_deploy.workers.worker" in modules
    assert {"torch", "onnxruntime", "typer", "rich"}.isdisjoint(modules)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("executable", "/nowhere/python", "cannot be started"),
        ("executable", "false", "cannot be started"),
        ("path", ["/nowhere"], "ModuleNotFoundError"),
    ],
)
def test_a_worker_that_cannot_be_started_stops_the_run_in_one_line(image, monkeypatch, attribute, value, message):
    with open_pool() as pool:
        monkeypatch.setattr(sys, attribute, value)
        for _ in range(2):
            with pytest.raises(StoppedEarly, match=f"{message}.*--no-isolate") as caught:
                submit(pool, InputImage("a", image)).result(60)
            assert "\n" not in str(caught.value)


def test_the_time_of_processes_counts_as_that_of_threads(image):
    timer = StageTimer()
    prepare_all(open_pool(timer, workers=2), [image] * 9)
    rows = {row.stage: row for row in timer.read().select_role("decoders")}
    assert set(rows) == {"read", "decode", "resize"}
    assert rows["decode"].calls == rows["resize"].calls == 9
    assert rows["decode"].wall > 0
    assert rows["decode"].cpu > 0


def test_leaving_drops_what_waits(tmp_path, plugin):
    path = misbehaving(tmp_path / "slow.jpg", "slow")
    with open_pool(decode_timeout=0.5) as pool:
        waiting = [submit(pool, InputImage("a", path)) for _ in range(50)]
    assert waiting[-1].cancelled()


# ---- the process around the workers

# no guard around it: a worker that imported the main module again would start workers for ever
SCRIPT = """
import pathlib, sys, time
from opal_deploy.predict.decoder_pool import DecoderPool
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.sources.image import InputImage

print("main", flush=True)
options = InferenceOptions(workers=2, isolate=True, decode_timeout=None)
with DecoderPool(options, (32, 32), slots=9, rows=1) as decoders:
    futures = [decoders.submit([InputImage(name, pathlib.Path(name))]) for name in sys.argv[1:]]
    print([future.result().images[0].error for future in futures], flush=True)
"""


@contextlib.contextmanager
def run_script(tmp_path, *paths):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process


def test_a_script_without_a_guard_runs_once(tmp_path, image):
    with run_script(tmp_path, image, image) as process:
        out, err = process.communicate(timeout=60)
    assert out.split("\n")[:2] == ["main", "[None, None]"], err


def test_no_worker_outlives_a_parent_that_was_killed(tmp_path, plugin):
    # one is in the middle of an image, the other has nothing to do
    actions = ("slow", "pid")
    with run_script(tmp_path, *(misbehaving(tmp_path / f"{action}.jpg", action) for action in actions)) as process:
        workers = [psutil.Process(read_pid(tmp_path / f"{action}.txt")) for action in actions]
        process.kill()
        process.wait(30)
        # its own parent reaps it, or it is a zombie for a moment
        for worker in workers:
            wait_until(lambda w=worker: not w.is_running() or w.status() == psutil.STATUS_ZOMBIE)
