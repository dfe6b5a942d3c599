"""URLs: which texts are supported URLs, and which part of a URL records and messages may show."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl

from opal_deploy.errors import UsageError, require

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/?#@\s]*@")
_HTTP_QUERY = re.compile(r"(?i)(\bhttps?://[^\s?#'\"]*)\?([^\s#'\"]*)(#[^\s'\"]*)?")
# parameters of signed URLs (AWS, Google, Azure, CloudFront) and others that grant access
_SECRET = re.compile(
    r"(?i)x-amz-|x-goog-|sig|token|key|secret|passw|pwd|pass$|auth|cred|session|jwt|policy|awsaccesskeyid|code$"
)


class Scheme(NamedTuple):
    """A supported scheme: fsspec's module, our extra that installs it, and whether it names objects in a bucket."""

    package: str
    extra: str
    is_bucket: bool = True


SCHEMES = {
    "s3": Scheme("s3fs", "s3"),
    "s3a": Scheme("s3fs", "s3"),
    "gs": Scheme("gcsfs", "gcs"),
    "gcs": Scheme("gcsfs", "gcs"),
    "az": Scheme("adlfs", "azure"),
    "abfs": Scheme("adlfs", "azure"),
    "abfss": Scheme("adlfs", "azure"),
    "http": Scheme("aiohttp", "http", is_bucket=False),
    "https": Scheme("aiohttp", "http", is_bucket=False),
}
_EXPECTED = "expected a path, or a URL with s3://, gs://, az://, abfs:// or https://"


def is_url(text: str) -> bool:
    """Return whether a text is a URL rather than a path, even one with an unsupported scheme."""
    return _URL.match(text) is not None


def parse_scheme(url: str) -> str:
    """Return the scheme of a URL, in lower case; raise UsageError or MissingExtra if it is not supported."""
    match = _URL.match(url)
    name = match[1].lower() if match else ""
    scheme = SCHEMES.get(name)
    if scheme is None:
        what = "give the path itself, without file://" if name == "file" else _EXPECTED
        raise UsageError(f"{redact(url)}: {name}:// is not read; {what}")
    if scheme.is_bucket and re.match(r"[^/]*:[^/]*@", url.partition("://")[2]):
        raise UsageError(
            f"{redact(url)}: credentials inside the URL are not used; set them in the environment, a profile or a role"
        )
    if scheme.is_bucket and url.partition("://")[2][:1] in ("", "/"):
        raise UsageError(f"{url}: it names no bucket; expected {name}://BUCKET/...")
    require(scheme.package, scheme.extra, f"reading {name}://")
    require("fsspec", scheme.extra, f"reading {name}://")
    return name


def is_bucket_url(text: str) -> bool:
    """Return whether a text is the URL of a bucket, a folder or an object in one."""
    match = _URL.match(text)
    scheme = SCHEMES.get(match[1].lower()) if match else None
    return scheme is not None and scheme.is_bucket


def redact(text: str) -> str:
    """Return a text whose URLs show no user names, passwords or signatures.

    For `https://` the whole query is removed if one of its parameters grants access, so that a URL that was signed
    again looks the same; other queries stay, since they may be all that distinguishes two images.
    """

    def shown(match: re.Match[str]) -> str:
        names = [name for name, _ in parse_qsl(match[2], keep_blank_values=True)]
        return match[1] if any(_SECRET.search(name) for name in names) else match[0]

    def without_user(match: re.Match[str]) -> str:
        # abfs://container@account.dfs.core.windows.net has no user
        keeps = match[1].lower().startswith(("abfs", "az")) and ":" not in match[0][len(match[1]) :]
        return match[0] if keeps else match[1]

    return _HTTP_QUERY.sub(shown, _USERINFO.sub(without_user, text)) if "://" in text else text
