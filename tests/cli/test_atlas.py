"""`opal-deploy atlas`, and the sheets that `explain --atlas` makes with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRAINER = ("torch", "torchvision", "sklearn", "scipy", "matplotlib", "onnx")
PLAIN = ["set", "--plain", "--out", "a"]


def make_set(root: Path, make_pictures: Callable) -> None:
    """Write twelve images into folders called as two of the model's classes."""
    for number, path in enumerate(make_pictures(root / "made", 12)):
        target = root / "set" / ("ash" if number % 2 else "birch") / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    (root / "made").rmdir()


def read_atlas(root: Path) -> dict[str, Any]:
    return json.loads((root / "a/atlas.json").read_text())


def all_patches(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [patch for each in document["classes"] for slot in each["slots"] for patch in slot["patches"]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, make_pictures: Callable, opal: Callable, exact_model: Path) -> Path:
    """A folder with the images in `set`, their atlas in `a`, and the command's JSON in `said.json`."""
    root = tmp_path_factory.mktemp("built")
    make_set(root, make_pictures)
    done = opal("atlas", *PLAIN, "--top", "3", "--json", "--model", exact_model, "--threads", "1", cwd=root)
    assert done.returncode == 0, done.stderr
    assert "Atlas: a" in done.stderr
    (root / "said.json").write_text(done.stdout)
    return root


@pytest.fixture
def place(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def atlas(opal: Callable, exact_model: Path, place: Path) -> Callable:
    def run(*arguments: str | Path, **options: Any) -> Any:
        return opal("atlas", *arguments, "--model", exact_model, "--threads", "1", cwd=place, **options)

    return run


@pytest.fixture
def explain(opal: Callable, exact_model: Path, place: Path) -> Callable:
    return lambda *arguments: opal(
        "explain", *arguments, "--atlas", "a", "--model", exact_model, "--threads", "1", cwd=place
    )


def test_every_slot_has_its_patches(built: Path) -> None:
    document, said = read_atlas(built), json.loads((built / "said.json").read_text())
    slots = [slot for each in document["classes"] for slot in each["slots"]]
    assert len(slots) == 4 * 3
    assert sum(each["slots"][0]["images"] for each in document["classes"]) == 12
    assert all((built / "a" / patch["file"]).is_file() for patch in all_patches(document))
    assert all((built / "set" / patch["image"]).is_file() for patch in all_patches(document))
    assert all(len(slot["patches"]) == min(3, slot["images"]) for slot in slots)
    assert said["patches"] == len(all_patches(document))
    assert said["findings"] == document["findings"]
    assert (built / "a/atlas.html").is_file()
    assert not (built / "a/.lock").exists()


def test_the_patches_are_those_that_infer_says_contributed_most(built: Path, opal: Callable, exact_model: Path) -> None:
    opal("infer", "set", "--model", exact_model, "--out", "run", "--threads", "1", cwd=built)
    records = [json.loads(line) for line in (built / "run/results.jsonl").read_text().splitlines()]
    for each in read_atlas(built)["classes"]:
        mine = [r for r in records if r["prediction"]["class_id"] == each["class_id"]]
        for slot in each["slots"]:
            best = sorted(mine, key=lambda r: -r["evidence"][slot["slot"]]["contribution"])[:3]
            assert [f"set/{patch['image']}" for patch in slot["patches"]] == [r["image"] for r in best]
            assert [patch["cell"] for patch in slot["patches"]] == [r["evidence"][slot["slot"]]["cell"] for r in best]


def test_a_data_set_that_the_trainer_reads_gives_its_training_images(atlas: Callable) -> None:
    pytest.importorskip("sklearn")
    done = atlas("set", "--out", "b", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["images"] < 12
    assert "train split" in done.stderr


def test_without_the_trainers_packages_folders_are_classes(atlas: Callable) -> None:
    done = atlas("set", "--out", "b", "--json", blocked=TRAINER)
    assert done.returncode == 0, done.stderr
    assert "pip install 'opal-deploy[train]'" in done.stderr
    assert json.loads(done.stdout)["data"]["images"] == 12


def test_a_limit_takes_so_many_of_each_label(atlas: Callable) -> None:
    done = atlas("set", "--plain", "--out", "b", "--limit", "2", "--json")
    assert json.loads(done.stdout)["data"]["images"] == 4


def test_only_correct_says_how_many_were_left_out(atlas: Callable) -> None:
    done = atlas("set", "--plain", "--out", "b", "--only-correct", "--json")
    if done.returncode == 2:
        assert "predicted wrong" in done.stderr
        return
    data = json.loads(done.stdout)["data"]
    assert data["answered"] + data["wrong"] == data["images"] == 12
    assert data["wrong"] > 0


def test_an_image_that_fails_is_named_and_the_exit_code_says_so(atlas: Callable, place: Path) -> None:
    (place / "set/ash/bad.png").write_bytes(b"no image")
    done = atlas("set", "--plain", "--out", "b", "--limit", "7")
    assert done.returncode == 3
    assert "ash/bad.png" in done.stderr
    assert (place / "b/atlas.json").is_file()


def test_a_sheet_shows_other_images_of_the_predicted_class(explain: Callable, place: Path) -> None:
    fullest = max(read_atlas(place)["classes"], key=lambda each: each["slots"][0]["images"])
    own, *others = fullest["slots"][0]["patches"]
    assert others
    shutil.copy(place / "set" / own["image"], place / "copy.png")
    done = explain("copy.png", "--out", "figure.svg")
    assert done.returncode == 0, done.stderr
    figure = (place / "figure.svg").read_text("utf-8")
    assert "This looks like that" in figure
    assert f"slot 0 in {own['image']}" not in figure
    assert f"slot 0 in {others[0]['image']}" in figure
    assert explain("copy.png", "--out", "figure.png").returncode == 0


def test_names_in_the_atlas_are_used(explain: Callable, place: Path) -> None:
    labels = [json.dumps(each["label"], ensure_ascii=False) for each in read_atlas(place)["classes"]]
    (place / "a/names.toml").write_text("\n".join(f"[{label}]\n0 = 'beak'\n" for label in labels), encoding="utf-8")
    slots = json.loads(explain("set/ash/001.png", "--json").stdout)["predicted"]["slots"]
    assert {slot["slot"]: slot["name"] for slot in slots} == {0: "beak", 1: None, 2: None}


def test_another_models_atlas_is_refused_and_the_checkpoints_is_not(
    explain: Callable, opal: Callable, exact_model: Path, place: Path
) -> None:
    source = json.loads(opal("inspect", exact_model, "--json", cwd=place).stdout)["metadata"]["source"]
    for checkpoint, code in ((None, 2), (source["sha256"], 0)):
        document = read_atlas(place)
        document["model"].update(sha256="0" * 64, checkpoint_sha256=checkpoint)
        (place / "a/atlas.json").write_text(json.dumps(document))
        done = explain("set/ash/001.png")
        assert done.returncode == code, done.stderr
        assert ("another model" in done.stderr) == (code == 2)


def test_an_atlas_is_replaced_only_when_asked(atlas: Callable, place: Path) -> None:
    before = (place / "a/atlas.json").read_bytes()
    done = atlas(*PLAIN, "--top", "1")
    assert done.returncode == 2
    assert "an atlas is there already" in done.stderr
    assert (place / "a/atlas.json").read_bytes() == before
    assert atlas(*PLAIN, "--top", "1", "--overwrite").returncode == 0
    named = {patch["file"] for patch in all_patches(read_atlas(place))}
    assert {p.relative_to(place / "a").as_posix() for p in (place / "a/patches").rglob("*.jpg")} == named


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["set", "--out", "set"], "set: other files are there"),
        (["empty", "--plain", "--out", "b/a"], "no images in it"),
    ],
)
def test_a_call_that_comes_to_nothing_leaves_nothing(
    atlas: Callable, place: Path, arguments: list[str], complaint: str
) -> None:
    (place / "empty").mkdir()
    before = sorted(place.rglob("*"))
    done = atlas(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr.splitlines()[-1]
    assert sorted(place.rglob("*")) == before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_killed_build_leaves_the_atlas_that_was_there(atlas: Callable, exact_model: Path, place: Path) -> None:
    before = (place / "a/atlas.json").read_bytes()
    for number in range(400):
        shutil.copy(place / "set/ash/001.png", place / f"set/ash/copy{number:03}.png")
    main = "import sys; sys.argv[0] = 'opal-deploy'; from opal_deploy.cli import main; main()"
    call = ["atlas", *PLAIN, "--overwrite", "--model", str(exact_model), "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", main, *call], cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        # the lock is there from the first image on
        while not (place / "a/.lock").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    assert (place / "a/atlas.json").read_bytes() == before
    assert atlas(*PLAIN, "--overwrite", "--limit", "5").returncode == 0
