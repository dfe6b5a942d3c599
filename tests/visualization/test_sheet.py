import base64
import io
import itertools
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct
from PIL import Image

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import cosines
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import ImageInfo, build_records, class_evidence
from opal_deploy.records.decision import Decision
from opal_deploy.visualization.drawing import SCALE, Bitmap, Rect, Text
from opal_deploy.visualization.overlay import crop_box
from opal_deploy.visualization.sheet import OtherClass, draw_sheet
from opal_deploy.visualization.style import measure_text, slot_color
from tests.builders import make_patches

GRID = (7, 7)
HOSTILE = "<script>alert(1)</script>\"'&\n\udcff]]></title><img src=x onerror=alert(2)>"
LONG = "Großer Übersee-Eichelhäher mit einem Namen, der auf keine zwei Zeilen einer Seite passt, 日本語の長い名前 " * 2
SVG = "{http://www.w3.org/2000/svg}"


def photograph(size):
    """Return an image whose grid cells each have a colour of their own."""
    y, x = np.mgrid[: size[1], : size[0]]
    row, col = y * GRID[0] // size[1], x * GRID[1] // size[0]
    return Image.fromarray(np.stack([row * 30, col * 30, 200 - row * 10 - col * 10], axis=-1).astype(np.uint8))


def draw(
    m=5, size=(700, 490), labels=("ash", "birch"), *, crop=None, distance="l2", dropped=(), patches=None,
    image="a/b.jpg", label=None, status=None, **options,
):  # fmt: skip
    """Return record and sheet of a random answer."""
    channels = m * len(labels)
    attention = np.random.default_rng(m).dirichlet(np.full(channels, 0.1), size=49).T[None].astype(np.float32)
    class_map = ClassMap.blocks(len(labels), m, dropped)
    scores, cells = attention.max(axis=2) * class_map.kept_prototypes, attention.argmax(axis=2).astype(np.int32)
    outputs = Outputs(-np.sqrt(2 - 2 * cosines(scores, class_map, 1e-8)).astype(np.float32), cells, scores)
    head = {"distance": distance, "epsilon": 1e-8, "dropped": list(dropped)}
    metadata = Metadata(labels, m, head, "exact", "resnet18", GRID, (224, 224), patches=patches or {})
    geometry = Geometry(*size, crop or (0, 0, *size))
    (record,) = build_records([ImageInfo(image, geometry, {"label": label})], outputs, metadata, top=2, **options)
    record = record if status is None else replace_struct(record, status=status)
    others = [
        OtherClass(answer, class_evidence(answer.class_id, geometry, outputs, metadata), photograph(size))
        for answer in record.top[1:]
    ]
    return record, draw_sheet(photograph(size), record, others, metadata, geometry.crop)


CASES = {
    "five slots": {},
    "one slot": {"m": 1, "patches": make_patches(2, 1)},
    "ten slots": {"m": 10, "patches": make_patches(2, 10)},
    "slots of one class dropped": {"dropped": (0, 2, 3), "patches": make_patches(2, 5)},
    "no patch of the class": {"m": 3, "patches": make_patches(2, 3, ())},
    "tall": {"size": (70, 700), "patches": make_patches(2, 5)},
    "wide": {"size": (1400, 70), "patches": make_patches(2, 5)},
    "cropped": {"crop": (100, 50, 600, 400)},
    "abstained": {"decision": Decision(min_margin=0.99)},
    "label of no class": {"label": LONG},
    "long names": {"labels": (LONG, LONG[::-1]), "image": LONG * 5, "patches": make_patches(2, 5)},
    "no name": {"labels": (" ", ""), "image": None},
    "one class": {"labels": ("only",)},
    "no contributions": {"distance": "linf"},
    "parts of a distance": {"distance": "kl"},
}


def extent(shape):
    """Return left, top, right and bottom of a shape; the capitals of a text are 0.7 of its size high."""
    if isinstance(shape, Text):
        width = measure_text(shape.text, shape.size)
        left = {"start": shape.x, "middle": shape.x - width / 2, "end": shape.x - width}[shape.anchor]
        return left, shape.y - 0.7 * shape.size, left + width, shape.y + 0.1 * shape.size
    width, height = (shape.width, shape.height) if isinstance(shape, Rect) else (n // SCALE for n in shape.image.size)
    return shape.x, shape.y, shape.x + width, shape.y + height


def texts(page):
    return [shape.text for shape in page.shapes if isinstance(shape, Text)]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_everything_lies_on_the_sheet_and_no_text_over_another_or_a_bitmap(case):
    _, page = draw(**case)
    boxes = [(extent(shape), shape) for shape in page.shapes if not (isinstance(shape, Text) and not shape.text)]
    for (left, top, right, bottom), shape in boxes:
        assert min(left, top, page.width - right, page.height - bottom) >= 0, shape
    words, bitmaps = ([box for box in boxes if isinstance(box[1], kind)] for kind in (Text, Bitmap))
    for (a, one), (b, two) in itertools.chain(itertools.combinations(words, 2), itertools.product(words, bitmaps)):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, two)


@pytest.mark.parametrize(("file_format", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_file_is_the_same_every_time(file_format, start):
    first, again = (draw(patches=make_patches(2, 5))[1].encode(file_format) for _ in range(2))
    assert first == again
    assert first.startswith(start)


def test_a_row_shows_what_the_slot_found_and_two_patches_of_other_training_images():
    record, page = draw(patches=make_patches(2, 5))
    slot = max(record.evidence, key=lambda slot: slot.contribution)
    found, *alike = [shape for shape in page.shapes if getattr(shape, "alt", "").startswith(f"slot {slot.slot}: ")]
    assert [patch.alt.split(" in ")[1].partition(",")[0] for patch in alike] == ["other.jpg", "third.jpg"]
    # the box's cell in the middle, outlined in the slot's colour
    shown = np.asarray(found.image).reshape(-1, 3).tolist()
    assert list(photograph((700, 490)).getpixel((int(slot.box[0]) + 50, int(slot.box[1]) + 35))) in shown
    assert any(isinstance(shape, Rect) and shape.edge == slot_color(slot.slot) for shape in page.shapes)
    assert "looks like, in training images" in texts(page)


def test_slots_stand_in_the_order_of_their_contributions_with_their_sum():
    record, page = draw()
    values = [f"{slot.contribution:.3f}" for slot in sorted(record.evidence, key=lambda slot: -slot.contribution)]
    assert [text for text in texts(page) if text in values][:5] == values
    assert f"sum {record.prediction.cosine:.3f}" in texts(page)


@pytest.mark.parametrize(("label", "verdict"), [("birch", "correct"), ("ash", "wrong, label ash"), (None, None)])
def test_the_label_is_compared_and_folders_stay_private(label, verdict):
    record, page = draw(label=label, image="/home/ann/birds/1.jpg")
    assert record.prediction.label == "birch"
    assert (verdict in texts(page)) == (verdict is not None)
    assert "1.jpg" in texts(page)
    assert not any("home" in text for text in texts(page))


@pytest.mark.parametrize("status", ["unknown", "abstained"])
def test_a_refused_answer_has_its_class_below_in_smaller_letters(status):
    title, below, *_ = draw(status=status)[1].shapes
    assert (title.text, below.text) == ({"unknown": "Unknown", "abstained": "Not sure"}[status], "closest class: birch")
    assert title.size > below.size


@pytest.mark.parametrize("name", [HOSTILE, "]]>", "&amp;", "\x00\x1b[31m", "日本語", ""])
def test_the_svg_is_well_formed_whatever_things_are_called(name):
    names = {(0, 0): name or "x", (1, 1): name or "x"}
    patches = make_patches(2, 5, (name,))
    _, page = draw(labels=(name, name + "2"), image=name + "3", slot_names=names, patches=patches)
    elements = list(ET.fromstring(page.encode("svg")).iter())
    assert {element.tag.removeprefix(SVG) for element in elements} == {"svg", "rect", "text", "image"}
    assert not [key for element in elements for key in element.attrib if key.startswith("on")]
    for element in elements:
        if element.tag == f"{SVG}image":
            data = element.attrib["href"].removeprefix("data:image/jpeg;base64,")
            assert Image.open(io.BytesIO(base64.b64decode(data))).format == "JPEG"


def test_a_patch_stays_in_the_image_and_is_at_least_a_pixel():
    image = photograph((70, 70))
    assert crop_box(image, (60.0, 60.0, 70.4, 70.4), image.size).size == (10, 10)
    assert crop_box(image, (69.9, 69.9, 70.0, 70.0), image.size).size == (1, 1)
    # of an image twice as large
    assert crop_box(image, (120.0, 120.0, 140.0, 130.0), (140, 140)).size == (10, 5)
