"""Records print in one line, show themselves in a notebook, and stay plain dictionaries."""

import copy
import json
import pickle
from html.parser import HTMLParser
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from opal_deploy import Explanation, Explanations, ImageError, UsageError
from opal_deploy.records.build import error_record
from tests.cli.calls import check

ELEMENTS = {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "span"}
BOX = (10, 20, 70, 80)
HOSTILE = "<script>alert(1)</script>\"'\n&.png"


def page(shown):
    """The elements that a browser would make of what a notebook is given."""
    found = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append((tag, dict(attrs)))

    Parser().feed(shown._repr_html_())
    return found


@pytest.fixture
def paths(make_pictures, tmp_path):
    return make_pictures(tmp_path, 2)


def test_a_record_is_a_plain_dictionary_in_every_respect(model, paths):
    record, both = model.predict(paths[0]), model.predict(paths)
    plain = json.loads(json.dumps(record))
    assert record == plain == copy.deepcopy(record)
    assert both == [plain, model.predict(paths[1])]
    assert json.dumps(record) == json.dumps(dict(record))
    assert isinstance(both, list)


def test_a_record_prints_as_one_line_and_a_list_as_a_line_each(model, paths):
    records = model.predict([*paths, paths[0].with_name("none.jpg")])
    first, answer = records[0], records[0]["prediction"]
    assert str(first) == f"{paths[0]}: {answer['label']}, cosine {answer['cosine']:.4f}, margin {first['margin']:.4f}"
    assert str(records).splitlines() == [str(record) for record in records]
    assert str(records[2]).endswith("none.jpg: error not_found: no such file")


def test_a_notebook_shows_the_drawing_while_the_file_is_the_same(model, paths):
    record = model.predict(paths[0])
    tags = page(record)
    (image,) = [attributes for tag, attributes in tags if tag == "img"]
    assert (image["src"] or "").startswith("data:image/jpeg;base64,")
    assert image["alt"] == str(record)
    Image.new("RGB", (96, 96)).save(paths[0])
    assert "img" not in [tag for tag, _ in page(record)]
    assert "img" in [tag for tag, _ in page(model.predict(Image.new("RGB", (50, 50))))]


@pytest.mark.parametrize("kind", ["path", "bytes", "PIL", "array", "crop"])
def test_a_record_saves_the_drawings_of_the_commands(model, paths, opal, exact_model, tmp_path, kind):
    with Image.open(paths[0]) as image:
        image.load()
    given = {"bytes": paths[0].read_bytes(), "PIL": image, "array": np.asarray(image)}.get(kind, paths[0])
    record = model.predict(given, boxes=BOX if kind == "crop" else None)
    assert record.save_overlay(tmp_path / "new/overlay.jpg").is_file()
    sheet = record.save_sheet(tmp_path / "sheet.svg").read_text("utf-8")
    if kind == "path":
        check(opal("explain", paths[0], "--model", exact_model, "--out", tmp_path / "cli.svg", "--threads", "1"))
        assert sheet == (tmp_path / "cli.svg").read_text("utf-8")


def test_what_cannot_be_drawn_is_said_in_one_line(model, paths, tmp_path):
    record, copied = model.predict(paths[0]), copy.deepcopy(model.predict(paths[0]))
    assert pickle.loads(pickle.dumps(record)) == record  # noqa: S301  # our own
    assert copied.save_overlay(tmp_path / "a.jpg").is_file()
    with pytest.raises(UsageError, match="it has no model"):
        copied.save_sheet(tmp_path / "a.png")
    with pytest.raises(UsageError, match=r"a\.jpg: expected a \.png or \.svg file"):
        record.save_sheet(tmp_path / "a.jpg")
    (streamed,) = model.stream([paths[1].read_bytes()])
    for lost, name in ((record, str(paths[0])), (streamed, "the record names no image")):
        paths[0].write_bytes(b"other")
        for save in (lost.save_overlay, lost.save_sheet):
            with pytest.raises(ImageError, match=name):
                save(tmp_path / "b.png")
    with pytest.raises(ImageError, match="no prediction"):
        model.predict(tmp_path / "none.png").save_overlay(tmp_path / "c.jpg")


def test_records_save_the_report_of_infer(model, paths, opal, exact_model, tmp_path):
    records = Explanations(model.stream(tmp_path))
    assert records.save_report(tmp_path / "out") == tmp_path / "out/report.html"
    written = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text("utf-8").splitlines()]
    assert [record.pop("overlay") for record in written] == [f"overlays/00000{i}-00{i}.jpg" for i in (0, 1)]
    assert written == records
    # again, with fewer records, one of which can no longer be drawn
    paths[0].unlink()
    some = Explanations([*records[:1], model.predict(Image.new("RGB", (50, 50)))])
    some[1]["label"] = some[1]["prediction"]["label"]
    text = some.save_report(tmp_path / "out").read_text("utf-8")
    assert f"<title>000.png, explained by {exact_model.name}</title>" in text
    assert "Accuracy: 1 of 1" in text
    assert [path.name for path in (tmp_path / "out/overlays").iterdir()] == ["000001-image.jpg"]
    (tmp_path / "out/run.json").touch()
    with pytest.raises(UsageError, match="run of `infer`"):
        records.save_report(tmp_path / "out")
    assert Explanations().save_report(tmp_path / "empty").is_file()


def test_nothing_from_outside_becomes_markup(model, paths):
    record = cast(dict[str, Any], {**model.predict(paths[0]), "image": HOSTILE})
    record["prediction"] = {**record["prediction"], "label": HOSTILE}
    failed = error_record(HOSTILE, "code", HOSTILE)
    for shown in (Explanation(record), Explanation(failed), Explanations([Explanation(record), Explanation(failed)])):
        assert {tag for tag, _ in page(shown)} <= ELEMENTS
        assert not any(name.startswith("on") for _, attributes in page(shown) for name in attributes)
    assert "\n" not in str(Explanation(record))


def test_a_model_is_pickled_as_its_file_and_opens_again(model):
    again = pickle.loads(pickle.dumps(model))  # noqa: S301  # our own
    assert (again.path, again.sha256, again.description) == (model.path, model.sha256, model.description)
