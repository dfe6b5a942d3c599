"""What people import: its names, its signatures, what it costs to import, and that it answers as the CLI does."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import opal_deploy
from opal_deploy import Model


@pytest.fixture(scope="module")
def model(exact_model: Path) -> Model:
    return opal_deploy.load(exact_model, device="cpu", threads=1)


@pytest.fixture(scope="module")
def pictures(make_pictures: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_pictures(tmp_path_factory.mktemp("pictures"), 5)


def test_the_public_names_are_these() -> None:
    assert opal_deploy.__all__ == [
        "ArtifactError",
        "CheckpointError",
        "ImageError",
        "MissingExtra",
        "Model",
        "OpalError",
        "Record",
        "Service",
        "StoppedEarly",
        "UsageError",
        "VerificationError",
        "__version__",
        "json_schema",
        "load",
        "to_coco",
        "to_label_studio",
        "to_pandas",
    ]


@pytest.mark.parametrize("name", opal_deploy.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(opal_deploy, name) is not None


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = opal_deploy.nonsense


def test_load_takes_these_arguments() -> None:
    assert list(inspect.signature(opal_deploy.load).parameters) == ["path", "device", "threads"]


def test_explain_takes_these_arguments() -> None:
    parameters = inspect.signature(Model.explain).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert list(parameters)[:2] == ["self", "images"]
    assert defaults == {"boxes": None, "top": 5, "min_margin": None, "batch": 16, "max_pixels": 100_000_000}


def modules_after(statement: str, *arguments: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_costs_neither_numpy_nor_pillow_nor_an_engine() -> None:
    heavy = {"numpy", "PIL", "torch", "onnx", "onnxruntime", "typer", "rich", "matplotlib", "sklearn"}
    assert not modules_after("import opal_deploy") & heavy


def test_explaining_with_an_onnx_file_never_imports_torch(exact_model: Path, pictures: list[Path]) -> None:
    statement = "import opal_deploy\nopal_deploy.load(sys.argv[1], device='cpu').explain(sys.argv[2])"
    loaded = modules_after(statement, str(exact_model), str(pictures[0]))
    assert "onnxruntime" in loaded
    assert not loaded & {"torch", "torchvision", "onnx", "onnxscript"}


def test_explaining_works_where_torch_cannot_be_imported(exact_model: Path, pictures: list[Path]) -> None:
    statement = (
        "sys.modules.update(torch=None, torchvision=None, onnx=None)\nimport opal_deploy\n"
        "assert opal_deploy.load(sys.argv[1], device='cpu').explain(sys.argv[2])['status'] == 'ok'"
    )
    modules_after(statement, str(exact_model), str(pictures[0]))


def as_(kind: str, path: Path) -> Any:
    if kind == "path":
        return path
    if kind == "str":
        return str(path)
    if kind == "bytes":
        return path.read_bytes()
    with Image.open(path) as image:
        image.load()
    return image if kind == "PIL" else np.asarray(image)


KINDS = ["path", "str", "bytes", "PIL", "array"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_image_of_any_kind_gives_one_record(model: Model, pictures: list[Path], kind: str) -> None:
    record = model.explain(as_(kind, pictures[0]))
    expected = model.explain(pictures[0])
    if kind not in ("path", "str"):
        expected["image"] = None
    if kind in ("PIL", "array"):
        # pixels have no file
        expected["file_sha256"] = None
    assert record == expected


@pytest.mark.parametrize("kind", KINDS)
def test_many_images_of_any_kind_give_a_list_in_their_order(model: Model, pictures: list[Path], kind: str) -> None:
    found = model.explain([as_(kind, path) for path in pictures])
    assert found == [model.explain(as_(kind, path)) for path in pictures]


def test_kinds_may_be_mixed(model: Model, pictures: list[Path]) -> None:
    found = model.explain([as_(kind, pictures[0]) for kind in KINDS])
    assert len({json.dumps({**record, "image": None, "file_sha256": None}) for record in found}) == 1


def test_a_list_of_one_gives_a_list(model: Model, pictures: list[Path]) -> None:
    assert model.explain([pictures[0]]) == [model.explain(pictures[0])]


def test_no_images_give_no_records(model: Model) -> None:
    assert model.explain([]) == []


def test_a_stack_of_arrays_is_many_images(model: Model, pictures: list[Path]) -> None:
    stack = np.stack([as_("array", path) for path in pictures])
    assert model.explain(stack) == model.explain([as_("array", path) for path in pictures])  # type: ignore[call-overload]


def test_an_image_that_cannot_be_used_raises_nothing(model: Model, tmp_path: Path) -> None:
    record = model.explain(tmp_path / "none.jpg")
    assert record["status"] == "error"
    assert record["error"]["code"] == "not_found"


def test_a_box_crops_one_image(model: Model, pictures: list[Path]) -> None:
    record = model.explain(pictures[0], boxes=(10, 20, 70, 80))
    for slot in record["evidence"]:
        x0, y0, x1, y1 = slot["box"]
        assert 10 <= x0 < x1 <= 70
        assert 20 <= y0 < y1 <= 80
    assert (record["width"], record["height"]) == (96, 96)


def test_boxes_belong_to_their_images(model: Model, pictures: list[Path]) -> None:
    box = (10, 20, 70, 80)
    assert model.explain(pictures[:2], boxes=[None, box]) == [
        model.explain(pictures[0]),
        model.explain(pictures[1], boxes=box),
    ]


@pytest.mark.parametrize("boxes", [[], [None], [None] * 3])
def test_boxes_that_do_not_match_the_images_are_refused(model: Model, pictures: list[Path], boxes: list[None]) -> None:
    with pytest.raises(ValueError, match=f"{len(boxes)} boxes for 2 images; give one for each, None for none"):
        model.explain(pictures[:2], boxes=boxes)


def test_a_margin_marks_answers_below_it(model: Model, pictures: list[Path]) -> None:
    assert model.explain(pictures[0], min_margin=2.0)["status"] == "abstained"


def test_a_pixel_limit_is_kept(model: Model, pictures: list[Path]) -> None:
    assert model.explain(pictures[0], max_pixels=96 * 96 - 1)["error"]["code"] == "too_many_pixels"


def test_batches_change_no_answer(model: Model, pictures: list[Path]) -> None:
    assert model.explain(pictures, batch=1) == model.explain(pictures, batch=5)


def test_records_are_what_the_cli_writes(model: Model, pictures: list[Path], exact_model: Path, tmp_path: Path) -> None:
    (pictures[0].parent / "broken.png").write_bytes(pictures[0].read_bytes()[:200])
    paths = [*pictures, pictures[0].parent / "broken.png"]
    code = "from opal_deploy.cli import main; main()"
    arguments = ["infer", *map(str, paths), "--model", str(exact_model), "--out", str(tmp_path / "out"), "--explain"]
    # batches of one, on one thread: the same arithmetic to the last bit
    arguments += ["--batch", "1", "--threads", "1", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    written = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text("utf-8").splitlines()]
    for record in written:
        record.pop("overlay", None)
    assert written == model.explain(paths, batch=1)


def test_a_model_says_what_it_is(model: Model) -> None:
    assert repr(model).startswith("<opal_deploy.Model shufflenet_v2_x0_5, 4 classes, ONNX Runtime")


def test_loading_what_is_no_model_raises_an_artifact_error(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"nothing")
    with pytest.raises(opal_deploy.ArtifactError, match="not an ONNX file"):
        opal_deploy.load(path)


def test_errors_can_all_be_caught_as_one() -> None:
    for name in opal_deploy.__all__:
        if name.endswith(("Error", "Extra", "Early")):
            assert issubclass(getattr(opal_deploy, name), opal_deploy.OpalError)
