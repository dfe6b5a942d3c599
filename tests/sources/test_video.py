"""Videos, encoded for the test: which frames are taken, how they look, and what is said of damaged ones."""

import sys

import numpy as np
import psutil
import pytest

from opal_deploy.errors import ImageError, MissingExtra, UsageError
from opal_deploy.sources import video
from opal_deploy.sources.video import ALL_FRAMES, FrameReader, Sampling
from tests.videos import FRAMES, crash_at_ten, cut, damage, noise, number_of, picture, write_sound, write_video


def read_all(path, sampling=ALL_FRAMES, **options):
    """Return the frames, and the code of what is wrong with the video."""
    frames = []
    with FrameReader(**options) as reader:
        try:
            while (frame := reader.read(path, sampling, frames[-1].info.index + 1 if frames else 0)) is not None:
                frames.append(frame)
        except ImageError as error:
            return frames, error.code
    return frames, ""


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("h264.mp4", "libx264", {}),
        ("vp9.webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
        ("mpeg4.mkv", "mpeg4", {"bf": "2"}),
        ("motion.avi", "mjpeg", {}),
        ("h264.ts", "libx264", {}),
    ],
)
def test_frames_are_chosen_by_number_or_by_time(tmp_path, name, codec, options):
    clip = write_video(
        tmp_path / name, codec, options=options, pixel_format="yuvj420p" if codec == "mjpeg" else "yuv420p"
    )
    every_seventh, damaged = read_all(clip, Sampling.parse("7"))
    assert (damaged, [frame.info.index for frame in every_seventh]) == ("", [0, 7, 14, 21, 28])
    by_time, _ = read_all(clip, Sampling.parse("0.75s"))
    # ten frames a second: the first ones at or after 0, 0.75, 1.5, 2.25 s
    assert [(frame.info.index, frame.info.seconds) for frame in by_time] == [
        (0, 0), (8, pytest.approx(0.8)), (15, pytest.approx(1.5)), (23, pytest.approx(2.3))
    ]  # fmt: skip
    for frame in [*every_seventh, *by_time]:
        assert frame.content.dtype == np.uint8
        assert number_of(frame.content) == frame.info.index


@pytest.mark.parametrize(("rotation", "turn"), [((-90, False), -1), ((180, False), 2), ((90, True), 1)])
def test_a_phone_s_rotation_is_applied(tmp_path, rotation, turn):
    (frame,), _ = read_all(write_video(tmp_path / "phone.mp4", frames=1, rotation=rotation))
    expected = np.rot90(picture(0), turn)
    expected = expected[:, ::-1] if rotation[1] else expected
    assert frame.content.shape == expected.shape
    assert np.abs(frame.content.astype(int) - expected).mean() < 4


def test_colours_follow_the_matrix_that_the_video_declares(tmp_path):
    for matrix in ("ITU601", "ITU709"):
        (frame,), _ = read_all(write_video(tmp_path / f"{matrix}.mp4", frames=1, colorspace=matrix))
        assert frame.content[5, 5] == pytest.approx([200, 30, 30], abs=4), matrix


def test_a_damaged_video_gives_its_good_frames_and_says_what_is_wrong(tmp_path):
    frames, code = read_all(cut(write_video(tmp_path / "cut.mp4", draw=noise)))
    assert code == "truncated_video"
    assert 10 < len(frames) < FRAMES
    assert read_all(cut(write_video(tmp_path / "cut.mkv", draw=noise)))[1] == "truncated_video"
    frames, code = read_all(
        damage(write_video(tmp_path / "hole.mp4", draw=noise, options={"x264-params": "scenecut=0"}))
    )
    errors = {frame.info.index: frame.content for frame in frames if isinstance(frame.content, ImageError)}
    bad = list(errors)
    # up to the next key frame: they are predicted from the damaged one
    assert bad == list(range(bad[0], bad[-1] + 1))
    assert 10 < bad[0] < bad[-1] < 20
    assert {error.code for error in errors.values()} == {"corrupt_frame"}
    assert code == "corrupt_video"


@pytest.mark.parametrize("start", [0.3, 0.5, 0.7])
def test_a_damaged_frame_of_motion_jpeg_never_shows_another_frame(tmp_path, start):
    clip = write_video(tmp_path / "motion.avi", "mjpeg", pixel_format="yuvj420p", draw=noise)
    whole = {frame.content.tobytes() for frame in read_all(clip)[0]}
    frames, code = read_all(damage(clip, start=start))
    # FFmpeg leaves what it cannot decode of a frame as it was in the buffer
    assert FRAMES - 6 < len(frames) < FRAMES
    assert all(isinstance(frame.content, ImageError) or frame.content.tobytes() in whole for frame in frames)
    assert code == "corrupt_video"


def test_a_frame_with_a_wrong_checksum_is_refused(tmp_path):
    clip = write_video(tmp_path / "archived.mkv", "ffv1", options={"level": "3", "slices": "4"}, draw=noise)
    whole = [frame.content.tobytes() for frame in read_all(clip)[0]]
    frames, _ = read_all(damage(clip, count=20))
    bad = [frame.info.index for frame in frames if isinstance(frame.content, ImageError)]
    assert 10 < bad[0] < bad[-1] < 20
    assert all(frame.info.index in bad or frame.content.tobytes() == whole[frame.info.index] for frame in frames)


def test_joined_recordings_have_times_that_go_on(tmp_path):
    clip = write_video(tmp_path / "a.ts")
    clip.write_bytes(2 * clip.read_bytes())
    frames, _ = read_all(clip, Sampling.parse("1s"))
    assert [frame.info.index for frame in frames] == [0, 10, 20, 30, 40, 50]


def test_what_is_no_video_of_use_is_named(tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty.mp4").touch()
    options = {"x264-params": "transfer=smpte2084"}
    codes = {
        "text.mp4": "not_a_video",
        "empty.mp4": "empty_file",
        write_sound(tmp_path / "sound.mp4").name: "no_frames",
        write_video(
            tmp_path / "hdr.mp4", frames=1, pixel_format="yuv420p10le", options=options
        ).name: "unsupported_video",
        "missing.mp4": "not_found",
    }
    assert {name: read_all(tmp_path / name)[1] for name in codes} == codes
    assert read_all(write_video(tmp_path / "large.mp4"), max_pixels=3000) == ([], "too_many_pixels")


@pytest.mark.parametrize("text", ["0", "0s", "-1", "1.5", "5ms", "x", ""])
def test_a_sampling_is_frames_or_seconds(text):
    with pytest.raises(UsageError, match="expected"):
        Sampling.parse(text)


def test_without_pyav_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra, match=r"opal-deploy\[video\]"):
        FrameReader().read(tmp_path / "a.mp4", ALL_FRAMES)


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
    for frame, index in ((first, 7), (second, 14), (third, 3)):
        assert (frame.info.index, number_of(frame.content)) == (index, index)
        assert frame.info.image_sha256 == first.info.image_sha256


def test_a_video_that_crashes_its_decoder_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "_read_in_worker", crash_at_ten)
    crash, good = write_video(tmp_path / "crash.mp4"), write_video(tmp_path / "good.mp4")
    with FrameReader(isolate=True, timeout=30) as reader:
        assert reader.read(crash, ALL_FRAMES, 0) is not None
        with pytest.raises(ImageError, match="SIGSEGV") as crashed:
            reader.read(crash, ALL_FRAMES, 10)
        assert crashed.value.code == "decoder_crashed"
        assert reader.read(good, ALL_FRAMES, 10) is not None
