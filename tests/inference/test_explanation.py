"""Records print in one line, show themselves in a notebook, and stay plain dictionaries."""

import copy
import json
from html.parser import HTMLParser
from typing import Any, cast

import pytest
from PIL import Image

import opal_deploy
from opal_deploy.inference.explanation import Explanation, Explanations, to_explanations
from opal_deploy.records.record import Record, error_record

ELEMENTS = {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "span"}
HOSTILE = "<script>alert(1)</script>\"'\n&.png"


@pytest.fixture(scope="module")
def model(exact_model):
    return opal_deploy.load(exact_model, device="cpu", threads=1)


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
    record, both = model.explain(paths[0]), model.explain(paths)
    plain = json.loads(json.dumps(record))
    assert record == plain == copy.deepcopy(record)
    assert both == [plain, model.explain(paths[1])]
    assert json.dumps(record) == json.dumps(dict(record))
    assert repr(record) == repr(dict(record))
    assert isinstance(both, list)


def test_a_record_prints_as_one_line_and_a_list_as_a_line_each(model, paths):
    records = model.explain([*paths, paths[0].with_name("none.jpg")])
    first, answer = records[0], records[0]["prediction"]
    assert str(first) == f"{paths[0]}: {answer['label']}, cosine {answer['cosine']:.4f}, margin {first['margin']:.4f}"
    assert str(records).splitlines() == [str(record) for record in records]
    assert str(records[2]).endswith("none.jpg: error not_found: no such file")


def test_a_notebook_shows_the_drawing_and_each_slot_while_the_file_is_the_same(model, paths):
    record = model.explain(paths[0])
    tags = page(record)
    (image,) = [attributes for tag, attributes in tags if tag == "img"]
    assert (image["src"] or "").startswith("data:image/jpeg;base64,")
    assert image["alt"] == str(record)
    assert [tag for tag, _ in tags].count("tr") == 1 + len(record["evidence"])
    Image.new("RGB", (96, 96)).save(paths[0])
    assert "img" not in [tag for tag, _ in page(record)]
    assert "img" not in [tag for tag, _ in page(model.explain(Image.new("RGB", (50, 50))))]


def test_nothing_from_outside_becomes_markup(model, paths):
    record = cast(dict[str, Any], {**model.explain(paths[0]), "image": HOSTILE})
    record["prediction"] = {**record["prediction"], "label": HOSTILE}
    record["evidence"][0]["name"] = HOSTILE
    failed = cast(dict[str, Any], error_record(HOSTILE, "code", HOSTILE))
    for shown in (
        Explanation(record),
        Explanation(failed),
        to_explanations([cast(Record, record), cast(Record, failed)]),
    ):
        assert {tag for tag, _ in page(shown)} <= ELEMENTS
        assert not any(name.startswith("on") for _, attributes in page(shown) for name in attributes)
    assert "\n" not in str(Explanation(record))


def test_a_long_list_names_the_number_of_the_others():
    assert "and 10 more" in Explanations([error_record("a", "b", "c")] * 60)._repr_html_()
