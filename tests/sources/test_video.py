"""Videos, encoded for the test: which frames are taken, how they look, and what is said of damaged ones."""

from pathlib import Path

import numpy as np
import pytest

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.sources import video
from opal_deploy.sources.image import InputImage
from opal_deploy.sources.video import Sampling, VideoOptions, expand_videos
from tests.videos import FRAMES, crash_at_ten, cut, damage, noise, number_of, picture, write_sound, write_video


def read_all(path, every="1", **options):
    """Return the frames, and the code of what is wrong with the video."""
    items = list(expand_videos([InputImage.at(path)], VideoOptions(Sampling.parse(every), **options)))
    code = items.pop().error.code if items and items[-1].frame is None else ""
    return items, code


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("h264.mp4", "libx264", {}),
        ("vp9.webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
        ("motion.avi", "mjpeg", {}),
    ],
)
def test_frames_are_chosen_by_number_or_by_time(tmp_path, name, codec, options):
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    clip = write_video(tmp_path / name, codec, options=options, pixel_format=pixel_format)
    every_seventh, damaged = read_all(clip, "7")
    assert (damaged, [item.frame.index for item in every_seventh]) == ("", [0, 7, 14, 21, 28])
    assert every_seventh[1].name == f"{clip}#frame=000007"
    by_time, _ = read_all(clip, "0.75s")
    # ten frames a second: the first ones at or after 0, 0.75, 1.5, 2.25 s
    assert [(item.frame.index, item.frame.seconds) for item in by_time] == [
        (0, 0), (8, pytest.approx(0.8)), (15, pytest.approx(1.5)), (23, pytest.approx(2.3))
    ]  # fmt: skip
    for item in [*every_seventh, *by_time]:
        assert item.source.dtype == np.uint8
        assert number_of(item.source) == item.frame.index


@pytest.mark.parametrize(("rotation", "turn"), [(-90, -1), (180, 2)])
def test_a_phone_s_rotation_is_applied(tmp_path, rotation, turn):
    (item,), _ = read_all(write_video(tmp_path / "phone.mp4", frames=1, rotation=rotation))
    expected = np.rot90(picture(0), turn)
    assert item.source.shape == expected.shape
    assert np.abs(item.source.astype(int) - expected).mean() < 4


def test_colours_follow_the_matrix_that_the_video_declares(tmp_path):
    for matrix in ("ITU601", "ITU709"):
        (item,), _ = read_all(write_video(tmp_path / f"{matrix}.mp4", frames=1, colorspace=matrix))
        assert item.source[5, 5] == pytest.approx([200, 30, 30], abs=4), matrix


def test_a_damaged_video_gives_its_good_frames_and_says_what_is_wrong(tmp_path):
    for name in ("cut.mp4", "cut.mkv"):
        items, code = read_all(cut(write_video(tmp_path / name, draw=noise)))
        assert code == "truncated_video"
        assert 10 < len(items) < FRAMES
    clip = damage(write_video(tmp_path / "hole.mp4", draw=noise, options={"x264-params": "scenecut=0"}))
    items, code = read_all(clip)
    errors = {item.frame.index: item.error.code for item in items if item.error is not None}
    bad = list(errors)
    # up to the next key frame: they are predicted from the damaged one
    assert bad == list(range(bad[0], bad[-1] + 1))
    assert 10 < bad[0] < bad[-1] < 20
    assert set(errors.values()) == {"corrupt_frame"}
    assert code == "corrupt_video"


@pytest.mark.parametrize("start", [0.3, 0.5, 0.7])
def test_a_damaged_frame_of_motion_jpeg_never_shows_another_frame(tmp_path, start):
    clip = write_video(tmp_path / "motion.avi", "mjpeg", pixel_format="yuvj420p", draw=noise)
    whole = {item.source.tobytes() for item in read_all(clip)[0]}
    items, code = read_all(damage(clip, start=start))
    # FFmpeg leaves what it cannot decode of a frame as it was in the buffer
    assert FRAMES - 6 < len(items) < FRAMES
    assert all(item.error is not None or item.source.tobytes() in whole for item in items)
    assert code == "corrupt_video"


def test_what_is_no_video_of_use_is_named(tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty.mp4").touch()
    write_sound(tmp_path / "sound.mp4")
    hdr = {"x264-params": "transfer=smpte2084"}
    write_video(tmp_path / "hdr.mp4", frames=1, pixel_format="yuv420p10le", options=hdr)
    # its decoder shows parts of other frames where one is damaged
    write_video(tmp_path / "archived.mkv", "ffv1", frames=1)
    codes = {
        "text.mp4": "not_a_video", "empty.mp4": "empty_file", "sound.mp4": "no_frames", "hdr.mp4": "unsupported_video",
        "archived.mkv": "unsupported_video", "missing.mp4": "not_found",
    }  # fmt: skip
    assert {name: read_all(tmp_path / name)[1] for name in codes} == codes
    assert read_all(write_video(tmp_path / "large.mp4"), max_pixels=3000) == ([], "too_many_pixels")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "5ms", ""])
def test_a_sampling_is_frames_or_seconds(text):
    with pytest.raises(UsageError, match="expected"):
        Sampling.parse(text)


def test_a_video_that_crashes_its_decoder_or_stops_it_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "_next_in_worker", crash_at_ten)
    names = ["crash.mp4", "stop.mp4", "good.mp4"]
    videos = [InputImage.at(write_video(tmp_path / name)) for name in names]
    options = VideoOptions(Sampling.parse("1"), isolate=True, timeout=0.5)
    items = list(expand_videos(videos, options))
    by_video = {name: [item for item in items if Path(item.name).name.startswith(name)] for name in names}
    assert [len(by_video[name]) for name in names] == [11, 11, FRAMES]
    errors = [by_video[name][-1].error for name in names]
    assert [error and error.code for error in errors] == ["decoder_crashed", "decode_timeout", None]


def test_a_decoder_that_was_killed_between_two_frames_loses_none_in_silence(monkeypatch):
    monkeypatch.setattr(video, "_frames", None)
    with pytest.raises(ImageError, match="killed"):
        video._next_in_worker()
