"""The picture of a card: an overlay's photograph, small enough to be embedded."""

from __future__ import annotations

import io

from PIL import Image

from opal_deploy.explain.overlay import photograph_size
from opal_deploy.explain.records import Record

THUMBNAIL_WIDTH, THUMBNAIL_HEIGHT, THUMBNAIL_QUALITY = 480, 640, 80
# a picture that would shrink by less than this is embedded at its own size
_SMALL_ENOUGH = 0.75


class Thumbnail(bytes):
    """What `thumbnail` makes: the JPEG that a card shows."""


def thumbnail(overlay: bytes | Image.Image, record: Record) -> Thumbnail:
    """The overlay's photograph as JPEG, at most 480 x 640 pixels, or a little more where that spares a resize."""
    image = Image.open(io.BytesIO(overlay)) if isinstance(overlay, bytes) else overlay
    whole = image.size
    width, height = photograph_size(record.get("width", whole[0]), record.get("height", whole[1]))
    share = min(1.0, THUMBNAIL_WIDTH / width, THUMBNAIL_HEIGHT / height)
    if share > _SMALL_ENOUGH:
        share = 1.0
    if isinstance(overlay, bytes):
        # the decoder itself halves large pictures: a 24-megapixel overlay costs little
        image.draft("RGB", (round(whole[0] * share), round(whole[1] * share)))
    # cut first: a resize of a part would blend the legend into its last rows
    part = (max(1, width * image.size[0] // whole[0]), max(1, height * image.size[1] // whole[1]))
    size = (max(1, round(width * share)), max(1, round(height * share)))
    cut = image.convert("RGB").crop((0, 0, *part))
    small = cut if cut.size == size else cut.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=THUMBNAIL_QUALITY, subsampling=0)
    return Thumbnail(buffer.getvalue())
