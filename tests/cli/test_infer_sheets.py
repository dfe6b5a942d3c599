"""`infer --sheets`, `--atlas`, `--heatmap` and `--slot-names`: what they add, what they refuse, and how they go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.artifact.files import compute_sha256

Opal = Callable[..., subprocess.CompletedProcess[str]]
MAIN = "import sys; sys.argv[0] = 'opal-deploy'; from opal_deploy.cli import main; main()"
IMAGES, BROKEN = 10, 5
BEAKS = "".join(f"[{json.dumps(label)}]\n0 = 'beak'\n2 = 'wing tip'\n" for label in ("ash", "birch"))


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]


def files(root: Path) -> dict[str, bytes]:
    """What a run leaves, but for what names times."""
    left_out = {"run.json", "summary.json", ".lock"}
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name not in left_out
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, make_pictures: Callable, opal: Opal, exact_model: Path) -> Path:
    """Images in `in`, one of them broken, their atlas in `atlas`, and runs in `plain` and `sheets`."""
    cwd = tmp_path_factory.mktemp("place")
    make_pictures(cwd / "in", IMAGES)
    (cwd / "in" / f"{BROKEN:03}.png").write_bytes(b"no")
    common = ["--model", exact_model, "--threads", "1"]
    assert opal("atlas", "in", "--plain", "--out", "atlas", *common, cwd=cwd).returncode == 3
    assert opal("infer", "in/", "--out", "plain", *common, cwd=cwd).returncode == 3
    assert opal("infer", "in/", "--out", "sheets", "--sheets", "--json", *common, cwd=cwd).returncode == 3
    return cwd


@pytest.fixture
def infer(opal: Opal, exact_model: Path, place: Path, tmp_path: Path) -> Opal:
    """`infer in` in a folder with these images and a copy of their atlas."""
    (tmp_path / "in").symlink_to(place / "in")
    shutil.copytree(place / "atlas", tmp_path / "atlas")

    def run(*arguments: str | Path, model: Path = exact_model) -> Any:
        return opal("infer", "in/", "--model", model, "--threads", "1", "--out", "out", *arguments, cwd=tmp_path)

    return run


def explained(opal: Opal, model: Path, cwd: Path, *arguments: str) -> dict[str, bytes]:
    """The sheets of `explain`, by their names."""
    done = opal("explain", "in/", "--model", model, "--threads", "1", "--out", "e", *arguments, cwd=cwd)
    assert done.returncode == 3, done.stderr
    return files(cwd / "e")


def sheets(out: Path) -> dict[str, bytes]:
    return files(out / "sheets")


def test_the_sheets_are_those_that_explain_draws_byte_for_byte(
    place: Path, opal: Opal, exact_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").symlink_to(place / "in")
    expected = explained(opal, exact_model, tmp_path)
    assert len(expected) == IMAGES - 1
    assert sheets(place / "sheets") == expected


def test_each_answer_names_its_sheet_and_a_run_without_sheets_shows_no_trace_of_them(place: Path) -> None:
    found = records(place / "sheets")
    names = [record.pop("sheet", None) for record in found]
    assert names == [None if n == BROKEN else f"sheets/{n:06}-{n:03}.png.png" for n in range(IMAGES)]
    assert found == records(place / "plain")
    assert not (place / "sheets/overlays").exists()
    assert not (place / "sheets/report.html").exists()
    assert set(files(place / "plain")) == {"results.jsonl"}
    config = json.loads((place / "plain/run.json").read_text())["run"]
    assert {"sheets", "heatmap", "atlas", "slot_names"}.isdisjoint(config)


def test_an_atlas_asks_for_sheets_with_its_rows_and_its_names_are_in_the_records(
    infer: Opal, opal: Opal, exact_model: Path, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "atlas/names.toml").write_text(BEAKS)
    done = infer("--atlas", "atlas", "--explain")
    assert done.returncode == 3, done.stderr
    assert "Sheets: out/sheets" in done.stderr
    found = sheets(tmp_path / "out")
    assert found == explained(opal, exact_model, tmp_path, "--atlas", "atlas")
    # the rows make each sheet another one
    assert all(found[name] != plain for name, plain in sheets(place / "sheets").items())
    for record, plain in zip(records(tmp_path / "out"), records(place / "plain"), strict=True):
        if "evidence" in record:
            named = record["prediction"]["label"] in ("ash", "birch")
            expected = ["beak", None, "wing tip"] if named else [None] * 3
            assert [slot.pop("name", None) for slot in record["evidence"]] == expected
            assert record.pop("overlay").startswith("overlays/")
            assert record.pop("sheet").startswith("sheets/")
        assert record == plain
    config = json.loads((tmp_path / "out/run.json").read_text())["run"]
    assert config["atlas"] == f"atlas.json, sha256 {compute_sha256(tmp_path / 'atlas/atlas.json')}"
    assert config["slot_names"] == f"names.toml, sha256 {compute_sha256(tmp_path / 'atlas/names.toml')}"


def test_names_alone_are_in_the_records_and_nothing_is_drawn(infer: Opal, place: Path, tmp_path: Path) -> None:
    every = "".join(
        f"[{json.dumps(label, ensure_ascii=False)}]\n1 = 'tail'\n"
        for label in {record["prediction"]["label"] for record in records(place / "plain") if "prediction" in record}
    )
    (tmp_path / "names.toml").write_text(every, "utf-8")
    assert infer("--slot-names", "names.toml").returncode == 3
    assert set(files(tmp_path / "out")) == {"results.jsonl"}
    for record in records(tmp_path / "out"):
        assert [slot.get("name") for slot in record.get("evidence", [])] in ([None, "tail", None], [])


@pytest.mark.slow
def test_heatmaps_of_an_export_that_has_them_are_on_the_sheets(
    infer: Opal, opal: Opal, exact_model: Path, place: Path, tmp_path: Path
) -> None:
    from opal_deploy.export.checkpoint_source import CheckpointSource
    from opal_deploy.export.exporter import export
    from opal_deploy.export.options import ExportOptions, ExportTargets
    from opal_deploy.model.checkpoint import load

    checkpoint = exact_model.with_suffix(".pt")
    model = tmp_path / "maps.onnx"
    options = ExportOptions(attention=True, threads=1)
    export(CheckpointSource(load(checkpoint), checkpoint), ExportTargets({"fp32": model}), options)
    assert infer("--heatmap", model=model).returncode == 3
    found = sheets(tmp_path / "out")
    assert found == explained(opal, model, tmp_path, "--heatmap")
    assert all(found[name] != plain for name, plain in sheets(place / "sheets").items())
    # the maps are there, and are not shown unasked
    assert infer("--sheets", "--overwrite", model=model).returncode == 3
    assert all(sheet != found[name] for name, sheet in sheets(tmp_path / "out").items())


def another_model(cwd: Path) -> None:
    document = json.loads((cwd / "atlas/atlas.json").read_text())
    document["model"].update(sha256="0" * 64, checkpoint_sha256=None)
    (cwd / "atlas/atlas.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("arguments", "before", "complaint"),
    [
        (["--heatmap"], None, "exact.onnx: it was exported without attention maps, which --heatmap needs; opal-deploy"),
        (["--atlas", "atlas"], another_model, "atlas: this atlas was built with exact.onnx (sha256 000000000000…)"),
        (["--sheets", "--atlas", "in"], None, "in/atlas.json: cannot be read"),
        (["--slot-names", "n.toml"], lambda cwd: (cwd / "n.toml").write_text("[oak]\n"), "'oak' is no class of the mo"),
    ],
    ids=["no attention", "another model's atlas", "no atlas", "names of another model"],
)
def test_what_the_model_cannot_do_is_refused_before_anything_is_written(
    infer: Opal, tmp_path: Path, arguments: list[str], before: Callable[[Path], object] | None, complaint: str
) -> None:
    if before is not None:
        before(tmp_path)
    there = sorted(tmp_path.rglob("*"))
    done = infer(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert complaint in line
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize("lost", ["missing", "empty"])
def test_a_record_whose_sheet_was_lost_is_made_again_with_all_after_it(
    infer: Opal, place: Path, tmp_path: Path, lost: str
) -> None:
    shutil.copytree(place / "sheets", tmp_path / "out")
    (tmp_path / "out/summary.json").unlink()
    sheet = tmp_path / "out/sheets/000004-004.png.png"
    sheet.unlink() if lost == "missing" else sheet.write_bytes(b"")
    done = infer("--sheets")
    assert done.returncode == 3, done.stderr
    assert "out: 4 records are there already" in done.stderr
    assert f"{IMAGES} images (4 of them before)" in done.stderr
    assert files(tmp_path / "out") == files(place / "sheets")
    assert json.loads((tmp_path / "out/summary.json").read_text())["images"] == IMAGES


# in the middle of the sheets, between the writing of one and its getting its name
KILL = """
import os, pathlib, signal
n, old = [0], pathlib.Path.replace
def replace(self, target):
    n[0] += ".png.part" in self.name
    if n[0] == AT:
        os.kill(os.getpid(), signal.SIGKILL)
    return old(self, target)
pathlib.Path.replace = replace
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("at", [1, 7])
def test_killed_between_two_sheets_it_ends_like_a_run_that_was_not(
    infer: Opal, exact_model: Path, place: Path, tmp_path: Path, at: int
) -> None:
    call = ["infer", "in/", "--model", str(exact_model), "--threads", "1", "--out", "out", "--sheets"]
    died = subprocess.run(
        [sys.executable, "-c", KILL.replace("AT", str(at)) + MAIN, *call],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL
    assert list((tmp_path / "out/sheets").glob(".*.part"))
    done = infer("--sheets")
    assert done.returncode == 3, done.stderr
    assert files(tmp_path / "out") == files(place / "sheets")


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        ([], "--sheets yes there, none here"),
        (["--atlas", "atlas"], "--atlas none there, atlas.json, sha256 "),
        (["--sheets", "--slot-names", "names.toml"], "--slot-names none there, names.toml, sha256 "),
    ],
)
def test_a_run_with_other_drawings_is_another_run(
    infer: Opal, place: Path, tmp_path: Path, arguments: list[str], difference: str
) -> None:
    shutil.copytree(place / "sheets", tmp_path / "out")
    (tmp_path / "names.toml").write_text(BEAKS)
    (tmp_path / "out/summary.json").unlink()
    before = files(tmp_path / "out")
    done = infer(*arguments)
    assert done.returncode == 2
    assert difference in done.stderr.splitlines()[-1]
    assert files(tmp_path / "out") == before


def test_overwriting_takes_the_sheets_away(infer: Opal, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "sheets", tmp_path / "out")
    assert infer("--overwrite").returncode == 3
    assert files(tmp_path / "out") == files(place / "plain")
    assert not (tmp_path / "out/sheets").exists()
