"""The process that decodes videos: killed, it is replaced and goes on; a video that kills it costs no other."""

import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest

from opal_deploy.errors import ImageError
from opal_deploy.predict import decoder_pool as pool_module
from opal_deploy.predict.decoder_pool import DecoderPool
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.preprocess.video import ALL_FRAMES, Sampling
from opal_deploy.sources.image import FrameInfo, InputImage
from opal_deploy.sources.video import FrameReader
from opal_deploy.workers.pool import ProcessPool
from tests.videos import CrashingTask, number_of, write_video


def test_a_killed_decoder_goes_on_at_the_same_frame(tmp_path):
    clip = write_video(tmp_path / "a.mp4")
    before = set(psutil.Process().children())
    with FrameReader(isolate=True) as reader:
        first = reader.read(clip, Sampling(frames=7), 1)
        for process in set(psutil.Process().children()) - before:
            process.kill()
            process.wait()
        second = reader.read(clip, Sampling(frames=7), 8)
        # earlier than the last one: decoded from the beginning again
        third = reader.read(clip, ALL_FRAMES, 3)
    for found, index in ((first, 7), (second, 14), (third, 3)):
        assert (found.frame.index, number_of(found.frame.pixels)) == (index, index)
        assert found.image_sha256 == first.image_sha256


def test_frames_are_dropped_once_they_are_prepared(monkeypatch):
    frame_pixels = 300 * 400
    monkeypatch.setattr(pool_module, "PIXELS_PER_WORKER", 2 * frame_pixels)
    alive = []
    most = 0

    def requests():
        nonlocal most
        for index in range(40):
            pixels = np.full((300, 400, 3), 5 * index, np.uint8)
            alive.append(weakref.ref(pixels))
            yield InputImage("a", pixels, frame=FrameInfo(Path("a.mp4"), index, 0.0, "0" * 64))
            del pixels
            most = max(most, sum(reference() is not None for reference in alive))

    with DecoderPool(InferenceOptions(workers=1), (8, 8), slots=1, rows=40) as pool:
        batch = pool.submit(requests()).result()
    assert [int(pixels[0, 0, 0]) for pixels in batch.pixels] == [5 * index for index in range(40)]
    assert {image.image_sha256 for image in batch.images} == {"0" * 64}
    # two that wait or are prepared, and one that comes
    assert most <= 3


def test_a_video_that_crashes_its_decoder_costs_no_other(tmp_path):
    crash, good = write_video(tmp_path / "crash.mp4"), write_video(tmp_path / "good.mp4")
    with FrameReader(isolate=True) as reader:
        reader._pool = ProcessPool(1, CrashingTask(10**6), 30)
        assert reader.read(crash, ALL_FRAMES, 0) is not None
        with pytest.raises(ImageError, match="its decoder was ended by SIGSEGV, each of 2 times") as crashed:
            reader.read(crash, ALL_FRAMES, 10)
        assert crashed.value.code == "decoder_crashed"
        assert reader.read(good, ALL_FRAMES, 10) is not None
