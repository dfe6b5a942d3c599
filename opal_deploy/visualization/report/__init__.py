"""`report.html`: one self-contained page to look through a run in a browser.

`writer` streams records into the page, `cards` holds what the page says of one record and of all; `script.js` draws,
filters and sorts the cards in the browser.
"""

from opal_deploy.visualization.report.cards import Thumbnail, make_thumbnail
from opal_deploy.visualization.report.writer import EMBED_LIMIT, Fact, ReportOptions, ReportWriter, choose_image_mode

__all__ = [
    "EMBED_LIMIT", "Fact", "ReportOptions", "ReportWriter", "Thumbnail", "choose_image_mode", "make_thumbnail",
]  # fmt: skip
