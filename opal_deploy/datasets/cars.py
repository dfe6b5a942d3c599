"""Stanford Cars: 196 models, whole pictures, the official split (it has no validation pictures).

    devkit/cars_meta.mat, devkit/cars_train_annos.mat
    cars_test_annos_withlabels.mat          beside devkit/ or in it; a download of its own
    cars_train/*.jpg, cars_test/*.jpg

torchvision.datasets.StanfordCars reads the lists. Class names are the devkit's.
"""

from __future__ import annotations

from pathlib import Path

from opal_deploy.datasets.listing import Adapter, Listing, first_of, from_pairs, has, lacking, require_files
from opal_deploy.datasets.torchvision_lists import through_torchvision

_TITLE = "Stanford Cars"
_TEST_LABELS = "cars_test_annos_withlabels.mat"


def is_cars(folder: Path) -> bool:
    """Whether it has the devkit or both picture folders."""
    return has(folder, "devkit/cars_meta.mat") or has(folder, "cars_train/", "cars_test/")


def read(folder: Path) -> Listing:
    """The lists' content.

    Raises:
        UsageError: files that are absent or damaged.
    """
    test_labels = first_of(folder, _TEST_LABELS, f"devkit/{_TEST_LABELS}")
    absent = lacking(folder, ("devkit/cars_meta.mat", "devkit/cars_train_annos.mat", "cars_train/", "cars_test/"))
    absent += [] if test_labels.is_file() else [_TEST_LABELS]
    require_files(folder, _TITLE, absent)
    # Kaggle packs the pictures into a second folder of the same name
    train, test = (
        nested if (nested := folder / name / name).is_dir() else folder / name for name in ("cars_train", "cars_test")
    )
    links = {"devkit": folder / "devkit", "cars_train": train, "cars_test": test, _TEST_LABELS: test_labels}
    lists = through_torchvision(
        folder,
        "StanfordCars",
        {f"stanford_cars/{name}": path for name, path in links.items()},
        {split: {"split": split} for split in ("train", "test")},
    )
    splits = {split: found.pairs for split, found in lists.items()}
    return from_pairs("cars", folder, lists["train"].classes, splits, pictures=(train, test))


ADAPTER = Adapter(
    "cars", _TITLE, is_cars, lambda folder, _: read(folder), ("stanford_cars", "StanfordCars", "stanford-cars", "cars")
)
