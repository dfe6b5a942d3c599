"""The to-do list that an atlas writes for a model's owner: slots that do not do what a slot is for.

Each rule looks at one slot over the pictures that its class was predicted for, and only where there are enough of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from opal_deploy.explain.atlas.entries import Finding, SlotFigures

# fewer pictures say nothing about a habit
FEWEST_IMAGES = 5
# a slot that has its cell to itself in fewer pictures than this shows nothing that another does not
OWN_CELL = 0.1
# a slot whose mean contribution is less than this share of an equal part adds little
EQUAL_PART = 0.2
# a slot that chooses the same cell in more pictures than this looks at a place, not at a part of the object
ONE_PLACE = 0.5


def findings_of(class_id: int, label: str, slots: Sequence[SlotFigures]) -> list[Finding]:
    """What is wrong with a class's slots, in their order."""
    if not slots[0].images:
        return [
            Finding("never_predicted", class_id, None, 0.0, f"{label}: predicted for no picture, so it has no patches")
        ]
    if slots[0].images < FEWEST_IMAGES:
        return []
    found = []
    parts = [figures.mean_contribution for figures in slots]
    known = [part for part in parts if part is not None]
    equal = sum(known) / len(known) if len(known) == len(slots) else None
    for slot, figures in enumerate(slots):
        who = f"{label}, slot {slot}"
        if len(slots) > 1 and figures.own_cell is not None and figures.own_cell < OWN_CELL:
            text = f"{who}: has a cell to itself in only {figures.own_cell:.0%} of {figures.images} pictures"
            found.append(Finding("shares_its_cell", class_id, slot, figures.own_cell, text))
        part = parts[slot]
        if equal is not None and part is not None and equal > 0 and part < EQUAL_PART * equal:
            text = f"{who}: adds {part:.3f} on average, where an equal part would be {equal:.3f}"
            found.append(Finding("adds_little", class_id, slot, part, text))
        share = figures.top_cell_share
        if share is not None and figures.top_cell is not None and share > ONE_PLACE:
            row, col = figures.top_cell
            text = f"{who}: looks at cell {row}, {col} in {share:.0%} of {figures.images} pictures, whatever they show"
            found.append(Finding("one_place", class_id, slot, share, text))
    return found
