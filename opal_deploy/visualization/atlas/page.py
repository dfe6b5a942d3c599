"""`atlas.html`: the atlas as a page that opens from disk and loads only its own patches."""

from __future__ import annotations

from opal_deploy.artifact.files import atomic_write
from opal_deploy.visualization.atlas.entries import FINDING_KINDS, Atlas, format_counts
from opal_deploy.visualization.pages import render_page
from opal_deploy.visualization.style import count_of

PAGE_FILE = "atlas.html"
# longer lists of findings are collapsed
_OPEN_FINDINGS = 12


def write_page(atlas: Atlas) -> None:
    """Write the page to the atlas's folder; raise UsageError if the page cannot be written."""
    findings = []
    for heading, actionable in (("To do", True), ("Also noted", False)):
        kinds = [
            (about, found)
            for kind, about in FINDING_KINDS.items()
            if about.actionable == actionable and (found := [each for each in atlas.findings if each.kind == kind])
        ]
        findings += [(heading, kinds)] if kinds else []
    text = render_page(
        __package__, "atlas", images="'self' file:", atlas=atlas, labels=_describe_labels(atlas), findings=findings,
        open_findings=_OPEN_FINDINGS, describe_class=_describe_class,
        shows_fields=any(patch.field is not None for entry in atlas.entries.values() for patch in entry.patches),
    )  # fmt: skip
    with atomic_write(atlas.root / PAGE_FILE) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def _describe_labels(atlas: Atlas) -> str:
    wrong = atlas.count_wrong()
    if not atlas.labels:
        return "Images count for their predicted class; their labels are not known."
    if not wrong:
        return "Every prediction is correct."
    return (
        f"Images count for their predicted class: {count_of(wrong, 'prediction is', 'predictions are')} wrong. "
        "Patches of these images are marked and listed in addition."
    )


def _describe_class(atlas: Atlas, class_id: int) -> str:
    """Return the number of images predicted as the class, their labels, and the predictions for its own images."""
    name, images = atlas.class_names[class_id], atlas.images_of(class_id)
    labels, predictions = dict(atlas.labels_of(class_id)), dict(atlas.predictions_of(class_id))
    known, shown = sum(labels.values()), sum(predictions.values())
    correct = labels.pop(name, 0)
    predictions.pop(name, None)
    parts = []
    if atlas.labels and images:
        parts.append(f"{correct:,} correct")
    if labels:
        parts.append(f"{known - correct:,} of other classes ({format_counts(labels)})")
    if atlas.labels and known < images:
        parts.append(f"{images - known:,} without a known label")
    text = f"Predicted for {count_of(images, 'image')}" + (f": {', '.join(parts)}." if parts else ".")
    if predictions:
        text += (
            f" Of {count_of(shown, 'image')} with this label, {shown - correct:,} predicted as other classes "
            f"({format_counts(predictions)})."
        )
    return text
