"""What members of archives have in common: which are wanted, what they are called, how large they may be."""

from __future__ import annotations

import re
from pathlib import Path

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources.items import Item, is_image_name
from opal_deploy.preprocess.decode import Source

# 100 megapixels of 16-bit RGB fit; what claims more is no photograph
MAX_MEMBER = 512 << 20


class ArchiveError(Exception):
    """An archive cannot be read on from here; the message says where and why."""


def wanted(name: str) -> bool:
    """Whether a member is taken for an image: by its suffix, and not hidden (`__MACOSX/._x.jpg` is no picture)."""
    hidden = any(part.startswith(".") and part not in (".", "..") for part in re.split(r"[/\\]", name))
    return not hidden and is_image_name(name)


def member_item(archive: Path, name: str, content: Source | None = None, problem: ImageError | None = None) -> Item:
    """A member as an item. Its name is a label and nothing else: `..`, a leading slash or a NUL lead nowhere."""
    return Item(Path(f"{archive}/{name}"), name, problem, content)


def oversized(size: int) -> ImageError:
    """The problem of a member that claims more than the limit."""
    return ImageError(
        "oversized_member", f"it claims {size:,} bytes, over the limit of {MAX_MEMBER:,} for a picture in an archive"
    )
