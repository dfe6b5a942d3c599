"""`opal-deploy atlas`, and the sheets that `explain --atlas` makes with it."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.calls import check

TRAINER = ("torch", "torchvision", "sklearn", "scipy", "matplotlib", "onnx")


def read_atlas(root, name="a"):
    return json.loads((root / name / "atlas.json").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory, make_pictures, opal, exact_model):
    """Twelve images of no class of the model in `set`, and their atlas in `a`."""
    root = tmp_path_factory.mktemp("built")
    for number, path in enumerate(make_pictures(root / "made", 12)):
        target = root / "set" / ("left" if number % 2 else "right") / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    call = ("atlas", "set", "--plain", "--out", "a", "--top", "3", "--model", exact_model, "--threads", "1")
    assert "Atlas: a" in check(opal(*call, cwd=root)).stderr
    return root


@pytest.fixture
def place(built, tmp_path):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def run(opal, exact_model, place):
    def run(*arguments, code=0, **options):
        return check(opal(*arguments, "--model", exact_model, "--threads", "1", cwd=place, **options), code)

    return run


def test_only_training_images_are_used_with_and_without_the_trainers_packages(run, place):
    (place / "split").mkdir()
    shutil.copytree(place / "set", place / "split/train")
    shutil.copytree(place / "set", place / "split/test")
    for blocked, images in ((TRAINER, 12), ((), 9)):
        done = run("atlas", "split", "--out", "b", "--overwrite", "--json", blocked=blocked)
        assert json.loads(done.stdout)["data"]["images"] == images
        assert ("warning: the images that training set aside" in done.stderr) == bool(blocked)
        slots = [slot for each in read_atlas(place, "b")["classes"] for slot in each["slots"]]
        assert {Path(patch["image"]).parts[0] for slot in slots for patch in slot["patches"]} == {"train"}


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
