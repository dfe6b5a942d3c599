"""The closed form against the network itself, and the figures of an effect."""

import numpy as np
import pytest
import torch

from opal_deploy.artifact.drops import check_drops, name_slot, parse_slots
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.editing.scores import Effect, Scores
from opal_deploy.errors import UsageError
from opal_deploy.model.config import HeadConfig
from opal_deploy.model.head import OpalHead

DROPPED = (1, 3, 4)


def random_scores(num_classes=4, m=3, images=200):
    features = 3 * torch.randn(images, 16, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    head = OpalHead(16, num_classes, HeadConfig(prototypes_per_class=m)).eval()
    metadata = Metadata(tuple("abcd"[:num_classes]), m, head.config.to_dict(), "exact", "resnet18", (4, 4), (64, 64))
    with torch.no_grad():
        outputs = head.explain(head.project(features))
    labels = np.random.default_rng(0).integers(num_classes, size=images)
    return features, head, Scores(metadata, outputs.scores.numpy(), labels)


def test_the_closed_form_is_what_the_network_with_dropped_slots_computes():
    features, head, scores = random_scores()
    edited = OpalHead(16, 4, HeadConfig(prototypes_per_class=3, dropped=DROPPED)).eval()
    edited.load_state_dict(head.state_dict())
    with torch.no_grad():
        outputs = edited.explain(edited.project(features))
    class_map = scores.metadata.class_map.drop(DROPPED)

    np.testing.assert_allclose(scores.logits(class_map), outputs.logits.numpy(), rtol=2e-5, atol=2e-6)
    kept = class_map.kept_prototypes
    assert (outputs.scores.numpy()[:, kept] == scores.values[:, kept]).all()
    assert not outputs.scores.numpy()[:, ~kept].any()
    # what is dropped does change logits
    assert np.abs(scores.logits(scores.metadata.class_map) - outputs.logits.numpy()).max() > 1e-3


def test_each_slot_alone_has_the_effect_of_dropping_it():
    _, _, scores = random_scores()
    effects = dict(scores.try_each())
    assert sorted(effects) == list(range(12))
    for channel, effect in effects.items():
        expected = scores.try_drop([("abcd"[channel // 3], channel % 3)])
        assert effect.before.tolist() == expected.before.tolist()
        assert effect.after.tolist() == expected.after.tolist()


def test_a_classs_last_slot_is_not_tried():
    _, _, scores = random_scores()
    metadata = scores.metadata
    left = Scores(
        Metadata(**{**vars(metadata), "head": {**metadata.head, "dropped": [0, 1]}}), scores.values, scores.labels
    )
    assert sorted(channel for channel, _ in left.try_each()) == list(range(3, 12))


def test_slots_of_another_distance_are_refused():
    metadata = Metadata(("a", "b"), 2, {"distance": "kl", "dropped": []}, "exact", "resnet18", (8, 8), (64, 64))
    with pytest.raises(UsageError, match="kl"):
        check_drops([0], metadata)


def test_an_effect_lists_right_answers_that_become_wrong_first():
    before, after = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 0, 0, 2, 0])
    effect = Effect(before, after, labels=np.array([0, 0, 0, 2, 2, 0]))
    assert effect.changed.tolist() == [1, 3, 2, 5]
    assert (effect.gained, effect.lost, effect.accuracy) == (2, 1, (3 / 6, 4 / 6))
    # two-sided binomial test of 1 in 3
    assert effect.p_value == 1.0
    assert Effect(np.zeros(9, int), np.ones(9, int), np.ones(9, int)).p_value == pytest.approx(2 / 2**9)


def test_slots_of_classes_that_share_a_name_are_named_by_their_channel():
    head = {"distance": "l2", "epsilon": 1e-8, "dropped": []}
    metadata = Metadata(("a", "b", "a"), 2, head, "exact", "resnet18", (8, 8), (64, 64))
    names = [name_slot(channel, metadata) for channel in range(6)]
    assert names == ["0", "1", "b/0", "b/1", "4", "5"]
    assert parse_slots(names, metadata, "--drop") == [*range(6)]
    with pytest.raises(UsageError, match="channel"):
        parse_slots(["a/1"], metadata, "--drop")
    with pytest.raises(UsageError, match="CLASS/SLOT"):
        parse_slots(["6"], metadata, "--drop")
