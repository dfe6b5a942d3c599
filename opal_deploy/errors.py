"""Every failure that opal-deploy knows how to name.

    OpalError                    base class; `exit_code` is what the CLI exits with
    ├── UsageError          2    the call or one of its inputs is wrong
    │   ├── MissingExtra    2    a package of one of our extras is not installed
    │   ├── ArtifactError   2    a model file is missing, corrupt, or not ours
    │   └── CheckpointError 2    a checkpoint does not fit what it is meant for
    ├── ImageError          3    one image cannot be used; it gets an error record
    ├── VerificationError   4    outputs differ from the reference; nothing was left behind
    └── StoppedEarly        5    disk full, device lost, too many errors; can be resumed
        └── OutOfMemory     5    a device's memory is full; fewer pictures at a time may fit

Messages are one line: what was wrong, what was found, what was expected, what to do.
Anything else that reaches the CLI is our bug and exits with 1.
"""

from __future__ import annotations

import importlib.util


class OpalError(Exception):
    """Base of all errors that are not bugs of ours."""

    exit_code = 1


class UsageError(OpalError):
    """The call or one of its inputs is wrong."""

    exit_code = 2


class MissingExtra(UsageError):
    """A package is missing that one of our extras installs.

    Args:
        package: what could not be imported, as a person would `pip install` it.
        extra: the extra of opal-deploy that brings it.
        purpose: what it is needed for, completing "X needs ...".
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'opal-deploy[{extra}]'")


class ArtifactError(UsageError):
    """A model file is missing, corrupt, or not one of ours."""


class CheckpointError(UsageError):
    """A checkpoint does not fit the network that it is meant for."""


class ImageError(OpalError):
    """One image cannot be used. It is the image's fault, and it costs no other image anything.

    Args:
        code: a stable machine-readable word; `preprocess.decode` lists them.
        message: one line for a person.
    """

    exit_code = 3

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(" ".join(message.split()))


class VerificationError(OpalError):
    """An artifact's outputs differ from the reference by more than its gate allows."""

    exit_code = 4


class StoppedEarly(OpalError):
    """The run ended before its inputs did; what was written is complete and can be resumed."""

    exit_code = 5


class OutOfMemory(StoppedEarly):
    """The memory of a device, or what the host may pin, is full; a smaller batch may fit."""


def require(package: str, extra: str, purpose: str, *, pip_name: str | None = None) -> None:
    """Raise MissingExtra unless `package` can be found (without importing it)."""
    try:
        found = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise MissingExtra(pip_name or package, extra, purpose)


def first_line(error: Exception) -> str:
    """What another library's error says, for a line of ours: its first line, at most 200 characters, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
