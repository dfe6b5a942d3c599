"""The file systems of URLs, by fsspec: opened once per process, with retries, and errors in one line.

Credentials are found as the storage's own libraries find them: environment, profiles, roles of the machine, and
fsspec's configuration files (https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from opal_deploy.errors import ImageError, first_line
from opal_deploy.storage.urls import parse_scheme, redact

T = TypeVar("T")

# how long temporary failures are retried, with waits that double
PATIENCE_SECONDS = 20.0
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0
# until the connection is open, and between two parts of a response
_CONNECT_SECONDS, _READ_SECONDS = 5, 15
# classes of aiohttp, botocore, azure-core and fsspec, by name so that these are not imported
_LOST_CONNECTIONS = frozenset(
    ["EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError", "HTTPClientError", "ResponseParserError",
     "ConnectionClosedError", "IncompleteReadError", "ClientConnectionError", "ClientPayloadError", "FSTimeoutError",
     "ServiceRequestError", "ServiceResponseError"]
)  # fmt: skip
_BUSY_ERRNOS = (errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO))

# by process, so that a fork opens its own, and by scheme
_filesystems: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()


def open_filesystem(url: str) -> Any:
    """Return fsspec's file system of a URL, for any thread of this process; raise ImageError if it cannot be opened."""
    scheme = parse_scheme(url)
    # the account of abfs://container@account.dfs.core.windows.net is an option of its file system
    account = url.partition("://")[2].partition("/")[0] if "@" in url and scheme.startswith(("abfs", "az")) else ""
    key = (os.getpid(), f"{scheme}://{account}")
    with _lock:
        if key not in _filesystems:
            import fsspec

            _silence_libraries()
            try:
                filesystem, _ = fsspec.url_to_fs(url, **_options(scheme))
            except Exception as error:  # as in `retry`: no account, no credentials
                raise to_image_error(error) from None
            if hasattr(filesystem, "call_s3"):
                # `retry` and botocore retry already; a third loop would multiply the time
                filesystem.retries = 1
            _filesystems[key] = filesystem
        return _filesystems[key]


def _silence_libraries() -> None:
    """Send the libraries' log messages only to loggers that the caller has set up."""
    for name in ("fsspec", "s3fs", "gcsfs", "adlfs", "azure", "google", "aiobotocore", "asyncio"):
        logging.getLogger(name).addHandler(logging.NullHandler())


def _options(scheme: str) -> dict[str, Any]:
    # a cached listing would hide changes; fsspec caches one file system per thread
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme in ("s3", "s3a"):
        from fsspec.config import conf

        config = {
            "retries": {"mode": "standard", "max_attempts": 3},
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
        }
        options["config_kwargs"] = {**config, **conf.get("s3", {}).get("config_kwargs", {})}
    elif scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
        # trust_env: proxies from the environment. URLs stay as given: a signature covers the exact characters
        options |= {"client_kwargs": {"timeout": timeout, "trust_env": True}, "encoded": True}
    return options


def retry(operation: Callable[[], T], patience: float | None = None) -> T:
    """Return the result of an operation; retry it during temporary failures.

    Args:
        operation: can be repeated after it failed.
        patience: seconds after which it is not retried; None: `PATIENCE_SECONDS`.

    Raises:
        ImageError: `not_found`, `unreadable`, or `storage_unavailable` if all retries failed; the message has no URL.
    """
    began, wait = time.monotonic(), _FIRST_WAIT
    patience = PATIENCE_SECONDS if patience is None else patience
    while True:
        try:
            return operation()
        except ImageError:
            raise
        except Exception as error:  # the libraries of the storages have no common class of errors
            if not is_temporary(error) or time.monotonic() - began + wait > patience:
                raise to_image_error(error) from None
        time.sleep(wait * random.uniform(0.5, 1))
        wait = min(2 * wait, _LONGEST_WAIT)


def response_code(error: BaseException) -> tuple[int | None, str]:
    """Return the HTTP status and the storage's own code of an error; None and "" where it has none."""
    for cause in (error, error.__cause__):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return (int(status) if status else None), str(response.get("Error", {}).get("Code", ""))
        for name in ("status", "status_code", "code"):  # aiohttp, Azure, gcsfs
            value = getattr(cause, name, None)
            if isinstance(value, int):
                return value, ""
    return None, ""


def is_temporary(error: BaseException) -> bool:
    """Return whether the same operation may succeed soon: throttling, an internal error, a lost connection."""
    # first: a broken connection may have an HTTP status, too, of a response that never arrived
    if not _class_names(error).isdisjoint(_LOST_CONNECTIONS):
        return True
    status, code = response_code(error)
    if status is not None:
        codes = ("SlowDown", "RequestTimeout", "ConditionalRequestConflict")
        return status in (408, 425, 429) or (status >= 500 and status != 501) or code in codes
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return False
    if isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError | asyncio.IncompleteReadError):
        return True
    if isinstance(error, OSError) and error.errno in _BUSY_ERRNOS:
        return True
    return isinstance(error, OSError) and error.__cause__ is not None and is_temporary(error.__cause__)


def _class_names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _one_line(error: BaseException) -> str:
    # botocore describes an invalid name after the first line
    return first_line(Exception(" ".join(str(error).split()) or type(error).__name__))


def to_image_error(error: BaseException) -> ImageError:
    """Return the ImageError for a storage library's exception."""
    status, code = response_code(error)
    names = _class_names(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        bucket = " bucket" if code == "NoSuchBucket" else " object"
        return ImageError("not_found", f"no such{bucket}")
    if not names.isdisjoint(("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")):
        return ImageError("unreadable", "no credentials were found; set them as for the storage's own tools")
    if "TooManyRedirects" in names:
        return ImageError("unreadable", "the server refers from one address to another without end")
    lost = not names.isdisjoint(_LOST_CONNECTIONS)
    answer = "" if lost else code or (f"status {status}" if status is not None else "")
    if isinstance(error, PermissionError) or status in (401, 403):
        return ImageError("unreadable", f"access is refused ({answer or 'permission denied'})")
    if is_temporary(error):
        what = answer or type(error).__name__
        return ImageError("storage_unavailable", f"the storage did not answer within {PATIENCE_SECONDS:g} s ({what})")
    if answer in ("400", "status 400"):
        # the answer to HEAD has no body that would say more
        return ImageError("unreadable", "the request is refused (status 400), as where credentials have expired")
    return ImageError("unreadable", f"it cannot be used: {answer or redact(_one_line(error))}")
