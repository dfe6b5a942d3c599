"""The page for people, at /: it takes a dropped picture and shows its evidence sheet; nothing comes from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment

from opal_deploy.server.models import ServedModel

_FILES = files("opal_deploy.server")
# what a model's evidence can be drawn as
_FORMATS = {"exact": "sheet", "map": "overlay", "none": "record"}
STYLE, SCRIPT = ((_FILES / name).read_bytes() for name in ("page.css", "page.js"))
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def render_page(models: Sequence[ServedModel]) -> str:
    """Return the page for these models."""
    template = Environment(autoescape=True).from_string((_FILES / "page.html.jinja").read_text("utf-8"))
    described = [
        {
            "name": model.name,
            "classes": f"{model.metadata.num_classes:,}",
            "format": _FORMATS[model.metadata.evidence],
        }
        for model in models
    ]
    return template.render(models=described)
