import base64
import io
import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import cosines
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import ImageInfo
from opal_deploy.records.decision import Decision
from opal_deploy.visualization.atlas.entries import Exemplar, Exemplars
from opal_deploy.visualization.overlay import crop_box
from opal_deploy.visualization.sheet.content import build_sheet_content
from opal_deploy.visualization.sheet.drawing import (
    Bitmap,
    Text,
    encode_png,
    encode_svg,
    enlarge,
    render_png,
)
from opal_deploy.visualization.sheet.layout import layout_sheet
from opal_deploy.visualization.style import ALERT, measure_text, slot_color

GRID = (7, 7)
HOSTILE = "<script>alert(1)</script>\"'&\n\udcff]]></title><img src=x onerror=alert(2)>"
LONG = "Großer Übersee-Eichelhäher mit einem Namen, der auf keine zwei Zeilen einer Seite passt, 日本語の長い名前 " * 2
SVG = "{http://www.w3.org/2000/svg}"


def cell_color(row, col):
    return row * 30, col * 30, 200 - row * 10 - col * 10


def photograph(size):
    """Return an image whose grid cells each have a colour of their own."""
    y, x = np.mgrid[: size[1], : size[0]]
    colors = cell_color(y * GRID[0] // size[1], x * GRID[1] // size[0])
    return Image.fromarray(np.stack(colors, axis=-1).astype(np.uint8))


def content(
    m=5, size=(700, 490), labels=("ash", "birch"), *, crop=None, distance="l2", field=None, dropped=(), **options
):  # fmt: skip
    channels = m * len(labels)
    attention = np.random.default_rng(m).dirichlet(np.full(channels, 0.1), size=49).T[None].astype(np.float32)
    class_map = ClassMap.blocks(len(labels), m, dropped)
    scores, cells = attention.max(axis=2) * class_map.kept_prototypes, attention.argmax(axis=2).astype(np.int32)
    logits = -np.sqrt(2 - 2 * cosines(scores, class_map, 1e-8)).astype(np.float32)
    outputs = Outputs(logits, cells, scores)
    metadata = Metadata(
        labels,
        m,
        {"distance": distance, "epsilon": 1e-8, "dropped": list(dropped)},
        "exact",
        "resnet18",
        GRID,
        (224, 224),
    )
    if field is not None:
        metadata = replace(metadata, receptive_field={"stride": 32, "effective": field, "effective_offset": 16})
    geometry = Geometry(*size, crop or (0, 0, *size))
    image = ImageInfo(options.pop("image", "a/b.jpg"), geometry, label=options.pop("label", None))
    return build_sheet_content(image, outputs, metadata, **options)


def exemplars(m, count=4):
    patch = Image.new("RGB", (70, 50), (1, 2, 3))
    exemplar = Exemplar(patch, (30, 20, 40, 30), (0, 0, 70, 50), "0.123 some/name.jpg", "elsewhere")
    return Exemplars({slot: [exemplar] * count for slot in range(m)}, "An atlas.")


CASES = {
    "five slots": (content(), None),
    "one slot": (content(1), exemplars(1)),
    "ten slots": (content(10), exemplars(10)),
    "slots of one class dropped": (content(dropped=(0, 2, 3)), exemplars(5)),
    "slots of the other class dropped": (content(dropped=(5, 6)), None),
    "no image in the atlas": (content(3), exemplars(3, 0)),
    "tall": (content(size=(70, 700)), exemplars(5)),
    "wide": (content(size=(1400, 70)), exemplars(5)),
    "cropped": (content(crop=(100, 50, 600, 400)), None),
    "abstained": (content(decision=Decision(min_margin=0.99)), None),
    "label of no class": (content(label=LONG), None),
    "fields": (content(10, field=96, crop=(100, 50, 600, 400)), exemplars(10)),
    "long names": (content(labels=(LONG, LONG[::-1]), image=LONG * 5), exemplars(5)),
    "no name": (content(labels=(" ", ""), image=None), None),
    "one class": (content(labels=("only",)), None),
    "no contributions": (content(distance="linf"), None),
    "parts of a distance": (content(distance="kl"), None),
}


def draw(shown, others=None, **how):
    return layout_sheet(shown, photograph((shown.width, shown.height)), others, **how)


def extent(shape):
    """Return left, top, right and bottom of a shape; the capitals of a text are 0.7 of its size high."""
    if isinstance(shape, Text):
        width = measure_text(shape.text, shape.size)
        left = {"start": shape.x, "middle": shape.x - width / 2, "end": shape.x - width}[shape.anchor]
        return left, shape.y - 0.7 * shape.size, left + width, shape.y + 0.1 * shape.size
    width, height = shape.size if isinstance(shape, Bitmap) else (shape.width, shape.height)
    return shape.x, shape.y, shape.x + width, shape.y + height


@pytest.mark.parametrize(("shown", "others"), list(CASES.values()), ids=list(CASES))
def test_everything_lies_on_the_sheet_readable_and_no_text_over_another_or_a_bitmap(shown, others):
    page = draw(shown, others)
    # on a phone's screen of 390 CSS pixels
    assert min(shape.size for shape in page.shapes if isinstance(shape, Text)) * 390 / page.width >= 12
    boxes = [(extent(shape), shape) for shape in page.shapes if not (isinstance(shape, Text) and not shape.text)]
    for (left, top, right, bottom), shape in boxes:
        assert min(left, top, page.width - right, page.height - bottom) >= 0, shape
    texts, bitmaps = ([each for each in boxes if isinstance(each[1], kind)] for kind in (Text, Bitmap))
    for (a, one), (b, two) in itertools.chain(itertools.combinations(texts, 2), itertools.product(texts, bitmaps)):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, two)


@pytest.mark.parametrize(("label", "alarming"), [(None, False), ("birch", False), ("ash", True)])
def test_only_a_wrong_answer_has_its_notes_in_the_colour_of_an_alert(label, alarming):
    shown = content(label=label, decision=Decision(min_margin=0.99))
    notes = [shape for shape in draw(shown).shapes if isinstance(shape, Text) and shape.text in shown.cautions()]
    assert len(notes) == 1
    assert {note.color == ALERT for note in notes} == {alarming}


def test_a_file_is_the_same_every_time_and_the_png_has_its_size():
    page, again = (draw(content(), exemplars(5)) for _ in range(2))
    assert encode_png(page) == encode_png(again)
    assert encode_svg(page) == encode_svg(again)
    opened = Image.open(io.BytesIO(encode_png(page)))
    assert opened.size == (2 * page.width, 2 * page.height)


def test_each_slots_patch_is_its_cell_of_the_photograph_in_the_slots_colour():
    shown = content(size=(700, 490))
    page = draw(shown)
    pixels = render_png(page)
    patches = [shape for shape in page.shapes if isinstance(shape, Bitmap) and shape.alt.startswith("patch of slot")]
    for patch, slot in zip(patches, [*shown.predicted.slots, *shown.runner_up.slots], strict=True):
        assert patch.image.getcolors() == [(patch.image.width * patch.image.height, cell_color(*slot.cell))]
        assert patch.image.width / patch.image.height == pytest.approx(100 / 70, abs=0.03)
        assert pixels.getpixel((2 * patch.x - 4, 2 * patch.y + 10)) == slot_color(slot.slot)


def test_a_known_field_is_shown_and_explained():
    texts = " ".join(shape.text for shape in draw(content(field=96)).shapes if isinstance(shape, Text))
    assert "effective receptive field" in texts


@pytest.mark.parametrize("status", ["unknown", "abstained"])
def test_a_refused_answer_has_its_class_below_in_smaller_letters(status):
    title, below, *_ = draw(replace(content(), status=status)).shapes
    assert (title.text, below.text) == ({"unknown": "Unknown", "abstained": "Not sure"}[status], "closest class: birch")
    assert title.size > below.size


def test_sums_margin_and_names_stand_on_the_sheet_but_not_where_its_image_lies():
    shown = content(names={(content().predicted.class_id, 2): "beak"}, image="/home/ann/birds/1.jpg")
    page = draw(shown)
    texts = [shape.text for shape in page.shapes if isinstance(shape, Text)]
    assert "1.jpg" in texts
    assert not any("home" in text for text in texts)
    assert texts.count("sum = cosine") == 2
    assert f"{shown.predicted.total:.3f}" in texts
    assert f"{shown.margin:.3f}" in texts
    assert any(text.startswith("beak, cell") for text in texts)


@pytest.mark.parametrize("name", [HOSTILE, "]]>", "&amp;", "\x00\x1b[31m", "日本語", ""])
def test_the_svg_is_well_formed_whatever_things_are_called(name):
    shown = content(labels=(name, name + "2"), image=name, names={(0, 0): name or "x", (1, 1): name or "x"})
    hostile = Exemplars({0: [Exemplar(Image.new("RGB", (9, 9)), (0, 0, 9, 9), None, name, name)]}, name)
    elements = list(ET.fromstring(encode_svg(draw(shown, hostile))).iter())
    assert {element.tag.removeprefix(SVG) for element in elements} == {"svg", "rect", "text", "image"}
    assert not [key for element in elements for key in element.attrib if key.startswith("on")]
    for element in elements:
        if element.tag == f"{SVG}image":
            assert element.attrib["aria-label"] or not name
            data = element.attrib["href"].removeprefix("data:image/jpeg;base64,")
            assert Image.open(io.BytesIO(base64.b64decode(data))).format == "JPEG"


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ValueError, match="its record says"):
        layout_sheet(content(), photograph((10, 10)))


def test_a_patch_stays_in_the_image_and_is_at_least_a_pixel_and_few_pixels_are_shown_as_squares():
    image = photograph((70, 70))
    assert crop_box(image, (60.0, 60.0, 70.4, 70.4), image.size).size == (10, 10)
    assert crop_box(image, (69.9, 69.9, 70.0, 70.0), image.size).size == (1, 1)
    # of an image twice as large
    assert crop_box(image, (120.0, 120.0, 140.0, 130.0), (140, 140)).size == (10, 5)
    two = Image.fromarray(np.array([[[0] * 3, [255] * 3]], dtype=np.uint8))
    assert {color for _, color in enlarge(two, (100, 100)).getcolors()} == {(0, 0, 0), (255, 255, 255)}
