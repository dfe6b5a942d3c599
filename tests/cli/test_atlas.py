"""`opal-deploy atlas`, and the sheets that `explain --atlas` makes with it."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.calls import check

TRAINER = ("torch", "torchvision", "sklearn", "scipy", "matplotlib", "onnx")
PLAIN = ["set", "--plain", "--out", "a"]


def read_atlas(root, name="a"):
    return json.loads((root / name / "atlas.json").read_text())


def list_slots(document):
    return [slot for each in document["classes"] for slot in each["slots"]]


def list_patches(document):
    return [patch for slot in list_slots(document) for patch in slot["patches"]]


@pytest.fixture(scope="module")
def built(tmp_path_factory, make_pictures, opal, exact_model):
    """Twelve images of no class of the model in `set`, their atlas in `a`, the JSON in `printed.json`."""
    root = tmp_path_factory.mktemp("built")
    for number, path in enumerate(make_pictures(root / "made", 12)):
        target = root / "set" / ("left" if number % 2 else "right") / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    done = check(opal("atlas", *PLAIN, "--top", "3", "--json", "--model", exact_model, "--threads", "1", cwd=root))
    assert "Atlas: a" in done.stderr
    (root / "printed.json").write_text(done.stdout)
    return root


@pytest.fixture
def place(built, tmp_path):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def run(opal, exact_model, place):
    def run(*arguments, code=0, **options):
        done = opal(*arguments, "--model", exact_model, "--threads", "1", cwd=place, **options)
        assert done.returncode == code, done.stderr
        return done

    return run


def test_every_slot_has_its_patches(built):
    document, printed = read_atlas(built), json.loads((built / "printed.json").read_text())
    slots, patches = list_slots(document), list_patches(document)
    assert len(slots) == 4 * 3
    assert sum(each["slots"][0]["images"] for each in document["classes"]) == 12
    assert all((built / "a" / patch["file"]).is_file() for patch in patches)
    assert all((built / "set" / patch["image"]).is_file() for patch in patches)
    assert all(len(slot["patches"]) <= 3 for slot in slots)
    assert printed["patches"] == len(patches)
    assert (built / "a/atlas.html").is_file()
    assert not (built / "a/.lock").exists()


def test_only_training_images_are_used_with_and_without_the_trainers_packages(run, place):
    (place / "split").mkdir()
    shutil.copytree(place / "set", place / "split/train")
    shutil.copytree(place / "set", place / "split/test")
    for blocked, images in ((TRAINER, 12), ((), 9)):
        done = run("atlas", "split", "--out", "b", "--overwrite", "--json", blocked=blocked)
        assert json.loads(done.stdout)["data"]["images"] == images
        assert ("warning: the images that training set aside" in done.stderr) == bool(blocked)
        assert {Path(patch["image"]).parts[0] for patch in list_patches(read_atlas(place, "b"))} == {"train"}


def test_a_data_set_whose_lists_cannot_be_read_is_refused(run, place):
    for name in ("images/a.jpg", "annotations/trainval.txt", "annotations/test.txt"):
        (place / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "pets" / name).touch()
    done = run("atlas", "pets", "--out", "b", blocked=TRAINER, code=2)
    assert "needs torchvision" in done.stderr
    assert "or use every image, labelled by its folder, with --plain" in done.stderr


def test_a_sheet_shows_other_images_of_the_predicted_class_and_the_names_in_the_atlas(run, place):
    document = read_atlas(place)
    labels = [json.dumps(each["name"], ensure_ascii=False) for each in document["classes"]]
    (place / "a/names.toml").write_text("\n".join(f"[{label}]\n0 = 'beak'\n" for label in labels), encoding="utf-8")
    fullest = max(document["classes"], key=lambda each: each["slots"][0]["images"])
    own, other, *_ = fullest["slots"][0]["patches"]
    shutil.copy(place / "set" / own["image"], place / "copy.png")
    done = run("explain", "copy.png", "--atlas", "a", "--out", "figure.svg", "--json")
    slots = json.loads(done.stdout)["predicted"]["slots"]
    assert {slot["slot"]: slot["name"] for slot in slots} == {0: "beak", 1: None, 2: None}
    figure = (place / "figure.svg").read_text("utf-8")
    assert "This looks like that" in figure
    assert f"slot 0 in {own['image']}" not in figure
    assert f"slot 0 in {other['image']}" in figure
