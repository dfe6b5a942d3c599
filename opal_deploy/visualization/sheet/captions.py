"""The sentences of a sheet: what its numbers mean, for those who see the sheet and those who have it read to them."""

from __future__ import annotations

from opal_deploy.records.names import hide_folders
from opal_deploy.visualization.legend import BOX_NOTE, format_number
from opal_deploy.visualization.sheet.content import ClassView, SheetContent, SlotView

HEADINGS = {
    "cosine": "what each slot adds to the cosine",
    "distance": "each slot's part of the distance",
    "score": "each slot's score",
}
_NO_SUM = "This head's distance ({}) is decided by one extreme entry, so slots have scores but no contributions."


def build_title(content: SheetContent) -> str:
    """Return the sheet's title."""
    return f"{content.predicted.label}: evidence in {hide_folders(content.image) or 'an image'}"


def describe_truth(content: SheetContent) -> tuple[str, str]:
    """Return `right`, `wrong` or nothing, and the image's label in words; both empty where it is not known."""
    if content.truth is None:
        return "", ""
    if content.correct is None:
        return "", f"labelled {content.truth}, which is no class of the model"
    return "right" if content.correct else "wrong", f"labelled {content.truth}"


def describe_answer(content: SheetContent) -> str:
    """Return the predicted label, and whether it is right where that is known."""
    truth = ", ".join(filter(None, describe_truth(content)))
    return content.predicted.label + (f" ({truth})" if truth else "")


def describe_places(view: ClassView) -> str:
    """Return a sentence on how many places a class's slots looked at."""
    m = len(view.slots)
    if view.distinct_cells == 1 and m > 1:
        return f"All {m} slots at one place."
    if m == 1:
        return "One slot, so one place."
    if view.distinct_cells == m:
        return f"{m} slots, each at a place of its own."
    return f"{m} slots at {view.distinct_cells} different places."


def label_sum(content: SheetContent, view: ClassView) -> str:
    """Return what the bars of a class add up to; an empty text where they add up to nothing."""
    if view.total is None:
        return ""
    quantity = {"l2": "cosine", "l3": "part of the third power of the distance"}.get(
        content.distance, "part of the distance"
    )
    return f"sum = {quantity}"


def explain_figures(content: SheetContent, *, fields: bool = False) -> list[str]:
    """Return sentences on how to read the images and bars; `fields`: receptive fields are drawn on the photographs."""
    sentences = []
    if content.crop != (0, 0, content.width, content.height):
        sentences.append("The model was shown what lies inside the white frame.")
    if content.predicted.slots[0].field is not None:
        sentences.append(
            "A box is the cell where a slot's score was read. Patches show what the score mostly depends on, the "
            "cell's effective receptive field, with the cell outlined in it."
            + (" On the photographs that field is dashed." if fields else "")
        )
    if content.largest is not None:
        sentences.append(BOX_NOTE)
    if content.difference is not None:
        sentences.append(
            "A slot's difference is what it adds less what the runner-up's slot of the same rank adds; the differences "
            "add up to the margin."
        )
    if content.meaning == "score":
        sentences.append(_NO_SUM.format(content.distance))
    if content.meaning == "distance":
        sentences.append(
            f"This head decides by distance ({content.distance}). The bars are the part of it that a class's own "
            "channels have; the rest comes from the other classes' channels. Slots stand in the order of their scores."
        )
    return sentences


def describe_difference(content: SheetContent) -> list[str]:
    """Return sentences on what made the difference between the two classes."""
    if content.runner_up is None:
        return []
    sentences = []
    differences = round_differences(content)
    if differences:
        ranked = list(zip(differences, content.predicted.slots, strict=True))
        favour = [(value, slot) for value, slot in ranked if value > 0]
        against = [(value, slot) for value, slot in ranked if value < 0]
        sentences.append(
            f"In favour: {_list_slots(favour)}; against: {_list_slots(against)}; "
            f"margin {format_number(content.margin)}."
        )
        largest = [(value, slot) for value, slot in favour if value == max(differences)]
        if len(favour) > 1 and len(largest) == 1:
            value, slot = largest[0]
            name = f" ({slot.name})" if slot.name else ""
            sentences.append(f"Slot {slot.slot}{name} gives the largest part in favour, {format_difference(value)}.")
    shared = content.count_shared_cells()
    if not shared:
        sentences.append("The two classes looked at different places.")
    elif shared == 1:
        sentences.append("One place is the same for both classes.")
    else:
        sentences.append(f"{shared} places are the same for both classes.")
    return sentences


def round_differences(content: SheetContent) -> list[int]:
    """Return the difference of each rank as it is printed, in thousandths; none where differences mean nothing.

    They add up to the margin as it is printed, and as many as that allows are what the two printed contributions of
    the rank differ by. Each is within a thousandth of the exact difference.
    """
    if content.difference is None or content.runner_up is None or content.margin is None:
        return []
    exact = [1000 * value for value in content.difference.by_rank]
    rounded = [
        _thousandths(own.value) - _thousandths(other.value)
        for own, other in zip(content.predicted.slots, content.runner_up.slots, strict=True)
    ]
    missing = _thousandths(content.margin) - sum(rounded)
    step = 1 if missing > 0 else -1
    for _ in range(abs(missing)):
        furthest = max(range(len(exact)), key=lambda rank: step * (exact[rank] - rounded[rank]))
        rounded[furthest] += step
    return rounded


def format_difference(thousandths: int) -> str:
    """Return a difference with its sign and three decimals."""
    return f"{thousandths / 1000:+.3f}" if thousandths else "0.000"


def describe_place(slot: SlotView) -> str:
    """Return the cell where a slot found its maximum."""
    return f"cell {slot.cell[0]}, {slot.cell[1]}{' (shared)' if slot.shared else ''}"


def describe_slot(slot: SlotView) -> str:
    """Return a slot's name, if it has one, and its place."""
    return f"{slot.name}, {describe_place(slot)}" if slot.name else describe_place(slot)


def build_description(content: SheetContent) -> str:
    """Return all that the sheet says, in one paragraph."""
    predicted, runner_up = content.predicted, content.runner_up
    parts = [f"Predicted {describe_answer(content)}, cosine {format_number(predicted.cosine)}"]
    if runner_up is not None:
        parts[0] += (
            f", margin {format_number(content.margin)} over the runner-up {runner_up.label}, "
            f"cosine {format_number(runner_up.cosine)}"
        )
    parts[0] += "."
    parts += content.cautions()
    parts.append(describe_places(predicted))
    for view in (predicted, runner_up):
        if view is None:
            continue
        slots = "; ".join(f"slot {s.slot}, {describe_slot(s)}: {format_number(s.value)}" for s in view.slots)
        total = label_sum(content, view)
        end = f"; {total} {format_number(view.total)}" if total else ""
        parts.append(f"{view.label}, {HEADINGS[content.meaning]}: {slots}{end}.")
    return " ".join([*parts, *describe_difference(content), *explain_figures(content)])


def _list_slots(ranked: list[tuple[int, SlotView]]) -> str:
    """Return slots and the sum of their differences, which are in thousandths."""
    if not ranked:
        return "none"
    numbers = [str(slot.slot) for _, slot in ranked]
    listed = ", ".join(numbers[:-1]) + " and " + numbers[-1] if len(numbers) > 1 else numbers[0]
    total = format_difference(sum(value for value, _ in ranked))
    return f"slot{'s' if len(numbers) > 1 else ''} {listed}, {total}"


def _thousandths(value: float) -> int:
    return round(1000 * float(format_number(value)))
