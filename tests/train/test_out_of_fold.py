"""Training on all images, with answers out of fold instead of validation images."""

import csv
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from opal_deploy import train_model
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import split_off_validation
from opal_deploy.errors import UsageError
from opal_deploy.logs import no_progress
from opal_deploy.model import checkpoint
from opal_deploy.train import loop
from opal_deploy.train.head_fit import Basis
from opal_deploy.train.images import Batches, TrainImages
from opal_deploy.train.machine import start_fabric
from opal_deploy.train.out_of_fold import OutOfFold, assign_folds, find_doubtful, group_copies, write_answers
from tests.builders import SMALL_BACKBONE
from tests.train.fitting import evaluate, fit, small


def read_answers(result):
    """Return the rows of a run's answers.csv by image."""
    with (result.best.parent / "answers.csv").open(encoding="utf-8") as stream:
        return {row["image"]: row for row in csv.DictReader(stream)}


@pytest.fixture(scope="module")
def all_images(squares):
    """The squares with the validation images among the training images."""
    return squares.whole


@pytest.fixture(scope="module")
def trained(all_images, fitted_options, tmp_path_factory):
    lines = []
    return fit(all_images, fitted_options, tmp_path_factory.mktemp("all") / "run", log=lines.append), lines


def test_every_image_is_trained_on_and_answered_once(trained, all_images):
    result, lines = trained
    assert (result.val.images, result.config["data"]["train"], result.config["data"]["val"]) == (30, 30, 0)
    # a third by chance; squares of one colour are easy
    assert result.val.accuracy > 0.7
    assert result.test.accuracy > 0.7
    rows = read_answers(result)
    assert rows.keys() == {str(s.path.relative_to(all_images.root)) for s in all_images.train}
    right = sum(row["label"] == row["predicted"] for row in rows.values())
    assert right == round(30 * result.val.accuracy)
    assert any(line.startswith("out of fold, ") for line in lines)
    assert any("logistic regression" in line for line in lines)


def test_the_answer_to_an_image_is_not_learned_from_its_label(all_images, fitted_options, trained, tmp_path):
    # three images of one class carry another label: fitted to them, the head would repeat it
    wrong = [replace(sample, label=(sample.label + 1) % 3) for sample in all_images.train[:3]]
    result = fit(replace(all_images, train=[*wrong, *all_images.train[3:]]), fitted_options, tmp_path / "run")
    rows = read_answers(result)
    names = [str(sample.path.relative_to(all_images.root)) for sample in wrong]
    assert sum(rows[name]["label"] != rows[name]["predicted"] for name in names) >= 2


def test_repeating_the_command_fits_again_and_leaves_the_same_model(all_images, fitted_options, trained, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(trained[0].best.parent, out)
    again = fit(all_images, fitted_options, out, resume=True)
    weights, expected = (checkpoint.load(run.best).network.state_dict() for run in (again, trained[0]))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert read_answers(again) == read_answers(trained[0])
    with pytest.raises(UsageError, match="another run"):
        fit(all_images, replace(fitted_options, seed=5), out, resume=True)


def test_fine_tuning_afterwards_sets_images_aside_and_begins_with_a_head_fitted_to_the_others(
    all_images, fitted_options, trained, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(trained[0].best.parent, out)
    lines, options = [], replace(fitted_options, epochs=1)
    result = fit(split_off_validation(all_images), options, out, resume=True, log=lines.append)
    assert [record.epoch for record in result.epochs][:1] == [0]
    assert any("sets" in line and "aside" in line for line in lines)
    # of the other head, unless it came back
    assert (out / "answers.csv").exists() is (result.best_epoch == 0)


def test_fine_tuning_that_gains_ends_on_all_images_with_figures_of_those_set_aside(squares, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "is_best", lambda *arguments: True)
    options = small(backbone=SMALL_BACKBONE, head_steps=1, epochs=1, batch_size=8, size=64, foreground=1.0)

    def interrupt(line):
        if line.startswith("training again"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(squares, options, tmp_path, log=interrupt)
    held_out = checkpoint.load(tmp_path / "best.pt")
    assert (held_out.training["data"]["val"], (tmp_path / "summary.json").exists()) == (6, False)
    resumed = fit(squares, options, tmp_path, resume=True)
    once = fit(squares, options, tmp_path / "once")
    models = [checkpoint.load(result.best) for result in (resumed, once)]
    weights, expected, before = (model.network.state_dict() for model in (*models, held_out))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert not torch.equal(weights["head.projection.weight"], before["head.projection.weight"])
    assert (models[1].training["data"]["train"], models[1].training["data"]["val"]) == (30, 0)
    assert models[1].metrics["val_accuracy"] == held_out.metrics["val_accuracy"]
    test = evaluate(models[1].network, Batches(TrainImages(squares.test, (64, 64)), 64))
    assert models[1].metrics["test_loss"] == pytest.approx(test.loss, abs=1e-6)
    assert (models[1].calibration.split, models[1].baseline.split) == ("held-out", "held-out")


def test_other_classes_keep_the_slots_of_those_that_stay(all_images, fitted_options, trained, tmp_path):
    first = checkpoint.load(trained[0].best)
    kept = [name for name in all_images.class_names if name != "green"]
    labels = {all_images.class_names.index(name): label for label, name in enumerate(kept)}

    def select(samples):
        return [replace(sample, label=labels[sample.label]) for sample in samples if sample.label in labels]

    fewer = replace(all_images, class_names=kept, train=select(all_images.train), test=select(all_images.test), val=[])
    result = fit(fewer, replace(fitted_options, start_from=str(trained[0].best)), tmp_path / "run")
    network = checkpoint.load(result.best).network
    assert network.config.num_classes == 2
    assert result.val.accuracy > 0.8
    for name, value in first.network.backbone.state_dict().items():
        assert torch.equal(value, network.backbone.state_dict()[name])


def test_copies_share_a_fold():
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 32, generator=generator), torch.arange(60) % 3
    features[30:36] = features[0:6] + 0.01 * torch.randn(6, 32, generator=generator)
    groups = group_copies(features)
    assert [groups[i] == groups[30 + i] for i in range(6)] == [True] * 6
    assert len(set(groups.tolist())) == 54
    folds = assign_folds(features, labels, seed=0)
    assert (folds[:6] == folds[30:36]).all()
    assert all(set(labels[folds == fold].tolist()) == {0, 1, 2} for fold in range(5))


def test_a_class_needs_two_different_images():
    features = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert sorted(assign_folds(features, torch.tensor([0, 0, 1, 1]), seed=0)) == [0, 0, 1, 1]
    with pytest.raises(UsageError, match="at least two"):
        assign_folds(features[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1]), seed=0)


def test_labels_are_doubted_only_where_another_class_is_confident():
    probabilities = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.2, 0.8], [0.95, 0.05], [0.45, 0.55]])
    labels = np.array([0, 0, 1, 1, 1, 0])
    assert find_doubtful(probabilities, labels).tolist() == [False, False, False, False, True, False]


def test_a_doubtful_photograph_is_shown_with_those_that_it_is_most_like(squares, tmp_path):
    labels = np.array([sample.label for sample in squares.train])
    answered = labels.copy()
    answered[5] = (labels[5] + 1) % 3
    logits = np.where(np.eye(3)[answered] > 0, -0.2, -1.2).astype(np.float32)
    noise = np.random.default_rng(0).normal(0, 0.01, (24, 3))
    pooled = (np.eye(3)[answered] + noise).astype(np.float32)
    answers = OutOfFold(np.arange(24), labels, Outputs(logits), np.ones(24, bool), pooled)
    table, page = tmp_path / "answers.csv", tmp_path / "doubtful.html"
    assert write_answers(table, page, answers, squares, 0.2) == 1
    name = squares.train[5].path.relative_to(squares.root).as_posix()
    assert table.read_text().splitlines()[1].startswith(f"{name},")
    text = page.read_text("utf-8")
    assert text.count("data:image/jpeg;base64,") == 3
    assert "1 label may be wrong" in text
    assert f"Labelled <bdi>{squares.class_names[labels[5]]}</bdi> (1%), answered" in text
    assert write_answers(table, tmp_path / "none.html", answers, squares, None) == 0
    assert not (tmp_path / "none.html").exists()


def test_coordinates_keep_what_the_projection_needs():
    fabric, _ = start_fabric("cpu", "fp32")
    generator = torch.Generator().manual_seed(0)
    # two maps of very different size, of rank 6 together
    low = torch.randn(40, 6, 5, 5, generator=generator)
    features = torch.einsum("nrhw,dr->ndhw", low, torch.randn(24, 6, generator=generator)) + 3
    features[:, 16:] *= 100
    basis = Basis.find(features, (16, 8), fabric)
    rebuilt = torch.einsum("nrhw,rd->ndhw", basis.measure(features), torch.linalg.pinv(basis.directions))
    rebuilt += basis.mean[:, None, None]
    torch.testing.assert_close(rebuilt, features, rtol=1e-3, atol=1e-1)


def test_a_folder_of_classes_needs_no_validation_images(all_images, lite0_weights, tmp_path):
    result = train_model(
        all_images.root, weights=lite0_weights, backbone="timm:tf_efficientnet_lite0", size=64, head_steps=20,
        out=tmp_path / "run", log=print, progress=no_progress,
    )  # fmt: skip
    assert result.config["data"]["val"] == 0
