"""The Python bindings of TensorRT and TensorRT for RTX, one API under two import names, and a logger for either."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opal_deploy.errors import MissingExtra, UsageError, first_line
from opal_deploy.runtime import diagnostics

TENSORRT = "tensorrt"
TENSORRT_RTX = "tensorrt-rtx"
# the name of each as an import, in file names, as an extra of opal-deploy, and for people
MODULES = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt_rtx"}
SHORT_NAMES = {TENSORRT: "trt", TENSORRT_RTX: "rtx"}
EXTRAS = {TENSORRT: "trt", TENSORRT_RTX: "trt-rtx"}
TITLES = {TENSORRT: "TensorRT", TENSORRT_RTX: "TensorRT for RTX"}


@dataclass(frozen=True)
class Bindings:
    """A loaded library.

    Attributes:
        name: `tensorrt` or `tensorrt-rtx`.
        module: the imported bindings.
        version: in full, such as 11.4.0.106; plans are bound to it.
        cuda: the CUDA major version that the library is made for.
    """

    name: str
    module: Any
    version: str
    cuda: int

    @property
    def title(self) -> str:
        """The library's name and version, for messages."""
        return f"{TITLES[self.name]} {self.version}"


def installed_version(name: str) -> str | None:
    """Return the full version of an installed library, without importing it; None if any part of it is missing."""
    if name not in MODULES:
        return None
    return diagnostics.tensorrt_version(name, MODULES[name])


def load(name: str, purpose: str) -> Bindings:
    """Import a library.

    Args:
        name: `tensorrt` or `tensorrt-rtx`.
        purpose: what the library is needed for, completing "X needs ...".

    Raises:
        MissingExtra: the library is not installed.
        UsageError: it is installed, but does not load.
    """
    if installed_version(name) is None:
        raise MissingExtra(f"{name}-cu13", EXTRAS[name], purpose)
    try:
        module = importlib.import_module(MODULES[name])
    except Exception as error:  # a missing library is FileNotFoundError, OSError or ImportError, as it happens
        raise UsageError(
            f"{TITLES[name]} is installed but does not load ({first_line(error)}); see `opal-deploy doctor`"
        ) from None
    return Bindings(name, module, str(module.__version__), diagnostics.tensorrt_cuda_major(name))


def make_logger(module: Any, listen: Callable[[str, str], None] | None = None) -> Any:
    """Create a logger for a bindings module; its `errors` collect the messages of severity error or worse.

    Args:
        module: `tensorrt` or `tensorrt_rtx`.
        listen: called with (severity, message) for every message that is not verbose.
    """

    class Log(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            # called from native code: an exception here would end the process
            try:
                level = str(getattr(severity, "name", severity))
                if level in ("ERROR", "INTERNAL_ERROR"):
                    self.errors.append(" ".join(message.split()))
                if listen is not None and level != "VERBOSE":
                    listen(level, message)
            except Exception:
                pass

    return Log()


def first_error(logger: Any) -> str:
    """Return the first error of a logger, which names the cause; later errors follow from it."""
    return logger.errors[0][:300] if logger.errors else "it gave no reason"
