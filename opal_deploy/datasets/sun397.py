"""SUN397: 397 scenes, whole pictures, ten official partitions of 50 training and 50 test pictures a class.

    SUN397/ClassName.txt, SUN397/<letter>/<scene>/sun_*.jpg
    Training_<pp>.txt, Testing_<pp>.txt     pp = 01 ... 10, of Partitions.zip, in SUN397/, Partitions/ or beside

torchvision.datasets.SUN397 reads the classes; it knows no split. A partition uses a part of the archive by design, so
pictures that it does not list are no warning. It has no validation pictures.
"""

from __future__ import annotations

from pathlib import Path

from opal_deploy.datasets.image_folder import subfolders
from opal_deploy.datasets.listing import Adapter, Listing, Pair, from_pairs, has, lacking, require_files, text_of
from opal_deploy.datasets.samples import listed
from opal_deploy.datasets.torchvision_lists import through_torchvision

_TITLE = "SUN397"
_AGAIN = "unpack Partitions.zip again"


def is_sun397(folder: Path) -> bool:
    """Whether it has the first letter's scenes beside the class names, or beside other letters' scenes alone.

    An ImageFolder of letters has pictures in them, not folders that begin with the letter.
    """
    if not has(folder, "a/"):
        return False
    letters = [found for found in subfolders(folder) if found.name != "Partitions"]
    return has(folder, "ClassName.txt") or (len(letters) > 1 and all(map(_is_letter, letters)))


def _is_letter(folder: Path) -> bool:
    """Whether it is one of the archive's: a letter, with nothing in it but folders that begin with it."""
    visible = [path for path in folder.iterdir() if not path.name.startswith(".")]
    scenes = all(path.name.startswith(folder.name) and path.is_dir() for path in visible)
    return len(folder.name) == 1 and bool(visible) and scenes


def read(folder: Path, partition: int = 1) -> Listing:
    """The lists of a partition.

    Args:
        partition: 1 ... 10.

    Raises:
        UsageError: files that are absent or damaged.
    """
    files = {"train": f"Training_{partition:02}.txt", "test": f"Testing_{partition:02}.txt"}
    places = (folder, folder / "Partitions", folder.parent, folder.parent / "Partitions")
    lists = next((place for place in places if has(place, *files.values())), folder)
    absent = [*lacking(folder, ["ClassName.txt"]), *lacking(lists, files.values())]
    advice = "fetch Partitions.zip from https://vision.princeton.edu/projects/2010/SUN/ and unpack it there"
    require_files(folder, _TITLE, absent, advice)
    found = through_torchvision(folder, "SUN397", {"SUN397": folder}, {"all": {}})["all"]
    label_of = {name: label for label, name in enumerate(found.classes)}
    splits: dict[str, list[Pair]] = {}
    problems = []
    for split, name in files.items():
        # /<letter>/<scene>/<file>, where a scene may have an inner part: /a/apartment_building/outdoor/sun_x.jpg
        paths = [Path(line.strip().lstrip("/")) for line in text_of(lists / name, _AGAIN).splitlines() if line.strip()]
        scenes = ["/".join(path.parts[1:-1]) for path in paths]
        if strange := sorted(set(scenes) - label_of.keys()):
            problems.append(f"{name} has scenes that ClassName.txt does not name: {listed(strange)}")
        pairs = zip(paths, scenes, strict=True)
        splits[split] = [(folder / path, label_of[scene]) for path, scene in pairs if scene in label_of]
    return from_pairs("sun397", folder, found.classes, splits, problems=problems)


ADAPTER = Adapter("sun397", _TITLE, is_sun397, read, ("SUN397",), partitions=10)
