"""`report.html`: a run, to look through in a browser, with nothing to install and nothing fetched."""

from opal_deploy.visualization.report.page import Pictures, Thumbnail, thumbnail
from opal_deploy.visualization.report.writer import EMBED_LIMIT, REPORT_LIMIT, Fact, ReportWriter, pictures_for

__all__ = ["EMBED_LIMIT", "REPORT_LIMIT", "Fact", "Pictures", "ReportWriter", "Thumbnail", "pictures_for", "thumbnail"]
