"""The report's templates, rendered with all texts escaped and under a content security policy, and its thumbnails.

The policy names the page's script and style sheets by their digests. Other scripts, style attributes, frames, forms and
fetches are impossible, whatever a file's name contains.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Literal

from PIL import Image

from opal_deploy.records.record import Failed, Record
from opal_deploy.visualization.glossary import GLOSSARY
from opal_deploy.visualization.overlay import COSINE, NO_EVIDENCE, build_bars, photograph_size
from opal_deploy.visualization.pages import (
    content_digest,
    load_templates,
    mark_safe,
    read_asset,
    read_evidence_script,
    read_style,
)
from opal_deploy.visualization.report.cards import Card

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
    style = read_style(__package__, "style.css") + "".join(_size_rule(card, image_mode) for card in first)
    script, *styles = (content_digest(text) for text in (_read_script(), style, _NO_SCRIPT_STYLE))
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
        glossary=GLOSSARY,
        shown=_list_words(first),
        **content,
    )


def _list_words(cards: Sequence[Card]) -> set[str]:
    """Return the words of the glossary that cards show and a reader may not know."""
    records = [card.record for card in cards if not isinstance(card.record, Failed)]
    words = {"slot"} if any(record.evidence for record in records) else set()
    if any(record.evidence and build_bars(record)[0] == COSINE for record in records):
        words.add("contribution")
    if any(card.is_cosine and card.value is not None for card in cards):
        words.add("cosine")
    return words


def render_card(card: Card, labels: Sequence[str], source: str | None) -> str:
    """Return one card; `source` is the address of its image, None without one."""
    template = load_templates(__package__).get_template("card.html.jinja")
    return template.render(card=card, labels=labels, source=source, no_evidence=NO_EVIDENCE)


def render_tables(**content: Any) -> str:
    """Return the part after the cards: tables and dialogs."""
    return load_templates(__package__).get_template("tables.html.jinja").render(**content)


def render_tail() -> str:
    """Return the script and the end of the page."""
    return f"<script>{_read_script()}</script>\n</body>\n</html>\n"


def _read_script() -> str:
    return read_evidence_script() + read_asset(__package__, "script.js")


def _size_rule(card: Card, image_mode: ImageMode) -> str:
    """Return a CSS rule that reserves the image's space and hides the legend of an overlay file."""
    if isinstance(card.record, Failed):
        return ""
    share = 100 * card.overlay_width if image_mode == "files" else 100
    size = f"{card.record.width:d}/{card.record.height:d}"
    figure = f"#f{card.number:d}"
    return f"{figure}{{aspect-ratio:{size};max-width:calc(18rem*{size})}}{figure} img{{width:{share:.2f}%}}\n"


class Thumbnail(bytes):
    """A JPEG made by `make_thumbnail` of a photograph without boxes, ready to be embedded in a card."""


def make_thumbnail(overlay: bytes | Image.Image, record: Record) -> Thumbnail:
    """Return a photograph, or an overlay without its legend, as JPEG of about 480 x 640 pixels at most."""
    image = Image.open(io.BytesIO(overlay)) if isinstance(overlay, bytes) else overlay
    whole = image.size
    width, height = (
        photograph_size(*whole) if isinstance(record, Failed) else photograph_size(record.width, record.height)
    )
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
