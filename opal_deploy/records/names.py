"""File names as text that any JSON reader accepts, and back.

POSIX names are bytes. In records a backslash is written twice, every byte that is not UTF-8 as \\xNN, and a NUL, which
a member of an archive may have in its name, as \\x00, so that `unescape_name(escape_name(name)) == name` for every name
that the operating system or an archive can hand out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from opal_deploy.storage.files import RemoteFile
from opal_deploy.storage.urls import is_url, redact

_SURROGATE_BASE = 0xDC00
_ESCAPED = re.compile(r"\\(\\|x([0-9a-f]{2}))")


def escape_name(name: str) -> str:
    """Return a name from `os.fsdecode` (undecodable bytes as lone surrogates) as encodable text."""
    doubled = name.replace("\\", "\\\\")
    if doubled.isascii() and "\0" not in doubled:
        return doubled
    return "".join(
        "\\x00"
        if c == "\0"
        else f"\\x{ord(c) - _SURROGATE_BASE:02x}"
        if _SURROGATE_BASE + 0x80 <= ord(c) <= _SURROGATE_BASE + 0xFF
        else c
        for c in doubled
    )


def unescape_name(text: str) -> str:
    """Return the name whose escaped text is given: the inverse of `escape_name`."""

    def unescape(match: re.Match[str]) -> str:
        if match[1] == "\\":
            return "\\"
        value = int(match[2], 16)
        return chr(_SURROGATE_BASE + value if value >= 0x80 else value)

    return _ESCAPED.sub(unescape, text)


def find_common_folder(names: Iterable[str]) -> str:
    """Return the folder that the absolute paths among escaped names have in common, with the separator at its end.

    Empty where no name is an absolute path, or they share the root alone. Pages that are handed on show paths without
    it: where a machine keeps its files, and whose they are, is nobody else's business.
    """
    separator = escape_name(os.sep)
    folder: str | None = None
    for name in names:
        if not os.path.isabs(name):
            continue
        if folder is None:
            folder = name
        while not (folder.endswith(separator) and name.startswith(folder)):
            parent = folder.removesuffix(separator).rpartition(separator)[0]
            if not parent:
                return ""
            folder = parent + separator
    return folder or ""


def hide_folders(name: str | None) -> str:
    """Return an escaped name as drawings show it: of an absolute path the file's name alone; "" for None."""
    if name is None or not os.path.isabs(name):
        return name or ""
    return name.rpartition(escape_name(os.sep))[2]


def source_name(source: object) -> str | None:
    """Return the name in the record of an argument for `decode`: a path or URL as text, None for else."""
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        return escape_name(redact(text) if is_url(text) else str(Path(text)))
    return escape_name(source.shown) if isinstance(source, RemoteFile) else None


def readable_name(image: str | None) -> str:
    """Return the unescaped path of a record's image; the escaped one if the path is not UTF-8, "" for None."""
    if image is None:
        return ""
    plain = unescape_name(image)
    try:
        plain.encode("utf-8")
    except UnicodeEncodeError:
        return image
    return plain
