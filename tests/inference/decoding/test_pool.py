"""The decoder pool: the same images from threads and processes, and the cost of a crash, a hang or a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from opal_deploy.errors import ImageError, StoppedEarly
from opal_deploy.inference.decoding.pool import CpuDecoderPool
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InferenceOptions, Prepared, Request
from opal_deploy.preprocess.decode import Decoding

INPUT = (32, 48)

# a Pillow plugin in the worker processes: a file's own text says how its decoder misbehaves
PLUGIN = """
import os, pathlib, signal, sys, time
from PIL import Image

hoard = []

def misbehave(file, name):
    _, action, path = file.read().decode().split(" ", 2)
    path = pathlib.Path(path)
    if action == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "quit":
        os._exit(7)
    if action == "hang":
        time.sleep(600)
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
    if action == "slow":
        time.sleep(600)
    return Image.new("RGB", (90, 70))

Image.register_open("MISBEHAVING", misbehave, lambda prefix: prefix.startswith(b"MISBEHAVING "))
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)


def misbehaving(path: Path, action: str) -> Path:
    """Write a file whose decoder crashes, hangs, ...; it writes what it has to tell to `path` with the suffix .txt."""
    path.write_text(f"MISBEHAVING {action} {path.with_suffix('.txt')}")
    return path


def photograph(path: Path, size: tuple[int, int] = (90, 70)) -> Path:
    coarse = np.random.default_rng(len(path.name)).integers(0, 255, (5, 6, 3), np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, "JPEG")
    return path


def processes(**options: object) -> InferenceOptions:
    return InferenceOptions(**{"workers": 1, "isolate": True, **options})  # type: ignore[arg-type]


def prepare_all(options: InferenceOptions, paths: list[Path]) -> list[Prepared]:
    with CpuDecoderPool(options, INPUT) as decoders:
        futures = [decoders.submit(Request(path.name, path)) for path in paths]
        return [future.result(60) for future in futures]


def code(prepared: Prepared) -> str | None:
    return None if prepared.error is None else prepared.error.code


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "decoding.worker" in " ".join(child.cmdline())]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert children() == []


@pytest.mark.parametrize("decoding", list(Decoding))
@pytest.mark.parametrize("keep", [False, True])
def test_processes_give_what_threads_give(tmp_path: Path, decoding: Decoding, keep: bool) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    paths = [photograph(tmp_path / f"{n}.jpg", (60 + 40 * n, 50 + 31 * n)) for n in range(6)]
    photograph(tmp_path / "large.jpg", (1600, 1400))
    paths += [tmp_path / "broken.jpg", tmp_path / "gone.jpg", tmp_path / "large.jpg"]

    found, expected = (
        prepare_all(InferenceOptions(workers=2, keep_images=keep, decode=decoding, isolate=isolate), paths)
        for isolate in (True, False)
    )

    for one, other in zip(found, expected, strict=True):
        assert (one.request, one.geometry, repr(one.error)) == (other.request, other.geometry, repr(other.error))
        assert (one.image is None) == (other.image is None)
        if other.pixels is not None:
            assert np.array_equal(one.pixels, other.pixels)
        if one.image is not None and other.image is not None:
            assert one.image.tobytes() == other.image.tobytes()
    assert [code(one) for one in found[6:]] == ["not_an_image", "not_found", None]
    assert (found[0].image is None) == (not keep)


@pytest.mark.parametrize("isolate", [False, True])
def test_every_kind_of_source_and_box_is_prepared(tmp_path: Path, isolate: bool) -> None:
    path = photograph(tmp_path / "a.jpg")
    picture = Image.open(path)
    sources = [path, str(path), path.read_bytes(), picture, np.asarray(picture)]
    with CpuDecoderPool(InferenceOptions(workers=2, isolate=isolate), INPUT) as decoders:
        whole = [decoders.submit(Request(None, source)).result(60) for source in sources]
        cropped = decoders.submit(Request(None, path, (10, 5, 60, 50))).result(60)
        boxless = decoders.submit(Request("a", path, error=ImageError("no_box", "none is listed"))).result(60)
    for entry in whole:
        assert entry.pixels is not None
        assert np.abs(entry.pixels.astype(int) - whole[0].pixels).max() <= 1
    assert cropped.geometry is not None
    assert cropped.geometry.crop == (10, 5, 60, 50)
    assert code(boxless) == "no_box"


@pytest.mark.parametrize(
    ("name", "expected", "says"),
    [
        ("crash", "decoder_crashed", "SIGSEGV"),
        ("quit", "decoder_crashed", "exit code 7"),
        ("hang", "decode_timeout", "1.5 s"),
    ],
)
def test_a_decoder_that_ends_costs_its_image_alone(
    tmp_path: Path, plugin: None, name: str, expected: str, says: str
) -> None:
    paths = [photograph(tmp_path / f"{n}.jpg") for n in range(8)]
    paths[2:2] = paths[5:5] = [misbehaving(tmp_path / f"{name}.jpg", name)]

    found = prepare_all(processes(workers=2, decode_timeout=1.5), paths)

    assert [code(entry) for entry in found] == [expected if path.stem == name else None for path in paths]
    assert found[2].request.name == f"{name}.jpg"
    assert says in str(found[2].error)


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 here")
def test_a_worker_killed_in_the_middle_costs_its_image_alone(tmp_path: Path, plugin: None) -> None:
    paths = [photograph(tmp_path / f"{n}.jpg") for n in range(3)]
    paths[1:1] = [misbehaving(tmp_path / "slow.jpg", "slow")]
    pid = tmp_path / "slow.txt"
    with CpuDecoderPool(processes(), INPUT) as decoders:
        futures = [decoders.submit(Request(path.name, path)) for path in paths]
        wait_until(lambda: pid.exists() and pid.read_text() != "")
        os.kill(int(pid.read_text()), signal.SIGKILL)
        found = [future.result(60) for future in futures]
    assert [code(entry) for entry in found] == [None, "decoder_crashed", None, None]
    assert "SIGKILL" in str(found[1].error)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 here")
def test_an_idle_worker_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    path = photograph(tmp_path / "a.jpg")
    with CpuDecoderPool(processes(), INPUT) as decoders:
        assert code(decoders.submit(Request("a", path)).result(60)) is None
        (child,) = children()
        child.kill()
        # all its threads, and without taking its exit status from who started it
        wait_until(lambda: os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        assert code(decoders.submit(Request("a", path)).result(60)) is None


def test_a_time_limit_is_for_each_image_not_for_all(tmp_path: Path) -> None:
    path = photograph(tmp_path / "a.jpg")
    with CpuDecoderPool(processes(decode_timeout=1.0), INPUT) as decoders:
        for _ in range(2):
            assert code(decoders.submit(Request("a", path)).result(60)) is None
            (child,) = children()
            # idle for longer than the limit
            time.sleep(1.2)
            assert children() == [child]


def test_prints_of_a_library_do_not_end_up_in_a_response(tmp_path: Path, plugin: None) -> None:
    paths = [misbehaving(tmp_path / "chatter.jpg", "chatter"), photograph(tmp_path / "0.jpg")]
    assert [code(entry) for entry in prepare_all(processes(), paths)] == [None, None]


def test_a_worker_that_keeps_memory_is_replaced(tmp_path: Path, plugin: None) -> None:
    misbehaving(tmp_path / "hoard.jpg", "hoard")
    with CpuDecoderPool(processes(), INPUT) as decoders:
        assert code(decoders.submit(Request("a", photograph(tmp_path / "a.jpg"))).result(60)) is None
        (first,) = children()
        assert code(decoders.submit(Request("h", tmp_path / "hoard.jpg")).result(60)) is None
        assert code(decoders.submit(Request("a", tmp_path / "a.jpg")).result(60)) is None
        (second,) = children()
    assert first.pid != second.pid


def test_a_large_image_leaves_no_memory_behind(tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    Image.new("RGB", (9000, 8000), (9, 8, 7)).save(large, compress_level=1)
    with CpuDecoderPool(processes(), INPUT) as decoders:
        assert code(decoders.submit(Request("a", large)).result(60)) is None
        resident = sum(child.memory_info().rss for child in children())
    # its pixels are 288 MB
    assert resident < 150 << 20


def test_a_bug_is_raised_not_recorded(tmp_path: Path) -> None:
    request: Any = Request("bug", photograph(tmp_path / "a.jpg"), box="no box at all")
    with CpuDecoderPool(processes(), INPUT) as decoders, pytest.raises(RuntimeError, match="in a decode worker"):
        decoders.submit(request).result(60)


def test_a_worker_imports_no_runtime(tmp_path: Path, plugin: None) -> None:
    prepare_all(processes(), [misbehaving(tmp_path / "a.jpg", "modules")])
    modules = (tmp_path / "a.txt").read_text().split()
    assert "opal_deploy.inference.decoding.worker" in modules
    assert {"torch", "onnxruntime", "typer", "rich"}.isdisjoint(modules)


@pytest.mark.parametrize("python", ["/nowhere/python", "false"])
def test_a_worker_that_cannot_be_started_stops_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    path = photograph(tmp_path / "a.jpg")
    monkeypatch.setattr(sys, "executable", python)
    with CpuDecoderPool(processes(), INPUT) as decoders:
        for _ in range(2):
            with pytest.raises(StoppedEarly, match="cannot be started") as caught:
                decoders.submit(Request("a", path)).result(60)
            assert "\n" not in str(caught.value)
            assert "--no-isolate" in str(caught.value)


def test_a_worker_without_its_packages_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = photograph(tmp_path / "a.jpg")
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    with CpuDecoderPool(processes(), INPUT) as decoders:
        future = decoders.submit(Request("a", path))
        with pytest.raises(StoppedEarly, match="ModuleNotFoundError"):
            future.result(60)


def test_the_time_of_processes_counts_as_that_of_threads(tmp_path: Path) -> None:
    paths = [photograph(tmp_path / f"{n}.jpg") for n in range(9)]
    timer = StageTimer()
    with CpuDecoderPool(processes(workers=2), INPUT, timer) as decoders:
        for future in [decoders.submit(Request("a", path)) for path in paths]:
            future.result(60)
    rows = {row.stage: row for row in timer.read().select_role("decoders")}
    assert set(rows) == {"read", "decode", "resize"}
    assert rows["decode"].calls == rows["resize"].calls == 9
    assert rows["decode"].wall > 0
    assert rows["decode"].cpu > 0


def test_a_short_run_starts_no_more_processes_than_it_needs(tmp_path: Path) -> None:
    path = photograph(tmp_path / "a.jpg")
    with CpuDecoderPool(processes(workers=8), INPUT) as decoders:
        assert children() == []
        for _ in range(5):
            decoders.submit(Request("a", path)).result(60)
        assert len(children()) == 1


def test_leaving_drops_what_waits(tmp_path: Path, plugin: None) -> None:
    path = misbehaving(tmp_path / "hang.jpg", "hang")
    waiting: list[Future[Prepared]] = []
    with CpuDecoderPool(processes(decode_timeout=1.0), INPUT) as decoders:
        waiting += [decoders.submit(Request("a", path)) for _ in range(50)]
    assert waiting[-1].cancelled()


@pytest.mark.parametrize("limit", [50, 10**9])
def test_the_limit_of_pixels_holds_in_processes(tmp_path: Path, limit: int) -> None:
    (found,) = prepare_all(processes(max_pixels=limit), [photograph(tmp_path / "a.jpg")])
    assert code(found) == ("too_many_pixels" if limit == 50 else None)


# no guard around it: a worker that imported the main module again would start workers for ever
SCRIPT = """
import pathlib, sys, time
from opal_deploy.inference.decoding.pool import CpuDecoderPool
from opal_deploy.inference.types import InferenceOptions, Request

print("main", flush=True)
with CpuDecoderPool(InferenceOptions(workers=2, isolate=True), (32, 32)) as decoders:
    futures = [decoders.submit(Request(name, pathlib.Path(name))) for name in sys.argv[1:]]
    print([future.result().error for future in futures], flush=True)
"""


def _script(tmp_path: Path, *names: Path) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, names)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    with _script(tmp_path, photograph(tmp_path / "a.jpg"), photograph(tmp_path / "b.jpg")) as process:
        out, err = process.communicate(timeout=60)
    assert out.split("\n")[:2] == ["main", "[None, None]"], err


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 here")
@pytest.mark.parametrize("name", ["slow", "pid"])
def test_no_worker_outlives_a_parent_that_was_killed(tmp_path: Path, plugin: None, name: str) -> None:
    # one is in the middle of a picture, the other has nothing to do
    busy, idle = (misbehaving(tmp_path / f"{action}.jpg", action) for action in ("slow", "pid"))
    with _script(tmp_path, busy, idle) as process:
        files = [tmp_path / "slow.txt", tmp_path / "pid.txt"]
        wait_until(lambda: all(path.exists() and path.read_text() for path in files))
        worker = psutil.Process(int((tmp_path / f"{name}.txt").read_text()))
        process.kill()
        process.wait(30)
        # its own parent reaps it, or it is a zombie for a moment
        wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.skipif(not hasattr(os, "setsid"), reason="no signals of terminals here")
def test_ctrl_c_does_not_reach_the_workers(tmp_path: Path) -> None:
    path = photograph(tmp_path / "a.jpg")
    with CpuDecoderPool(processes(), INPUT) as decoders:
        decoders.submit(Request("a", path)).result(60)
        (child,) = children()
        assert os.getpgid(child.pid) != os.getpgid(0)
        os.kill(child.pid, signal.SIGINT)
        assert code(decoders.submit(Request("a", path)).result(60)) is None
        assert children() == [child]


@pytest.mark.data
def test_every_odd_file_has_the_same_fate_in_a_process(odd_images: Path) -> None:
    paths = [path for path in sorted(odd_images.iterdir()) if path.name != "manifest.tsv"]
    assert len(paths) == 149
    found, expected = (
        prepare_all(InferenceOptions(workers=2, isolate=isolate, decode_timeout=None), paths)
        for isolate in (True, False)
    )
    for one, other in zip(found, expected, strict=True):
        assert code(one) == code(other), one.request.name
        assert (one.pixels is None) == (other.pixels is None)
        if one.pixels is not None and other.pixels is not None:
            assert np.array_equal(one.pixels, other.pixels), one.request.name
