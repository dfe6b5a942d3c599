"""Names of slots."""

import pytest

from opal_deploy.artifact.drops import name_slot, parse_slots
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import UsageError


def test_slots_of_classes_that_share_a_name_are_named_by_their_channel():
    head = {"distance": "l2", "epsilon": 1e-8, "dropped": []}
    metadata = Metadata(("a", "b", "a"), 2, head, "exact", "resnet18", (8, 8), (64, 64))
    names = [name_slot(channel, metadata) for channel in range(6)]
    assert names == ["0", "1", "b/0", "b/1", "4", "5"]
    assert parse_slots(names, metadata, "--drop") == [*range(6)]
    with pytest.raises(UsageError, match="--drop 'a/1': 2 classes have that name; give the channel: 1 or 5"):
        parse_slots(["a/1"], metadata, "--drop")
    with pytest.raises(UsageError, match="--drop '6': expected CLASS/SLOT"):
        parse_slots(["6"], metadata, "--drop")
