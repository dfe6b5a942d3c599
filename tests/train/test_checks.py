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
    ({"recipe": "pape"}, "not one of grounded, paper"),
    ({"backbone": "resnet19"}, "did you mean resnet18"),
    ({"weights": "none.safetensors"}, "no such weights file"),
    ({"weights": "IMAGENET1K_V9"}, "not torchvision's for resnet18"),
    ({"background": "taken", "head": "linear"}, "background needs slots"),
    ({"epochs": 0}, "epochs 0: expected at least 1"),
    ({"stride": 12}, "multiples of its stride 12"),
    ({"device": "cpu", "precision": "fp16"}, "precision fp16 on a CPU"),
    ({"size": (64, 0)}, "input size"),
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
