"""JPEG files decoded and resized on a GPU: NVIDIA's nvImageCodec (nvJPEG) and PyTorch.

The codec gives one picture or nothing for each file of a batch. Its pixels are not libjpeg-turbo's, bit for bit: the
inverse cosine transform is another; `bench decoding` measures by how much. The resize repeats Pillow's arithmetic, rows
first, rounded, then columns, within 1 count. EXIF orientation is applied here, for the codec is told to leave it.

Only plain, whole files of three components or one are given to it: everything that can be wrong or odd about a file is
judged on the CPU, so that every decode path has the same verdict. A decoder on the CPU, the device `cpu`, is the same
codec with libjpeg-turbo; it is there to test all of this on machines without a GPU.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from opal_deploy.errors import UsageError, first_line, require
from opal_deploy.preprocess.decode import MAX_PIXELS, is_plain_jpeg
from opal_deploy.preprocess.geometry import Box, Geometry, compute_geometry_from_size

if TYPE_CHECKING:
    import torch

_EXTRA, _PURPOSE = "gpu-decode", "--decode gpu"
# a decoded test picture may be this far from Pillow's; anything that works is nearer
_CANARY_COUNTS = 8
# CUDA's antialiased resize has no room for filters of far more taps
_MOST_SQUASHED = 128
# rows that are squashed at a time: what is in float32 meanwhile is bounded
_MOST_FLOATS = 12_000_000

# markers: start and end of the picture; frames of baseline, extended and progressive JPEG; a scan; what may come
# between two scans (tables, restart interval, comments, application data)
_START, _END = b"\xff\xd8", b"\xff\xd9"
_FRAMES, _SCAN = (0xC0, 0xC1, 0xC2), 0xDA
_BETWEEN = frozenset({0xC4, 0xDA, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
_MARKER_HERE = re.compile(rb"\xff++([^\x00\xd0-\xd7])")  # possessive: fill bytes may be many
_MARKER_AFTER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
# cameras and encoders write a dozen; each scan is another pass over the picture, and there is no time limit on a GPU
_MOST_SEGMENTS, _MOST_SCANS = 1000, 100
# component ids of a file that holds RGB, not YCbCr, without saying so
_RGB_IDS = b"RGB"


@dataclass(frozen=True)
class Jpeg:
    """A file that the GPU may decode, and what its header says.

    Attributes:
        data: the file's bytes.
        stored: (width, height) in pixels, as stored.
        orientation: EXIF's, 1 to 8.
        geometry: of the oriented picture, with the crop that was asked for.
    """

    data: bytes
    stored: tuple[int, int]
    orientation: int
    geometry: Geometry

    @property
    def pixels(self) -> int:
        """How many it has."""
        return self.stored[0] * self.stored[1]

    def can_resize_to(self, input_size: tuple[int, int]) -> bool:
        """Whether the GPU's resize can do it: not of pictures that are a hundred times as long as the input."""
        x0, y0, x1, y1 = self.geometry.crop
        height, width = input_size
        return x1 - x0 <= _MOST_SQUASHED * width and y1 - y0 <= _MOST_SQUASHED * height


def read_header(data: bytes, box: Box | None, max_pixels: int) -> Jpeg | None:
    """What the GPU has to know of a file; None: it is for the CPU to decode, or to refuse.

    Args:
        data: any file. box: to crop to, in pixels of the oriented picture. max_pixels: more are the CPU's to refuse.
    """
    if not is_well_formed(data):
        return None
    try:
        # of no other format: what decodes those in this process may crash it
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            if not is_plain_jpeg(image, len(data)) or image.width * image.height > max_pixels:
                return None
            width, height = stored = image.size
            orientation = _orientation(image)
        geometry = compute_geometry_from_size((height, width) if orientation >= 5 else stored, box)
    except Exception:  # the CPU meets it again, and has words for it
        return None
    return Jpeg(data, stored, orientation, geometry)


def is_well_formed(data: bytes) -> bool:
    """Whether a file is a JPEG of 8 bits whose markers follow each other from the first byte to the last.

    nvJPEG may take a file that ends early, or is damaged between its markers, for a whole one; the CPU's decoders
    notice. Lossless, arithmetic and 12-bit JPEG are not for the GPU, nor is one whose components are called R, G and B.
    """
    if not data.startswith(_START) or not data.endswith(_END):
        return False
    frame: bytes | None = None
    progressive = False
    scans = 0
    position = len(_START)
    for _ in range(_MOST_SEGMENTS):
        found = _MARKER_HERE.match(data, position)
        if found is None:
            return False
        marker, position = found[1][0], found.end()
        if marker == _END[1]:
            return bool(scans) and position == len(data)
        segment = data[position + 2 : position + int.from_bytes(data[position : position + 2])]
        if marker in _FRAMES and frame is None:
            frame, progressive = segment, marker == _FRAMES[2]
            if not _is_for_the_gpu(frame):
                return False
        elif marker not in _BETWEEN:
            return False
        position += 2 + len(segment)
        if marker == _SCAN:
            scans += 1
            if frame is None or not segment or scans > _MOST_SCANS:
                return False
            coded = _MARKER_AFTER.search(data, position)
            # one scan of all components is the whole picture, unless it comes in stages
            if coded is None or (coded[1] != _END[1:] and segment[0] == frame[5] and not progressive):
                return False
            position = coded.start()
    return False


def _is_for_the_gpu(frame: bytes) -> bool:
    """By its frame header: bits, height and width (2 bytes each), components, of each its id and two bytes more."""
    return len(frame) > 5 and frame[0] == 8 and frame[6::3] != _RGB_IDS


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF: it has none, as on the CPU
        return 1
    return value if value in range(1, 9) else 1


class GpuDecoder:
    """nvImageCodec on one device. Used by one thread."""

    def __init__(self, device: str, cpu_threads: int = 2) -> None:
        """Open the codec, and see that it decodes.

        Args:
            device: `cuda:N`; or `cpu`, for tests.
            cpu_threads: of the codec, for what nvJPEG leaves to the CPU: Huffman decoding of most pictures.

        Raises:
            MissingExtra: nvImageCodec or PyTorch is not installed. UsageError: there is no such GPU, or nvImageCodec
                does not decode there.
        """
        require("torch", _EXTRA, _PURPOSE)
        require("nvidia.nvimgcodec", _EXTRA, _PURPOSE, pip_name="nvidia-nvimgcodec-cu13")
        import torch

        self.device = torch.device(device)
        self._on_gpu = self.device.type == "cuda"
        index = self.device.index or 0
        if self._on_gpu and torch.version.cuda is None:
            raise UsageError(f"there is no decoding on {device}: this PyTorch was built without CUDA")
        if self._on_gpu and index >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise UsageError(f"there is no decoding on {device}: PyTorch finds {count} usable GPUs on this machine")
        with _silent():
            from nvidia import nvimgcodec

            kinds = nvimgcodec.BackendKind
            # not the JPEG hardware (HW_GPU_ONLY): it takes a share of each batch and leaves the rest to the others, so
            # that the pixels of a picture would depend on its neighbours
            wanted = [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU] if self._on_gpu else [kinds.CPU_ONLY]
            try:
                self._decoder = nvimgcodec.Decoder(
                    device_id=index if self._on_gpu else nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
                    max_num_cpu_threads=cpu_threads,
                    backends=[nvimgcodec.Backend(kind) for kind in wanted],
                    # chroma as libjpeg-turbo interpolates it
                    options=":fancy_upsampling=1",
                )
            except Exception as error:  # whatever its library raises
                why = first_line(error)
                raise UsageError(f"there is no decoding on {device}: nvImageCodec cannot be used ({why})") from None
            self._codec = nvimgcodec
            self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)
            why = self.find_problem()
        if why:
            raise UsageError(f"there is no decoding on {device}: {why}")

    def decode(self, files: Sequence[Jpeg]) -> list[torch.Tensor | None]:
        """uint8 [height, width, 3], RGB, oriented, on the device; None for each file that the codec refuses.

        Raises:
            Exception: whatever the codec and CUDA raise where it is not a file's fault.
        """
        streams = [self._codec.CodeStream(file.data) for file in files]
        decoded = self._decoder.decode(streams, params=self._params, cuda_stream=self._stream())
        return [self._oriented(image, file) for image, file in zip(decoded, files, strict=True)]

    def resize_to_inputs(
        self, pictures: Sequence[torch.Tensor], crops: Sequence[Geometry], input_size: tuple[int, int]
    ) -> NDArray[np.uint8]:
        """uint8 [N, H0, W0, 3], RGB, in this computer's memory: the crops squashed to `input_size` = (H0, W0)."""
        import torch

        squashed = [
            resize(picture[crop.crop[1] : crop.crop[3], crop.crop[0] : crop.crop[2]], input_size)
            for picture, crop in zip(pictures, crops, strict=True)
        ]
        found: NDArray[np.uint8] = torch.stack(squashed).cpu().numpy()
        return found

    def find_problem(self) -> str:
        """Why it cannot decode, found by a test picture that is decoded, turned, cropped and squashed; empty: it can.

        Where a library or a driver is missing, the codec raises nothing: it decodes no picture.
        """
        file, expected = _test_picture()
        try:
            (picture,) = self.decode([file])
            if picture is None:
                return (
                    "nvImageCodec decodes nothing there; expected a GPU, its driver and nvJPEG (pip install "
                    "'opal-deploy[gpu-decode]')"
                )
            found = self.resize_to_inputs([picture], [file.geometry], expected.shape[:2])[0]
        except Exception as error:  # as above
            return first_line(error)
        furthest = int(np.abs(found.astype(np.int16) - expected).max())
        if furthest > _CANARY_COUNTS:
            return f"a test picture is {furthest} counts from Pillow's, expected at most {_CANARY_COUNTS}"
        return ""

    def free_memory(self) -> None:
        """Give the device what PyTorch holds in reserve."""
        if self._on_gpu:
            import torch

            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()

    def _stream(self) -> int:
        if not self._on_gpu:
            return 0
        import torch

        stream: int = torch.cuda.current_stream(self.device).cuda_stream
        return stream

    def _oriented(self, image: Any, file: Jpeg) -> torch.Tensor | None:
        import torch

        if image is None or tuple(image.shape) != (*file.stored[::-1], 3):
            return None
        tensor = torch.utils.dlpack.from_dlpack(image) if self._on_gpu else torch.from_numpy(np.array(image))
        return apply_orientation(tensor, file.orientation) if tensor.dtype == torch.uint8 else None


@cache
def _test_picture() -> tuple[Jpeg, NDArray[np.uint8]]:
    """A file of three different colour ramps that lies on its side, with a crop, and Pillow's answer for it."""
    rows, columns = np.mgrid[0:48, 0:64]
    ramps = np.stack([4 * columns, 5 * rows, 255 - 2 * (rows + columns)], axis=2).clip(0, 255).astype(np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    stream = io.BytesIO()
    Image.fromarray(ramps).save(stream, "JPEG", quality=95, subsampling=0, exif=exif)
    file = read_header(stream.getvalue(), (4.0, 6.0, 44.0, 60.0), MAX_PIXELS)
    assert file is not None
    with Image.open(stream) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    size = (16, 24)
    return file, np.asarray(upright.crop(file.geometry.crop).resize(size, Image.Resampling.BILINEAR))


@contextmanager
def _silent() -> Iterator[None]:
    """Native libraries that complain on stderr, of codecs that are of no interest here, are not heard meanwhile."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        kept = os.dup(2)
    except OSError:
        # there is no stderr
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def apply_orientation(stored: torch.Tensor, orientation: int) -> torch.Tensor:
    """[height, width, 3] as stored to how it is to be seen, by EXIF's orientation, 1 to 8."""
    turned = stored.transpose(0, 1) if orientation >= 5 else stored
    # of the picture that has been transposed where it lies on its side
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}.get(orientation, ())
    return turned.flip(flips) if flips else turned


def resize(picture: torch.Tensor, input_size: tuple[int, int]) -> torch.Tensor:
    """uint8 [height, width, 3] to uint8 [H0, W0, 3], antialiased bilinear, rounded after each direction as Pillow."""
    import torch

    height, width = input_size
    at_a_time = max(1, _MOST_FLOATS // (3 * picture.shape[1]))
    parts: tuple[torch.Tensor, ...] = torch.split(picture, at_a_time)
    rows = [_resized(part.permute(2, 0, 1).unsqueeze(0).float(), (part.shape[0], width)) for part in parts]
    return _resized(torch.cat(rows, 2), (height, width))[0].permute(1, 2, 0).byte()


def _resized(values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    import torch

    found = torch.nn.functional.interpolate(values, size, mode="bilinear", antialias=True)
    return (found + 0.5).floor_().clamp_(0, 255)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception of `GpuDecoder` says that the GPU's memory is full."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def open_gpu_decoders(devices: Sequence[str], cpu_threads: int, otherwise: str) -> tuple[GpuDecoder, ...]:
    """One decoder a device, for `EngineOptions.gpus`.

    Args:
        devices: `cuda:N` each. cpu_threads: of each codec. otherwise: what else a person can do, for the message.

    Raises:
        MissingExtra: nvImageCodec or PyTorch is not installed. UsageError: no device, or one that cannot decode.
    """
    if not devices:
        raise UsageError(f"there is no GPU to decode on: the model runs on the CPU; {otherwise}")
    try:
        return tuple(GpuDecoder(device, cpu_threads) for device in devices)
    except UsageError as error:
        raise UsageError(f"{error}; {otherwise}") from None
