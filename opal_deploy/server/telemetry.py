"""The server's log on stderr, and its metrics for Prometheus.

Metric labels take few values, whatever clients send: routes are named after their handlers, models by the command line,
and only the first `MAX_LABELS` classes have a label of their own.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from opal_deploy.logs import one_line
from opal_deploy.records.record import Failed, Record
from opal_deploy.records.shifts import KINDS
from opal_deploy.server.drift import Comparison
from opal_deploy.server.options import LogFormat
from opal_deploy.timing import Stage, StageTimer

# they would double the number of series
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABELS = 1000
_OTHER = "other"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MARGINS = (0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1)
_SIZES = tuple(1 << power for power in range(10))


class ServerLog:
    """Writes whole lines to stderr, from any thread; `off` writes messages only, as text."""

    def __init__(self, log_format: LogFormat = "text") -> None:
        self._format, self._lock = log_format, threading.Lock()

    def message(self, text: str, level: str = "info") -> None:
        """Write a line that belongs to no single request."""
        if self._format == "json":
            self._write_json({"level": level, "event": "message", "message": text})
        else:
            self._write(one_line(text))

    def request(self, fields: dict[str, Any]) -> None:
        """Write a request's line: `method`, `path`, `status`, `ms`, then the other fields in order."""
        if self._format == "json":
            self._write_json({"level": "info", "event": "request", **fields})
        elif self._format == "text":
            method, path, status, ms, *rest = fields.items()
            head = f"{_now()} {method[1]} {path[1]} {status[1]} {ms[1]} ms"
            self._write(one_line(" ".join([head, *(f"{name}={value}" for name, value in rest)])))

    def take_over_libraries(self) -> None:
        """Write the warnings and tracebacks of the HTTP libraries as messages."""
        for name in ("uvicorn", "uvicorn.error", "asyncio"):
            logger = logging.getLogger(name)
            logger.handlers[:] = [_Handler(self)]
            logger.setLevel(logging.WARNING)
            logger.propagate = False
        # a damaged form is answered, not logged
        logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

    def _write_json(self, fields: dict[str, Any]) -> None:
        self._write(json.dumps({"time": _now(), **fields}))

    def _write(self, line: str) -> None:
        with self._lock:
            try:
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
            except (BrokenPipeError, ValueError):
                # requests are answered even when stderr is closed
                pass


class _Handler(logging.Handler):
    def __init__(self, log: ServerLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record and its traceback, one message per line."""
        for line in self.format(record).splitlines():
            self._log.message(line, record.levelname.lower())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Metrics:
    """A server's metrics; every method may be called from any thread."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self.requests = Counter("opal_requests", "Requests answered.", ["route", "model", "status"], registry=registry)
        self.request_seconds = Histogram(
            "opal_request_seconds", "Seconds from the start of a request to the end of its response.",
            ["route", "model"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.in_progress = Gauge("opal_requests_in_progress", "Requests not yet answered.", registry=registry)
        self.stage_seconds = Histogram(
            "opal_stage_seconds",
            "Seconds per stage. Per image: prepare (from submission until ready for a batch), of which read, decode "
            "and resize; queue (from ready until its batch begins); draw. Per batch: compute and evidence.",
            ["model", "stage"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.batch_images = Histogram(
            "opal_batch_images", "Images per batch.", ["model"], buckets=_SIZES, registry=registry
        )
        self.images_in_flight = Gauge("opal_images_in_flight", "Images in flight.", ["model"], registry=registry)
        self.capacity = Gauge(
            "opal_images_in_flight_limit", "Maximum number of images in flight.", ["model"], registry=registry
        )
        self.image_errors = Counter(
            "opal_image_errors", "Images that could not be classified, by error code.", ["model", "code"],
            registry=registry,
        )  # fmt: skip
        self.predictions = Counter(
            "opal_predictions", "Images by predicted class and status: ok, abstained (--min-margin) or unknown.",
            ["model", "label", "status"], registry=registry,
        )  # fmt: skip
        self.margin = Histogram(
            "opal_margin", "Cosine of the predicted class minus that of the runner-up.", ["model"],
            buckets=_MARGINS, registry=registry,
        )  # fmt: skip
        self.drift_effect = Gauge(
            "opal_drift_effect", "Largest effect of the last window's shifts from the baseline; 0 without a shift.",
            ["model", "kind"], registry=registry,
        )  # fmt: skip
        self.drift_q = Gauge(
            "opal_drift_q", "Smallest q-value of the last window's comparisons.", ["model", "kind"], registry=registry
        )
        self.drift_shifts = Gauge(
            "opal_drift_shifts", "Shifts of the last window from the baseline.", ["model", "kind"], registry=registry
        )
        self.drift_images = Gauge(
            "opal_drift_window_images", "Images in the last complete window.", ["model"], registry=registry
        )
        self.drift_end = Gauge(
            "opal_drift_window_end_timestamp_seconds", "Unix time of the end of the last complete window.", ["model"],
            registry=registry,
        )  # fmt: skip
        self.model = Info("opal_model", "The models served.", ["model"], registry=registry)

    def count_record(self, model: str, record: Record) -> None:
        """Count an image's record."""
        if isinstance(record, Failed):
            self.image_errors.labels(model, record.error.code).inc()
            return
        answer = record.prediction
        label = answer.label if answer.class_id < MAX_LABELS else _OTHER
        self.predictions.labels(model, label, record.status).inc()
        if record.margin is not None:
            self.margin.labels(model).observe(record.margin)

    def set_drift(self, model: str, last: Comparison) -> None:
        """Set the metrics of a model's last complete window."""
        for kind in KINDS:
            self.drift_effect.labels(model, kind).set(last.effect(kind))
            self.drift_q.labels(model, kind).set(last.q(kind))
            self.drift_shifts.labels(model, kind).set(sum(shift.kind == kind for shift in last.shifts))
        self.drift_images.labels(model).set(last.window.counts.images)
        self.drift_end.labels(model).set(last.window.ended or 0.0)

    def describe(self, model: str, facts: Mapping[str, str]) -> None:
        """Set a model's `opal_model_info` labels."""
        self.model.labels(model).info(dict(facts))

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class MetricsTimer(StageTimer):
    """A timer that observes each time in the metrics of one model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        super().__init__()
        self._metrics, self._model = metrics, model

    @contextmanager
    def _timed(self, name: Stage) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._metrics.stage_seconds.labels(self._model, name).observe(time.perf_counter() - start)

    stage = _timed

    def add(self, name: Stage, wall: float, cpu: float, calls: int) -> None:
        """Observe an image's time for a stage in a worker process."""
        self._metrics.stage_seconds.labels(self._model, name).observe(wall)
