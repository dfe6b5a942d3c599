"""Oxford-IIIT Pets: 37 breeds, whole pictures, the official split (it has no validation pictures).

    images/<Breed>_<number>.jpg
    annotations/trainval.txt, annotations/test.txt      <name> <class id> <species> <breed id>

torchvision.datasets.OxfordIIITPet reads the lists; `trainval` is what is trained on. Class names are torchvision's in
the order of the class ids. Oddities of the official archive that do no harm: images/ holds a few .mat files, which are
passed over, and GIFs and PNGs called .jpg, which are read for what they are.
"""

from __future__ import annotations

from pathlib import Path

from opal_deploy.datasets.listing import Adapter, Listing, from_pairs, has, lacking, require_files
from opal_deploy.datasets.samples import listed
from opal_deploy.datasets.torchvision_lists import Lists, through_torchvision
from opal_deploy.errors import UsageError

_TITLE = "Oxford-IIIT Pets"
_FILES = ("images/", "annotations/trainval.txt", "annotations/test.txt")


def is_pets(folder: Path) -> bool:
    """Whether it has images/ and one of the lists."""
    return has(folder, "images/") and any(has(folder, name) for name in _FILES[1:])


def read(folder: Path) -> Listing:
    """The lists' content.

    Raises:
        UsageError: files that are absent or damaged, or lists that name the classes differently.
    """
    require_files(folder, _TITLE, lacking(folder, _FILES))
    lists = through_torchvision(
        folder,
        "OxfordIIITPet",
        {f"oxford-iiit-pet/{name}": folder / name for name in ("images", "annotations")},
        {split: {"split": split} for split in ("trainval", "test")},
    )
    trainval, test = lists["trainval"], lists["test"]
    if problems := _disagreements(trainval, test):
        raise UsageError(f"{folder}: {'; '.join(problems)}; unpack the official annotations.tar.gz again")
    splits = {"train": trainval.pairs, "test": test.pairs}
    return from_pairs("pets", folder, trainval.classes, splits, pictures=(folder / "images",))


def _disagreements(trainval: Lists, test: Lists) -> list[str]:
    """Where ids and breeds are not one to one.

    torchvision numbers the names that it meets: with an id left out, all names after it would move.
    """
    problems = []
    breeds: dict[int, set[str]] = {}
    for path, label in trainval.pairs:
        breeds.setdefault(label, set()).add(_breed(path))
    if gaps := [str(label + 1) for label in range(max(breeds, default=-1) + 1) if label not in breeds]:
        problems.append(f"trainval.txt has no picture of the class ids {listed(gaps)}")
    if several := [f"{label + 1} ({', '.join(sorted(names))})" for label, names in breeds.items() if len(names) > 1]:
        problems.append(f"trainval.txt has several breeds of the class ids {listed(several)}")
    strange = {f"{_breed(p)} ({label + 1})": None for p, label in test.pairs if _breed(p) not in breeds.get(label, ())}
    if strange:
        problems.append(f"test.txt has breeds that trainval.txt does not have under these ids: {listed([*strange])}")
    return problems


def _breed(path: Path) -> str:
    return path.stem.rsplit("_", 1)[0]


ADAPTER = Adapter("pets", _TITLE, is_pets, lambda folder, _: read(folder), ("oxford-iiit-pet", "pets"))
