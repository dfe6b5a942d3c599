"""`report.html`: a run, to look through in a browser, with nothing to install and nothing fetched."""

from opal_deploy.explain.report.page import Pictures
from opal_deploy.explain.report.thumbnails import Thumbnail, thumbnail
from opal_deploy.explain.report.writer import EMBED_LIMIT, REPORT_LIMIT, Fact, ReportWriter, pictures_for

__all__ = ["EMBED_LIMIT", "REPORT_LIMIT", "Fact", "Pictures", "ReportWriter", "Thumbnail", "pictures_for", "thumbnail"]
