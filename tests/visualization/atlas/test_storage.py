import html
import io
import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.visualization.atlas.entries import (
    Atlas,
    AtlasPatch,
    SlotEntry,
    SlotStatistics,
    find_exemplars,
    name_patch,
)
from opal_deploy.visualization.atlas.storage import check_out_dir, load_atlas, save_atlas, write_patch

MODEL = {
    "file": "m.onnx", "sha256": "a" * 64, "checkpoint_sha256": "c" * 64, "backbone": "resnet18", "precision": "fp32",
    "prototypes_per_class": 2, "dropped": [], "grid": [7, 7], "distance": "l2",
}  # fmt: skip
HOSTILE = "<script>alert(1)</script>\"'&"


def jpeg(shade):
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), (shade, 0, 0)).save(buffer, "JPEG")
    return buffer.getvalue()


def build(root, shade=0, label="oak", labels=("oak", "ash", None)):
    """Save an atlas of two classes of two slots, three patches each in class 0; class 1 was never predicted."""
    statistics = SlotStatistics(3, 0.5, 1.0, 0.9, 0.4, (1, 2), 2 / 3)

    def patch(slot, i):
        encoded = jpeg(shade + 10 * i + slot)
        write_patch(root, file := name_patch(encoded), encoded)
        box, field = (0.5, 1.0, 20.25, 11.0), (0.0, 0.0, 40.0, 20.0) if i else None
        return AtlasPatch(f"{label}/{i}.jpg", f"{i}" * 64, (1, i), box, 0.9, 0.4 - i / 10, file, field, labels[i])

    entries = {(0, slot): SlotEntry(0, slot, statistics, tuple(patch(slot, i) for i in range(3))) for slot in (0, 1)}
    entries |= {(1, slot): SlotEntry(1, slot, SlotStatistics(0), ()) for slot in (0, 1)}
    data, cells = {"description": "train", "answered": 3}, (6,) + (0,) * 48
    counts = Counter(each for each in labels if each)
    atlas = Atlas(root, MODEL, (label, "ash"), data, 8, entries, cells, {0: dict(counts)} if counts else {})
    save_atlas(atlas)
    return atlas


def patch_files(atlas):
    return sorted(patch.file for entry in atlas.entries.values() for patch in entry.patches)


def images(atlas, slot, **options):
    return [patch.image for patch in atlas.patches(0, slot, **options)]


def test_what_was_written_is_read_back_equal(tmp_path):
    atlas = build(tmp_path / "atlas")
    assert load_atlas(tmp_path / "atlas") == atlas
    pixels = atlas.load_patch(atlas.patches(0, 1)[2])
    assert pixels.size == (20, 10)
    assert np.abs(np.asarray(pixels, int) - (21, 0, 0)).max() <= 3


def test_patches_are_best_first_and_leave_out_what_is_excluded(tmp_path):
    atlas = build(tmp_path)
    assert images(atlas, 1) == ["oak/0.jpg", "oak/1.jpg", "oak/2.jpg"]
    assert images(atlas, 1, exclude={"1" * 64}) == ["oak/0.jpg", "oak/2.jpg"]
    assert images(atlas, 0, exclude=["oak/0.jpg"]) == ["oak/1.jpg", "oak/2.jpg"]
    assert atlas.patches(1, 0) == []
    with pytest.raises(KeyError):
        atlas.patches(0, 2)


@pytest.mark.parametrize(
    ("labels", "shown", "fate"),
    [
        (("oak", "ash", "oak"), "02", "with this prediction."),
        ((None, None, None), "012", "their labels are not known."),
    ],
    ids=["one of another class", "not known"],
)
def test_exemplars_show_the_class_itself(tmp_path, labels, shown, fate):
    found = find_exemplars(build(tmp_path, labels=labels), 0, [0])
    assert [exemplar.caption.split()[1] for exemplar in found.by_slot[0]] == [f"{number}.jpg" for number in shown]
    assert found.of_class == (labels[0] is not None)
    assert found.origin.endswith(fate)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_missing_or_damaged_patch_is_refused(tmp_path, damage):
    atlas = build(tmp_path)
    patch = atlas.patches(0, 0)[0]
    damage(tmp_path / patch.file)
    with pytest.raises(ArtifactError, match="build the atlas again"):
        atlas.load_patch(patch)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda d: d.update(schema=2), "schema 2, expected 1"),
        (lambda d: d.update(kind="other"), "not an atlas"),
        (lambda d: d.pop("model"), "damaged"),
        (lambda d: d["classes"][0]["slots"].pop(), "damaged"),
        (lambda d: d["classes"][0]["slots"][0].pop("own_cell"), "damaged"),
        (lambda d: d["classes"][0]["slots"][0]["patches"][0].update(file="../../secret.jpg"), "damaged"),
    ],
)
def test_a_damaged_atlas_is_refused_in_one_line(tmp_path, edit, complaint):
    build(tmp_path)
    document = json.loads((tmp_path / "atlas.json").read_text())
    edit(document)
    (tmp_path / "atlas.json").write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match=complaint) as error:
        load_atlas(tmp_path)
    assert "\n" not in str(error.value)
    assert "opal-deploy atlas" in str(error.value)


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_what_is_no_atlas_is_refused_in_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "atlas.json").write_text(text)
    with pytest.raises(ArtifactError, match="No such file" if text is None else "atlas") as error:
        load_atlas(tmp_path)
    assert "\n" not in str(error.value)


def test_only_exports_of_the_same_checkpoint_belong_to_it(tmp_path):
    atlas = build(tmp_path)
    atlas.check_model({"sha256": "a" * 64}, "m.onnx")
    atlas.check_model({"sha256": "b" * 64, "checkpoint_sha256": "c" * 64}, "m.fp16.onnx")
    for other in ({"sha256": "b" * 64}, {"sha256": "b" * 64, "checkpoint_sha256": "d" * 64}):
        with pytest.raises(UsageError, match="belongs"):
            atlas.check_model(other, "n.onnx")


def test_an_atlas_is_whole_until_the_next_one_replaces_it_and_all_its_patches(tmp_path):
    old = build(tmp_path)
    (tmp_path / "names.toml").write_text("")
    write_patch(tmp_path, name_patch(jpeg(200)), jpeg(200))  # and then the process is killed
    assert load_atlas(tmp_path) == old
    for patch in old.patches(0, 0) + old.patches(0, 1):
        old.load_patch(patch)
    new = build(tmp_path, shade=100)
    assert {p.relative_to(tmp_path).as_posix() for p in (tmp_path / "patches").rglob("*.jpg")} == {*patch_files(new)}
    assert (tmp_path / "names.toml").exists()


@pytest.mark.parametrize(
    ("there", "overwrite", "out", "complaint"),
    [
        ("", False, ".", None),
        ("atlas.json patches", True, ".", None),
        ("atlas.json", False, ".", "already holds an atlas"),
        ("photo.jpg", True, ".", "holds other files"),
        ("a", True, "a", "is a file"),
    ],
)
def test_an_atlas_is_written_where_it_replaces_nothing_else(tmp_path, there, overwrite, out, complaint):
    for name in there.split():
        (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match=complaint) if complaint else nullcontext():
        check_out_dir(tmp_path / out, overwrite=overwrite)


def test_the_page_shows_every_patch_and_escapes_what_things_are_called(tmp_path):
    atlas = build(tmp_path, label=HOSTILE, labels=("ash", "ash", None))
    text = (tmp_path / "atlas.html").read_text("utf-8")
    assert "0 correct, ash 2" in text
    assert "<script" not in text
    assert HOSTILE in html.unescape(text)
    sources = re.findall(r'<img [^>]*src="([^"]*)"', text)
    assert sorted(sources) == patch_files(atlas)
    assert all((tmp_path / source).is_file() for source in sources)
    assert not re.search(r"https?://", text)
