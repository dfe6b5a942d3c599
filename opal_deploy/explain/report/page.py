"""The report's page around its records: templates with every text escaped, and a policy that lets nothing else in.

The page's one script and its one style sheet are named in the policy by their digests; no other script, no style
attribute, no frame, no form and no fetch is possible, whatever a file's name tries to be.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from opal_deploy.explain.bars import number
from opal_deploy.explain.legend import NO_EVIDENCE
from opal_deploy.explain.report.cards import MEANINGS, Card
from opal_deploy.explain.text import visible

if TYPE_CHECKING:
    import jinja2

Pictures = Literal["embed", "files"]

# cards on one page of the grid, and so many are in the file for browsers without scripts
PAGE_SIZE = 48

# what does nothing without scripts
_WITHOUT_SCRIPTS = ".script{display:none!important}"
_SOURCES = {"embed": "data:", "files": "'self' file:"}


def render_head(pictures: Pictures, first: Sequence[Card], **content: Any) -> str:
    """Everything up to the first page's cards.

    Args:
        pictures: where pictures come from.
        first: cards of the first page, whose sizes go into the style sheet.
        content: what the template names: title, facts, counts, tables.
    """
    style = asset("style.css") + "".join(_size_rule(card, pictures) for card in first)
    policy = (
        f"default-src 'none'; img-src {_SOURCES[pictures]}; script-src '{_digest(asset('script.js'))}'; "
        f"style-src '{_digest(style)}' '{_digest(_WITHOUT_SCRIPTS)}'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return (
        _environment()
        .get_template("head.html.jinja")
        .render(policy=policy, style=_raw(style), without_scripts=_raw(_WITHOUT_SCRIPTS), **content)
    )


def render_card(card: Card, labels: Sequence[str], source: str | None) -> str:
    """One card; `source`: its picture's address, None without a picture."""
    template = _environment().get_template("card.html.jinja")
    return template.render(card=card, labels=labels, source=source, meanings=MEANINGS, no_evidence=NO_EVIDENCE)


def render_tables(**content: Any) -> str:
    """What follows the cards: tables and dialogs, up to the data."""
    return _environment().get_template("tables.html.jinja").render(**content)


def render_tail() -> str:
    """The script and the end."""
    return f"<script>{asset('script.js')}</script>\n</body>\n</html>\n"


def island(name: str, value: object) -> str:
    """A value for the page's script, as a block of data that no browser runs."""
    return f'<script type="application/json" id="{name}">{to_json(value)}</script>\n'


def to_json(value: object) -> str:
    """JSON that cannot end the block that it stands in, nor begin a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(name: str) -> str:
    """One of the package's own files."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _size_rule(card: Card, pictures: Pictures) -> str:
    """Room for a picture that is not there yet, and in a drawing the photograph alone without its legend."""
    if not card.width:
        return ""
    share = 100 * card.overlay_width if pictures == "files" else 100
    size = f"{card.width:d}/{card.height:d}"
    figure = f"#f{card.number:d}"
    return f"{figure}{{aspect-ratio:{size};max-width:calc(18rem*{size})}}{figure} img{{width:{share:.2f}%}}\n"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _raw(text: str) -> object:
    import markupsafe

    return markupsafe.Markup(text)  # our own style sheet, and numbers


def _breakable(text: str) -> object:
    """A long name breaks after its folders and words."""
    import markupsafe

    return markupsafe.Markup("<wbr>").join(re.split(r"(?<=[/_])", text))


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = number
    environment.filters["breakable"] = _breakable
    environment.filters["visible"] = visible
    environment.filters["thousands"] = lambda count: f"{count:,}"
    environment.filters["several"] = lambda count, one, many: f"{count:,} {one if count == 1 else many}"
    return environment
