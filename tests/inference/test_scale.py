"""Nothing grows with the number of images: memory, open files, threads."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.monitor import MemoryCurve, MemorySampler
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.sources.discovery import discover
from opal_deploy.inference.sources.items import Skipped
from opal_deploy.inference.types import InferenceOptions
from opal_deploy.runtime.session import ImageBatch, Session
from tests.inference.bright import BrightSession

SIZE = (128, 128)
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux shows of a process")
sizes = pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])


class LeakingSession(BrightSession):
    """Keeps every batch that it was given, thrice over: the process that it leaks in may be a large one already."""

    def run(self, images: ImageBatch) -> Outputs:
        self.kept: list[ImageBatch] = [*getattr(self, "kept", ()), images, images.copy(), images.copy()]
        return super().run(images)


def write_tar(path: Path, count: int) -> Path:
    """So many tiny pictures, WebDataset-style."""
    stream = io.BytesIO()
    Image.new("RGB", SIZE, (90, 120, 60)).save(stream, "JPEG")
    data = stream.getvalue()
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(count):
            info = tarfile.TarInfo(f"{number // 1000:04}/{number:07}.jpg")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            # or the writer keeps them
            tar.members.clear()
    return path


def explained(path: Path, session: Session, *, isolate: bool = False) -> Iterator[str]:
    asked = discover([str(path)], Skipped())
    for result in predict_stream(asked, [session], InferenceOptions(batch=16, workers=2, isolate=isolate)):
        yield result.record["status"]


def watched(path: Path, session: Session) -> MemoryCurve:
    gc.collect()
    # give freed memory back to the system; only glibc has it
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
    with MemorySampler(interval=0.02) as watch:
        assert set(explained(path, session)) == {"ok"}
    return watch.curve


@sizes
def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path, count: int) -> None:
    path = write_tar(tmp_path / "a.tar", count)
    # what is loaded and filled once
    watched(write_tar(tmp_path / "first.tar", 200), BrightSession(input_size=SIZE))
    curve = watched(path, BrightSession(input_size=SIZE))
    assert curve.rise is not None
    assert not curve.grows, curve.describe()


def test_the_same_check_finds_a_session_that_leaks(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", 2_000)
    watched(write_tar(tmp_path / "first.tar", 200), BrightSession(input_size=SIZE))
    curve = watched(path, LeakingSession(input_size=SIZE))
    assert curve.grows, curve.describe()


@linux
@pytest.mark.parametrize("isolate", [False, True], ids=["threads", "processes"])
@sizes
def test_open_files_and_threads_do_not_grow_with_the_number_of_images(
    tmp_path: Path, count: int, isolate: bool
) -> None:
    path = write_tar(tmp_path / "a.tar", count)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    files: list[int] = []
    threads: list[int] = []
    for number, _ in enumerate(explained(path, BrightSession(input_size=SIZE), isolate=isolate)):
        if number % 50 == 0:
            files.append(len(os.listdir("/proc/self/fd")))
            threads.append(threading.active_count())
    # the archive, and what each of two decoders has open
    assert max(files) <= before[0] + 1 + 2 * 6
    # two decoders and the one that watches their processes, one session
    assert max(threads) <= before[1] + 4
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


@linux
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_peak_of_100_000_images_is_that_of_1_000(exact_model: Path, tmp_path: Path) -> None:
    # the command itself, with its runtime: what counts is what a machine must have
    peaks = {}
    for count in (1_000, 100_000):
        path = write_tar(tmp_path / f"{count}.tar", count)
        arguments = ["infer", path, "--model", exact_model, "--out", tmp_path / f"{count}", "--threads", "1"]
        program = "from opal_deploy.cli import main; main()"
        process = subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        with (tmp_path / f"{count}" / "results.jsonl").open("rb") as records:
            assert sum(1 for _ in records) == count
        peaks[count] = usage.ru_maxrss
    assert peaks[100_000] <= 1.05 * peaks[1_000], peaks
