"""An image to classify, before it is decoded. Light to import: decode processes load this module, and no runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import Source
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import escape_name
from opal_deploy.remote import RemoteFile

# where an image lies
Location: TypeAlias = Path | RemoteFile


@dataclass(frozen=True)
class FrameInfo:
    """The place of a frame in its video.

    Attributes:
        video: the video's path.
        index, seconds: number of frames before this one, and time after the first; None without time stamps.
        image_sha256: hex digest of the video's file.
    """

    video: Path
    index: int
    seconds: float | None
    image_sha256: str


@dataclass(frozen=True)
class InputImage:
    """An image to classify, with everything known before it is decoded.

    Attributes:
        name: the image's name in its record, see `escape_name`; None for an image without a name.
        source: a path, a remote file, bytes, an archive member, a PIL image, or uint8 [H, W, 3] RGB.
        crop: (x0, y0, x1, y1) to crop to first, in pixels of the whole oriented image.
        label: the image's label, if it has one.
        error: why the image cannot be classified, if that is known already: an empty folder, a missing crop.
        index: position among all images of the inputs, from 0; None for an image that `discover` did not find.
        drawn: the image will be drawn: keep it and its row of the outputs, whatever the options say.
        frame: the place in a video; None for an image that is not a frame.
        detection: position of the crop among the boxes of a detector, see `detections.Crop`.
        relative: the path from the folder or archive that was searched; the file's name for a file given directly.
    """

    name: str | None
    source: Source
    crop: Box | None = None
    label: str | None = None
    error: ImageError | None = None
    index: int | None = None
    drawn: bool = False
    frame: FrameInfo | None = None
    detection: int | None = None
    relative: str = ""

    @classmethod
    def at(
        cls,
        path: Location,
        relative: str | None = None,
        error: ImageError | None = None,
        source: Source | None = None,
        index: int | None = None,
    ) -> InputImage:
        """Return the image at a path or URL, named after it.

        Args:
            path: as a person would open it from the working directory. For an archive's member the archive's path, a
                slash and the member's name, which is only a label.
            relative, error, index: see `InputImage`; by default `relative` is the last part of `path`.
            source: the member's bytes or the frame's pixels; None: the file itself.
        """
        source, relative = path if source is None else source, path.name if relative is None else relative
        return cls(escape_name(str(path)), source, error=error, index=index, relative=relative)
