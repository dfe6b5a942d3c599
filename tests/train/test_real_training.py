"""A real fine-tuning, short."""

from __future__ import annotations

from pathlib import Path

import pytest

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.train.loop import fit
from opal_deploy.train.recipe import TrainOptions


@pytest.mark.data
@pytest.mark.slow
def test_three_epochs_on_ten_species_are_far_above_chance(
    cub_mini: Path, resnet18_weights: Path, tmp_path: Path
) -> None:
    result = fit(
        read_dataset(cub_mini), TrainOptions(backbone="resnet18", weights=str(resnet18_weights), epochs=3), tmp_path
    )
    assert result.test is not None
    assert result.test.accuracy > 0.5
    assert result.test.spatial_prototype_collapse is not None
    assert result.test.spatial_prototype_collapse < 0.15
