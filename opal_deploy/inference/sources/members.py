"""Members of archives: which of them are images, what stands for one as an item, and where links between them lead."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources.items import Item, Location, Skipped, is_image_name
from opal_deploy.preprocess.decode import Source
from opal_deploy.records.names import escape_name

# 100 megapixels of 16-bit RGB fit; no photograph takes more
MAX_MEMBER = 512 << 20

# links on the way to one file, as on Linux, and characters of a path, as on macOS
_MAX_LINKS, MAX_PATH = 40, 1024
_OUTSIDE = "which lies outside the archive; pack what it leads to"


class ArchiveError(Exception):
    """An archive cannot be read on from here; the message says where and why."""


def is_hidden(name: str) -> bool:
    """Return whether a member or one of its folders is hidden, as the file `__MACOSX/._x.jpg` is."""
    return any(part.startswith(".") and part not in (".", "..") for part in re.split(r"[/\\]", name))


def member_items(archive: Location, name: str, content: Source | ImageError | None, skipped: Skipped) -> Iterator[Item]:
    """Yield a member as an item; count it where it is none: a link to a folder, or to a file but no image by its name.

    A member's name is only a label: `..`, a leading slash or a NUL lead nowhere.

    Args:
        archive: its path or URL.
        name: of the member.
        content: where its bytes are, or what is wrong with it; None: it is a link to a folder in the archive.
        skipped: counts what is no item.
    """
    path = Path(f"{archive}/{name}") if isinstance(archive, Path) else archive.child(name)
    if content is None:
        skipped.add_folder_link(Path(name))
    elif isinstance(content, ImageError):
        yield Item(path, name, content)
    elif is_image_name(name):
        yield Item(path, name, content=content)
    else:
        skipped.add(Path(name))


def oversized(size: int) -> ImageError:
    """Return the error of a member of more than `MAX_MEMBER` bytes."""
    return ImageError(
        "oversized_member", f"it claims {size:,} bytes, over the limit of {MAX_MEMBER:,} for an image in an archive"
    )


class Link(NamedTuple):
    """A link between members.

    Attributes:
        target: as the archive has it.
        hard: the target is a path in the archive, not one from the folder of the link.
    """

    target: str
    hard: bool

    def error(self, why: str) -> ImageError:
        """Return the error of a link that is not followed."""
        kind = "hard" if self.hard else "symbolic"
        # a path of any length may be claimed
        return ImageError("unsupported_member", f"it is a {kind} link to {escape_name(self.target[:200])}, {why}")


def normalize_name(name: str) -> str:
    """Return a member's path from the archive's root, by which links find it."""
    return posixpath.normpath(name).lstrip("/")


def parents(path: str, *, itself: bool) -> Iterator[str]:
    """Yield the folders that a normalised path lies in, and `itself` where it is one."""
    # a header may claim a name of a million folders
    if len(path) <= MAX_PATH:
        folder = path if itself else posixpath.dirname(path)
        while folder not in ("", "/"):
            yield folder
            folder = posixpath.dirname(folder)


def resolve_link(name: str, link: Link, links: Mapping[str, Link]) -> str:
    """Return the normalised path that a link leads to, through any others; nothing may be there.

    Args:
        name: of the link, normalised.
        link: where it leads.
        links: all of the archive, by their normalised names.

    Raises:
        ImageError: unsupported_member: it leads out of the archive, or in a circle.
    """
    # the path as far as it is walked, and its parts still to walk, the next one last
    resolved, remaining = name.split("/"), list[str]()
    followed = characters = 0
    current: Link | None = link
    while current is not None or remaining:
        if current is not None:
            followed, characters = followed + 1, characters + len(current.target)
            if followed > _MAX_LINKS or characters > MAX_PATH:
                raise link.error("which leads in a circle")
            if current.target.startswith("/") and not current.hard:
                raise link.error(_OUTSIDE)
            resolved = [] if current.hard else resolved[:-1]
            remaining += current.target.split("/")[::-1]
            current = None
            continue
        part = remaining.pop()
        if part == "..":
            if not resolved:
                raise link.error(_OUTSIDE)
            resolved.pop()
        elif part not in ("", "."):
            resolved.append(part)
            current = links.get("/".join(resolved))
    return "/".join(resolved)
