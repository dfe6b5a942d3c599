"""Training on an NVIDIA GPU: every precision, and continued."""

import math
from dataclasses import replace

import pytest
import torch

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.model import checkpoint
from opal_deploy.synthetic import generate_dataset
from opal_deploy.train.images import Batches, TrainImages
from opal_deploy.train.machine import set_tf32
from tests.train.fitting import evaluate, fit, small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that PyTorch can use"),
]

OPTIONS = small(
    backbone="resnet18", epochs=4, batch_size=32, lr=1e-3, size=96, augment="none", device="cuda", workers=2
)


@pytest.fixture(scope="module")
def creatures(tmp_path_factory):
    root = tmp_path_factory.mktemp("creatures") / "data"
    generate_dataset(root, num_species=3, train_per_class=64, val_per_class=12, test_per_class=12, size=(96, 96))
    return read_dataset(root)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns(creatures, tmp_path, precision):
    result = fit(creatures, replace(OPTIONS, precision=precision), tmp_path)
    assert result.epochs[-1].train_loss < 0.9 * result.epochs[0].train_loss


@pytest.mark.parametrize("wanted", [{"head_steps": 60}, {"adversarial": 1.0}], ids=str)
def test_the_fit_of_the_head_and_every_term_of_the_loss_run(creatures, tmp_path, wanted):
    result = fit(creatures, replace(OPTIONS, epochs=1, augment="erase", **wanted), tmp_path)
    assert math.isfinite(result.epochs[-1].train_loss)


def test_the_result_is_judged_in_float32_although_epochs_are_not(creatures, tmp_path):
    result = fit(creatures, replace(OPTIONS, epochs=1, precision="bf16"), tmp_path)
    network = checkpoint.load(result.best).network.cuda()
    set_tf32(False)
    exact = evaluate(network, Batches(TrainImages(creatures.val, OPTIONS.input_size), OPTIONS.batch_size))
    assert result.val.loss == pytest.approx(exact.loss, rel=1e-5)
    assert result.epochs[0].val_loss == pytest.approx(exact.loss, rel=0.02)


def test_a_run_goes_on_with_its_optimizer_and_scaler(creatures, tmp_path):
    class Stop(BaseException):
        pass

    def interrupt(line):
        if line.startswith("epoch 2"):
            raise Stop

    options = replace(OPTIONS, precision="fp16")
    with pytest.raises(Stop):
        fit(creatures, options, tmp_path / "run", log=interrupt)
    resumed = fit(creatures, options, tmp_path / "run", resume=True)
    whole = fit(creatures, options, tmp_path / "whole")
    # sums on a GPU come in no fixed order
    assert resumed.epochs[1].val_loss == pytest.approx(whole.epochs[1].val_loss, rel=0.1)
    assert resumed.epochs[-1].train_loss == pytest.approx(whole.epochs[-1].train_loss, rel=0.1)
