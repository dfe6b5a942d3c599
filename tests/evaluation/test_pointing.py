"""The pointing game by hand: regions, expectations for random cells, what is counted and what is left out."""

import json
from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.inputs import Annotations, ImageAnnotation, Part, annotate
from opal_deploy.evaluation.metrics import compute_metrics
from opal_deploy.evaluation.pointing import count_hits, play_pointing_game
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.preprocess.geometry import Geometry, compute_geometry
from opal_deploy.synthetic import generate_dataset, read_annotations

GRID = (4, 4)
METADATA = Metadata(("a", "b", "c"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", GRID, (64, 64))
# 80 x 80 pixels, cells of 20; the object is the four cells in the middle, the beak one of them, the tail another
BEAK, TAIL = Part(((21, 21, 39, 39),), True), Part(((41, 41, 59, 59),), False)
MIDDLE = ImageAnnotation("a", ((20, 20, 60, 60),), parts=(BEAK, TAIL))
WHOLE = Geometry.whole(80, 80)
ON_BEAK, ON_TAIL, ON_BODY, OFF = (30, 30), (50, 50), (50, 30), (10, 10)


def test_hits_and_random_cells_are_counted_by_their_centres():
    points = np.array([ON_BEAK, ON_TAIL, ON_BODY, OFF], np.float64)
    hits = count_hits(MIDDLE, points, WHOLE, CellGrid(*GRID))
    assert hits == {"object": (3 / 4, 4 / 16), "part": (2 / 4, 2 / 4), "distinguishing_part": (1 / 4, 1 / 4)}
    assert MIDDLE.on_parts(points, WHOLE).tolist() == [[True, False], [False, True], [False, False], [False, False]]
    # the same object as a mask
    mask = np.zeros((80, 80), np.bool_)
    mask[20:60, 20:60] = True
    assert count_hits(replace(MIDDLE, mask=lambda: mask, boxes=()), points, WHOLE, CellGrid(*GRID)) == hits
    # an object between the centres leaves all cells to the control
    nowhere = count_hits(replace(MIDDLE, boxes=((0, 0, 5, 5),)), points, WHOLE, CellGrid(*GRID))
    assert (nowhere["object"][1], nowhere["part"][1]) == (0, 2 / 16)


@pytest.mark.parametrize(
    ("crop", "distance", "hit"),
    [
        (None, 14.9, True),
        (None, 15.1, False),
        # half the image is scaled to the input: its pixels are twice as large there
        ((0, 0, 112, 112), 7.4, True),
        ((0, 0, 112, 112), 7.6, False),
    ],
)
def test_a_point_is_hit_within_the_margin_at_the_scale_of_the_input(crop, distance, hit):
    parts = (Part(((10, 10), (60, 60))),)
    points = np.array([[60 + distance, 60]])
    annotation = ImageAnnotation("a", parts=parts)
    assert annotation.on_parts(points, compute_geometry((224, 224), crop)).tolist() == [[hit]]


def test_centres_follow_the_crop():
    crop = compute_geometry((100, 50), (20, 10, 60, 50)).crop
    centres = CellGrid(2, 4).centres(crop)
    assert centres.tolist() == [[25, 20], [35, 20], [45, 20], [55, 20], [25, 40], [35, 40], [45, 40], [55, 40]]
    # a box that would leave the crop stays at its edge
    moved = CellGrid(2, 4, -0.4).centres(crop)
    assert moved.tolist() == [[25, 20], [31, 20], [41, 20], [51, 20], [25, 32], [31, 32], [41, 32], [51, 32]]


def _result(cells, labels, predicted, size=64):
    logits = -np.ones((len(labels), 3), np.float32)
    logits[np.arange(len(labels)), predicted] = -0.1
    outputs = Outputs(logits, cells.astype(np.int32), np.full(cells.shape, 0.5, np.float32))
    geometries = [Geometry.whole(size, size)] * len(labels)
    return EvaluationResult(compute_metrics(logits, labels), None, labels, outputs, geometries)


def _play(images, cells, predicted):
    """Play with images of class a, each with the cells of that class's two slots."""
    slots = np.array([[*pair, 0, 0, 0, 0] for pair in cells])
    result = _result(slots, np.zeros(len(images), np.int64), np.array(predicted), 80)
    return play_pointing_game(result, Annotations(images, "cells"), METADATA)


def test_images_are_the_unit_and_only_right_predictions_with_annotations_count():
    on_beak, on_tail, off = 5, 10, 0
    unseen = replace(MIDDLE, parts=(TAIL,))
    game = _play(
        [MIDDLE, MIDDLE, unseen, MIDDLE, ImageAnnotation("a")],
        [[on_beak, on_tail], [on_beak, off], [on_beak, on_tail], [on_beak, on_beak], [on_beak, on_beak]],
        [0, 0, 0, 1, 0],
    )
    assert (game.images, game.images_without_annotation, game.cells_per_image) == (3, 1, 2)
    assert game.object.mean == pytest.approx(np.mean([1, 0.5, 1]))
    assert game.part.mean == pytest.approx(np.mean([1, 0.5, 0.5]))
    assert (game.part.count, game.part.random) == (3, pytest.approx(np.mean([0.5, 0.5, 0.25])))
    assert game.distinguishing_part.mean == pytest.approx(np.mean([0.5, 0.5, 0]))
    document = json.loads(json.dumps(game.to_dict()))
    assert (document["object"]["random"], document["images_without_annotation"]) == (0.25, 1)
    text = list(game.describe())
    assert "in the object 83.3 % [" in text[0]
    assert "1 correct predictions without annotation left out" in text[1]

    # objects without parts; no right prediction; no single cells
    game = _play([replace(MIDDLE, parts=())], [[on_beak, off]], [0])
    assert (game.part, game.distinguishing_part) == (None, None)
    assert _play([MIDDLE], [[on_beak, off]], [1]) is None
    nothing = _result(np.zeros((1, 6)), np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert play_pointing_game(nothing, Annotations([MIDDLE], ""), replace(METADATA, evidence="map")) is None


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("creatures") / "data"
    generate_dataset(root, num_species=3, train_per_class=2, val_per_class=1, test_per_class=3, size=(64, 64))
    return read_dataset(root)


def test_records_and_outputs_of_creatures_give_the_same_game(data):
    labels = np.array([sample.label for sample in data.test])
    annotations = annotate(data, data.test, boxes=True, parts=True)
    # every slot looks at the cell that holds the centre of a distinguishing part
    creatures = {str(data.root / each.image): each for each in read_annotations(data.root)}
    cells = np.zeros((len(labels), 6), np.int64)
    for row, sample in enumerate(data.test):
        part = next(part for part in creatures[str(sample.path)].parts.values() if part.distinguishing)
        cells[row] = int(part.centre[1] // 4) * 16 + int(part.centre[0] // 4)
    predicted = labels.copy()
    predicted[0] = (labels[0] + 1) % 3
    metadata = replace(METADATA, grid=(16, 16))
    game = play_pointing_game(_result(cells, labels, predicted), annotations, metadata)
    assert game.distinguishing_part.mean > 2 * game.distinguishing_part.random > 0

    with pytest.raises(UsageError, match="--no-parts"):
        annotate(data, [replace(data.test[0], path=data.root / "test" / "new.png")], boxes=True, parts=True)


def _coco(path, names, categories):
    """Write a COCO file with a box of 10 x 20 pixels at (5, 6) for each image."""
    document = {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
        "annotations": [
            {"image_id": number, "category_id": number, "bbox": [5, 6, 10, 20]} for number, _ in enumerate(names)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(categories)],
    }
    path.write_text(json.dumps(document))
    return path


def test_objects_of_a_coco_file_count_where_their_category_is_the_class_or_none_of_the_classes(data, tmp_path):
    names = [f"{sample.path.parent.name}/{sample.path.name}" for sample in data.test]
    classes = [sample.path.parent.name for sample in data.test]

    def objects(categories, files=names):
        path = _coco(tmp_path / "objects.json", files, categories)
        annotations = annotate(data, data.test, boxes=True, parts=False, objects=path)
        assert annotations.images[0].boxes in ((), ((5, 6, 15, 26),))
        return [len(image.boxes) for image in annotations.images]

    assert objects(["animal"] * 9) == [1] * 9
    assert objects(classes) == [1] * 9
    # the first image's class occurs, elsewhere; its own box is of something else
    assert objects(["animal", *classes[1:]]) == [0] + [1] * 8
    assert objects(["animal"], names[:1]) == [1] + [0] * 8
    with pytest.raises(UsageError, match="no boxes for any of the 9 images"):
        objects(["animal"], ["other.png"])


@pytest.mark.parametrize(
    ("box", "boxes", "inside", "name"),
    [
        (None, True, None, "no foreground is known"),
        ((20, 10, 60, 30), True, None, "images are cropped to their boxes"),
        ((20, 10, 60, 30), False, [5, 6, 9, 10], "annotated box"),
    ],
)
def test_foreground_by_what_the_data_set_knows(data, box, boxes, inside, name):
    annotations = annotate(data, [Sample(data.test[0].path, 0, box)], boxes=boxes, parts=False)
    foreground = annotations.images[0].foreground(Geometry.whole(80, 40), CellGrid(*GRID))
    assert name in annotations.foreground
    assert np.flatnonzero(foreground).tolist() == (list(range(16)) if inside is None else inside)
    assert annotations.known == (inside is not None)
