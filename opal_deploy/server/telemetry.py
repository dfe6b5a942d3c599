"""The server's log on stderr, the file of its records, and its metrics for Prometheus.

Metric labels take few values, whatever clients send: routes are named after their handlers, models by the command line,
and only the first `MAX_LABELS` classes have a label of their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client as prometheus

from opal_deploy.errors import UsageError
from opal_deploy.logs import one_line
from opal_deploy.records.lines import to_json_line
from opal_deploy.records.record import Failed, Record
from opal_deploy.server.options import LogFormat

# they would double the number of series
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]

MAX_LABELS = 1000
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MARGINS = (0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1)
_SIZES = tuple(1 << power for power in range(10))


class ServerLog:
    """Writes whole lines to stderr, from any thread; `off` writes messages only, as text."""

    def __init__(self, log_format: LogFormat = "text") -> None:
        self._format = log_format

    def message(self, text: str, level: str = "info") -> None:
        """Write a line that belongs to no single request."""
        self._write(one_line(text), {"level": level, "event": "message", "message": text})

    def request(self, fields: dict[str, Any]) -> None:
        """Write a request's line."""
        if self._format != "off":
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            self._write(f"{_now()} {one_line(text)}", {"level": "info", "event": "request", **fields})

    def _write(self, text: str, fields: dict[str, Any]) -> None:
        line = json.dumps({"time": _now(), **fields}) if self._format == "json" else text
        # one call writes a whole line; requests are answered even when stderr is closed
        with suppress(BrokenPipeError, ValueError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RecordFile:
    """A JSON Lines file that every served record is appended to; a full disk costs records, not answers."""

    def __init__(self, path: Path, log: ServerLog) -> None:
        self._path, self._log, self._failed = path, log, False
        try:
            # unbuffered and appended: each write is one whole line
            self.stream = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"--records {path}: cannot be written ({error.strerror}); choose another file") from None

    def write(self, record: Record) -> None:
        """Append a record; the first failure is logged."""
        line, problem = to_json_line(record), ""
        try:
            if (written := self.stream.write(line)) < len(line):
                # only whole lines stay
                self.stream.truncate(self.stream.seek(0, os.SEEK_END) - written)
                problem = "no space left on device"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem and not self._failed:
            self._log.message(f"--records {self._path}: records are lost ({problem})", "error")
        self._failed = bool(problem)


class Metrics:
    """A server's metrics; every method may be called from any thread."""

    def __init__(self) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        counter, gauge = partial(prometheus.Counter, registry=registry), partial(prometheus.Gauge, registry=registry)
        histogram = partial(prometheus.Histogram, registry=registry, buckets=_SECONDS)
        self.requests = counter("opal_requests", "Requests answered.", ["route", "model", "status"])
        self.request_seconds = histogram("opal_request_seconds", "Seconds per request.", ["route", "model"])
        self.stage_seconds = histogram(
            "opal_stage_seconds", "Seconds per image (prepare, queue) or per batch (compute).", ["model", "stage"]
        )
        self.batch_images = histogram("opal_batch_images", "Images per batch.", ["model"], buckets=_SIZES)
        self.images_in_flight = gauge("opal_images_in_flight", "Images in flight.", ["model"])
        self.image_errors = counter("opal_image_errors", "Images with an error record.", ["model", "code"])
        self.predictions = counter("opal_predictions", "Images by predicted class.", ["model", "label", "status"])
        self.margin = histogram("opal_margin", "Margins of predictions.", ["model"], buckets=_MARGINS)
        self.model = prometheus.Info("opal_model", "The models served.", ["model"], registry=registry)

    def count_record(self, model: str, record: Record) -> None:
        """Count an image's record."""
        if isinstance(record, Failed):
            self.image_errors.labels(model, record.error.code).inc()
            return
        answer = record.prediction
        label = answer.label if answer.class_id < MAX_LABELS else "other"
        self.predictions.labels(model, label, record.status).inc()
        if record.margin is not None:
            self.margin.labels(model).observe(record.margin)

    def observe(self, model: str, stage: str, seconds: Sequence[float]) -> None:
        """Count the seconds that images spent in a stage; those in the queue belong to one batch."""
        if stage == "queue":
            self.batch_images.labels(model).observe(len(seconds))
        for value in seconds:
            self.stage_seconds.labels(model, stage).observe(value)
