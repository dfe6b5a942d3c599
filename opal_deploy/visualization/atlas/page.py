"""`atlas.html`: the atlas as a page that opens from disk and loads only its own patches."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from opal_deploy.artifact.files import atomic_write
from opal_deploy.visualization.atlas.entries import (
    FINDING_KINDS,
    Atlas,
    AtlasPatch,
    Finding,
    SlotEntry,
    format_counts,
)
from opal_deploy.visualization.style import (
    count_of,
    escape_unprintable,
    format_number,
    slot_color,
    text_color,
    to_hex,
)

PAGE_FILE = "atlas.html"
_POLICY = "default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
# longer lists of findings are collapsed
_OPEN_FINDINGS = 12
_FIELD_NOTE = ", showing each cell's effective receptive field with the cell outlined"
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fafaf8; --faint: #565656; --rule: #d0d0cb;
  --alert: #96281b; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececea; --paper: #17181a; --faint: #a9a9a6; --rule: #3a3b3e;
  --alert: #ff9b8c; } }
body { margin: 0 auto; max-width: 1200px; padding: 1rem; font: 16px/1.45 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .2rem; border-top: 1px solid var(--rule); padding-top: 1rem; }
h3 { margin: 1rem 0 0; font-size: 1rem; }
p, small { color: var(--faint); margin: .4rem 0; max-width: 60rem; } ul { margin: .4rem 0; padding-left: 1.4rem; }
a, summary { color: inherit; } a { text-decoration-color: var(--faint); }
.slot { display: flex; gap: .8rem; align-items: flex-start; margin: .9rem 0; flex-wrap: wrap; }
.about { flex: 0 0 11rem; font-size: .85rem; color: var(--faint); }
.about b { display: inline-block; min-width: 1.6rem; text-align: center; border: 1px solid var(--ink); }
.patches { flex: 1 1 30rem; display: grid; gap: .8rem .7rem;
  grid-template-columns: repeat(auto-fill, minmax(96px, 1fr)); }
@media (max-width: 46rem) { .about { flex-basis: 100%; } }
figure { margin: 0; min-width: 0; }
figure div { position: relative; width: 96px; margin-bottom: .3rem; }
figure img, figure svg { width: 96px; height: 96px; object-fit: contain; display: block; }
figure svg { position: absolute; inset: 0; }
rect { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; } .case { stroke: #1a1a1a; stroke-width: 4; }
figcaption { font-size: .75rem; line-height: 1.3; color: var(--faint); }
.other div { outline: 2px dashed var(--alert); outline-offset: 1px; }
.other strong { display: block; margin-top: .2rem; color: var(--alert); }
"""


def write_page(atlas: Atlas) -> None:
    """Write the page to the atlas's folder.

    Raises:
        UsageError: the page cannot be written.
    """
    with (
        atomic_write(atlas.root / PAGE_FILE) as temporary,
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as page,
    ):
        page.writelines(_render(atlas))


def _render(atlas: Atlas) -> Iterator[str]:
    data, model = atlas.data, atlas.model
    shows_fields = any(patch.field is not None for entry in atlas.entries.values() for patch in entry.patches)
    note = _FIELD_NOTE if shows_fields else ""
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Atlas of {_escape(str(model['file']))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Atlas of {_escape(str(model['file']))}</h1>\n"
        f"<p>{count_of(data.get('answered', 0), 'image')} of {_escape(str(data.get('description', '')))}; "
        f"the {atlas.top} best patches of each slot{note}. {_describe_labels(atlas)}</p>\n"
        f"<p>Model sha256 {_escape(str(model['sha256']))}</p>\n"
    )
    for heading, actionable in (("To do", True), ("Also noted", False)):
        found = [finding for finding in atlas.findings if FINDING_KINDS[finding.kind].actionable == actionable]
        if found:
            yield f"<h2>{heading}</h2>\n"
        for kind in FINDING_KINDS:
            yield _render_findings(kind, [finding for finding in found if finding.kind == kind])
    m = model["prototypes_per_class"]
    for class_id, label in enumerate(atlas.class_names):
        images = atlas.entries[class_id, 0].statistics.images
        yield (
            f'<h2 id="class-{class_id}"><bdi>{_break(label)}</bdi></h2>\n'
            f"<p>{_escape(_describe_class(atlas, class_id))}</p>\n"
        )
        for slot in range(m if images else 0):
            yield _render_slot(atlas.entries[class_id, slot], label)
    yield "</body>\n</html>\n"


def _render_findings(kind: str, findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    listed = "".join(
        f'<li><a href="#class-{finding.class_id}">{_break(finding.message)}</a></li>\n' for finding in findings
    )
    about = FINDING_KINDS[kind]
    is_open = " open" if len(findings) <= _OPEN_FINDINGS else ""
    return (
        f"<h3>{len(findings):,} {about.title}</h3>\n<p>{_escape(about.advice)}</p>\n"
        f"<details{is_open}><summary>List</summary><ul>\n{listed}</ul></details>\n"
    )


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
    name, images = atlas.class_names[class_id], atlas.entries[class_id, 0].statistics.images
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


def _render_slot(entry: SlotEntry, label: str) -> str:
    statistics, color = entry.statistics, slot_color(entry.slot)
    mean = f"mean contribution {format_number(statistics.mean_contribution)}"
    if statistics.mean_contribution is None:
        mean = f"mean score {format_number(statistics.mean_score)}"
    patches = "".join(_render_patch(entry.slot, patch, label, to_hex(color)) for patch in entry.patches)
    return (
        f'<div class="slot"><div class="about"><b style="background:{to_hex(color)};color:{to_hex(text_color(color))}">'
        f"{entry.slot}</b> {mean}; "
        f"strongest slot in {_format_share(statistics.strongest)} of the images, "
        f"own cell in {_format_share(statistics.own_cell)}, "
        f'most frequent cell in {_format_share(statistics.top_cell_share)}</div><div class="patches">{patches}</div>'
        "</div>\n"
    )


def _render_patch(slot: int, patch: AtlasPatch, label: str, color: str) -> str:
    is_other = patch.label not in (None, label)
    warning = f"<strong>shows <bdi>{_break(patch.label or '')}</bdi></strong>" if is_other else ""
    return (
        f'<figure{" class=other" if is_other else ""}><div><img loading="lazy" src="{patch.file}" '
        f'alt="slot {slot} in {_escape(patch.image)}">{_outline_cell(patch, color)}</div>'
        f'<figcaption title="{_escape(patch.image)}">'
        f"{format_number(patch.value)} "
        f"<bdi>{_break(patch.image.rpartition('/')[2])}</bdi>{warning}</figcaption></figure>"
    )


def _outline_cell(patch: AtlasPatch, color: str) -> str:
    """Return the outline of the cell on a patch that shows its field."""
    if patch.field is None:
        return ""
    x0, y0, x1, y1 = patch.field
    x, y = patch.box[0] - x0, patch.box[1] - y0
    width, height = patch.box[2] - patch.box[0], patch.box[3] - patch.box[1]
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return (
        f'<svg viewBox="0 0 {x1 - x0:.1f} {y1 - y0:.1f}" aria-hidden="true">'
        f'<rect class="case" {place}/><rect {place} stroke="{color}"/></svg>'
    )


def _format_share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _break(text: str) -> str:
    """Return escaped text that may break after folders and words."""
    return "<wbr>".join(_escape(part) for part in re.split(r"(?<=[/_])", text))


def _escape(text: str) -> str:
    return html.escape(escape_unprintable(text))
