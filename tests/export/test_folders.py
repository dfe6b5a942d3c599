"""The folders for Hugging Face's libraries and MLflow, and the model card."""

import base64
import importlib
import json

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import yaml
from PIL import Image

import opal_deploy


def test_the_folders_graph_answers_as_opal_deploys_does(opal, exact_model, make_pictures, tmp_path):
    folder = tmp_path / "hub"
    done = opal("export", exact_model.with_suffix(".pt"), "--hf", folder, "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert f"Wrote model.onnx, opal.onnx, config.json, preprocessor_config.json, README.md in {folder}" in done.stderr
    config, prepare = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "preprocessor_config"))
    session = onnxruntime.InferenceSession(folder / "onnx/model.onnx")
    assert [each.name for each in session.get_inputs()] == ["pixel_values"]
    model = opal_deploy.load(folder / "opal.onnx", device="cpu", threads=1)
    size = prepare["size"]["width"], prepare["size"]["height"]
    for path in make_pictures(tmp_path / "images", 3):
        pixels = (
            np.asarray(Image.open(path).convert("RGB").resize(size, prepare["resample"])) * prepare["rescale_factor"]
        )
        pixels = (pixels - prepare["image_mean"]) / prepare["image_std"]
        (logits,) = session.run(["logits"], {"pixel_values": pixels.transpose(2, 0, 1)[None].astype(np.float32)})
        record = model.predict(path).record
        assert config["id2label"][str(logits.argmax())] == record.prediction.label
        assert logits.max() == pytest.approx(record.top[0].logit, abs=1e-2)
    assert config["label2id"] == {name: int(index) for index, name in config["id2label"].items()}
    again = opal("export", exact_model.with_suffix(".pt"), "--hf", folder)
    assert "holds a model; choose another folder or pass --overwrite" in again.stderr


def test_mlflows_loader_answers_as_infer_does(opal, exact_model, make_pictures, tmp_path):
    folder = tmp_path / "mlflow"
    done = opal("export", exact_model, "--mlflow", folder)
    assert done.returncode == 0, done.stderr
    function = yaml.safe_load((folder / "MLmodel").read_text())["flavors"]["python_function"]
    # as MLflow does
    loaded = importlib.import_module(function["loader_module"])._load_pyfunc(str(folder / function["data"]))
    paths = make_pictures(tmp_path / "images", 2)
    model, data = opal_deploy.load(exact_model, device="cpu"), [path.read_bytes() for path in paths]
    expected = [dict(each) for each in model.predict(data, min_margin=2.0)]
    assert loaded.predict(pd.DataFrame({"image": data}), {"min_margin": 2.0}) == expected
    assert loaded.predict([base64.b64encode(each).decode() for each in data], {"min_margin": 2.0}) == expected
    with pytest.raises(ValueError, match="columns path: expected a column 'image'"):
        loaded.predict(pd.DataFrame({"path": paths}))
    refused = opal("export", exact_model, "--mlflow", tmp_path / "other", "--no-ood-score")
    assert "copied as it is; leave out --no-ood-score" in refused.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x.onnx"], "--hf, --out: a folder by itself"),
        (["--trt"], "a folder by itself"),
        ([], "--hf takes a checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused(opal, exact_model, tmp_path, arguments, message):
    done = opal("export", exact_model, "--hf", tmp_path / "hub", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "hub").exists()
