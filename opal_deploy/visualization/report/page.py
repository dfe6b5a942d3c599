"""The report's templates, rendered with all texts escaped and under a content security policy, and its thumbnails.

The policy names the page's script and style sheets by their digests. Other scripts, style attributes, frames, forms and
fetches are impossible, whatever a file's name contains.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image

from opal_deploy.records.record import Record
from opal_deploy.visualization.overlay import NO_EVIDENCE, photograph_size
from opal_deploy.visualization.report.cards import MEANINGS, SLOT_COLORS, Card
from opal_deploy.visualization.style import count_of, escape_unprintable, format_number

if TYPE_CHECKING:
    import jinja2


ImageMode = Literal["embed", "files"]

# cards per page of the grid; those of the first page are in the HTML, for browsers without scripts
PAGE_SIZE = 48

# (name in the script, name on the page); the report opens in the first order
ORDERS = (
    ("typical", "typical first"),
    ("margin", "least certain first"),
    ("certain", "most certain first"),
    ("input", "input order"),
    ("class", "by class"),
)

# hides what needs scripts
_NO_SCRIPT_STYLE = ".script{display:none!important}"
THUMBNAIL_WIDTH, THUMBNAIL_HEIGHT, THUMBNAIL_QUALITY = 480, 640, 80
# images that would shrink by less are embedded in full size
_SMALL_ENOUGH = 0.75
_IMAGE_SOURCES = {"embed": "data:", "files": "'self' file:"}


def render_head(image_mode: ImageMode, first: Sequence[Card], **content: Any) -> str:
    """Return the page up to the cards."""
    style = read_asset("style.css") + "".join(_size_rule(card, image_mode) for card in first)
    script, *styles = (content_digest(text) for text in (read_asset("script.js"), style, _NO_SCRIPT_STYLE))
    policy = (
        f"default-src 'none'; img-src {_IMAGE_SOURCES[image_mode]}; script-src '{script}'; "
        f"style-src '{styles[0]}' '{styles[1]}'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    template = load_templates(__package__).get_template("head.html.jinja")
    return template.render(
        policy=policy,
        style=mark_safe(style),
        without_scripts=mark_safe(_NO_SCRIPT_STYLE),
        orders=ORDERS,
        **content,
    )


def render_card(card: Card, labels: Sequence[str], source: str | None) -> str:
    """Return one card; `source` is the address of its image, None without one."""
    template = load_templates(__package__).get_template("card.html.jinja")
    return template.render(
        card=card, labels=labels, source=source, meanings=MEANINGS, colors=SLOT_COLORS, no_evidence=NO_EVIDENCE
    )


def render_tables(**content: Any) -> str:
    """Return the part after the cards: tables and dialogs."""
    return load_templates(__package__).get_template("tables.html.jinja").render(**content)


def render_tail() -> str:
    """Return the script and the end of the page."""
    return f"<script>{read_asset('script.js')}</script>\n</body>\n</html>\n"


def json_script(name: str, value: object) -> str:
    """Return a value for the page's script as a data block, which browsers do not run."""
    return f'<script type="application/json" id="{name}">{to_json(value)}</script>\n'


def to_json(value: object) -> str:
    """Return JSON that can neither end the data block around it nor start a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def read_asset(name: str) -> str:
    """Return the text of one of the package's files."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _size_rule(card: Card, image_mode: ImageMode) -> str:
    """Return a CSS rule that reserves the image's space and hides the legend of an overlay file."""
    if not card.width:
        return ""
    share = 100 * card.overlay_width if image_mode == "files" else 100
    size = f"{card.width:d}/{card.height:d}"
    figure = f"#f{card.number:d}"
    return f"{figure}{{aspect-ratio:{size};max-width:calc(18rem*{size})}}{figure} img{{width:{share:.2f}%}}\n"


def content_digest(text: str) -> str:
    """Return the digest of a script or style sheet, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def mark_safe(text: str) -> object:
    """Return our own text, such as a style sheet, that templates insert as it is."""
    import markupsafe

    return markupsafe.Markup(text)


def _breakable(text: str) -> object:
    """Return a name that may break after folders and words."""
    import markupsafe

    return markupsafe.Markup("<wbr>").join(re.split(r"(?<=[/_])", text))


@cache
def load_templates(package: str) -> jinja2.Environment:
    """Return the templates of a package, which escape all texts, with filters for numbers and names."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files(package).joinpath(name).read_text(encoding="utf-8")),
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
        "share": lambda value: "–" if value is None else f"{value:.0%}",
    }
    return environment


class Thumbnail(bytes):
    """A JPEG made by `make_thumbnail`, ready to be embedded in a card."""


def make_thumbnail(overlay: bytes | Image.Image, record: Record) -> Thumbnail:
    """Return an overlay without its legend as JPEG of about 480 x 640 pixels at most."""
    image = Image.open(io.BytesIO(overlay)) if isinstance(overlay, bytes) else overlay
    whole = image.size
    width, height = photograph_size(record.get("width", whole[0]), record.get("height", whole[1]))
    share = min(1.0, THUMBNAIL_WIDTH / width, THUMBNAIL_HEIGHT / height)
    if share > _SMALL_ENOUGH:
        share = 1.0
    if isinstance(overlay, bytes):
        # the decoder halves large images by itself, which is fast
        image.draft("RGB", (round(whole[0] * share), round(whole[1] * share)))
    # crop first: resizing a part would blend the legend into its last rows
    part = (max(1, width * image.size[0] // whole[0]), max(1, height * image.size[1] // whole[1]))
    size = (max(1, round(width * share)), max(1, round(height * share)))
    cut = image.convert("RGB").crop((0, 0, *part))
    small = cut if cut.size == size else cut.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=THUMBNAIL_QUALITY, subsampling=0)
    return Thumbnail(buffer.getvalue())
