"""What all requests share: the models, the limits, the counters, and whether the server is well."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from opal_deploy.errors import StoppedEarly
from opal_deploy.inference.service import ServiceObserver
from opal_deploy.server.limits import Gate, HttpError, Limits
from opal_deploy.server.logs import LogFormat, ServerLog
from opal_deploy.server.metrics import Metrics
from opal_deploy.server.models import EXPLAIN_SUFFIX, ServedModel


class ServerState:
    """What all requests share.

    Attributes:
        models: in the order in which they were given.
        limits: of requests.
        gate: lets requests in.
        metrics: counts them.
        log: has a line for each.
        token: what a client must show; None: nothing.
        problem: why no requests are to be sent here any more; empty while all is well.
        failed: whether a restart alone can help.
    """

    def __init__(self, limits: Limits | None = None, *, token: str | None = None, log: ServerLog | None = None) -> None:
        self.models: list[ServedModel] = []
        self.limits = limits or Limits()
        self.gate = Gate(self.limits)
        self.metrics = Metrics()
        self.log = log or ServerLog(LogFormat.off)
        self.token = token
        self.problem, self.failed = "", False

    def add(self, model: ServedModel) -> None:
        """Serve a model too."""
        self.models.append(model)
        metrics, service = self.metrics, model.service
        metrics.images_in_work.labels(model.name).set_function(lambda: service.in_work)
        metrics.capacity.labels(model.name).set(service.capacity)
        metrics.describe(model.name, model.facts())

    def find(self, name: str) -> tuple[ServedModel, bool]:
        """Return the model of a name, and whether the name is that of its explain model.

        Raises:
            HttpError: there is none.
        """
        for model in self.models:
            if name in (model.name, model.name + EXPLAIN_SUFFIX):
                return model, name != model.name
        known = ", ".join(f"{model.name}, {model.name}{EXPLAIN_SUFFIX}" for model in self.models)
        raise HttpError(HTTPStatus.NOT_FOUND, f"model {name[:80]!r} found, one of {known} expected")

    def observer(self, model: str) -> ServiceObserver:
        """Return what is told of the work of a model's service."""
        return _Observer(self, model)


class _Observer(ServiceObserver):
    """Counts what the service of one model does, and gives the server up once its device is lost."""

    def __init__(self, state: ServerState, model: str) -> None:
        self._state, self._model = state, model

    def prepared(self, seconds: float) -> None:
        """See `ServiceObserver.prepared`."""
        self._state.metrics.stage_seconds.labels(self._model, "prepare").observe(seconds)

    def batch_began(self, waited: Sequence[float]) -> None:
        """See `ServiceObserver.batch_began`."""
        metrics = self._state.metrics
        metrics.batch_images.labels(self._model).observe(len(waited))
        queue = metrics.stage_seconds.labels(self._model, "queue")
        for seconds in waited:
            queue.observe(seconds)

    def device_lost(self, error: StoppedEarly) -> None:
        """See `ServiceObserver.device_lost`."""
        self._state.problem, self._state.failed = str(error), True
