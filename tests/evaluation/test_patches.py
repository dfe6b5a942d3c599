"""Patches of training images by slot, and the page that shows them."""

import io
from dataclasses import replace

import pytest
from PIL import Image

from opal_deploy import create_atlas, export_model
from opal_deploy.artifact.onnx_file import read_metadata
from opal_deploy.artifact.patches import PER_SLOT, Patch, Patches, SlotPatches
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.evaluation.patches import collect_patches
from opal_deploy.model.checkpoint import load
from opal_deploy.model.checkpoint import save as save_checkpoint
from opal_deploy.runtime.torch_session import TorchSession
from tests.bright import BrightSession, save


@pytest.fixture
def samples(tmp_path):
    """Images of class 1, brighter and brighter; the brightest cell is the slot's."""
    return [Sample(save(tmp_path / f"{number}.png", (64, 48), 130 + 20 * number), 1) for number in range(6)]


def test_each_slot_keeps_its_strongest_images_that_are_answered_correctly(samples):
    session = BrightSession()
    wrong = Sample(samples[5].path, 0)
    patches = collect_patches(session, [*samples[:5], wrong], "train")
    by_slot = {(row.class_id, row.slot): row.patches for row in patches.slots}
    assert [patch.image for patch in by_slot[1, 0]] == ["4.png", "3.png", "2.png", "1.png"]
    assert by_slot[0, 0] == ()
    # without the image itself, which would be its own proof
    assert [patch.image for patch in patches.find(1, 0, "a/b/3.png")] == ["4.png", "2.png"]
    for patch in by_slot[1, 0]:
        left, top, right, bottom = patch.cell
        assert left < right
        assert top < bottom
        assert max(Image.open(io.BytesIO(patch.decode())).size) <= 96


def test_boxes_of_the_data_set_crop_the_view(samples):
    cropped = [replace(sample, box=(32, 24, 64, 48)) for sample in samples]
    patches = collect_patches(BrightSession(), cropped, "train")
    own = collect_patches(BrightSession(), cropped, "train", boxes=False)
    assert patches.find(1, 0) != own.find(1, 0)


def test_an_exported_file_takes_as_many_patches_per_slot_as_20_kb_hold():
    def fit(size, slots=5):
        patch = Patch("a.jpg", 0.1, (0, 0, 1, 1), "A" * (size * 4 // 3))
        rows = tuple(SlotPatches(0, slot, (patch,) * PER_SLOT) for slot in range(slots))
        fitted = Patches("train", 9, rows).fit()
        return 0 if fitted is None else len(fitted.slots[0].patches)

    assert [fit(size) for size in (900, 1_900, 3_900, 5_000)] == [4, 2, 1, 0]


def test_a_document_from_outside_is_checked():
    row = {"class_id": 0, "slot": 0, "patches": [{"image": "a", "value": 1.0, "cell": [0, 0, 1, 1], "jpeg": "<b>"}]}
    with pytest.raises(ArtifactError, match="jpeg"):
        Patches.from_dict({"split": "train", "images": 1, "slots": [row]})
    assert Patches.from_dict({}) is None


def test_the_atlas_shows_the_patches_of_a_data_set_or_those_that_the_model_keeps(tmp_path, exact_model, make_pictures):
    checkpoint, own, out = load(exact_model.with_suffix(".pt")), tmp_path / "own.pt", tmp_path / "atlas.html"
    checkpoint.class_names = ["ash", "birch", "elm", "oak"]
    for name in checkpoint.class_names:
        make_pictures(tmp_path / "data/train" / name, 2)
    save_checkpoint(own, checkpoint)
    with pytest.raises(UsageError, match="no patches"):
        create_atlas(own, out=out)
    assert len(create_atlas(own, data=tmp_path / "data", out=out).patches.slots) == 12
    shown = out.read_text("utf-8").count("data:image/jpeg;base64,")
    files = sorted(tmp_path.glob("data/train/*/*"))
    samples = [Sample(path, checkpoint.class_names.index(path.parent.name)) for path in files]
    checkpoint.patches = collect_patches(TorchSession(checkpoint), samples, "train")
    save_checkpoint(own, checkpoint)
    create_atlas(own, out=out, overwrite=True)
    assert out.read_text("utf-8").count("data:image/jpeg;base64,") == shown > 0
    # an export carries them unless it must not
    exported = export_model(own, out=tmp_path / "own.onnx", verify=False)
    assert read_metadata(exported.path).patches
    with pytest.raises(UsageError, match="patches"):
        export_model(exported.path, out=tmp_path / "without.onnx", precision="fp16", patches=False)
