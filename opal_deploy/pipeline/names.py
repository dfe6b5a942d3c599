"""File names as text that any JSON reader accepts, and back.

POSIX names are bytes. In records a backslash is written twice and every byte that is not UTF-8 as \\xNN, so that
`unescape_name(escape_name(name)) == name` for every name that the operating system can hand out.
"""

from __future__ import annotations

import re

_SURROGATE_BASE = 0xDC00
_ESCAPED = re.compile(r"\\(\\|x([0-9a-f]{2}))")


def escape_name(name: str) -> str:
    """A name from `os.fsdecode` (undecodable bytes as lone surrogates) as encodable text."""
    doubled = name.replace("\\", "\\\\")
    return "".join(
        f"\\x{ord(c) - _SURROGATE_BASE:02x}" if _SURROGATE_BASE + 0x80 <= ord(c) <= _SURROGATE_BASE + 0xFF else c
        for c in doubled
    )


def unescape_name(text: str) -> str:
    """The inverse of `escape_name`."""
    return _ESCAPED.sub(lambda m: "\\" if m[1] == "\\" else chr(_SURROGATE_BASE + int(m[2], 16)), text)
