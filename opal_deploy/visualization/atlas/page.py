"""`atlas.html`: the atlas as a page that opens from disk and loads nothing but its own patches."""

from __future__ import annotations

import html
from collections.abc import Iterator

from opal_deploy.artifact.files import atomic_write
from opal_deploy.visualization.atlas.entries import Atlas, AtlasPatch, SlotEntry
from opal_deploy.visualization.legend import format_number
from opal_deploy.visualization.palette import slot_color, text_color, to_hex
from opal_deploy.visualization.text import escape_unprintable

PAGE_FILE = "atlas.html"
_POLICY = "default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_FIELD_NOTE = ", as much as it mostly depends on, with the cell where its score was read outlined"
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fafaf8; --faint: #565656; --rule: #d0d0cb; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececea; --paper: #17181a; --faint: #a9a9a6; --rule: #3a3b3e; } }
body { margin: 0 auto; max-width: 1100px; padding: 1rem; font: 16px/1.45 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h2 { margin: 2.2rem 0 .2rem; border-top: 1px solid var(--rule); padding-top: 1rem; overflow-wrap: anywhere; }
p, small { color: var(--faint); } li { overflow-wrap: anywhere; }
.slot { display: flex; gap: .8rem; align-items: flex-start; margin: .7rem 0; flex-wrap: wrap; }
.about { flex: 0 0 11rem; font-size: .85rem; color: var(--faint); }
.about b { display: inline-block; min-width: 1.6rem; text-align: center; border: 1px solid var(--ink); }
figure { margin: 0; width: 92px; }
figure div { position: relative; }
figure img, figure svg { width: 92px; height: 92px; object-fit: contain; display: block; }
figure svg { position: absolute; inset: 0; }
rect { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; } .case { stroke: #1a1a1a; stroke-width: 4; }
figcaption { font-size: .72rem; color: var(--faint); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
"""


def write_page(atlas: Atlas) -> None:
    """Write the page into the atlas's folder.

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
        f"<p>{data.get('answered', 0):,} images of {_escape(str(data.get('description', '')))}; "
        f"the best {atlas.top} patches of each slot{note}. "
        f"Model sha256 {_escape(str(model['sha256']))}.</p>\n"
    )
    if atlas.findings:
        listed = "".join(f"<li>{_escape(finding.message)}</li>\n" for finding in atlas.findings)
        yield f"<h2>To do</h2>\n<ul>\n{listed}</ul>\n"
    m = model["prototypes_per_class"]
    for class_id, label in enumerate(atlas.class_names):
        images = atlas.entries[class_id, 0].statistics.images
        yield f'<h2 id="class-{class_id}"><bdi>{_escape(label)}</bdi></h2>\n<p>predicted for {images:,} images</p>\n'
        for slot in range(m if images else 0):
            yield _render_slot(atlas.entries[class_id, slot])
    yield "</body>\n</html>\n"


def _render_slot(entry: SlotEntry) -> str:
    statistics, color = entry.statistics, slot_color(entry.slot)
    mean = statistics.mean_score if statistics.mean_contribution is None else statistics.mean_contribution
    patches = "".join(
        f'<figure><div><img loading="lazy" src="{patch.file}" alt="slot {entry.slot} in {_escape(patch.image)}">'
        f"{_outline_cell(patch, to_hex(color))}</div>"
        f'<figcaption title="{_escape(patch.image)}">'
        f"{format_number(patch.score if patch.contribution is None else patch.contribution)} "
        f"{_escape(patch.image.rpartition('/')[2])}</figcaption></figure>"
        for patch in entry.patches
    )
    return (
        f'<div class="slot"><div class="about"><b style="background:{to_hex(color)};color:{to_hex(text_color(color))}">'
        f"{entry.slot}</b> adds {format_number(mean)} on average; "
        f"a cell to itself in {_format_share(statistics.own_cell)}, "
        f"the strongest in {_format_share(statistics.strongest)}, "
        f"its favourite cell in {_format_share(statistics.top_cell_share)}</div>{patches}</div>\n"
    )


def _outline_cell(patch: AtlasPatch, color: str) -> str:
    """Return the cell's outline on a patch that shows more than the cell."""
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


def _escape(text: str) -> str:
    return html.escape(escape_unprintable(text))
