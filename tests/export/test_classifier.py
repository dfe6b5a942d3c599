"""Classifiers of other tools: graphs as their exporters write them, from a few nodes, and one of a real library."""

import csv
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import opal_deploy
from opal_deploy.artifact.onnx_file import read_metadata
from opal_deploy.artifact.preprocessing import ResizeRule, from_config
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.evaluation.calibration import evaluate_calibration
from opal_deploy.records.tables import FORMATS, write_table
from opal_deploy.synthetic import example_images
from tests.cli.calls import check, one_line, read_results

SIZE, CHANNELS, CLASSES = 32, 6, 4


def make(path, tail, *, batch="N", dtype=np.float32, last=False, constants=(), outputs=("y",), opset=18):
    """Write a classifier of one convolution of stride 8, [N, 6, 4, 4], with these nodes after it."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(dtype)

    values = {
        "kernel": draw(CHANNELS, 3, 8, 8), "w": draw(CLASSES, CHANNELS), "wt": draw(CHANNELS, CLASSES),
        "b": draw(CLASSES),
        "w4": draw(CLASSES, CHANNELS, 1, 1), "gamma": draw(CHANNELS), "beta": draw(CHANNELS),
        "flat": np.array([batch if batch == 1 else -1, CHANNELS]), "cells": np.array([2, 3]), "rows": np.array([1, 2]),
        "hidden": draw(CHANNELS, CHANNELS), "w1": draw(1, CHANNELS), "b1": draw(1), "tokens": np.array([0, 6, 16]),
        "last": np.array([2]), "step": np.float32(0.1), "z": np.uint8(0), **dict(constants),
    }  # fmt: skip
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [("Transpose", ["x"], "first", {"perm": [0, 3, 1, 2]})] if last else []
    nodes += [("Conv", ["first" if last else "x", "kernel"], "conv", {"strides": [8, 8]}), ("Relu", ["conv"], "f", {})]
    nodes += [("Transpose", ["f"], "fl", {"perm": [0, 2, 3, 1]})] if last else []
    nodes = [helper.make_node(op, inputs, [out], **attributes) for op, inputs, out, attributes in (*nodes, *tail)]
    used = {name for node in nodes for name in node.input}
    shape = [batch, SIZE, SIZE, 3] if last else [batch, 3, SIZE, SIZE]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in values.items() if name in used],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


POOL = ("GlobalAveragePool", ["f"], "p", {})
FLAT = ("Flatten", ["p"], "v", {})
DENSE = ("Gemm", ["v", "w", "b"], "y", {"transB": 1})
NORM = ("LayerNormalization", ["v", "gamma", "beta"], "n", {"epsilon": 1e-2})
TAILS = {
    "dense": ([POOL, FLAT, DENSE], {}),
    "MatMul and Add": ([("ReduceMean", ["f", "cells"], "v", {"keepdims": 0}), ("MatMul", ["v", "wt"], "m", {}),
                        ("Add", ["m", "b"], "y", {})], {}),
    "convolution": ([POOL, ("Conv", ["p", "w4", "b"], "c", {}), ("Flatten", ["c"], "y", {})], {}),
    "softmax": ([POOL, FLAT, ("Gemm", ["v", "w", "b"], "l", {"transB": 1}), ("Softmax", ["l"], "y", {"axis": 1})], {}),
    "sigmoid": ([POOL, FLAT, ("Gemm", ["v", "w", "b"], "l", {"transB": 1}), ("Sigmoid", ["l"], "y", {})], {}),
    "LayerNorm": ([POOL, FLAT, NORM, ("Gemm", ["n", "w", "b"], "y", {"transB": 1})], {}),
    "LayerNorm in parts": ([
        POOL, FLAT, ("ReduceMean", ["v", "one"], "mu", {}), ("Sub", ["v", "mu"], "c", {}), ("Mul", ["c", "c"], "s", {}),
        ("ReduceMean", ["s", "one"], "var", {}), ("Add", ["var", "eps"], "e", {}), ("Sqrt", ["e"], "sd", {}),
        ("Div", ["c", "sd"], "d", {}), ("Mul", ["d", "gamma"], "g1", {}), ("Add", ["g1", "beta"], "n", {}),
        ("Gemm", ["n", "w", "b"], "y", {"transB": 1}),
    ], {"constants": {"one": np.array([1]), "eps": np.float32(1e-2)}}),
    "names like ours": ([POOL, FLAT, ("Gemm", ["v", "w", "b"], "logits", {"transB": 1})], {"outputs": ["logits"]}),
    "channels last": ([("ReduceMean", ["fl", "rows"], "v", {"keepdims": 0}), DENSE], {"last": True}),
    "batches of one": ([POOL, ("Reshape", ["p", "flat"], "v", {}), DENSE], {"batch": 1}),
    "half precision": ([POOL, FLAT, DENSE], {"dtype": np.float16}),
    "quantised weights": ([POOL, FLAT, ("DequantizeLinear", ["q", "scale"], "w8", {"axis": 0}),
                           ("Gemm", ["v", "w8", "b"], "y", {"transB": 1})],
                          {"constants": {"q": np.arange(-12, 12, dtype=np.int8).reshape(4, 6),
                                         "scale": np.full(4, 0.1, np.float32)}}),
    "a rounded mean and logits": ([
        POOL, FLAT, ("QuantizeLinear", ["v", "step", "z"], "vq", {}),
        ("DequantizeLinear", ["vq", "step", "z"], "vd", {}), ("Gemm", ["vd", "w", "b"], "l", {"transB": 1}),
        ("QuantizeLinear", ["l", "step", "z"], "yq", {}), ("DequantizeLinear", ["yq", "step", "z"], "y", {})], {}),
    "a map per class": ([("Conv", ["f", "w4", "b"], "m", {}), ("GlobalAveragePool", ["m"], "y", {})], {}),
    "tokens": ([("Reshape", ["f", "tokens"], "t", {}), ("ReduceMean", ["t", "last"], "v", {"keepdims": 0}), DENSE], {}),
    "binary": ([POOL, FLAT, ("Gemm", ["v", "w1", "b1"], "l", {"transB": 1}), ("Sigmoid", ["l"], "y", {})], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", TAILS)
def test_a_classifier_keeps_its_logits_and_its_cells_add_up_to_them(case, tmp_path):
    tail, how = TAILS[case]
    path = make(tmp_path / "c.onnx", tail, **how)
    lines = []
    out = opal_deploy.export_model(path, preprocess="raw", threads=1, log=lines.append).path
    assert out == tmp_path / "c.opal.onnx"
    # a runtime may fuse nodes differently
    assert "logits bit-equal" in lines[-1] or "logits within" in lines[-1]
    metadata = read_metadata(out)
    count = 2 if case == "binary" else CLASSES
    assert (metadata.grid, metadata.evidence, metadata.num_classes) == ((4, 4), "regions", count)
    ends = {"softmax": "softmax", "sigmoid": "sigmoid", "binary": "softmax"}
    assert metadata.head["activation"] == ends.get(case, "none")
    figures = evaluate_calibration(np.eye(count, dtype=np.float32), np.arange(count), metadata, fit=True)
    assert ("sigmoid" in figures.fitted.reason) == (case == "sigmoid")
    model = opal_deploy.load(out, threads=1)
    for image in example_images(3, SIZE, SIZE):
        record = model.predict(image).answered
        parts = sum(slot.contribution for slot in record.evidence)
        assert parts + record.rest + record.bias == pytest.approx(record.prediction.logit, abs=1e-9)
        assert record.prediction.class_id == model.predict(image, top=4).top[0].class_id
        assert (record.labels is not None, record.margin is None) == (case == "sigmoid",) * 2
        answers = [answer for answer in model.predict(image, top=4).top if answer.logit > 0]
        for answer, label in zip(answers, record.labels or (), strict=case == "sigmoid"):
            assert (label.label, label.logit) == (answer.label, answer.logit)
            assert label.probability == pytest.approx(1 / (1 + np.exp(-label.logit)), abs=1e-12)
            parts = sum(slot.contribution for slot in label.evidence)
            assert parts + label.rest + label.bias == pytest.approx(label.logit, abs=1e-9)
    if case == "sigmoid":
        assert len(answers) > 1
        sheet = model.predict(image).save_sheet(tmp_path / "sheet.svg").read_text("utf-8")
        assert f"{answers[1].label}, logit" in sheet
        parquet = pytest.importorskip("pyarrow.parquet")
        for kind in FORMATS:
            write_table([model.predict(image).answered], tmp_path, kind)
        (row,) = parquet.read_table(tmp_path / "results.parquet")["labels"].to_pylist()
        (fields,) = csv.DictReader((tmp_path / "results.csv").read_text("utf-8").splitlines())
        assert (row, [entry["label"] for entry in row]) == (json.loads(fields["labels"]), [a.label for a in answers])


REFUSED = {
    "a hidden layer (Relu)": [POOL, FLAT, ("Gemm", ["v", "hidden"], "h", {}), ("Relu", ["h"], "r", {}),
                       ("Gemm", ["r", "w", "b"], "y", {"transB": 1})],
    "an activation (HardSwish)": [POOL, FLAT, ("HardSwish", ["v"], "h", {}),
                                  ("Gemm", ["h", "w", "b"], "y", {"transB": 1})],
    "comes from Relu": [POOL, ("Relu", ["p"], "y", {})],
    "reads Relu, not the mean": [("Flatten", ["f"], "v", {}), ("Relu", ["v"], "r", {}),
                                 ("Gemm", ["r", "w", "b"], "y", {"transB": 1})],
    "reads the input": [("Gemm", ["x", "w", "b"], "y", {"transB": 1})],
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_a_classifier_without_exact_shares_is_refused_with_what_was_found(reason, tmp_path):
    path = make(tmp_path / "c.onnx", REFUSED[reason])
    with pytest.raises(UsageError) as refused:
        opal_deploy.export_model(path, preprocess="raw", threads=1)
    assert reason in str(refused.value)
    assert not (tmp_path / "c.opal.onnx").exists()


def test_a_hostile_file_is_refused_before_it_runs(tmp_path):
    path = make(tmp_path / "c.onnx", [POOL, FLAT, DENSE])
    model = onnx.load(path)

    def refuse(change, error, words):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        change(changed)
        (tmp_path / "h.onnx").write_bytes(changed.SerializeToString())
        with pytest.raises(error, match=words):
            opal_deploy.export_model(tmp_path / "h.onnx", preprocess="raw", threads=1)

    def outside(changed):
        tensor = changed.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../../etc/passwd")

    def custom(changed):
        changed.graph.node[1].domain = "evil"

    def loop(changed):
        changed.graph.node.append(helper.make_node("Loop", ["", ""], ["z"], body=changed.graph))

    def huge(changed):
        changed.graph.initializer[0].dims[0] = 1 << 40

    def short_bias(changed):
        changed.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "three"))
        changed.graph.node[-1].input[2] = "three"

    refuse(short_bias, ArtifactError, "fit")
    refuse(outside, ArtifactError, "outside its folder")
    refuse(custom, UsageError, "evil.Relu")
    refuse(loop, UsageError, "Loop")
    refuse(huge, ArtifactError, "shape")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preprocess": None}, "--preprocess torchvision"), ({"preprocess": "nothing"}, "--preprocess nothing"),
        ({"classes": ["a"]}, "1 class names for 4"), ({"size": 64}, "32x32"), ({"out": "c.onnx"}, "itself"),
        ({"input": "image"}, "--input"),
    ],
)  # fmt: skip
def test_what_is_missing_or_does_not_fit_is_said(changes, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = make(tmp_path / "c.onnx", [POOL, FLAT, DENSE])
    with pytest.raises(UsageError, match=words):
        opal_deploy.export_model(path, **{"preprocess": "raw", "threads": 1, **changes})


def test_ultralytics_files_name_their_classes_and_their_preprocessing(tmp_path):
    path = make(tmp_path / "yolo.onnx", [POOL, FLAT, DENSE])
    model = onnx.load(path)
    helper.set_model_props(model, {"author": "Ultralytics", "names": "{0: 'ash', 1: 'birch', 2: 'elm', 3: 'oak'}"})
    onnx.save(model, path)
    out = opal_deploy.export_model(path, threads=1).path
    metadata = read_metadata(out)
    assert metadata.class_names == ("ash", "birch", "elm", "oak")
    assert (metadata.resize, metadata.mean) == ("shortest_edge-32-bilinear", (0.0, 0.0, 0.0))
    before, (image,) = sorted(tmp_path.iterdir()), example_images(1, 60, 90)
    loaded = opal_deploy.load(path, classes=["a", "b", "c", "d"], threads=1)
    record, own = (model.predict(image).answered for model in (opal_deploy.load(out, threads=1), loaded))
    assert (own.evidence, own.prediction.logit, own.rest) == (record.evidence, record.prediction.logit, record.rest)
    assert (loaded.names[1], sorted(tmp_path.iterdir())) == ("b", before)
    assert opal_deploy.verify(loaded).passed
    with pytest.raises(UsageError, match="classes"):
        opal_deploy.load(out, classes=["a", "b", "c", "d"])


def test_a_keras_file_gets_pixels_in_its_own_order_and_range(tmp_path):
    path = make(tmp_path / "c.onnx", TAILS["channels last"][0], last=True)
    pixels = example_images(1, SIZE, SIZE)
    own = onnxruntime.InferenceSession(path)
    reversed_ = pixels[..., ::-1] - np.array([103.939, 116.779, 123.68])
    for preset, inputs in {"keras-caffe": reversed_, "keras-255": pixels, "keras-tf": pixels / 127.5 - 1}.items():
        record = opal_deploy.load(path, preprocess=preset, threads=1).predict(pixels[0]).answered
        (logits,) = own.run(None, {"x": inputs.astype(np.float32)})
        assert record.prediction.logit == pytest.approx(logits.max(), rel=1e-5)


def test_a_state_dict_a_module_and_the_command_give_the_same_records(tmp_path, opal):
    with torch.random.fork_rng():
        module = timm.create_model("test_resnet", num_classes=3)
    torch.save({"state_dict": {f"model.{k}": v for k, v in module.state_dict().items()}}, tmp_path / "best.pt")
    (tmp_path / "classes.txt").write_text("ash\nbirch\nelm\n")
    config = {"input_size": [3, 64, 64], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.875}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for number, pixels in enumerate(example_images(2, 60, 90)):
        (tmp_path / "in").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / f"in/{number}.png")
    options = ("--arch", "timm:test_resnet", "--classes", "classes.txt", "--preprocess", "config.json")
    check(opal("export", "best.pt", *options, "--threads", "1", cwd=tmp_path))
    check(opal("infer", "in", "--explain", "--model", "best.opal.onnx", "--out", "run", "--threads", "1", cwd=tmp_path))
    records = read_results(tmp_path / "run")
    assert [record["overlay"] for record in records] == ["overlays/000000-0.jpg", "overlays/000001-1.jpg"]
    check(opal("explain", "in/0.png", "--model", "best.opal.onnx", "--out", "s.svg", cwd=tmp_path))
    assert "Red cells speak for the class" in (tmp_path / "s.svg").read_text("utf-8")
    out = tmp_path / "module.onnx"
    opal_deploy.export_model(
        module, classes=["ash", "birch", "elm"], preprocess=str(tmp_path / "config.json"), out=out, threads=1
    )
    content = out.read_bytes()
    assert not [text for text in (b"site-packages", str(Path(torch.__file__).parent).encode()) if text in content]
    for record, path in zip(records, sorted((tmp_path / "in").iterdir()), strict=True):
        again = opal_deploy.load(out, threads=1).predict(path)
        assert again["evidence"] == record["evidence"]
    check(opal("verify", "run", "--model", "best.opal.onnx", "--threads", "1", cwd=tmp_path))
    for command in (("edit", "best.opal.onnx", "--drop", "0"), ("atlas", "--model", "best.opal.onnx")):
        assert "regions" in one_line(opal(*command, cwd=tmp_path))


def test_resize_rules_are_torchvisions():
    rule = ResizeRule.parse("shortest_edge-256-bilinear")
    # Resize(256) of 500 x 333, then CenterCrop(224)
    assert rule.fit((500, 333), (224, 224)) == ((384, 256), (80, 16))
    assert rule.fit((333, 500), (224, 224)) == ((256, 384), (16, 80))
    assert str(rule) == "shortest_edge-256-bilinear"
    for text in ("nearest", "shortest_edge-0-bilinear", "shortest_edge-bilinear", "letterbox-9-bicubic"):
        with pytest.raises(ValueError, match="not known"):
            ResizeRule.parse(text)


@pytest.mark.parametrize("size", [(60, 90), (91, 60), (2, 90)])
def test_a_letterbox_is_undone_in_the_boxes(size, tmp_path):
    path = make(tmp_path / "c.onnx", TAILS["dense"][0])
    pixels = example_images(1, 91, 91)[0][: size[0], : size[1]]
    record = opal_deploy.load(path, preprocess="letterbox", threads=1).predict(pixels).answered
    height, width = (max(1, round(side * SIZE / max(size))) for side in size)
    barred = np.full((SIZE, SIZE, 3), 114, np.uint8)
    top, left = (SIZE - height) // 2, (SIZE - width) // 2
    resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
    barred[top : top + height, left : left + width] = resized
    inputs = (barred[None] / 255).transpose(0, 3, 1, 2).astype(np.float32)
    assert record.prediction.logit == pytest.approx(
        onnxruntime.InferenceSession(path).run(None, {"x": inputs})[0].max()
    )
    for slot in record.evidence:
        x0, y0, x1, y1 = slot.box
        assert 0 <= x0 < x1 <= size[1]
        assert 0 <= y0 < y1 <= size[0]


def test_a_folder_of_hugging_face_states_names_and_preprocessing(tmp_path):
    make(tmp_path / "model.onnx", [POOL, FLAT, DENSE])
    processor = {"size": 32, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    names = {"10": "oak", "2": "elm", "0": "ash", "1": "birch"}
    for stated in ({"id2label": names}, {"label_names": ["ash", "birch", "elm", "oak"]}):
        (tmp_path / "config.json").write_text(json.dumps(stated))
        metadata = read_metadata(opal_deploy.export_model(tmp_path, threads=1, overwrite=True).path)
        assert metadata.class_names == ("ash", "birch", "elm", "oak")
    assert metadata.resize == "squash-bicubic"
    assert opal_deploy.load(tmp_path / "model.onnx", threads=1).names[0] == "ash"
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "ash"}}))
    with pytest.raises(UsageError, match="1 class names for 4"):
        opal_deploy.export_model(tmp_path, threads=1, overwrite=True)


def test_hugging_face_and_timm_configurations_are_read():
    vit = {"size": {"height": 224, "width": 224}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert str(from_config(vit).rule) == "squash-bilinear"
    resnet = {**vit, "size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224}}
    assert (str(from_config(resnet).rule), from_config(resnet).size) == ("shortest_edge-256-bilinear", 224)
    for size in ({"shortest_edge": 224}, 224):
        convnext = {**vit, "size": size, "crop_pct": 0.875, "resample": 3}
        assert (str(from_config(convnext).rule), from_config(convnext).size) == ("shortest_edge-256-bicubic", 224)
    assert str(from_config({**convnext, "size": 384}).rule) == "squash-bicubic"
    with pytest.raises(ValueError, match="resample"):
        from_config({**vit, "resample": 0})
