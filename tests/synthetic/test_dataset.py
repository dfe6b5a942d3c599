from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import UsageError
from opal_deploy.synthetic import example_images, generate_dataset, read_annotations
from opal_deploy.synthetic.creatures import MAX_SPECIES, draw_creature, list_species

SMALL = {"num_species": 3, "train_per_class": 2, "val_per_class": 1, "test_per_class": 1, "size": (64, 96)}


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


def test_layout_is_an_image_folder_with_annotations(tmp_path):
    steps = []
    root = tmp_path / "a" / "b"
    classes = generate_dataset(root, **SMALL, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(i, 12) for i in range(1, 13)]
    assert sorted(path.name for path in root.iterdir()) == ["parts.jsonl", "test", "train", "val"]
    for split in ("train", "val", "test"):
        # an ImageFolder numbers its classes alphabetically
        assert sorted(path.name for path in (root / split).iterdir()) == classes
    on_disk = {path.relative_to(root).as_posix() for path in root.glob("*/*/*.png")}
    assert {annotation.image for annotation in read_annotations(root / "parts.jsonl")} == on_disk


def test_annotations_read_back_are_those_of_the_drawings(tmp_path):
    generate_dataset(tmp_path, **SMALL, seed=5)
    found = {annotation.image: annotation for annotation in read_annotations(tmp_path)}
    kind = list_species(3)[2]
    creature = draw_creature(kind, np.random.default_rng(np.random.SeedSequence([5, 0, 2, 1])), (64, 96))
    annotation = found[f"train/{kind.name}/0001.png"]
    assert annotation.species == kind.name
    assert (annotation.height, annotation.width) == (64, 96)
    assert annotation.parts == creature.parts
    np.testing.assert_array_equal(annotation.foreground(), creature.foreground)
    np.testing.assert_array_equal(pixels(tmp_path / annotation.image), creature.image)


def test_an_image_depends_on_its_own_place_and_seed_only(tmp_path):
    generate_dataset(tmp_path / "few", **SMALL)
    generate_dataset(tmp_path / "more", **{**SMALL, "num_species": 4, "train_per_class": 3, "val_per_class": 0})
    generate_dataset(tmp_path / "seed", **SMALL, seed=1)
    name = f"test/{list_species(3)[1].name}/0000.png"
    np.testing.assert_array_equal(pixels(tmp_path / "few" / name), pixels(tmp_path / "more" / name))
    assert not (tmp_path / "more" / "val").exists()
    files = [*tmp_path.glob("few/*/*/*.png"), *tmp_path.glob("seed/*/*/*.png")]
    assert len({pixels(path).tobytes() for path in files}) == len(files) == 24


def test_an_occupied_folder_and_a_file_are_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    for place in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(UsageError, match="exists"):
            generate_dataset(place, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_species": MAX_SPECIES + 1}, f"2 to {MAX_SPECIES}"),
        ({"train_per_class": -1}, "must not be negative"),
        ({"train_per_class": 0, "val_per_class": 0, "test_per_class": 0}, "nor all 0"),
        ({"size": (16, 64)}, "at least 32"),
    ],
)
def test_impossible_request_is_refused_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        generate_dataset(tmp_path / "new", **{**SMALL, **change})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("damage", ["not json", "[]", "{}", '{"schema": 2}', '{"schema": 1}'])
def test_damaged_line_is_named(tmp_path, damage):
    generate_dataset(tmp_path, **SMALL)
    file = tmp_path / "parts.jsonl"
    file.write_text(f"{file.read_text().splitlines()[0]}\n{damage}\n")
    with pytest.raises(UsageError, match="line 2"):
        read_annotations(file)
    with pytest.raises(UsageError, match="cannot read part annotations"):
        read_annotations(tmp_path / "nowhere")


def test_examples_are_different_and_do_not_depend_on_their_number():
    images = example_images(20, 64, 96)
    assert (images.shape, images.dtype) == ((20, 64, 96, 3), np.uint8)
    np.testing.assert_array_equal(images[:2], example_images(2, 64, 96))
    for a, b in combinations(images, 2):
        assert (a != b).mean() > 0.5
    assert example_images(0, 64, 64).shape == (0, 64, 64, 3)
    with pytest.raises(UsageError):
        example_images(1, 8, 64)
