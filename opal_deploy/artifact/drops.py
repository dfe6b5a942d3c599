"""Names of slots as people write them, such as `Herring Gull/2`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import UsageError

# characters of a slot's name in a message
_SHOWN = 80


SlotName = str | tuple[str, int]
"""A slot as `CLASS/SLOT`, or as its class and number; as its channel if classes share that name."""


def write_slot(slot: SlotName) -> str:
    """Return a slot as CLASS/SLOT."""
    if not isinstance(slot, str) and (not isinstance(slot, tuple) or len(slot) != 2):
        raise UsageError(f"slot {slot!r}: expected 'CLASS/SLOT' or (class, number), each as an argument of its own")
    return slot if isinstance(slot, str) else "/".join(map(str, slot))


def parse_slots(slots: Iterable[SlotName], metadata: Metadata, option: str) -> list[int]:
    """Return the channels of slots; UsageError, which begins with `option`, if one does not exist or is given twice."""
    channels: list[int] = []
    for text in map(write_slot, slots):
        label, slash, number = text.rpartition("/")
        origin = f"{option} {text[:_SHOWN]!r}"
        if not slash and _is_index(number, metadata.num_prototypes):
            channels.append(int(number))
            continue
        if metadata.shares_prototypes:
            raise UsageError(f"{origin}: give a shared prototype's number, 0 to {metadata.num_prototypes - 1}")
        if not slash:
            raise UsageError(f"{origin}: expected CLASS/SLOT, such as {metadata.class_names[0]}/0")
        if label not in metadata.class_names:
            raise UsageError(f"{origin}: the model has no class {label[:_SHOWN]!r}; see `opal-deploy inspect`")
        class_id = metadata.class_names.index(label)
        size = int(metadata.class_map.sizes[class_id])
        if not _is_index(number, size):
            raise UsageError(f"{origin}: {label} has no slot {number[:_SHOWN]!r}; expected 0 to {size - 1}")
        if metadata.class_names.count(label) > 1:
            raise UsageError(f"{origin}: several classes have that name; give the slot's channel")
        channels.append(int(metadata.class_map.channel_table[class_id, int(number)]))
    if len(set(channels)) < len(channels):
        raise UsageError(f"{option}: a slot is given twice")
    return channels


def _is_index(text: str, size: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) < size


def name_slot(channel: int, metadata: Metadata) -> str:
    """Return a slot as `parse_slots` reads it; a shared prototype as its number."""
    if metadata.shares_prototypes:
        return str(channel)
    class_id, slot = metadata.class_map.owners(channel)[0]
    label = metadata.class_names[class_id]
    return f"{label}/{slot}" if metadata.class_names.count(label) == 1 else str(channel)


def check_drops(drop: Sequence[int], metadata: Metadata) -> None:
    """Raise UsageError for a slot that is dropped already, if a class would have none left, or for another distance."""
    if metadata.is_opal and metadata.distance != "l2":
        raise UsageError(f"the model's distance is {metadata.distance}; slots are dropped only from models with l2")
    for channel in drop:
        if channel in metadata.dropped:
            raise UsageError(f"{name_slot(channel, metadata)} is dropped already; leave it out")
    silenced = metadata.class_map.drop(drop).silenced
    if silenced.any():
        label = metadata.class_names[int(silenced.argmax())]
        raise UsageError(f"{label} would have no slot left; keep one, or train without the class")
