"""`report.html`: one self-contained page to look through a run in a browser.

`cards` holds what the page says of one record and of all, `page` renders the templates, `writer` streams records into
the page; `script.js` filters and sorts in the browser.
"""

from opal_deploy.visualization.report.page import ImageMode, Thumbnail, make_thumbnail
from opal_deploy.visualization.report.writer import EMBED_LIMIT, REPORT_LIMIT, Fact, ReportWriter, choose_image_mode

__all__ = [
    "EMBED_LIMIT", "REPORT_LIMIT", "Fact", "ImageMode", "ReportWriter", "Thumbnail", "choose_image_mode",
    "make_thumbnail",
]  # fmt: skip
