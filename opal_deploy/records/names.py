"""Names of images as text that any JSON reader accepts, and names of slots.

POSIX file names are bytes. Records double backslashes and write bytes that are not UTF-8 as \\xNN and NUL (possible in
archives) as \\x00, so that `unescape_name(escape_name(name)) == name` for every name of a file or archive member.

A file of slot names is TOML with a table per class and a line per slot:

    ["Black footed Albatross"]
    0 = "beak"
    3 = "wing tip"
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from opal_deploy.artifact.files import read_toml
from opal_deploy.errors import UsageError, suggest_names
from opal_deploy.remote import RemoteFile, is_url, redact

if TYPE_CHECKING:
    from opal_deploy.artifact.class_map import ClassMap

# (class_id, slot): name
SlotNames: TypeAlias = Mapping[tuple[int, int], str]
_MAX_SLOT_NAME = 100

_SURROGATE_BASE = 0xDC00
# NUL, and the surrogates of bytes from 0x80 on
_UNENCODABLE = re.compile("[\0\udc80-\udcff]")
_ESCAPED = re.compile(r"\\(\\|x([0-9a-f]{2}))")


def escape_name(name: str) -> str:
    """Return a name from `os.fsdecode` (undecodable bytes as lone surrogates) as encodable text."""
    return _UNENCODABLE.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", name.replace("\\", "\\\\"))


def unescape_name(text: str) -> str:
    """Return the name of an escaped text, the inverse of `escape_name`."""

    def unescape(match: re.Match[str]) -> str:
        if match[1] == "\\":
            return "\\"
        value = int(match[2], 16)
        return chr(_SURROGATE_BASE + value if value >= 0x80 else value)

    return _ESCAPED.sub(unescape, text)


def find_common_folder(names: Iterable[str]) -> str:
    """Return the common folder of the absolute paths among escaped names, with a separator at the end.

    Empty if no name is absolute, or if they share only the root. Pages meant for others show paths without it: they
    should not reveal a machine's folders and user names.
    """
    return functools.reduce(share_folder, names, None) or ""


def share_folder(folder: str | None, name: str) -> str | None:
    """Return the common folder of a name and of earlier names, which share `folder`; None: there were none."""
    if folder == "" or not os.path.isabs(name):
        return folder
    separator, folder = escape_name(os.sep), folder or name
    while not (folder.endswith(separator) and name.startswith(folder)):
        parent = folder.removesuffix(separator).rpartition(separator)[0]
        if not parent:
            return ""
        folder = parent + separator
    return folder


def hide_folders(name: str | None) -> str:
    """Return an escaped name for drawings: only the file name of an absolute path; "" for None."""
    if name is None or not os.path.isabs(name):
        return name or ""
    return name.rpartition(escape_name(os.sep))[2]


def source_name(source: object) -> str | None:
    """Return the name in the record of a source for `decode`: a path or URL as text, else None."""
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        return escape_name(redact(text) if is_url(text) else str(Path(text)))
    return escape_name(source.shown) if isinstance(source, RemoteFile) else None


def readable_name(image: str | None) -> str:
    """Return the unescaped path of a record's image, or the escaped one if it is not UTF-8; "" for None."""
    if image is None:
        return ""
    plain = unescape_name(image)
    try:
        plain.encode("utf-8")
    except UnicodeEncodeError:
        return image
    return plain


def read_slot_names(path: Path, class_names: Sequence[str], class_map: ClassMap) -> SlotNames:
    """Return the names in a TOML file for slots of a model with these classes.

    Raises:
        UsageError: the file cannot be read or is not TOML, a class or slot is not the model's, or a name is not text.
    """
    try:
        document = read_toml(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); expected a TOML file of names") from None
    except ValueError as error:  # raised for a number with too many digits too
        raise UsageError(f'{path}: not TOML ({error}); expected lines such as 0 = "beak" under ["class"]') from None
    ids = {name: class_id for class_id, name in reversed(list(enumerate(class_names)))}
    names: dict[tuple[int, int], str] = {}
    for label, table in document.items():
        if label not in ids or not isinstance(table, dict):
            similar = suggest_names(label, class_names)
            raise UsageError(f'{path}: {label!r} is not a table of a class; expected lines under ["class"]{similar}')
        count = int(class_map.sizes[ids[label]])
        for key, name in table.items():
            if key not in set(map(str, range(count))):
                raise UsageError(f"{path}: {label!r} has no slot {key[:40]!r}; expected 0 to {count - 1}")
            if not isinstance(name, str) or not 0 < len(name.strip()) <= _MAX_SLOT_NAME:
                expected = f"expected a name of 1 to {_MAX_SLOT_NAME} characters"
                raise UsageError(f"{path}: slot {key} of {label!r}: {expected}")
            names[ids[label], int(key)] = name.strip()
    return names
