"""Counters for Prometheus, at /metrics: what is asked, how long each step takes, and whether the answers drift.

Labels take few values, whatever clients send: addresses are named by their handlers, models by the command line,
classes by the model, of which the first `MAX_LABELS` have a name of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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

from opal_deploy.inference.timing import Stage, StageTimer
from opal_deploy.records.record import Record

# a second series beside each, with the time when it began
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABELS = 1000
OTHER = "other"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MARGINS = (0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1)
_SIZES = tuple(1 << power for power in range(10))


class Metrics:
    """All counters of a server; every method may be called from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self.requests = Counter("opal_requests", "Requests answered.", ["route", "model", "status"], registry=registry)
        self.request_seconds = Histogram(
            "opal_request_seconds", "Seconds from the head of a request to the end of its response.",
            ["route", "model"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.in_progress = Gauge("opal_requests_in_progress", "Requests that are not answered yet.", registry=registry)
        self.stage_seconds = Histogram(
            "opal_stage_seconds",
            "Seconds of a stage: prepare (from submission until ready for a batch), in it read, decode and resize; "
            "queue (ready until its batch begins); of a batch compute and evidence; draw.",
            ["model", "stage"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.batch_images = Histogram(
            "opal_batch_images", "Images of a batch.", ["model"], buckets=_SIZES, registry=registry
        )
        self.images_in_work = Gauge("opal_images_in_work", "Images in work.", ["model"], registry=registry)
        self.capacity = Gauge("opal_images_in_work_limit", "Images in work at most.", ["model"], registry=registry)
        self.image_errors = Counter(
            "opal_image_errors", "Images that could not be classified, by the code of their records.",
            ["model", "code"], registry=registry,
        )  # fmt: skip
        self.predictions = Counter(
            "opal_predictions", "Images by predicted class and status, ok or abstained (see --min-margin).",
            ["model", "label", "status"], registry=registry,
        )  # fmt: skip
        self.margin = Histogram(
            "opal_margin", "Cosine of the predicted class minus that of the runner-up.", ["model"],
            buckets=_MARGINS, registry=registry,
        )  # fmt: skip
        self.model = Info("opal_model", "What is served.", ["model"], registry=registry)

    def count_record(self, model: str, record: Record) -> None:
        """Count an image's record."""
        if "error" in record:
            self.image_errors.labels(model, record["error"]["code"]).inc()
            return
        answer = record["prediction"]
        label = answer["label"] if answer["class_id"] < MAX_LABELS else OTHER
        self.predictions.labels(model, label, record["status"]).inc()
        margin = record.get("margin")
        if margin is not None:
            self.margin.labels(model).observe(margin)

    def describe(self, model: str, facts: Mapping[str, str]) -> None:
        """Set what the metric `opal_model_info` says of a model."""
        self.model.labels(model).info(dict(facts))

    def render(self) -> bytes:
        """Return all counters in Prometheus's text format."""
        return generate_latest(self.registry)


class MetricsTimer(StageTimer):
    """A timer that puts each time it is given into the metrics of one model."""

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
        """Observe the time that a stage took in a worker process, of one image."""
        self._metrics.stage_seconds.labels(self._model, name).observe(wall)
