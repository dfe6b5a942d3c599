"""The report of `opal-deploy diff` as one page: the worst changes, both drawings side by side; no script at all."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from html import escape

from PIL import Image

from opal_deploy.auditing.model_diff import KINDS, Change, Changes
from opal_deploy.inference.explanation import line_of
from opal_deploy.records.record import Record
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg
from opal_deploy.visualization.text import escape_unprintable

# of a drawing on the page, pixels
_SIDE = 560

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


def page(changes: Changes, names: tuple[str, str], picture: Callable[[Record], Image.Image | None]) -> str:
    """The document.

    Args:
        changes: what to show.
        names: of the two sides.
        picture: the photograph of a record, or None where it is not at hand.
    """
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    counts = "".join(f"<tr><th scope='row'>{kind}</th><td>{changes.kinds[kind]}</td></tr>" for kind in KINDS)
    rest = (
        f"{changes.only_before} images only before, {changes.only_after} only after; "
        f"{changes.moved} of {changes.slots} slots moved; {changes.file_changed} image files changed"
    )
    sections = "".join(_section(*worst, picture) for worst in changes.worst)
    none = "" if changes.worst else "<p>Nothing changed.</p>"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>What changed</title><style>{_STYLE}</style></head><body><main><h1>What changed</h1>"
        f"<p>Before: {_safe(names[0])}<br>After: {_safe(names[1])}</p>"
        f"<p>{changes.changed} of {changes.paired} images changed. {rest}.</p>"
        f"<table><caption>Images by the worst that happened</caption>{counts}</table>{none}{sections}"
        "</main></body></html>\n"
    )


def _section(change: Change, old: Record, new: Record, picture: Callable[[Record], Image.Image | None]) -> str:
    figures = "".join(_figure(title, record, picture) for title, record in (("Before", old), ("After", new)))
    return (
        f"<section><h2>{_safe(change.image)}</h2><p>{change.kind}: {_safe(str(change))}</p>"
        f"<div class='pair'>{figures}</div></section>"
    )


def _figure(title: str, record: Record, picture: Callable[[Record], Image.Image | None]) -> str:
    text = _safe(f"{title}: {line_of({**record, 'image': None}).removeprefix('image: ')}")
    photograph = picture(record) if "prediction" in record else None
    shown = "<p>(no picture: the file is not at hand, or is another by now)</p>" if "prediction" in record else ""
    if photograph is not None:
        overlay = draw_overlay(photograph, record)
        overlay.thumbnail((_SIDE, _SIDE), Image.Resampling.BILINEAR)
        data = base64.b64encode(encode_jpeg(overlay)).decode()
        shown = f'<img alt="{text}" src="data:image/jpeg;base64,{data}">'
    return f"<figure><figcaption>{text}</figcaption>{shown}</figure>"


def _safe(text: str) -> str:
    return escape(escape_unprintable(text), quote=True)
