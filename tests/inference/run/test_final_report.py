"""`report.html` of a run that is on the disk."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

from opal_deploy.inference.run.drawing import ReportOptions, write_report

ANSWER: Mapping[str, Any] = {"class_id": 0, "label": "Auklet", "logit": -0.5, "cosine": 0.9}


def make_run(out: Path, images: int, *, overlays: bool = True) -> Path:
    """Records without evidence, the later the more certain, and their overlays."""
    (out / "overlays").mkdir(parents=True)
    with (out / "results.jsonl").open("w") as stream:
        for i in range(images):
            name = f"overlays/{i:06}-{i}.jpg"
            record = {
                "schema": 1, "image": f"{i}.jpg", "status": "ok", "width": 60, "height": 40,
                "prediction": ANSWER, "margin": i / 1000, "top": [ANSWER], "overlay": name,
            }  # fmt: skip
            stream.write(json.dumps(record) + "\n")
            if overlays:
                Image.new("RGB", (300, 120), (20, 40, 60)).save(out / name)
    return out


def sources(out: Path) -> list[str]:
    return re.findall(r' src="([^",]*)', (out / "report.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("images", "limit", "pictures", "embedded"),
    [
        pytest.param(3, 100, None, True, id="few are embedded"),
        pytest.param(201, 1000, None, False, id="many lie beside the page"),
        pytest.param(201, 200, None, True, id="few of many are embedded"),
        pytest.param(3, 100, "files", False, id="few beside the page, as asked"),
        pytest.param(201, 1000, "embed", True, id="many embedded, as asked"),
    ],
)
def test_where_pictures_are(
    tmp_path: Path, images: int, limit: int, pictures: Literal["embed", "files"] | None, embedded: bool
) -> None:
    out = make_run(tmp_path / "out", images)
    write_report(out, ReportOptions(limit=limit, images=pictures), {})
    first = ["data:image/jpeg;base64" if embedded else f"overlays/{i:06}-{i}.jpg" for i in range(min(images, 48))]
    assert sources(out) == first
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count('<script type="text/plain" id="p') == (max(0, min(images, limit) - 48) if embedded else 0)
    assert sorted(path.name for path in out.iterdir()) == ["overlays", "report.html", "results.jsonl"]


def test_a_drawing_that_is_gone_costs_its_picture_only(tmp_path: Path) -> None:
    out = make_run(tmp_path / "out", 2, overlays=False)
    write_report(out, ReportOptions(limit=100), {})
    assert sources(out) == []
    assert "no picture kept" in (out / "report.html").read_text(encoding="utf-8")
