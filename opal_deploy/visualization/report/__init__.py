"""`report.html`: one page to look through a run in a browser, with nothing to install and nothing fetched.

Start with `ReportWriter` in `writer`. `cards` computes what the page says of one record and `tables` of all records,
`page` renders the templates, `script.js` filters and sorts in the browser.
"""

from opal_deploy.visualization.report.page import ImageMode, Thumbnail, make_thumbnail
from opal_deploy.visualization.report.writer import EMBED_LIMIT, REPORT_LIMIT, Fact, ReportWriter, choose_image_mode

__all__ = [
    "EMBED_LIMIT",
    "REPORT_LIMIT",
    "Fact",
    "ImageMode",
    "ReportWriter",
    "Thumbnail",
    "choose_image_mode",
    "make_thumbnail",
]
