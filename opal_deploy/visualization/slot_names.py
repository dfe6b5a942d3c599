"""Names of slots, read from a TOML file with a table per class and a line per slot.

["Black footed Albatross"]
0 = "beak"
3 = "wing tip"
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opal_deploy.errors import UsageError

_MAX_LENGTH = 100


class SlotNames:
    """The names of slots by class and slot."""

    def __init__(self, names: Mapping[tuple[int, int], str] | None = None) -> None:
        self._names = dict(names or {})

    def __len__(self) -> int:
        return len(self._names)

    def name(self, class_id: int, slot: int) -> str | None:
        """Return a slot's name; None if it has none."""
        return self._names.get((class_id, slot))


def read_slot_names(path: Path, class_names: Sequence[str], prototypes_per_class: int) -> SlotNames:
    """Read a file of slot names.

    Args:
        path: the TOML file.
        class_names: the model's classes, which name the tables.
        prototypes_per_class: m; slots are 0 ... m-1.

    Raises:
        UsageError: the file cannot be read or is not TOML, names a class or slot that the model does not have, or a
            name is not a text.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); expected a TOML file of names") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f'{path}: not TOML ({error}); expected lines such as 0 = "beak" under ["a class"]') from None
    ids: dict[str, int] = {}
    for class_id, name in enumerate(class_names):
        ids.setdefault(name, class_id)
    names: dict[tuple[int, int], str] = {}
    for label, table in document.items():
        if label not in ids:
            near = difflib.get_close_matches(label, class_names, 1)
            raise UsageError(
                f"{path}: {label!r} is no class of the model{f'; did you mean {near[0]!r}?' if near else ''}; "
                'expected a table a class, such as ["a class"]'
            )
        names.update(_parse_class(path, label, ids[label], table, prototypes_per_class))
    return SlotNames(names)


def _parse_class(path: Path, label: str, class_id: int, table: Any, count: int) -> dict[tuple[int, int], str]:
    if not isinstance(table, dict):
        raise UsageError(f'{path}: {label!r} is a value; expected a table with lines such as 0 = "beak"')
    names = {}
    for key, name in table.items():
        if not (key.isascii() and key.isdigit() and int(key) < count):
            raise UsageError(f"{path}: {label!r} has no slot {key!r}; expected 0 to {count - 1}")
        if not isinstance(name, str) or not name.strip() or len(name) > _MAX_LENGTH:
            raise UsageError(
                f"{path}: the name of slot {key} of {label!r} is not a text of 1 to {_MAX_LENGTH} characters"
            )
        names[class_id, int(key)] = name.strip()
    return names
