"""Sheets that a run draws from the outputs of its own forward passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.inference import atlas as building
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.run.run import RunOptions, run
from opal_deploy.inference.sheets import SheetOptions, with_attention
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.visualization.atlas.storage import Atlas, write_atlas


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Six of rising brightness, the third one broken."""
    (tmp_path / "in").mkdir()
    for number in range(6):
        Image.new("RGB", (64, 48), (40 * number,) * 3).save(tmp_path / f"in/{number}.png")
    (tmp_path / "in/2.png").write_bytes(b"no")
    return tmp_path / "in"


def job(out: Path, sheets: SheetOptions, **settings: Any) -> RunOptions:
    out.mkdir(exist_ok=True)
    return RunOptions(out, InferenceOptions(batch=4), sheets=sheets, **settings)


def requests(folder: Path) -> list[Request]:
    return [Request(path.name, path) for path in sorted(folder.iterdir())]


def test_results_have_outputs_only_where_they_were_asked_for(bright_session: Callable, pictures: Path) -> None:
    asked = requests(pictures)
    for result in predict_stream(asked, [bright_session()], InferenceOptions(batch=4)):
        assert result.outputs is None
    for result in predict_stream(asked, [bright_session()], InferenceOptions(batch=4, keep_outputs=True)):
        if result.record["status"] == "error":
            assert result.outputs is None
            continue
        assert isinstance(result.outputs, Outputs)
        assert len(result.outputs) == 1
        best = int(result.outputs.logits[0].argmax())
        assert best == result.record["prediction"]["class_id"]
        assert float(result.outputs.logits[0, best]) == result.record["prediction"]["logit"]


def test_sheets_cost_no_forward_pass(bright_session: Callable, pictures: Path, tmp_path: Path) -> None:
    session = bright_session()
    run(iter(requests(pictures)), [session], job(tmp_path / "out", SheetOptions(session.metadata)))
    assert session.batches == [4, 2]
    assert len(list((tmp_path / "out/sheets").iterdir())) == 5


def test_a_large_picture_is_read_again_for_its_sheet(bright_session: Callable, tmp_path: Path) -> None:
    Image.new("RGB", (1500, 1400), "grey").save(tmp_path / "a.png")
    session = bright_session()
    run(iter([Request("a.png", tmp_path / "a.png")]), [session], job(tmp_path / "out", SheetOptions(session.metadata)))
    assert json.loads((tmp_path / "out/results.jsonl").read_text())["sheet"] == "sheets/000000-a.png.png"


@pytest.fixture
def atlas(bright_session: Callable, pictures: Path, tmp_path: Path) -> Atlas:
    asked = [building.Labelled(request) for request in requests(pictures)]
    collector, _ = building.collect(asked, [bright_session()], InferenceOptions(workers=1), 3)
    (tmp_path / "atlas").mkdir()
    made = building.write_patches(collector, tmp_path / "atlas", {"file": "m.onnx", "sha256": "ab"}, {})
    write_atlas(made)
    return made


def test_a_damaged_atlas_stops_the_run_and_a_whole_one_lets_it_go_on(
    bright_session: Callable, pictures: Path, atlas: Atlas, tmp_path: Path
) -> None:
    session = bright_session()
    sheets = SheetOptions(session.metadata, atlas=atlas)
    patches = sorted((tmp_path / "atlas/patches").rglob("*.jpg"))
    whole = [patch.read_bytes() for patch in patches]
    for patch in patches:
        patch.write_bytes(b"no jpeg")
    with pytest.raises(StoppedEarly, match="build the atlas again"):
        run(iter(requests(pictures)), [session], job(tmp_path / "out", sheets))
    for patch, content in zip(patches, whole, strict=True):
        patch.write_bytes(content)
    summary = run(iter(requests(pictures)), [session], job(tmp_path / "out", sheets, resume=True))
    assert summary.total == 6
    assert len(list((tmp_path / "out/sheets").iterdir())) == 5


def test_a_picture_of_the_atlas_is_not_its_own_neighbour(
    bright_session: Callable, pictures: Path, atlas: Atlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opal_deploy.inference import sheets as drawn_sheets

    shown: list[str] = []

    def layout_sheet(content: Any, photograph: Image.Image, looks: Any) -> Any:
        shown.extend(look.alt for look in looks.by_slot[0])
        return original(content, photograph, looks)

    original = drawn_sheets.layout_sheet
    monkeypatch.setattr(drawn_sheets, "layout_sheet", layout_sheet)
    # under another name, so that only the bytes can tell
    (tmp_path / "copy.png").write_bytes((pictures / "5.png").read_bytes())
    session = bright_session()
    run(
        iter([Request("copy.png", tmp_path / "copy.png")]),
        [session],
        job(tmp_path / "out", SheetOptions(session.metadata, atlas=atlas)),
    )
    assert [alt.split(" in ")[1].split(",")[0] for alt in shown] == ["4.png"]


def test_a_place_where_sheets_cannot_go_is_a_wrong_call(
    bright_session: Callable, pictures: Path, tmp_path: Path
) -> None:
    session = bright_session()
    asked = job(tmp_path / "out", SheetOptions(session.metadata))
    (tmp_path / "out/sheets").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot be written .*choose another --out"):
        run(iter(requests(pictures)), [session], asked)


def test_a_checkpoint_answers_with_its_maps_and_otherwise_alike(exact_model: Path) -> None:
    from opal_deploy.runtime.torch_session import TorchSession

    session = TorchSession(exact_model.with_suffix(".pt"), device="cpu", threads=1)
    (asked,) = with_attention([session])
    images = np.random.default_rng(0).integers(0, 255, (2, *session.metadata.input_size, 3), np.uint8)
    plain, found = session.run(images), asked.run(images)
    assert plain.attention is None
    assert found.attention is not None
    assert (found.logits == plain.logits).all()
    assert (found.scores == plain.scores).all()
    assert (found.attention.reshape(*found.attention.shape[:2], -1).argmax(2) == found.argmax).all()
    assert (asked.metadata, asked.description) == (session.metadata, session.description)


def test_an_export_that_has_maps_stays_as_it_is(bright_session: Callable) -> None:
    session = bright_session()
    session.metadata = replace(session.metadata, outputs=("logits", "argmax", "scores", "attention"))
    assert with_attention([session]) == [session]
