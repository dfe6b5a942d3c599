"""Refusals of `train` before it imports torch and reads images, and network names that it knows without torch."""

import json
import subprocess
import sys

import pytest
import timm
import torchvision

from opal_deploy.model import network_names

# options, and a part of the message
REFUSED = [
    ({"data": "nowhere"}, "nowhere: no such folder"),
    ({"dataset": "pet"}, "unknown data set 'pet'"),
    ({"recipe": "pape"}, "recipe 'pape': no such file"),
    ({"backbone": "resnet19"}, "torchvision has no such classifier; did you mean resnet18"),
    ({"backbone": "timm:resnet19"}, "timm has no such network; did you mean resnet18"),
    ({"weights": "none.safetensors"}, "none.safetensors: no such weights file"),
    ({"weights": "IMAGENET1K_V9"}, "not torchvision's for resnet18 (IMAGENET1K_V1)"),
    ({"start_from": "none.pt"}, "--start-from none.pt: no such checkpoint"),
    ({"start_from": "model.onnx"}, "only checkpoints can be trained"),
    ({"keep_off": "none.json"}, "--keep-off none.json: cannot be read"),
    ({"background": "taken"}, "--background taken: 0 images there; expected at least 5"),
    ({"background": "taken", "head": "linear"}, "background needs an OOD score"),
    ({"keep_layers": True}, "--keep-layers without --stride"),
    ({"epochs": 0}, "epochs 0: expected at least 1; 0 fits the head only"),
    ({"stride": 12}, "stride 12: no network has cells of so many pixels; give 32, 16 or 8"),
    ({"stride": 16, "size": 100}, "input size 100x100: resnet18 needs multiples of its stride 16"),
    ({"head": "linear", "agreement": 0.2}, "agreement needs slots with cells"),
    ({"freeze_backbone": True}, "--freeze-backbone without a trained network"),
    ({"device": "gpu"}, "device 'gpu': expected auto, cpu, cuda or cuda:N"),
    ({"device": "cpu", "precision": "fp16"}, "precision fp16 on a CPU"),
    ({"resume": True, "overwrite": True}, "give only one of them"),
    ({"out": "taken"}, "taken: it already holds a run (best.pt)"),
    ({"out": "file/run"}, "file/run: cannot be written (/"),
]
_SCRIPT = """
import json, sys
import opal_deploy
for options in json.load(sys.stdin):
    try:
        opal_deploy.train_model(options.pop("data"), **options)
    except opal_deploy.UsageError as error:
        print(error)
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def messages(squares, tmp_path_factory):
    """The message of each refusal, from one process, which must not have imported torch in the end."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "taken").mkdir()
    for name in ("taken/best.pt", "file"):
        (folder / name).touch()
    base = {"data": str(squares.root), "recipe": "paper", "backbone": "resnet18", "weights": "none", "out": "run"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], input=json.dumps([{**base, **options} for options, _ in REFUSED]),
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (folder / "run").exists()
    return done.stdout.splitlines()


@pytest.mark.parametrize(("number", "expected"), [(i, text) for i, (_, text) in enumerate(REFUSED)])
def test_an_impossible_run_is_refused_before_torch_is_imported(messages, number, expected):
    assert expected in messages[number]


def test_names_read_from_the_libraries_sources_are_those_that_the_libraries_list():
    networks = torchvision.models.list_models(module=torchvision.models)
    assert network_names.list_torchvision_networks() == sorted(networks)
    for name in networks:
        weights = torchvision.models.get_model_weights(name)
        assert network_names.list_torchvision_weights(name) == [each.name for each in weights]
    for name in timm.list_models():
        network_names.check_network(f"timm:{name}")
