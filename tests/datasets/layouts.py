"""Writers of small data sets in their official layouts, with images whose bytes no other has."""

import errno
import itertools

import numpy as np
from PIL import Image
from scipy.io import savemat

_numbers = itertools.count()


def draw(path, size=(16, 12), format=None):
    number = next(_numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    color = (number % 256, number // 256 % 256, 30)
    Image.new("RGB", size, color).save(path, format, comment=f"image {number}".encode())
    return path


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def deny(monkeypatch, owner, call, name):
    """Let one file or folder be unreadable: tests may run as root, whom no mode keeps out."""
    original = getattr(owner, call)

    def refuse(path, *args, **options):
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, *args, **options)

    monkeypatch.setattr(owner, call, refuse)


def write_class_folders(root, names="ab", count=5):
    for name in names:
        for index in range(count):
            draw(root / name / f"{index}.png")
    return root


def write_cub(root):
    """Two classes with three training images and one test image each."""
    names = [f"{c}/{i}.png" for c in ("001.Auk", "002.Jay") for i in range(4)]
    for name in names:
        draw(root / "images" / name)
    write_lines(root / "images.txt", [f"{i} {name}" for i, name in enumerate(names, 1)])
    write_lines(root / "image_class_labels.txt", [f"{i} {1 + (i > 4)}" for i in range(1, 9)])
    write_lines(root / "train_test_split.txt", [f"{i} {int(i % 4 != 0)}" for i in range(1, 9)])
    write_lines(root / "bounding_boxes.txt", [f"{i} 2.0 3.0 10.0 8.0" for i in range(1, 9)])
    write_lines(root / "classes.txt", ["1 001.Auk", "2 002.Jay"])
    return root


def write_parts(root):
    """CUB with two parts of each image, image i's beak at (i, 10.5), its tail invisible."""
    write_cub(root)
    write_lines(root / "parts" / "parts.txt", ["1 beak", "2 left tail"])
    lines = [line for i in range(1, 9) for line in (f"{i} 1 {i}.0 10.5 1", f"{i} 2 0.0 0.0 0")]
    write_lines(root / "parts" / "part_locs.txt", lines)
    return root


# the labels of the lists, not the folders' order, number the classes
BREEDS = {"n02085782-Chihuahua": 2, "n02085936-Zebra_dog": 1}


def annotate_dog(path, *boxes):
    corners = "<xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax>"
    objects = "".join(f"<object><name>dog</name><bndbox>{corners.format(*box)}</bndbox></object>" for box in boxes)
    write_lines(path, [f"<annotation><folder>x</folder>{objects}</annotation>"])


def write_dogs_list(path, files, labels):
    """As the official lists: an N x 1 cell array of strings, an N x 1 matrix."""
    cells = np.empty((len(files), 1), dtype=object)
    cells[:, 0] = files
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"file_list": cells, "annotation_list": cells, "labels": np.array(labels, np.uint8)[:, None]})


def write_dogs(root):
    """Two breeds with five training and two test images each."""
    files = {label: [f"{breed}/{breed[:9]}_{i}.jpg" for i in range(7)] for breed, label in BREEDS.items()}
    for name in [name for names in files.values() for name in names]:
        draw(root / "Images" / name)
        annotate_dog(root / "Annotation" / name.removesuffix(".jpg"), (1, 2, 10, 11))
    for split, part in (("train", slice(0, 5)), ("test", slice(5, 7))):
        names = [(name, label) for label, group in files.items() for name in group[part]]
        write_dogs_list(root / f"{split}_list.mat", [n for n, _ in names], [label for _, label in names])
    return root


# in the order of the class ids, which is not that of upper and lower case letters
PETS = ["Abyssinian", "american_bulldog", "Bengal"]


def write_pets_list(root, split, rows):
    lines = [f"{name} {class_id} {1 if name[0].isupper() else 2} 1" for name, class_id in rows]
    write_lines(root / "annotations" / f"{split}.txt", lines)


def write_pets(root):
    """Three breeds with five training images and one test image each."""
    for split, numbers in (("trainval", range(1, 6)), ("test", range(6, 7))):
        rows = [(f"{breed}_{i}", class_id) for class_id, breed in enumerate(PETS, 1) for i in numbers]
        for name, _ in rows:
            draw(root / "images" / f"{name}.jpg")
        write_pets_list(root, split, rows)
    return root


SCENES = ["/a/abbey", "/a/apartment_building/outdoor", "/b/bakery/shop"]


def write_sun397(root):
    """Three scenes of eight images."""
    for scene in SCENES:
        for i in range(8):
            draw(root / scene[1:] / f"sun_{i}.jpg")
    write_lines(root / "ClassName.txt", SCENES)
    return root
