"""Nothing grows with the number of images: memory, open files, threads."""

import ctypes
import gc
import io
import os
import tarfile
import threading

import numpy as np
import psutil
import pytest
from PIL import Image

from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.image import Skipped
from tests.bright import BrightSession

SIZE = (128, 128)
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux shows of a process")
sizes = pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])


def write_tar(path, count):
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


def classify(path, *, isolate=False):
    options = InferenceOptions(batch=16, workers=2, isolate=isolate)
    for result in predict_stream(discover([str(path)], Skipped()), [BrightSession(input_size=SIZE)], options):
        assert result.record.status == "ok"
        yield result


def watch_memory(path):
    """Return the process's memory in MB, sampled while it classifies the file."""
    gc.collect()
    # give freed memory back to the system; only glibc has it
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
    stop, process, samples = threading.Event(), psutil.Process(), []

    def sample():
        while not stop.wait(0.02):
            samples.append(process.memory_info().rss / 2**20)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        assert sum(1 for _ in classify(path))
    finally:
        stop.set()
        thread.join()
    return np.array(samples)


def rise(samples):
    """Return the MB by which a least-squares line rises after the first quarter of the samples."""
    after = samples[len(samples) // 4 :]
    assert len(after) >= 8
    return np.polyfit(np.arange(len(after)), after, 1)[0] * len(after)


@sizes
def test_memory_does_not_grow_with_the_number_of_images(tmp_path, count):
    path = write_tar(tmp_path / "a.tar", count)
    # what is loaded and filled once
    watch_memory(write_tar(tmp_path / "first.tar", 200))
    samples = watch_memory(path)
    # less is normal for allocators
    assert rise(samples) <= max(0.05 * samples[0], 10.0)


@linux
@pytest.mark.parametrize("isolate", [False, True], ids=["threads", "processes"])
@sizes
def test_open_files_and_threads_do_not_grow_with_the_number_of_images(tmp_path, count, isolate):
    path = write_tar(tmp_path / "a.tar", count)

    def count():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = count()
    counts = [count() for number, _ in enumerate(classify(path, isolate=isolate)) if number % 50 == 0]
    # the archive, and what each of two decoders has open
    assert max(files for files, _ in counts) <= before[0] + 1 + 2 * 6
    # two decoders, one session
    assert max(threads for _, threads in counts) <= before[1] + 3
    assert count() == before
