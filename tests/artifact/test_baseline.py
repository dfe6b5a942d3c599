"""The baseline of a model: what it keeps of the answers to validation images, and thresholds chosen from it."""

import json

import numpy as np
import pytest

from opal_deploy.artifact.baseline import MIN_IMAGES, QUANTITIES, Baseline, Observations
from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.errors import ArtifactError

M = 2


def observe(class_ids, **changes):
    """Return answers with these classes, in which the first slot of class 1 is dropped."""
    rng = np.random.default_rng(0)
    class_ids = np.asarray(class_ids)
    images = len(class_ids)
    scores = rng.uniform(0.1, 0.9, (images, M))
    scores[class_ids == 1, 0] = np.nan
    parts = scores * 0.5
    values = {name: rng.random(images) for name in QUANTITIES}
    places = np.where(np.isnan(scores), -1, rng.integers(0, 9, (images, M)))
    slots = {"scores": scores, "contributions": parts, "places": places}
    return Observations(**{"class_ids": class_ids, **values, "cosine": np.nansum(parts, axis=1), **slots, **changes})


def test_a_baseline_survives_json_and_pools_rare_classes():
    observations = observe([0] * 8 + [1] * MIN_IMAGES + [2] * (MIN_IMAGES - 1) + [3])
    baseline = Baseline.measure(observations, "val", 16, ClassMap.blocks(5, M))
    assert Baseline.from_dict(json.loads(json.dumps(baseline.to_dict()))) == baseline
    assert Baseline.from_dict({}) is None
    assert (baseline.images, baseline.classes) == (18, (8, 5, 4, 1, 0))
    # channels: both slots of class 0, the kept one of class 1
    assert set(baseline.slots) == {0, 1, 3}
    scores = observations.scores[:8, 1]
    assert baseline.find_slot(1).score == pytest.approx(np.quantile(scores, (0.05, 0.25, 0.5, 0.75, 0.95)), rel=1e-3)
    assert sum(baseline.find_slot(1).places) == pytest.approx(1, abs=1e-3)
    # two slots of each of the five answers with a rare class
    assert (baseline.find_slot(4), baseline.pooled.images) == (baseline.pooled, 10)
    assert baseline.ood_score == pytest.approx(sorted(observations.ood_score), abs=1e-6)


def test_what_the_model_does_not_compute_is_left_out():
    unknown = np.full(8, np.nan)
    observations = observe([0] * 8, ood_score=unknown, margin=unknown, contributions=np.full((8, M), np.nan))
    baseline = Baseline.measure(observations, "val", 32, ClassMap.blocks(1, M))
    assert set(baseline.quantiles) == {"cosine", "norm", "shared_cells"}
    assert (baseline.ood_score, baseline.slots[0].contribution, baseline.slots[0].share) == ((), (), None)
    assert baseline.choose_threshold(0.05) is None
    assert Baseline.from_dict(json.loads(json.dumps(baseline.to_dict()))) == baseline


@pytest.mark.parametrize("images", [1, 19, 20, 1000, 1001, 2500])
@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_of_exchangeable_images_at_most_the_rate_exceeds_the_threshold(images, rate):
    # each image's rank is its OOD score
    ranks = np.random.default_rng(0).permutation(images) + 1.0
    observations = observe(np.zeros(images, np.int64), ood_score=ranks)
    baseline = Baseline.measure(observations, "val", 16, ClassMap.blocks(1, M))
    assert len(baseline.ood_score) == min(images, 1000)
    threshold = baseline.choose_threshold(rate)
    if threshold is None:
        assert images + 1 < 1 / rate
    else:
        # the new image's rank among n + 1 is uniform: it exceeds the k-th smallest of n with 1 - k / (n + 1)
        exceeds = 1 - threshold / (images + 1)
        assert rate - (1 / (images + 1) if images <= 1000 else 3e-3) < exceeds <= rate + 1e-9


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"images": None}, r"\.images None"), ({"images": float("inf")}, r"\.images inf"),
        ({"ood_score": [0.5] * 19}, ".*19 OOD scores"), ({"ood_score": [float("nan")] * 20}, r"\.ood_score\[0\] nan"),
        ({"slots": None}, r"\.slots None"), ({"quantiles": {"cosine": [0.1]}}, r"\.quantiles\[\.\.\.\]"),
        ({"slots": {"channel": [0]}}, r"\.slots.*images"), ({"pooled": {"images": 3}}, r"\.pooled .*`score`"),
        ({"classes": [-1]}, r"\.classes\[0\] -1"), ({"classes": [19]}, ".*19 of its classes"),
        ({"stride": 0}, r"\.stride 0"),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_baseline_is_refused(change, found):
    document = Baseline.measure(observe([0] * 20), "val", 16, ClassMap.blocks(1, M)).to_dict()
    assert Baseline.from_dict(document) is not None
    with pytest.raises(ArtifactError, match=f"^baseline{found}"):
        Baseline.from_dict({**document, **change})
