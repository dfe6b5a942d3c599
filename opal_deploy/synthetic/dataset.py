"""A data set of creatures on disk, an ImageFolder with the place of every part; and example images in memory.

out/train/<species>/0000.png ...   out/val/...   out/test/...
out/parts.jsonl                    one JSON object per image, see `Annotation`; written last

An exported graph is compared with PyTorch on `example_images`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
from msgspec import convert
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.errors import UsageError
from opal_deploy.synthetic.creatures import MAX_SPECIES, PartBox, check_size, draw_creature, list_species

SPLITS = ("train", "val", "test")
PARTS_FILE = "parts.jsonl"
_SCHEMA = 1


@dataclass(frozen=True)
class Annotation:
    """The annotation of one image."""

    image: str  # the path relative to the data set's folder, with forward slashes
    species: str  # the name of the class
    width: int
    height: int
    parts: dict[str, PartBox]  # the place of every part, by name
    runs: tuple[int, ...]  # the foreground mask, see `encode_runs`

    def foreground(self) -> NDArray[np.bool_]:
        """Return the mask of the creature: bool [H, W]."""
        values = np.arange(len(self.runs)) % 2 == 1
        return np.repeat(values, self.runs).reshape(self.height, self.width)


def generate_dataset(
    out: Path,
    *,
    num_species: int = 8,
    train_per_class: int = 120,
    val_per_class: int = 20,
    test_per_class: int = 40,
    size: tuple[int, int] = (160, 160),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Draw a data set into a new or empty folder, and return the names of its classes by class id.

    An image depends only on (seed, split, class id, number in the class), not on the number of images.

    Args:
        out: the folder; made if missing.
        num_species: the number of classes, 2 ... `MAX_SPECIES`.
        train_per_class, val_per_class, test_per_class: images per class; 0 leaves the split out.
        size: (H, W) of every image in pixels, each at least 32.
        progress: called with (images written, all images) after each.

    Raises:
        UsageError: the folder is not empty or not a folder, or a number is out of range.
    """
    kinds = list_species(num_species)
    check_size(size)
    counts = dict(zip(SPLITS, (train_per_class, val_per_class, test_per_class), strict=True))
    if min(counts.values()) < 0 or not any(counts.values()):
        raise UsageError(f"images per class must not be negative, nor all 0: got {counts}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: exists; give a new or an empty folder for the data set")
    jobs = [(split, kind, i) for split, kind in product(SPLITS, range(num_species)) for i in range(counts[split])]
    lines = []
    for done, (split, class_id, index) in enumerate(jobs, 1):
        kind = kinds[class_id]
        rng = np.random.default_rng(np.random.SeedSequence([seed, SPLITS.index(split), class_id, index]))
        creature = draw_creature(kind, rng, size)
        name = f"{split}/{kind.name}/{index:04d}.png"
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        # the fastest compression: the files are read more often than moved
        Image.fromarray(creature.image).save(out / name, compress_level=1)
        annotation = Annotation(name, kind.name, size[1], size[0], creature.parts, encode_runs(creature.foreground))
        lines.append(json.dumps({"schema": _SCHEMA, **asdict(annotation)}, separators=(",", ":")))
        if progress is not None:
            progress(done, len(jobs))
    (out / PARTS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [kind.name for kind in kinds]


def encode_runs(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the lengths of the alternating runs of False and True in a mask [H, W], row by row, False first."""
    flat = mask.ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    bounds = np.concatenate([[0] if flat.size and flat[0] else [], [0], edges, [flat.size]])
    return tuple(int(length) for length in np.diff(bounds))


def read_annotations(path: Path) -> list[Annotation]:
    """Read annotations in the order of their file.

    Args:
        path: a parts file, or the data set's folder.

    Raises:
        UsageError: no such file, or a line is not an annotation.
    """
    file = path / PARTS_FILE if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read part annotations from {file}: {error}") from error
    annotations = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["schema"] != _SCHEMA:
                raise ValueError(f"schema {record['schema']}")
            annotations.append(convert(record, Annotation))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}, line {number}: not a part annotation of schema {_SCHEMA} ({error!r})") from error
    return annotations


_EXAMPLE_SEED = 20260917


def example_images(count: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return creatures of different species in scenes of their own: uint8 [count, height, width, 3], RGB.

    The species repeat after `MAX_SPECIES` images. With the same versions of NumPy and Pillow, the same arguments give
    the same images; image i does not depend on `count`. Raises UsageError for a side under 32 pixels.
    """
    images = [draw_example(number, height, width) for number in range(count)]
    return np.array(images, np.uint8).reshape(count, height, width, 3)


def draw_example(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return image `number` of `example_images`: uint8 [height, width, 3], RGB."""
    kind = list_species(MAX_SPECIES)[number % MAX_SPECIES]
    return draw_creature(kind, np.random.default_rng([_EXAMPLE_SEED, number]), (height, width)).image


def test_vector_images(height: int, width: int) -> NDArray[np.uint8]:
    """Return the images of test vectors, three creatures and one of noise: uint8 [4, height, width, 3]."""
    noise = np.random.default_rng(_EXAMPLE_SEED).integers(0, 256, (1, height, width, 3), dtype=np.uint8)
    return np.concatenate([example_images(3, height, width), noise])
