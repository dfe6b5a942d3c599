"""`opal-deploy atlas`, and the figure that `explain --atlas` makes with it."""

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

Opal = Callable[..., subprocess.CompletedProcess[str]]
TRAINER = ("torch", "torchvision", "sklearn", "scipy", "matplotlib", "onnx")


@pytest.fixture
def classes(make_pictures: Callable, tmp_path: Path) -> Path:
    """Twelve pictures in folders called as two of the model's classes."""
    paths = make_pictures(tmp_path / "made", 12)
    for number, path in enumerate(paths):
        target = tmp_path / "set" / ("ash" if number % 2 else "birch") / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    shutil.rmtree(tmp_path / "made")
    return tmp_path / "set"


@pytest.fixture
def atlas(opal: Opal, exact_model: Path, classes: Path, tmp_path: Path) -> Opal:
    def run(*arguments: str | Path, model: Path = exact_model, **options: Any) -> Any:
        return opal("atlas", *arguments, "--model", model, "--threads", "1", cwd=tmp_path, **options)

    return run


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("opal-deploy: ")
    return line


def test_plain_folders_need_neither_torch_nor_a_split(atlas: Opal, tmp_path: Path) -> None:
    done = atlas("set", "--plain", "--out", "a", "--top", "3", "--json", blocked=TRAINER)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "a/atlas.json").read_text())
    slots = [slot for each in document["classes"] for slot in each["slots"]]
    assert len(slots) == 4 * 3
    assert sum(each["slots"][0]["images"] for each in document["classes"]) == 12
    patches = [patch for slot in slots for patch in slot["patches"]]
    assert all((tmp_path / "a" / patch["file"]).is_file() for patch in patches)
    assert all((tmp_path / "set" / patch["image"]).is_file() for patch in patches)
    assert all(len(slot["patches"]) == min(3, slot["images"]) for slot in slots)
    assert "Atlas: a" in done.stderr
    said = json.loads(done.stdout)
    assert said["patches"] == len(patches)
    assert said["findings"] == document["findings"]
    assert (tmp_path / "a/atlas.html").is_file()
    assert not (tmp_path / "a/.lock").exists()


def test_the_patches_are_those_that_infer_says_contributed_most(
    atlas: Opal, opal: Opal, exact_model: Path, tmp_path: Path
) -> None:
    assert atlas("set", "--plain", "--out", "a", "--top", "2").returncode == 0
    opal("infer", "set", "--model", exact_model, "--out", "run", "--threads", "1", cwd=tmp_path)
    records = [json.loads(line) for line in (tmp_path / "run/results.jsonl").read_text().splitlines()]
    document = json.loads((tmp_path / "a/atlas.json").read_text())
    for each in document["classes"]:
        mine = [r for r in records if r["prediction"]["class_id"] == each["class_id"]]
        for slot in each["slots"]:
            best = sorted(mine, key=lambda r: -r["evidence"][slot["slot"]]["contribution"])[:2]
            assert [f"set/{patch['image']}" for patch in slot["patches"]] == [r["image"] for r in best]
            assert [patch["cell"] for patch in slot["patches"]] == [r["evidence"][slot["slot"]]["cell"] for r in best]


def test_a_data_set_that_the_trainer_reads_gives_its_training_pictures(atlas: Opal, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = atlas("set", "--out", "a", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["images"] < 12
    assert "train split" in done.stderr


def test_without_the_trainers_packages_folders_are_classes(atlas: Opal, tmp_path: Path) -> None:
    done = atlas("set", "--out", "a", "--json", blocked=TRAINER)
    assert done.returncode == 0, done.stderr
    assert "pip install 'opal-deploy[train]'" in done.stderr
    assert json.loads(done.stdout)["data"]["images"] == 12


def test_a_limit_takes_so_many_of_each_label(atlas: Opal) -> None:
    done = atlas("set", "--plain", "--out", "a", "--limit", "2", "--json")
    assert json.loads(done.stdout)["data"]["images"] == 4


def test_only_correct_says_how_many_were_left_out(atlas: Opal) -> None:
    done = atlas("set", "--plain", "--out", "a", "--only-correct", "--json")
    if done.returncode == 2:
        assert "predicted wrong" in done.stderr
        return
    data = json.loads(done.stdout)["data"]
    assert data["answered"] + data["wrong"] == data["images"] == 12
    assert data["wrong"] > 0


def test_a_picture_that_fails_is_named_and_the_exit_code_says_so(atlas: Opal, tmp_path: Path) -> None:
    (tmp_path / "set/ash/bad.png").write_bytes(b"no picture")
    done = atlas("set", "--plain", "--out", "a")
    assert done.returncode == 3
    assert "ash/bad.png" in done.stderr
    assert (tmp_path / "a/atlas.json").is_file()


def test_the_papers_figure_shows_other_pictures_of_the_predicted_class(
    atlas: Opal, opal: Opal, exact_model: Path, tmp_path: Path
) -> None:
    assert atlas("set", "--plain", "--out", "a").returncode == 0
    document = json.loads((tmp_path / "a/atlas.json").read_text())
    fullest = max(document["classes"], key=lambda each: each["slots"][0]["images"])
    own, *others = fullest["slots"][0]["patches"]
    assert others
    copy = tmp_path / "copy.png"
    shutil.copy(tmp_path / "set" / own["image"], copy)
    call = ["explain", copy, "--model", exact_model, "--atlas", "a", "--threads", "1", "--out"]
    done = opal(*call, "figure.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figure = (tmp_path / "figure.svg").read_text("utf-8")
    assert "This looks like that" in figure
    assert f"slot 0 in {own['image']}" not in figure
    assert f"slot 0 in {others[0]['image']}" in figure
    assert opal(*call, "figure.png", cwd=tmp_path).returncode == 0


def test_names_in_the_atlas_are_used(atlas: Opal, opal: Opal, exact_model: Path, tmp_path: Path) -> None:
    assert atlas("set", "--plain", "--out", "a").returncode == 0
    document = json.loads((tmp_path / "a/atlas.json").read_text())
    lines = [f"[{json.dumps(each['label'], ensure_ascii=False)}]\n0 = 'beak'\n" for each in document["classes"]]
    (tmp_path / "a/names.toml").write_text("\n".join(lines), encoding="utf-8")
    done = opal(
        "explain", "set/ash/001.png", "--model", exact_model, "--atlas", "a", "--json", "--threads", "1", cwd=tmp_path
    )
    slots = json.loads(done.stdout)["predicted"]["slots"]
    assert {slot["slot"]: slot["name"] for slot in slots} == {0: "beak", 1: None, 2: None}


def test_another_models_atlas_is_refused(atlas: Opal, opal: Opal, exact_model: Path, tmp_path: Path) -> None:
    assert atlas("set", "--plain", "--out", "a").returncode == 0
    document = json.loads((tmp_path / "a/atlas.json").read_text())
    document["model"].update(sha256="0" * 64, checkpoint_sha256=None)
    (tmp_path / "a/atlas.json").write_text(json.dumps(document))
    done = opal("explain", "set/ash/001.png", "--model", exact_model, "--atlas", "a", "--threads", "1", cwd=tmp_path)
    assert "another model" in refused(done)
    # the checkpoint that the export was made from is the same model
    document["model"]["checkpoint_sha256"] = json.loads(opal("inspect", exact_model, "--json", cwd=tmp_path).stdout)[
        "metadata"
    ]["source"]["sha256"]
    (tmp_path / "a/atlas.json").write_text(json.dumps(document))
    done = opal("explain", "set/ash/001.png", "--model", exact_model, "--atlas", "a", "--threads", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_atlas_is_replaced_only_when_asked(atlas: Opal, tmp_path: Path) -> None:
    assert atlas("set", "--plain", "--out", "a").returncode == 0
    before = (tmp_path / "a/atlas.json").read_bytes()
    assert "an atlas is there already" in refused(atlas("set", "--plain", "--out", "a", "--top", "1"))
    assert (tmp_path / "a/atlas.json").read_bytes() == before
    assert atlas("set", "--plain", "--out", "a", "--top", "1", "--overwrite").returncode == 0
    named = {
        patch["file"]
        for each in json.loads((tmp_path / "a/atlas.json").read_text())["classes"]
        for slot in each["slots"]
        for patch in slot["patches"]
    }
    assert {p.relative_to(tmp_path / "a").as_posix() for p in (tmp_path / "a/patches").rglob("*.jpg")} == named


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["set", "--out", "set"], "set: other files are there"),
        (["empty", "--plain", "--out", "b/a"], "no images in it"),
    ],
)
def test_a_call_that_comes_to_nothing_leaves_nothing(
    atlas: Opal, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = atlas(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_killed_build_leaves_the_atlas_that_was_there(atlas: Opal, exact_model: Path, tmp_path: Path) -> None:
    assert atlas("set", "--plain", "--out", "a").returncode == 0
    before = (tmp_path / "a/atlas.json").read_bytes()
    for number in range(400):
        shutil.copy(tmp_path / "set/ash/001.png", tmp_path / f"set/ash/copy{number:03}.png")
    main = "import sys; sys.argv[0] = 'opal-deploy'; from opal_deploy.cli import main; main()"
    call = ["atlas", "set", "--plain", "--out", "a", "--overwrite", "--model", str(exact_model), "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", main, *call], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        # the lock is there from the first picture on
        while not (tmp_path / "a/.lock").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "a/atlas.json").read_bytes() == before
    assert atlas("set", "--plain", "--out", "a", "--overwrite", "--limit", "5").returncode == 0
