"""Drawings of a run: sheets from the outputs of its own forward passes, and the report of a run on the disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.cli.atlas import collect_images
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.run.drawing import ReportOptions, write_report
from opal_deploy.inference.run.run import RunOptions, run
from opal_deploy.inference.run.summary import Summary
from opal_deploy.inference.sheets import SheetBuilder, SheetOptions, with_attention
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.entries import Atlas
from opal_deploy.visualization.atlas.storage import build_atlas, save_atlas


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Six of rising brightness, the third one broken."""
    (tmp_path / "in").mkdir()
    for number in range(6):
        Image.new("RGB", (64, 48), (40 * number,) * 3).save(tmp_path / f"in/{number}.png")
    (tmp_path / "in/2.png").write_bytes(b"no")
    return tmp_path / "in"


def requests(folder: Path) -> list[Request]:
    return [Request(path.name, path) for path in sorted(folder.iterdir())]


def run_in(out: Path, images: Path, session: Any, sheets: SheetOptions | None = None, **settings: Any) -> Summary:
    out.mkdir(exist_ok=True)
    builder = SheetBuilder(session.metadata, sheets)
    return run(
        iter(requests(images)), [session], RunOptions(out, InferenceOptions(batch=4), sheets=builder, **settings)
    )


def test_results_have_outputs_only_with_keep_outputs(bright_session: Callable, pictures: Path) -> None:
    for result in predict_stream(requests(pictures), [bright_session()], InferenceOptions(batch=4)):
        assert result.outputs is None
    for result in predict_stream(requests(pictures), [bright_session()], InferenceOptions(batch=4, keep_outputs=True)):
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
    # too large to be kept: it is read again
    Image.new("RGB", (1500, 1400), "grey").save(pictures / "6.png")
    run_in(tmp_path / "out", pictures, session)
    assert session.batches == [4, 3]
    written = [json.loads(line).get("sheet") for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert written == [None if n == 2 else f"sheets/00000{n}-{n}.png.png" for n in range(7)]
    assert len(list((tmp_path / "out/sheets").iterdir())) == 6


@pytest.fixture
def atlas(bright_session: Callable, pictures: Path, tmp_path: Path) -> Atlas:
    session = bright_session()
    collector = AtlasCollector(session.metadata, 3)
    collect_images(requests(pictures), [session], InferenceOptions(workers=1), collector)
    made = build_atlas(collector, tmp_path / "atlas", {"file": "m.onnx", "sha256": "ab"}, {})
    save_atlas(made)
    return made


def test_a_damaged_atlas_stops_the_run_and_a_whole_one_lets_it_go_on(
    bright_session: Callable, pictures: Path, atlas: Atlas, tmp_path: Path
) -> None:
    patches = sorted((tmp_path / "atlas/patches").rglob("*.jpg"))
    whole = [patch.read_bytes() for patch in patches]
    for patch in patches:
        patch.write_bytes(b"no jpeg")
    with pytest.raises(StoppedEarly, match="build the atlas again"):
        run_in(tmp_path / "out", pictures, bright_session(), SheetOptions(atlas=atlas))
    for patch, content in zip(patches, whole, strict=True):
        patch.write_bytes(content)
    assert run_in(tmp_path / "out", pictures, bright_session(), SheetOptions(atlas=atlas), resume=True).total == 6
    assert len(list((tmp_path / "out/sheets").iterdir())) == 5


def test_a_place_where_sheets_cannot_go_is_a_wrong_call(
    bright_session: Callable, pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/sheets").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot be written .*choose another --out"):
        run_in(tmp_path / "out", pictures, bright_session())


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


# ---- the report

PREDICTION = {"class_id": 0, "label": "Auklet", "logit": -0.5, "cosine": 0.9}


def make_run(out: Path, count: int, *, overlays: bool = True) -> Path:
    """Write records without evidence, the later the more certain, and their overlays."""
    (out / "overlays").mkdir(parents=True)
    with (out / "results.jsonl").open("w") as stream:
        for i in range(count):
            name = f"overlays/{i:06}-{i}.jpg"
            record = {
                "schema": 1, "image": f"{i}.jpg", "status": "ok", "width": 60, "height": 40,
                "prediction": PREDICTION, "margin": i / 1000, "top": [PREDICTION], "overlay": name,
            }  # fmt: skip
            stream.write(json.dumps(record) + "\n")
            if overlays:
                Image.new("RGB", (300, 120), (20, 40, 60)).save(out / name)
    return out


def sources(out: Path) -> list[str]:
    return re.findall(r' src="([^",]*)', (out / "report.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("count", "limit", "images", "embedded"),
    [
        pytest.param(3, 100, None, True, id="few are embedded"),
        pytest.param(201, 1000, None, False, id="many lie beside the page"),
        pytest.param(201, 200, None, True, id="few of many are embedded"),
        pytest.param(3, 100, "files", False, id="few beside the page, by option"),
        pytest.param(201, 1000, "embed", True, id="many embedded, by option"),
    ],
)
def test_where_the_reports_images_are(
    tmp_path: Path, count: int, limit: int, images: Literal["embed", "files"] | None, embedded: bool
) -> None:
    out = make_run(tmp_path / "out", count)
    write_report(out, ReportOptions(limit=limit, images=images), {})
    first = ["data:image/jpeg;base64" if embedded else f"overlays/{i:06}-{i}.jpg" for i in range(min(count, 48))]
    assert sources(out) == first
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count('<script type="text/plain" id="p') == (max(0, min(count, limit) - 48) if embedded else 0)
    assert sorted(path.name for path in out.iterdir()) == ["overlays", "report.html", "results.jsonl"]


def test_an_overlay_that_is_gone_costs_its_image_only(tmp_path: Path) -> None:
    out = make_run(tmp_path / "out", 2, overlays=False)
    write_report(out, ReportOptions(limit=100), {})
    assert sources(out) == []
    assert re.search("no (picture|image) kept", (out / "report.html").read_text(encoding="utf-8"))
