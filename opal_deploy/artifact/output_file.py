"""The rule for every file that a command writes: which existing files it may replace. Light to import."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from opal_deploy.artifact.files import check_replaceable, is_same_file
from opal_deploy.errors import UsageError
from opal_deploy.options import StrPath


def check_output(
    option: str, path: Path, suffixes: Iterable[str], *, inputs: Iterable[StrPath | None] = (), overwrite: bool
) -> None:
    """Check that a file may be written; the caller then uses `atomic_write(path, replace=overwrite)`.

    Args:
        option: the option that names the file, such as `--html`.
        path: the file.
        suffixes: the suffixes of its kind, such as `.html`.
        inputs: files that the call reads; anything else, such as a URL, is ignored.
        overwrite: whether a file of its kind may be replaced.

    Raises:
        UsageError: the path exists and is not a file of this kind, is a file that the call reads, or is any file
            without `overwrite`.
    """
    advice = "give another name"
    try:
        if not check_replaceable(path):
            return
        if any(is_same_file(path, Path(each)) for each in inputs if each is not None):
            raise UsageError(f"{option} {path}: this call reads that file; {advice}")
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error.strerror or error}); {advice}") from None
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} {path}: exists and is not a {' or '.join(suffixes)} file; {advice}")
    if not overwrite:
        raise UsageError(f"{option} {path}: the file exists; choose another name, or pass --overwrite")
