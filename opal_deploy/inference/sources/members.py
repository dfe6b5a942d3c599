"""Members of archives: which of them are images, and what stands for one as an item."""

from __future__ import annotations

import re
from pathlib import Path

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources.items import Item, is_image_name
from opal_deploy.preprocess.decode import Source

# 100 megapixels of 16-bit RGB fit; no photograph takes more
MAX_MEMBER = 512 << 20


class ArchiveError(Exception):
    """An archive cannot be read on from here; the message says where and why."""


def is_image_member(name: str) -> bool:
    """Return whether a member is an image by its suffix and not hidden, as `__MACOSX/._x.jpg` is."""
    hidden = any(part.startswith(".") and part not in (".", "..") for part in re.split(r"[/\\]", name))
    return not hidden and is_image_name(name)


def member_item(archive: Path, name: str, content: Source | ImageError) -> Item:
    """Return a member as an item. Its name is only a label: `..`, a leading slash or a NUL lead nowhere."""
    path = Path(f"{archive}/{name}")
    return Item(path, name, content) if isinstance(content, ImageError) else Item(path, name, content=content)


def oversized(size: int) -> ImageError:
    """Return the error of a member of more than `MAX_MEMBER` bytes."""
    return ImageError(
        "oversized_member", f"it claims {size:,} bytes, over the limit of {MAX_MEMBER:,} for an image in an archive"
    )
