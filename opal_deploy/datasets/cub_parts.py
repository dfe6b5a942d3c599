"""Where the fifteen parts of CUB-200-2011's birds are: `parts/`, beside the five tables that `cub` reads.

parts/parts.txt      <part id> <name>
parts/part_locs.txt  <image id> <part id> <x> <y> <1 if visible>, pixels of the whole picture
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opal_deploy.datasets.listing import cannot_be_read, is_id, text_of
from opal_deploy.datasets.samples import DataSet, Sample, counted, listed
from opal_deploy.errors import UsageError

_ADVICE = "mend it, or leave the parts out with --no-parts"
_LOCATIONS = Path("parts") / "part_locs.txt"
_BOXES = "bounding_boxes.txt"
_NAMES = Path("parts") / "parts.txt"


@dataclass(frozen=True)
class PartLocations:
    """The P parts of N pictures.

    Attributes:
        names: P names, such as `left eye`.
        points: float64 [N, P, 2], (x, y) in pixels of the whole picture; (0, 0) where a part is not visible.
        visible: bool [N, P].
        boxes: float64 [N, 4], (x, y, width, height) of the bird, width and height at least 1.
    """

    names: tuple[str, ...]
    points: NDArray[np.float64]
    visible: NDArray[np.bool_]
    boxes: NDArray[np.float64]

    def in_frame(self, size: int) -> NDArray[np.float64]:
        """float64 [N, P, 2], (x, y) of the parts on the box squashed to size x size; may lie outside it."""
        corner, extent = self.boxes[:, None, :2], self.boxes[:, None, 2:]
        frame: NDArray[np.float64] = size * ((self.points - corner) / extent)
        return frame

    def in_frame_truncated(self, size: int) -> NDArray[np.int64]:
        """As `in_frame`, int64: part, box and result each truncated toward zero (Huang et al. 2023)."""
        points, boxes = np.trunc(self.points), np.trunc(self.boxes)
        whole = PartLocations(self.names, points, self.visible, boxes)
        return np.trunc(whole.in_frame(size)).astype(np.int64)


def has_parts(data: DataSet) -> bool:
    """Whether `read` has something to read: CUB's layout, with part locations.

    Raises:
        UsageError: nobody may look.
    """
    try:
        return data.layout == "cub" and (data.root / _LOCATIONS).is_file()
    except OSError as error:
        raise cannot_be_read(error, data.root / _LOCATIONS, _ADVICE) from None


def read(root: Path, samples: Sequence[Sample]) -> PartLocations:
    """The parts of `samples`, row for row.

    Args:
        root: CUB's folder.
        samples: of that folder, as `cub.read` gives them.

    Raises:
        UsageError: a table is missing or not CUB's, or lacks some of the pictures.
    """
    names = _names(root / _NAMES)
    id_of = {name: int(key) for key, name in _pairs(root / "images.txt")}
    ids = []
    for sample in samples:
        name = sample.path.relative_to(root / "images").as_posix()
        if name not in id_of:
            raise UsageError(f"{root}: images.txt does not have {name}, so its parts are unknown; {_ADVICE}")
        ids.append(id_of[name])
    boxes = _by_image(root / _BOXES, ids, columns=5)
    locations = _by_image(root / _LOCATIONS, ids, columns=5, parts=tuple(names))
    small = [str(key) for key, box in zip(ids, boxes[:, 0], strict=True) if min(box[2:]) < 1]
    if small:
        raise UsageError(f"{root / _BOXES}: boxes of less than a pixel for image ids {listed(small)}; {_ADVICE}")
    return PartLocations(tuple(names.values()), locations[..., :2], locations[..., 2] == 1, boxes[:, 0])


def _by_image(
    path: Path, ids: Sequence[int], *, columns: int, parts: tuple[int, ...] | None = None
) -> NDArray[np.float64]:
    """Rows of a numeric table as [N, P, values]; P is 1 for a table with one row an image."""
    table = _numbers(path, columns)
    keys = 1 if parts is None else 2
    row_of = {tuple(map(int, row[:keys])): number for number, row in enumerate(table)}
    wanted = [[(i,) if parts is None else (i, part) for part in parts or (0,)] for i in ids]
    missing = [str(i) for i, row in zip(ids, wanted, strict=True) if any(key not in row_of for key in row)]
    if missing:
        lacks = counted(len(missing), "image id", "image ids")
        raise UsageError(f"{path}: it lacks lines of {lacks}: {listed(missing)}; {_ADVICE}")
    order = np.array([[row_of[key] for key in row] for row in wanted], dtype=np.int64)
    return table[order][..., keys:]


def _numbers(path: Path, columns: int) -> NDArray[np.float64]:
    lines = [line for line in text_of(path, _ADVICE).splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"{path}: the table is empty; {_ADVICE}")
    try:
        table = np.loadtxt(lines, dtype=np.float64, ndmin=2, comments=None)
    except ValueError as error:
        raise UsageError(f"{path}: not CUB's table of numbers ({' '.join(str(error).split())}); {_ADVICE}") from None
    if table.shape[1] != columns:
        found = counted(table.shape[1], "column", "columns")
        raise UsageError(f"{path}: {found} found, CUB's table has {columns}; {_ADVICE}")
    if not np.isfinite(table).all():
        strange = lines[int(np.isfinite(table).all(axis=1).argmin())]
        raise UsageError(f"{path}: {strange.strip()[:80]!r} is not all finite numbers, CUB's table is; {_ADVICE}")
    return table


def _names(path: Path) -> dict[int, str]:
    names = {int(key): name for key, name in _pairs(path)}
    if not names:
        raise UsageError(f"{path}: it names no part, CUB's has lines such as '7 left eye'; {_ADVICE}")
    return names


def _pairs(path: Path) -> list[tuple[str, str]]:
    pairs = []
    for line in filter(str.strip, text_of(path, _ADVICE).splitlines()):
        key, *rest = line.split(maxsplit=1)
        if not is_id(key) or not rest:
            raise UsageError(f"{path}: {line.strip()[:80]!r} is not CUB's format, a numeric id and a name; {_ADVICE}")
        pairs.append((key, rest[0].strip()))
    return pairs
