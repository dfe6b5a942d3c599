"""The report of `opal-deploy diff` as an HTML page without scripts: the worst changes, both overlays side by side."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from html import escape

from PIL import Image

from opal_deploy.auditing.model_diff import KINDS, DiffReport, ImageChange
from opal_deploy.inference.explanation import format_line
from opal_deploy.records.names import find_common_folder
from opal_deploy.records.record import Record
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg
from opal_deploy.visualization.style import escape_unprintable

# of an overlay on the page, pixels
_MAX_SIDE = 560

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 76rem; margin: 0 auto; padding: 1rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem 1rem .2rem 0; }
caption { text-align: left; white-space: nowrap; }
section { border-top: 1px solid #8888; padding: 1rem 0; overflow-wrap: anywhere; break-inside: avoid; }
h2 { font-size: 1.1rem; margin: 0; } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
figure { margin: .5rem 0; } img { max-width: 100%; height: auto; }
@media (max-width: 40rem) { .pair { grid-template-columns: 1fr; } }
"""


def render_page(report: DiffReport, names: tuple[str, str], load_image: Callable[[Record], Image.Image | None]) -> str:
    """Return the HTML document.

    Args:
        report: the changes to show.
        names: paths of the two models or results, shown from the folder that they have in common.
        load_image: returns the oriented image of a record, or None where the file is not at hand.
    """
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    counts = "".join(f"<tr><th scope='row'>{kind}</th><td>{report.kinds[kind]}</td></tr>" for kind in KINDS)
    rest = (
        f"{report.only_before} images only before, {report.only_after} only after; "
        f"{report.moved} of {report.slots} slots moved; {report.file_changed} image files changed"
    )
    before, after = (name.removeprefix(find_common_folder(names)) for name in names)
    folder = find_common_folder(change.image for change, _, _ in report.worst)
    sections = "".join(_render_section(*worst, load_image, folder) for worst in report.worst)
    none = "" if report.worst else "<p>Nothing changed.</p>"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>What changed</title><style>{_STYLE}</style></head><body><main><h1>What changed</h1>"
        f"<p>Before: {_escape(before)}<br>After: {_escape(after)}</p>"
        f"<p>{report.changed} of {report.paired} images changed. {rest}.</p>"
        f"<table><caption>Images by the worst that happened</caption>{counts}</table>{none}{sections}"
        "</main></body></html>\n"
    )


def _render_section(
    change: ImageChange, old: Record, new: Record, load_image: Callable[[Record], Image.Image | None], folder: str
) -> str:
    figures = "".join(_render_figure(title, record, load_image) for title, record in (("Before", old), ("After", new)))
    return (
        f"<section><h2>{_escape(change.image.removeprefix(folder))}</h2><p>{change.kind}: {_escape(str(change))}</p>"
        f"<div class='pair'>{figures}</div></section>"
    )


def _render_figure(title: str, record: Record, load_image: Callable[[Record], Image.Image | None]) -> str:
    text = _escape(f"{title}: {format_line({**record, 'image': None}).removeprefix('image: ')}")
    image = load_image(record) if "prediction" in record else None
    shown = "<p>(no image: the file is not at hand, or is another by now)</p>" if "prediction" in record else ""
    if image is not None:
        overlay = draw_overlay(image, record)
        overlay.thumbnail((_MAX_SIDE, _MAX_SIDE), Image.Resampling.BILINEAR)
        data = base64.b64encode(encode_jpeg(overlay)).decode()
        shown = f'<img alt="{text}" src="data:image/jpeg;base64,{data}">'
    return f"<figure><figcaption>{text}</figcaption>{shown}</figure>"


def _escape(text: str) -> str:
    return escape(escape_unprintable(text), quote=True)
