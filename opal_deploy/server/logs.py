"""The server's log on stderr: a line a request, as text for people or as JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any


class LogFormat(StrEnum):
    """How lines are written; `off`: messages as text, and no line for a request."""

    text = "text"
    json = "json"
    off = "off"


class ServerLog:
    """Writes lines to stderr, whole ones, from any thread."""

    def __init__(self, log_format: LogFormat = LogFormat.text) -> None:
        self._format, self._lock = log_format, threading.Lock()

    def message(self, text: str, level: str = "info") -> None:
        """Write something that concerns no single request."""
        if self._format is LogFormat.json:
            self._write(_to_json({"level": level, "event": "message", "message": text}))
        else:
            self._write(_printable(text))

    def request(self, fields: dict[str, Any]) -> None:
        """Write the line of a request: `method`, `path`, `status`, `ms` and what else is known of it, in order."""
        if self._format is LogFormat.json:
            self._write(_to_json({"level": "info", "event": "request", **fields}))
        elif self._format is LogFormat.text:
            head = f"{_now()} {fields['method']} {fields['path']} {fields['status']} {fields['ms']} ms"
            known = {name: value for name, value in fields.items() if name not in ("method", "path", "status", "ms")}
            self._write(_printable(" ".join([head, *(f"{name}={value}" for name, value in known.items())])))

    def take_over_libraries(self) -> None:
        """Write warnings of the libraries that serve, and their tracebacks, as messages here."""
        for name in ("uvicorn", "uvicorn.error"):
            logger = logging.getLogger(name)
            logger.handlers[:] = [_Handler(self)]
            logger.setLevel(logging.WARNING)
            logger.propagate = False
        # what is wrong with a form is answered, not logged
        logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

    def _write(self, line: str) -> None:
        with self._lock:
            try:
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
            except (BrokenPipeError, ValueError):
                # nobody reads the log any more; requests are answered all the same
                pass


class _Handler(logging.Handler):
    def __init__(self, log: ServerLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`; a traceback is part of the message."""
        for line in self.format(record).splitlines():
            self._log.message(line, record.levelname.lower())


def _to_json(fields: dict[str, Any]) -> str:
    return json.dumps({"time": _now(), **fields}, ensure_ascii=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _printable(text: str) -> str:
    """Return text that cannot break its line, nor steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
