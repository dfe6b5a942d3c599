"""The public Python API: names, signatures, the cost of importing it, and records that are those of the CLI."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import opal_deploy
from tests.cli.calls import check

BOX = (10, 20, 70, 80)


@pytest.fixture(scope="module")
def images(make_pictures, tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("images"), 5)


def test_public_names_exist_and_are_documented():
    documented = (Path(__file__).parents[1] / "docs/reference/python.md").read_text("utf-8")
    errors = [name for name in opal_deploy.__all__ if name.endswith(("Error", "Extra", "Early"))]
    missing = {
        name
        for name in opal_deploy.__all__
        if not re.search(rf"^::: opal_deploy\.([\w.]+\.)?{name}$", documented, re.M)
    }
    # the errors stand below their module, and `Record` is a union of two
    assert missing == {"__version__", "Record", *errors}
    assert all(getattr(opal_deploy, name) is not None for name in opal_deploy.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = opal_deploy.nonsense
    assert all(issubclass(getattr(opal_deploy, name), opal_deploy.OpalError) for name in errors)


def modules_after(statement, *arguments):
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_costs_neither_numpy_nor_pillow_nor_a_runtime():
    heavy = {"numpy", "PIL", "torch", "onnx", "onnxruntime", "typer", "rich", "matplotlib", "sklearn"}
    assert not modules_after("import opal_deploy") & heavy


def test_an_onnx_file_needs_no_torch(exact_model, images):
    statement = (
        "import opal_deploy\nassert opal_deploy.load(sys.argv[1], device='cpu').predict(sys.argv[2])['status'] == 'ok'"
    )
    loaded = modules_after(statement, str(exact_model), str(images[0]))
    assert "onnxruntime" in loaded
    assert not loaded & {"torch", "torchvision", "onnx", "onnxscript"}


def as_(kind, path):
    if kind in ("path", "str", "bytes"):
        return {"path": path, "str": str(path), "bytes": path.read_bytes()}[kind]
    with Image.open(path) as image:
        image.load()
    return image if kind == "PIL" else np.asarray(image)


@pytest.mark.parametrize("kind", ["path", "str", "bytes", "PIL", "array"])
def test_images_of_any_kind(model, images, kind):
    record, expected = model.predict(as_(kind, images[0])), model.predict(images[0])
    if kind not in ("path", "str"):
        expected["image"] = None
    if kind in ("PIL", "array"):
        # pixels have no file
        expected["image_sha256"] = None
    assert record == expected
    # one image is a record, many are a list
    assert model.predict([as_(kind, images[0])]) == [record]
    assert model.predict([as_(kind, path) for path in images]) == [model.predict(as_(kind, path)) for path in images]


def test_no_images_are_an_empty_list_and_a_stack_is_as_many_images(model, images):
    assert model.predict([]) == []
    arrays = [as_("array", path) for path in images]
    assert model.predict(np.stack(arrays)) == model.predict(arrays)


def test_boxes_crop_their_images(model, images):
    record = model.predict(images[0], boxes=BOX)
    for slot in record["evidence"]:
        x0, y0, x1, y1 = slot["box"]
        assert 10 <= x0 < x1 <= 70
        assert 20 <= y0 < y1 <= 80
    assert (record["width"], record["height"]) == (96, 96)
    boxed = [model.predict(images[0]), model.predict(images[1], boxes=BOX)]
    assert model.predict(images[:2], boxes=[None, BOX]) == boxed
    for one in ([BOX], list(BOX), np.array([BOX])):
        assert model.predict(images[0], boxes=one) == record
    for wrong in ([BOX, BOX], BOX[:3], [BOX[:3]], "box"):
        with pytest.raises(ValueError, match=r"\(x0, y0, x1, y1\)"):
            model.predict(images[0], boxes=wrong)
    for boxes in ([], [None] * 3):
        with pytest.raises(ValueError, match=f"{len(boxes)} boxes for 2 images; give one for each, None for none"):
            model.predict(images[:2], boxes=boxes)


def test_records_are_what_the_cli_writes(model, images, exact_model, tmp_path, opal):
    (images[0].parent / "broken.png").write_bytes(images[0].read_bytes()[:200])
    paths = [*images, images[0].parent / "broken.png"]
    # batches of one, on one thread: the same arithmetic to the last bit
    options = ["--out", tmp_path / "out", "--explain", "--batch", "1", "--threads", "1", "--device", "cpu"]
    check(opal("infer", *paths, "--model", exact_model, *options), 3)
    written = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text("utf-8").splitlines()]
    for record in written:
        record.pop("overlay", None)
        # its place among the inputs of a run
        record.pop("image_index")
    assert written == model.predict(paths, batch=1)


def test_a_model_describes_itself_and_other_files_are_refused(model, tmp_path):
    prediction = model.predict(np.zeros((96, 96, 3), np.uint8))["prediction"]
    assert model.names[prediction["class_id"]] == prediction["label"]
    assert list(model.names) == [0, 1, 2, 3]
    assert repr(model).startswith("<opal_deploy.Model timm:test_resnet, 4 classes, ONNX Runtime")
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(opal_deploy.ArtifactError, match="not an ONNX file"):
        opal_deploy.load(tmp_path / "model.onnx")
