"""The recorded evaluation of a model's evidence, as its metadata keeps it and as one line for a person.

The document, `Metadata.evaluation`:

    when, opal_deploy            date (ISO 8601) and version of the measurement
    model, runtime               the file that was measured and what ran it: an export carries its checkpoint's figures
    data, split, images, boxes   the data set's folder, its split, how many images, whether they were cropped to boxes
    accuracy                     0 ... 1
    pointing_game                shares `object`, `part`, `deciding_part`, each {mean, low, high, count, random} or null
    faithfulness                 {images, removal: [{fill, changed, changed_random}], same_cell: {change: share}}
    prototype_consistency, prototype_stability, part_purity

`changed` is the share of images whose predicted class changes without the evidence's cells, `changed_random` without as
many random foreground cells. Whatever was not measured is missing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from opal_deploy.artifact.receptive_field import ReceptiveField

REQUIRED: dict[str, type] = {
    "when": str, "opal_deploy": str, "model": str, "data": str, "split": str, "images": int, "accuracy": float,
}  # fmt: skip
"""The keys that every document has, with their types; `{}` stands for a model that was never measured."""

_SHARES = (("object", "in the object"), ("part", "on a part"), ("deciding_part", "on a deciding part"))
# of the changes that faithfulness makes to images, those that the line names
_CHANGES = {"JPEG quality 75": "JPEG (quality 75)", "horizontal flip": "mirroring"}


def describe_evaluation(
    evaluation: Mapping[str, Any],
    model: Path,
    receptive_field: Mapping[str, Any] | None = None,
    *,
    export_of: str | None = None,
) -> str:
    """Return one line: what was measured of a model's evidence, what was not, and the command that measures it.

    Args:
        evaluation: the document; empty for a model that was never measured.
        model: the model's file.
        receptive_field: `Metadata.receptive_field`, to say what a cell sees; None leaves that out.
        export_of: the checkpoint to measure, where the model's own file cannot be: it lists its best classes alone.
    """
    measured = export_of or str(model)
    command = shlex.join(["opal-deploy", "evaluate", "DATA", "--model", measured, "--faithfulness", "--record"])
    if export_of is not None:
        command += f", and export {export_of} again"
    if not evaluation:
        return f"never measured whether boxes show what decides; measure it with: {command}"
    findings = [*_pointing(evaluation.get("pointing_game")), *_faithfulness(evaluation.get("faithfulness"))]
    if not evaluation.get("pointing_game"):
        findings.append("where it lies was not measured (no boxes, masks or parts)")
    if not evaluation.get("faithfulness"):
        findings.append("what removing it changes was not measured")
    field = ReceptiveField.from_dict(receptive_field or {})
    if field is not None and field.effective is not None:
        findings.append(f"a score depends on {field.effective} pixels around its cell of {field.stride}")
    findings.append(f"accuracy {100 * evaluation['accuracy']:.1f} %")
    other = "" if evaluation["model"] == model.name else f" with {evaluation['model']}"
    cropped = " cropped to boxes" if evaluation.get("boxes") else ""
    source = (
        f"measured{other} on {evaluation['images']:,} {evaluation['split']} images of {evaluation['data']}{cropped}, "
        f"{evaluation['when'][:10]}, opal-deploy {evaluation['opal_deploy']}"
    )
    advice = "" if evaluation.get("faithfulness") else f"; measure the rest with: {command}"
    return f"{'; '.join(findings)} ({source}){advice}"


def _pointing(game: Mapping[str, Any] | None) -> Iterator[str]:
    shares = [
        f"{100 * share['mean']:.0f} % {title} (random cells {100 * share['random']:.0f} %)"
        for key, title in _SHARES
        if (share := (game or {}).get(key))
    ]
    if shares:
        yield ", ".join(shares)


def _faithfulness(document: Mapping[str, Any] | None) -> Iterator[str]:
    if not document:
        return
    for removal in document["removal"][:1]:
        random = removal["changed_random"]
        beside = "" if random is None else f", without as many random cells {100 * random:.0f} %"
        yield (
            f"without its cells {100 * removal['changed']:.0f} % of {document['images']} answers change{beside} "
            f"({removal['fill']})"
        )
    kept = [
        f"{100 * share:.0f} % under {title}"
        for change, title in _CHANGES.items()
        if (share := document["same_cell"].get(change)) is not None
    ]
    if kept:
        yield f"cells stay: {', '.join(kept)}"
