"""What TensorRT says while it builds and runs: errors kept for our one line, the rest for `--verbose`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make_logger(module: Any, listen: Callable[[str, str], None] | None = None) -> Any:
    """A logger for a bindings module, with `errors`, the messages of severity error or worse in order.

    Args:
        module: `tensorrt` or `tensorrt_rtx`.
        listen: called with (severity, message) for everything except verbose chatter.
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


def last_words(logger: Any) -> str:
    """The first error of a failure, which tells the cause; those after it follow from it."""
    return logger.errors[0][:300] if logger.errors else "it gave no reason"
