"""JPEG files decoded and resized on a GPU: NVIDIA's nvImageCodec (nvJPEG) and PyTorch.

The codec returns one image or nothing for each file of a batch. Its pixels are not libjpeg-turbo's, bit for bit: the
inverse cosine transform is another; `bench decoding` measures by how much. The resize repeats Pillow's arithmetic (rows
first, rounded, then columns) within 1 count. EXIF orientation is applied here, for the codec is told to leave it.

Only files that `jpeg_header.read_header` accepts are decoded. On the device `cpu`, the same codec uses libjpeg-turbo,
which serves to test this module on machines without a GPU.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from opal_deploy.errors import UsageError, first_line, require
from opal_deploy.preprocess.decode import MAX_PIXELS
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.jpeg_header import Jpeg, read_header

if TYPE_CHECKING:
    import torch

_EXTRA, _PURPOSE = "gpu-decode", "--decode gpu"
# a decoded test image may be this far from Pillow's; anything that works is nearer
_MAX_TEST_DIFFERENCE = 8
# float32 values that are resized at a time, so that their memory is bounded
_MAX_FLOATS = 12_000_000


class GpuDecoder:
    """nvImageCodec on one device, used by one thread.

    Attributes:
        device: where images are decoded and resized.
    """

    def __init__(self, device: str, cpu_threads: int = 2) -> None:
        """Open the codec and check that it decodes.

        Args:
            device: `cuda:N`, or `cpu` for tests.
            cpu_threads: of the codec, for what nvJPEG leaves to the CPU: Huffman decoding of most images.

        Raises:
            MissingExtra: nvImageCodec or PyTorch is not installed.
            UsageError: there is no such GPU, or nvImageCodec does not decode there.
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
        with _silenced_stderr():
            from nvidia import nvimgcodec

            kinds = nvimgcodec.BackendKind
            # not the JPEG hardware (HW_GPU_ONLY): it takes a share of each batch and leaves the rest to the others, so
            # that the pixels of an image would depend on its neighbours
            backends = [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU] if self._on_gpu else [kinds.CPU_ONLY]
            try:
                self._decoder = nvimgcodec.Decoder(
                    device_id=index if self._on_gpu else nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
                    max_num_cpu_threads=cpu_threads,
                    backends=[nvimgcodec.Backend(kind) for kind in backends],
                    # chroma as libjpeg-turbo interpolates it
                    options=":fancy_upsampling=1",
                )
            except Exception as error:  # whatever its library raises
                reason = first_line(error)
                raise UsageError(f"there is no decoding on {device}: nvImageCodec cannot be used ({reason})") from None
            self._codec = nvimgcodec
            self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)
            problem = self.find_problem()
        if problem:
            raise UsageError(f"there is no decoding on {device}: {problem}")

    def decode(self, files: Sequence[Jpeg]) -> list[torch.Tensor | None]:
        """Decode files to images, uint8 [height, width, 3], RGB, oriented, on the device.

        Returns:
            One image for each file, or None for a file that the codec refuses.

        Raises:
            Exception: whatever the codec and CUDA raise where it is not a file's fault.
        """
        streams = [self._codec.CodeStream(file.data) for file in files]
        decoded = self._decoder.decode(streams, params=self._params, cuda_stream=self._stream())
        return [self._oriented(image, file) for image, file in zip(decoded, files, strict=True)]

    def resize_to_inputs(
        self, images: Sequence[torch.Tensor], crops: Sequence[Geometry], input_size: tuple[int, int]
    ) -> NDArray[np.uint8]:
        """Return the images' crops resized to `input_size` = (H0, W0): uint8 [N, H0, W0, 3], RGB, on the host."""
        import torch

        resized = [
            resize(image[crop.crop[1] : crop.crop[3], crop.crop[0] : crop.crop[2]], input_size)
            for image, crop in zip(images, crops, strict=True)
        ]
        inputs: NDArray[np.uint8] = torch.stack(resized).cpu().numpy()
        return inputs

    def find_problem(self) -> str:
        """Decode, turn, crop and resize a test image, and return what is wrong with the result; empty if nothing is.

        Where a library or a driver is missing, the codec raises nothing: it decodes no image.
        """
        file, expected = _test_image()
        try:
            (image,) = self.decode([file])
            if image is None:
                return (
                    "nvImageCodec decodes nothing there; expected a GPU, its driver and nvJPEG (pip install "
                    "'opal-deploy[gpu-decode]')"
                )
            found = self.resize_to_inputs([image], [file.geometry], expected.shape[:2])[0]
        except Exception as error:  # whatever its library raises
            return first_line(error)
        furthest = int(np.abs(found.astype(np.int16) - expected).max())
        if furthest > _MAX_TEST_DIFFERENCE:
            return f"a test image is {furthest} counts from Pillow's, expected at most {_MAX_TEST_DIFFERENCE}"
        return ""

    def free_memory(self) -> None:
        """Return to the device the memory that PyTorch holds in reserve."""
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
def _test_image() -> tuple[Jpeg, NDArray[np.uint8]]:
    """Return a JPEG of three colour ramps that lies on its side, with a crop, and the input that Pillow makes of it."""
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
def _silenced_stderr() -> Iterator[None]:
    """Silence native libraries, which complain on stderr about codecs that are not used here."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        stderr = os.dup(2)
    except OSError:
        # there is no stderr
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def apply_orientation(stored: torch.Tensor, orientation: int) -> torch.Tensor:
    """Turn and flip a stored image [height, width, 3] as its EXIF orientation, 1 to 8, says."""
    turned = stored.transpose(0, 1) if orientation >= 5 else stored
    # after the transposition, where there is one
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}.get(orientation, ())
    return turned.flip(flips) if flips else turned


def resize(image: torch.Tensor, input_size: tuple[int, int]) -> torch.Tensor:
    """Resize uint8 [height, width, 3] to uint8 [H0, W0, 3]: antialiased bilinear, rounded after each direction."""
    import torch

    height, width = input_size
    at_a_time = max(1, _MAX_FLOATS // (3 * image.shape[1]))
    parts: tuple[torch.Tensor, ...] = torch.split(image, at_a_time)
    rows = [_interpolate(part.permute(2, 0, 1).unsqueeze(0).float(), (part.shape[0], width)) for part in parts]
    return _interpolate(torch.cat(rows, 2), (height, width))[0].permute(1, 2, 0).byte()


def _interpolate(values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    import torch

    resized = torch.nn.functional.interpolate(values, size, mode="bilinear", antialias=True)
    return (resized + 0.5).floor_().clamp_(0, 255)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an exception of `GpuDecoder` means that the GPU's memory is full."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def open_gpu_decoders(devices: Sequence[str], cpu_threads: int, otherwise: str) -> tuple[GpuDecoder, ...]:
    """Open one decoder a device, for `InferenceOptions.gpus`.

    Args:
        devices: `cuda:N` each.
        cpu_threads: of each codec.
        otherwise: what else a user can do, for the message.

    Raises:
        MissingExtra: nvImageCodec or PyTorch is not installed.
        UsageError: there is no device, or one cannot decode.
    """
    if not devices:
        raise UsageError(f"there is no GPU to decode on: the model runs on the CPU; {otherwise}")
    try:
        return tuple(GpuDecoder(device, cpu_threads) for device in devices)
    except UsageError as error:
        raise UsageError(f"{error}; {otherwise}") from None
