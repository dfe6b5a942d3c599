"""Nothing grows with the number of images: memory, open files, threads."""

import gc
import io
import os
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
from tests.sources.packing import pack

SIZE = (128, 128)


def write_tar(path, count):
    """So many tiny pictures, WebDataset-style."""
    stream = io.BytesIO()
    Image.new("RGB", SIZE, (90, 120, 60)).save(stream, "JPEG")
    names = (f"{number // 1000:04}/{number:07}.jpg" for number in range(count))
    return pack(path, dict.fromkeys(names, stream.getvalue()), "plain.tar")


def classify(path, *, isolate=False):
    options = InferenceOptions(batch=16, workers=2, isolate=isolate)
    for result in predict_stream(discover([str(path)], Skipped()), [BrightSession(input_size=SIZE)], options):
        assert result.record.status == "ok"
        yield result


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux shows of a process")
@pytest.mark.parametrize("isolate", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_nothing_grows_with_the_number_of_images(tmp_path, count, isolate):
    process = psutil.Process()

    def use():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), process.memory_info().rss / 2**20

    # loads and fills what stays
    assert sum(1 for _ in classify(write_tar(tmp_path / "first.tar", 200), isolate=isolate)) == 200
    gc.collect()
    before, path = use(), write_tar(tmp_path / "a.tar", count)
    samples = np.array([use() for number, _ in enumerate(classify(path, isolate=isolate)) if number % 50 == 0])
    files, threads, memory = samples.T
    # the archive, and what each of two decoders has open; two decoders, one session
    assert files.max() <= before[0] + 1 + 2 * 6
    assert threads.max() <= before[1] + 3
    first, second = np.split(memory, [len(memory) // 2])
    # less is normal for allocators
    assert second.max() - first.max() <= max(0.05 * before[2], 10.0)
    assert use()[:2] == before[:2]
