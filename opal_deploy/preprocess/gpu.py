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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from opal_deploy.errors import UsageError, require
from opal_deploy.preprocess.decode import is_plain_jpeg
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import Box, lay_out_size

if TYPE_CHECKING:
    import torch

_EXTRA, _PURPOSE = "gpu-decode", "--decode gpu"
# end of image: nvJPEG may take a file that ends early for a whole one
_END = b"\xff\xd9"
# a decoded test picture may be this far from Pillow's; anything that works is nearer
_CANARY_COUNTS = 8


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


def read_header(data: bytes, box: Box | None, max_pixels: int) -> Jpeg | None:
    """What the GPU has to know of a file; None: it is for the CPU to decode, or to refuse.

    Args:
        data: any file. box: to crop to, in pixels of the oriented picture. max_pixels: more are the CPU's to refuse.
    """
    if not data.endswith(_END):
        return None
    try:
        with Image.open(io.BytesIO(data)) as image:
            if not is_plain_jpeg(image, len(data)) or image.width * image.height > max_pixels:
                return None
            width, height = stored = image.size
            orientation = _orientation(image)
        geometry = lay_out_size((height, width) if orientation >= 5 else stored, box)
    except Exception:  # the CPU meets it again, and has words for it
        return None
    return Jpeg(data, stored, orientation, geometry)


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
        # it would tell the terminal of every file that it cannot decode; read when it is imported
        os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
        import torch
        from nvidia import nvimgcodec

        self.device = torch.device(device)
        self._on_gpu = self.device.type == "cuda"
        if self._on_gpu and (self.device.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"--decode gpu: PyTorch finds no GPU {device}, of {torch.cuda.device_count()} on this machine; "
                "leave --decode out to decode on the CPU"
            )
        kinds = nvimgcodec.BackendKind
        # not the JPEG hardware (HW_GPU_ONLY): it takes a share of each batch and leaves the rest to the others, so that
        # the pixels of a picture would depend on its neighbours
        wanted = [kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU] if self._on_gpu else [kinds.CPU_ONLY]
        self._codec = nvimgcodec
        try:
            self._decoder = nvimgcodec.Decoder(
                device_id=(self.device.index or 0) if self._on_gpu else nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=cpu_threads,
                backends=[nvimgcodec.Backend(kind) for kind in wanted],
                # chroma as libjpeg-turbo interpolates it
                options=":fancy_upsampling=1",
            )
        except Exception as error:  # whatever its library raises
            raise UsageError(f"--decode gpu: nvImageCodec cannot be used on {device}: {_first_line(error)}") from None
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)
        self._see_that_it_works(device)

    def decode(self, files: Sequence[Jpeg]) -> list[torch.Tensor | None]:
        """uint8 [height, width, 3], RGB, oriented, on the device; None for each file that the codec refuses.

        Raises:
            Exception: whatever the codec and CUDA raise where it is not a file's fault.
        """
        streams = [self._codec.CodeStream(file.data) for file in files]
        decoded = self._decoder.decode(streams, params=self._params, cuda_stream=self._stream())
        return [self._oriented(image, file) for image, file in zip(decoded, files, strict=True)]

    def to_inputs(
        self, pictures: Sequence[torch.Tensor], crops: Sequence[Geometry], input_size: tuple[int, int]
    ) -> NDArray[np.uint8]:
        """uint8 [N, H0, W0, 3], RGB, in this computer's memory: the crops squashed to `input_size` = (H0, W0)."""
        import torch

        squashed = [
            squash(picture[crop.crop[1] : crop.crop[3], crop.crop[0] : crop.crop[2]], input_size)
            for picture, crop in zip(pictures, crops, strict=True)
        ]
        found: NDArray[np.uint8] = torch.stack(squashed).cpu().numpy()
        return found

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
        return orient(tensor, file.orientation) if tensor.dtype == torch.uint8 else None

    def _see_that_it_works(self, device: str) -> None:
        # where a library or a driver is missing, the codec raises nothing: it decodes no picture
        ramp = np.linspace(0, 255, 64, dtype=np.uint8)
        picture = Image.fromarray(np.stack([np.tile(ramp, (48, 1))] * 3, axis=2))
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=95)
        with Image.open(stream) as image:
            expected = np.asarray(image.convert("RGB"))
        file = Jpeg(stream.getvalue(), picture.size, 1, Geometry.whole(*picture.size))
        try:
            (found,) = self.decode([file])
        except Exception as error:  # as above
            raise UsageError(f"--decode gpu: decoding on {device} fails: {_first_line(error)}") from None
        if found is None:
            raise UsageError(
                f"--decode gpu: nvImageCodec decodes nothing on {device}; expected a GPU, its driver and nvJPEG "
                "(pip install 'opal-deploy[gpu-decode]'); leave --decode out to decode on the CPU"
            )
        furthest = int(np.abs(found.cpu().numpy().astype(np.int16) - expected).max())
        if furthest > _CANARY_COUNTS:
            raise UsageError(
                f"--decode gpu: nvImageCodec decodes a test picture wrongly on {device}: {furthest} counts from "
                f"Pillow, expected at most {_CANARY_COUNTS}; leave --decode out to decode on the CPU"
            )


def orient(stored: torch.Tensor, orientation: int) -> torch.Tensor:
    """[height, width, 3] as stored to how it is to be seen, by EXIF's orientation, 1 to 8."""
    turned = stored.transpose(0, 1) if orientation >= 5 else stored
    # of the picture that has been transposed where it lies on its side
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}.get(orientation, ())
    return turned.flip(flips) if flips else turned


def squash(picture: torch.Tensor, input_size: tuple[int, int]) -> torch.Tensor:
    """uint8 [height, width, 3] to uint8 [H0, W0, 3], antialiased bilinear, rounded after each direction as Pillow."""
    height, width = input_size
    values = picture.permute(2, 0, 1).unsqueeze(0).float()
    rows = _resized(values, (picture.shape[0], width))
    return _resized(rows, (height, width))[0].permute(1, 2, 0).byte()


def _resized(values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    import torch

    found = torch.nn.functional.interpolate(values, size, mode="bilinear", antialias=True)
    return (found + 0.5).floor_().clamp_(0, 255)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception of `GpuDecoder` says that the GPU's memory is full."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def open_gpus(devices: Sequence[str], cpu_threads: int = 2) -> tuple[GpuDecoder, ...]:
    """One decoder a device, for `EngineOptions.gpus`. Raises as `GpuDecoder`, and UsageError without a device."""
    if not devices:
        raise UsageError("--decode gpu: the model runs on the CPU; expected a GPU, or no --decode")
    return tuple(GpuDecoder(device, cpu_threads) for device in devices)
