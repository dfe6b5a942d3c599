"""The head fitted to the frozen backbone before fine-tuning."""

import json
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.nn import functional

from opal_deploy.artifact.documents import Distance
from opal_deploy.evaluation.metrics import Mean
from opal_deploy.logs import no_progress
from opal_deploy.model import checkpoint
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.model.head import OpalHead
from opal_deploy.train import loop
from opal_deploy.train.checkpoints import RunWriter
from opal_deploy.train.head_fit import compute_frozen_features, find_background
from opal_deploy.train.images import Batches, TrainImages, normalize
from opal_deploy.train.losses import HeadTerms, Objective, Terms, find_logit_scale, measure_kept_off
from opal_deploy.train.machine import start_fabric
from opal_deploy.train.network import build_network, settle_stride
from tests.train.fitting import fit, write_regions


@pytest.fixture(scope="module")
def fitted(squares, fitted_options, tmp_path_factory):
    lines = []
    return fit(squares, fitted_options, tmp_path_factory.mktemp("fitted") / "run", log=lines.append), lines


def test_no_epochs_leave_the_backbone_as_it_was_and_a_head_that_answers(fitted, fitted_options):
    result, lines = fitted
    network = checkpoint.load(result.best).network
    for name, value in build_network(fitted_options, "abc", None).backbone.state_dict().items():
        assert torch.equal(value, network.backbone.state_dict()[name]), name
    assert (result.best_epoch, [record.epoch for record in result.epochs]) == (0, [0])
    # a third by chance
    assert result.epochs[0].train_accuracy > 0.9
    assert result.test.accuracy > 0.7
    cost, plain, _, frozen = lines
    assert "best.pt in about " in cost
    assert plain.startswith("a logistic regression ")
    assert frozen.startswith("frozen network, fitted head: training loss ")
    summary = json.loads((result.best.parent / "summary.json").read_text())
    assert summary["epochs"] == 0
    assert sum(counts["correct"] for counts in summary["classes"]) == round(9 * result.test.accuracy)


def test_a_recipes_cells_are_those_that_the_backbone_has(fitted_options):
    def settle(**changes):
        settled = settle_stride(replace(fitted_options, keep_layers=True, adapt_stride=True, **changes), None, None)
        return settled.stride, settled.keep_layers

    assert settle(size=224) == (16, True)
    # 40 pixels are no multiple of 16; a transformer has one size of cells
    assert settle(size=40) == settle(backbone="timm:test_vit", size=160) == (None, False)
    stored = {"options": {"stride": 8, "keep_layers": False}}
    assert settle_stride(replace(fitted_options, adapt_stride=True), None, stored).stride == 8


def test_fine_tuning_that_helps_nothing_leaves_the_frozen_network(squares, fitted_options, fitted, tmp_path):
    useless = replace(fitted_options, epochs=2, lr=0.5)
    result = fit(replace(squares, whole=None), useless, tmp_path / "run")
    assert (result.best_epoch, len(result.epochs)) == (0, 3)
    weights, expected = (checkpoint.load(each.best).network.state_dict() for each in (result, fitted[0]))
    # the head was fitted in fewer passes
    assert all(torch.equal(weights[name], expected[name]) for name in expected if name.startswith("backbone"))
    # images that were set aside are fitted to, once nothing has to be judged by them
    lines = []
    result = fit(squares, useless, tmp_path / "all", log=lines.append)
    assert (result.best_epoch, result.val.images, result.config["data"]["train"]) == (0, 30, 30)
    assert any("gained nothing" in line for line in lines)


@pytest.mark.parametrize("kept", [True, False])
def test_the_head_is_fitted_again_to_the_fine_tuned_network(kept, squares, fitted_options, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "is_best", lambda *arguments: True)
    monkeypatch.setattr(loop, "mean_with_interval", lambda gains: Mean(0.0, -1.0, 0.0 if kept else -0.1, len(gains)))
    lines, options = [], replace(fitted_options, epochs=1, foreground=1.0)
    result = fit(replace(squares, whole=None), options, tmp_path / "run", log=lines.append)
    best, last = (checkpoint.load(path).network.state_dict() for path in (result.best, result.last))
    changed = {name.partition(".")[0] for name in best if (best[name] != last[name]).any()}
    assert changed == ({"head"} if kept else set())
    assert [line.endswith("not kept") for line in lines if line.startswith("head fitted again")] == [not kept]


def test_a_run_that_ends_after_the_fit_goes_on_bit_by_bit(squares, fitted_options, tmp_path, monkeypatch):
    options, squares = replace(fitted_options, epochs=1), replace(squares, whole=None)
    whole = fit(squares, options, tmp_path / "whole")
    write_last = RunWriter.write_last

    def end(self, *arguments):
        write_last(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunWriter, "write_last", end)
    with pytest.raises(KeyboardInterrupt):
        fit(squares, options, tmp_path / "ended")
    monkeypatch.undo()
    lines = []
    ended = fit(squares, options, tmp_path / "ended", resume=True, log=lines.append)
    assert "resuming after epoch 0" in lines
    weights, expected = (checkpoint.load(each.last).network.state_dict() for each in (ended, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert [record.epoch for record in ended.epochs] == [0, 1]


def test_the_plain_head_is_fitted_without_memory_to_a_part_of_the_images(squares, fitted_options, tmp_path):
    options = replace(fitted_options, head="plain", stride=None, cache_megabytes=0, head_steps=20)
    assert fit(squares, options, tmp_path / "run").val.accuracy > 0.6


def test_features_that_do_not_fit_into_memory_are_of_a_part_of_the_images(squares, fitted_options):
    network, (fabric, _) = build_network(fitted_options, "abc", None), start_fabric("cpu", "fp32")
    batches = Batches(TrainImages(squares.train, (64, 64)), 8, shuffle_seed=0)
    view_bytes = 2 * min(network.backbone.num_features, 256) * 4 * 4
    for room, images in ((100, 24), (10, 8)):
        frozen = compute_frozen_features(
            network, batches, fabric, memory=room * view_bytes, foreground=False, progress=no_progress
        )
        assert (len(frozen.features), len(frozen.labels)) == (images, images)


def test_the_object_is_the_quarter_of_the_cells_with_the_largest_features():
    coordinates = torch.ones(1, 2, 4, 4)
    coordinates[:, :, 1:3, 1:3] = 3
    # larger still, but on the background's side
    coordinates[:, 0, 0] = -5
    background = find_background(coordinates)[0]
    assert not background[1:3, 1:3].any()
    assert background.sum() == 12


def test_scores_are_means_over_the_strongest_cells_while_the_head_is_fitted():
    torch.manual_seed(0)
    head, features = OpalHead(3, 2, HeadConfig(prototypes_per_class=2)), torch.randn(4, 3, 14, 14)
    cells = head.attend(head.project(features)).flatten(2).sort(dim=2, descending=True).values
    for fitting, number in ((False, 1), (True, 4)):
        terms = HeadTerms(head, fitting=fitting)(features, torch.tensor([0, 1, 1, 0]), None)
        torch.testing.assert_close(terms.logits, head.classify(cells[..., :number].mean(2)))


@pytest.mark.slow
def test_terms_of_the_attention_are_fitted_too(squares, fitted_options, tmp_path):
    file = write_regions(tmp_path / "regions.json", {str(sample.path): [0, 0, 56, 12] for sample in squares.train})
    kept_off, scores = replace(fitted_options, keep_off=str(file), keep_off_weight=100.0), []
    # the first row of cells
    sky = torch.zeros(len(squares.train), 4, 4)
    sky[:, 0] = 1
    for name, changed in (("plain", fitted_options), ("kept-off", kept_off)):
        run = fit(squares, changed, tmp_path / name)
        network = checkpoint.load(run.best).network
        (pixels, labels), *_ = Batches(TrainImages(squares.train, (64, 64)), len(squares.train))
        with torch.no_grad():
            attention = network.explain(normalize(pixels, network.config.mean, network.config.std)).attention
        channels = torch.from_numpy(network.config.class_map.channel_table)[labels]
        scores.append(float(measure_kept_off(attention, channels, sky).mean()))
    assert scores[1] < 0.5 * scores[0]


@pytest.mark.parametrize("distance", get_args(Distance))
@pytest.mark.parametrize("classes", [2, 100])
def test_an_embedding_at_its_anchor_has_the_probability_that_the_loss_is_scaled_to(distance, classes):
    head = OpalHead(8, classes, HeadConfig(prototypes_per_class=5, distance=distance))
    scale = find_logit_scale(head, 0.9)
    at_anchors = head.classify(torch.from_numpy(head.config.class_map(classes).matrix).float())
    probabilities = (scale * at_anchors).softmax(1).diagonal()
    # never scaled down: Kullback-Leibler distances are certain by themselves
    assert (probabilities >= 0.9 - 1e-5).all()
    assert scale == 1 or torch.allclose(probabilities, torch.tensor(0.9), atol=1e-5)
    labels = torch.arange(classes)
    terms = Terms(at_anchors, torch.zeros(classes))
    expected = functional.cross_entropy(scale * at_anchors, labels, reduction="sum")
    torch.testing.assert_close(Objective(scale=scale)(terms, labels)[0], expected)


def test_minutes_limit_the_epochs(squares, fitted_options, tmp_path):
    options = replace(fitted_options, epochs=50, minutes=0.02)
    assert fit(squares, options, tmp_path / "run").epochs[-1].epoch < 50


def test_the_papers_loss_and_heads_without_anchors_are_not_scaled():
    assert find_logit_scale(OpalHead(8, 10, HeadConfig()), None) == 1
    assert find_logit_scale(OpalHead(8, 10, LINEAR_BASELINE), 0.9) == 1
