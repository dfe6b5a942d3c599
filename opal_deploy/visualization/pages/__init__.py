"""The components that all HTML pages share: templates that escape all texts, a style sheet, and scripts.

`components.html.jinja` describes and draws a record when the page is written, `evidence.js` when it is viewed.
`base.css` has the colours and the controls; `class_map.js` computes cosines, contributions and margins. A page's
content security policy names its inline scripts and style sheets by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.artifact.files import atomic_write
from opal_deploy.visualization.overlay import MEANINGS, arrange_boxes, build_bars, describe_boxes
from opal_deploy.visualization.sentences import GLOSSARY, WORDS, describe_answer, headline
from opal_deploy.visualization.style import COLORS, count_of, escape_unprintable, format_number, text_color, to_hex

if TYPE_CHECKING:
    import jinja2
    import markupsafe

_COMPONENTS = "components.html.jinja"


@dataclass(frozen=True)
class Picture:
    """An image on a page: its URL, which may contain it, and its description."""

    url: str
    alt: str


@cache
def load_templates(package: str) -> jinja2.Environment:
    """Return the templates of a package, which escape all texts, with filters for numbers and names."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: read_asset(__name__ if name == _COMPONENTS else package, name)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": format_number,
        "breakable": _breakable,
        "visible": escape_unprintable,
        "thousands": "{:,}".format,
        "count": count_of,
        "explained": _explained,
        "share": lambda value: "–" if value is None else f"{value:.0%}",
    }
    environment.globals |= {
        "slot_class": slot_class, "headline": headline, "describe_answer": describe_answer, "build_bars": build_bars,
        "describe_boxes": describe_boxes, "arrange_boxes": arrange_boxes, "meanings": MEANINGS,
    }  # fmt: skip
    return environment


def render_page(package: str, name: str, *, script: str = "", images: str = "data:", **content: object) -> str:
    """Return the page of a package's NAME.html.jinja and NAME.css; its policy allows `script` and `images` only."""
    style = read_style(package, f"{name}.css")
    scripts = f"script-src '{content_digest(script)}'; " if script else ""
    policy = (
        f"default-src 'none'; img-src {images}; {scripts}style-src '{content_digest(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    template = load_templates(package).get_template(f"{name}.html.jinja")
    return template.render(policy=policy, style=mark_safe(style), script=mark_safe(script), **content)


def save_page(path: Path, text: str, *, overwrite: bool = True) -> None:
    """Write a page under its final name once it is whole; UsageError if it cannot be written."""
    with atomic_write(path, replace=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


@cache
def read_asset(package: str, name: str) -> str:
    """Return the text of one of a package's files."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


@cache
def read_style(package: str, name: str) -> str:
    """Return the style sheet that all pages share, the slots' colours, and a package's own style sheet."""
    colors = "".join(
        f".slot-{slot} {{ --slot: {to_hex(color)}; --on-slot: {to_hex(text_color(color))}; }}\n"
        for slot, color in enumerate(COLORS)
    )
    return read_asset(__name__, "base.css") + colors + read_asset(package, name)


@cache
def read_evidence_script() -> str:
    """Return the script that draws boxes, bars and tables of slots; it defines the global object `evidence`."""
    constants = {"GLOSSARY": GLOSSARY, "SLOT_COLORS": len(COLORS), "WORDS": WORDS}
    declared = ", ".join(f"{name} = {to_json(value)}" for name, value in constants.items())
    return f"const {declared};\n{read_asset(__name__, 'evidence.js')}"


@cache
def read_class_map_script() -> str:
    """Return the script that computes with class maps; it defines the functions `readClassMap` and `findMargin`."""
    return read_asset(__name__, "class_map.js")


def slot_class(slot: int) -> str:
    """Return the CSS class with a slot's colours."""
    return f"slot-{slot % len(COLORS)}"


def json_script(name: str, value: object) -> str:
    """Return a value for the page's script as a data block, which browsers do not run."""
    return f'<script type="application/json" id="{name}">{to_json(value)}</script>\n'


def to_json(value: object) -> str:
    """Return JSON that can neither end the data block around it nor start a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content_digest(text: str) -> str:
    """Return the digest of a script or style sheet, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def mark_safe(text: str) -> markupsafe.Markup:
    """Return our own text, such as a style sheet, that templates insert as it is."""
    import markupsafe

    return markupsafe.Markup(text)


def _breakable(text: str) -> object:
    """Return a name with allowed line breaks after folders and words."""
    return mark_safe("<wbr>").join(re.split(r"(?<=[/_])", text))


def _explained(text: str) -> object:
    """Return a text with the glossary's sentences about its first word, perhaps a plural, as a tooltip."""
    word = text.split(" ")[0].lower()
    if (meaning := GLOSSARY.get(word) or GLOSSARY.get(word.removesuffix("s"))) is None:
        return text
    return mark_safe('<abbr title="{}">{}</abbr>').format(meaning, text)
