"""Exceptions that this package raises on purpose.

    OpalError                    base class; `exit_code` is the exit code of the command line
    ├── UsageError          2    the call or one of its inputs is wrong
    │   ├── MissingExtra    2    a package of one of our extras is not installed
    │   ├── ArtifactError   2    a model file is missing, corrupt, or not ours
    │   └── CheckpointError 2    a checkpoint does not fit its purpose
    ├── ImageError          3    one image cannot be used; it gets an error record
    ├── VerificationError   4    outputs differ from the reference; nothing was left behind
    └── StoppedEarly        5    disk full, device lost, too many errors; the run can be resumed
        └── OutOfMemory     5    a device's memory is full; a smaller batch may fit

A message is one line: what was wrong, what was found, what was expected, what to do.
Any other exception that reaches the command line is an internal error; the exit code is 1.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum

_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    DONE = 0
    BUG = 1
    USAGE = 2
    SOME_IMAGES_FAILED = 3
    VERIFICATION_FAILED = 4
    STOPPED_EARLY = 5
    INTERRUPTED = 130


class OpalError(Exception):
    """Base class of all errors that this package raises on purpose."""

    exit_code: ExitCode = ExitCode.BUG


class UsageError(OpalError):
    """The call or one of its inputs is wrong."""

    exit_code: ExitCode = ExitCode.USAGE


class MissingExtra(UsageError):
    """A package of one of our extras is not installed.

    Args:
        package: the distribution, as `pip install` names it.
        extra: the extra of opal-deploy that installs the package.
        purpose: what needs the package, completing "PURPOSE needs PACKAGE".
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package, self.extra, self.purpose = package, extra, purpose
        super().__init__(f"{purpose} needs {package}, which is not installed: {install_command(extra)}")

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        # by default an exception is unpickled from its message only
        return type(self), (self.package, self.extra, self.purpose)


class ArtifactError(UsageError):
    """A model file is missing, corrupt, or not one of ours."""


class CheckpointError(UsageError):
    """A checkpoint is damaged, or does not fit the network that it is loaded into."""


class ImageError(OpalError):
    """One image cannot be used; the other images of a run are not affected.

    Args:
        code: a stable machine-readable word; `preprocess.decode` lists them.
        message: one line for users.
    """

    exit_code: ExitCode = ExitCode.SOME_IMAGES_FAILED

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(" ".join(message.split()))

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        # by default an exception is unpickled from its message only
        return type(self), (self.code, str(self))


class VerificationError(OpalError):
    """An artifact's outputs differ from the reference by more than its gate allows."""

    exit_code: ExitCode = ExitCode.VERIFICATION_FAILED


class StoppedEarly(OpalError):
    """The run ended before all inputs were processed; it can be resumed."""

    exit_code: ExitCode = ExitCode.STOPPED_EARLY


class OutOfMemory(StoppedEarly):
    """A device's memory, or the host's page-locked memory, is full; a smaller batch may fit."""


def install_command(extras: str, *, instead_of: str = "") -> str:
    """Return the command that adds extras, such as `cpu,serve`, to an opal-deploy from a checkout or an index.

    Args:
        instead_of: a package that is broken or in the way. `--force-reinstall` would look for opal-deploy in an index.
    """
    first = f"pip uninstall --yes {instead_of}, then " if instead_of else ""
    return f"{first}pip install 'opal-deploy[{extras}]'"


def require(package: str, extra: str, purpose: str, *, pip_name: str | None = None) -> None:
    """Raise MissingExtra unless `package` is installed; does not import it."""
    if not is_installed(package):
        raise MissingExtra(pip_name or package, extra, purpose)


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it; an empty folder left behind does not count."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, at most 200 characters; without a message, its type.

    Terminal codes, such as those for bold text, are left out.
    """
    text = _TERMINAL_CODE.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def suggest_attribute(name: str, known: Mapping[str, str]) -> str:
    """Return the end of an AttributeError: what to use instead of a name that people try from habit, or nothing."""
    return f"; use {known[name]}" if name in known else ""


def suggest_names(name: str, names: Sequence[str]) -> str:
    """Return the end of an error: `; did you mean ...?` with the known names closest to an unknown one, or nothing."""
    close = difflib.get_close_matches(name, names, n=6)
    return f"; did you mean {', '.join(close)}?" if close else ""
