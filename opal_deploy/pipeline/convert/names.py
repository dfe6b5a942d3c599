"""Names of images for other programs."""

from __future__ import annotations

from opal_deploy.pipeline.names import unescape_name


def file_name(image: str | None) -> str:
    """The image's own path where it is text; as the record escapes it where it is not."""
    if image is None:
        return ""
    plain = unescape_name(image)
    try:
        plain.encode("utf-8")
    except UnicodeEncodeError:
        return image
    return plain
