"""`report.html`: a run, to look through in a browser, with nothing to install and nothing fetched."""

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
