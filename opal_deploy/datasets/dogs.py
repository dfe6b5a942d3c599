"""Stanford Dogs: 120 breeds, its own Matlab lists, a box for every dog.

    Images/<nXXXXXXXX-Breed>/<stem>.jpg
    Annotation/<nXXXXXXXX-Breed>/<stem>     XML, without an extension
    train_list.mat, test_list.mat           in the folder itself or in lists/: file_list, labels (from 1)

Kaggle's images/Images and annotations/Annotation are read, too. Class names are the folders' names in the order of the
lists' labels. Images are cropped to the dog's box; if there are several, to the first, with a warning.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from opal_deploy.datasets.listing import Adapter, Listing, build_listing
from opal_deploy.datasets.samples import Sample, shorten_list
from opal_deploy.errors import UsageError, require
from opal_deploy.preprocess.geometry import Box

# LookupError: an unknown encoding
ANNOTATION_ERRORS = (OSError, ElementTree.ParseError, ValueError, LookupError)
_FILES = (
    "Images/|images/Images/", "Annotation/|annotations/Annotation/",
    "train_list.mat|lists/train_list.mat", "test_list.mat|lists/test_list.mat",
)  # fmt: skip


def _read_dogs(folder: Path) -> Listing:
    """Read lists and boxes; annotations that are missing or damaged become a problem."""
    images, annotation = find_folders(folder)
    splits = {split: _read_list(folder, f"{split}_list.mat", images) for split in ("train", "test")}
    breeds = sorted({(sample.label, sample.path.parent.name) for samples in splits.values() for sample in samples})
    if [label for label, _ in breeds] != list(range(len(breeds))):
        raise UsageError(f"{folder}: the lists' class ids and folders are not one to one; unpack lists.tar again")
    faults: list[str] = []

    def add_box(sample: Sample) -> Sample:
        name = "/".join(sample.path.with_suffix("").parts[-2:])
        try:
            return replace(sample, box=read_annotation(annotation / name)[0])
        except ANNOTATION_ERRORS as error:
            # of a missing image, only the image is reported
            faults.extend([f"{name} ({error})"] if sample.path.is_file() else [])
            return sample

    splits = {split: [*map(add_box, samples)] for split, samples in splits.items()}
    listing = build_listing("dogs", folder, [name for _, name in breeds], splits, crop="boxes")
    if faults:
        listing.problems.append(f"annotations missing or without a readable box: {shorten_list(faults)}")
    return listing


def read_annotation(path: Path) -> list[Box]:
    """Return the one or more boxes of an annotation in PASCAL VOC's XML, (x0, y0, x1, y1) in pixels.

    Raises:
        ANNOTATION_ERRORS: the file cannot be read, is not XML, or has no box of four numbers.
    """
    boxes = []
    for element in ElementTree.parse(path).getroot().findall("object/bndbox"):
        x0, y0, x1, y1 = (float(element.findtext(edge, "absent")) for edge in ("xmin", "ymin", "xmax", "ymax"))
        boxes.append((x0, y0, x1, y1))
    if not boxes:
        raise ValueError("no object/bndbox")
    return boxes


def _read_list(folder: Path, name: str, images: Path) -> list[Sample]:
    path = folder / "lists" / name if (folder / "lists" / name).is_file() else folder / name
    require("scipy", "train", f"reading {path}")
    from scipy.io import loadmat

    try:
        table = loadmat(path, squeeze_me=True)
        rows = zip(np.atleast_1d(table["file_list"]), np.atleast_1d(table["labels"]), strict=True)
        return [Sample(images / str(file), int(label) - 1) for file, label in rows]
    except Exception as error:  # SciPy's reader raises nearly anything for a damaged file
        text = " ".join(str(error).split())
        expected = "a Matlab file with file_list and as many labels"
        raise UsageError(f"{path}: not {expected} ({text}); unpack lists.tar again") from None


def find_folders(folder: Path) -> tuple[Path, Path]:
    """Return the folders of images and annotations, as Kaggle packs them or as the authors do."""
    kaggle = folder / "images" / "Images", folder / "annotations" / "Annotation"
    return kaggle if kaggle[0].is_dir() else (folder / "Images", folder / "Annotation")


DOGS = Adapter(
    "dogs", "Stanford Dogs", _read_dogs, _FILES, ("stanford_dogs", "StanfordDogs", "stanford-dogs", "dogs")
)  # fmt: skip
