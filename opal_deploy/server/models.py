"""The models that a server serves, and the state that all its requests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

import numpy as np
from starlette.exceptions import HTTPException

from opal_deploy._version import __version__
from opal_deploy.api.service import Service
from opal_deploy.artifact.outputs import INPUT, tensor_specs
from opal_deploy.predict.explain_tensors import BOX, EXPLAIN_SUFFIX, IMAGE, NAME, RECORD
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.predict.setup import check_model
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.records.decision import Decision
from opal_deploy.records.signatures import Signer
from opal_deploy.runtime.devices import default_batch, default_workers
from opal_deploy.runtime.session import Session
from opal_deploy.server.bodies import DTYPES, BodyReader, TensorSpec
from opal_deploy.server.options import ServeOptions
from opal_deploy.server.telemetry import Metrics, RecordFile, ServerLog
from opal_deploy.sources.image import InputImage

_EXPLAIN_SPECS = [
    TensorSpec(IMAGE, "BYTES", (-1, 1), is_file=True), TensorSpec(NAME, "BYTES", (-1, 1), optional=True),
    TensorSpec(BOX, "FP32", (-1, 4), optional=True),
], [TensorSpec(RECORD, "BYTES", (-1, 1))]  # fmt: skip
_DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
# images in flight per model, by default
_QUEUED_BATCHES = 8


@dataclass(frozen=True)
class ServedModel:
    """A model file under its name in URLs, with its service; `signer` signs the records that leave the server."""

    name: str
    path: Path
    session: Session
    options: InferenceOptions
    service: Service
    signer: Signer | None = None

    def facts(self) -> dict[str, str]:
        """Return facts about the model for clients and dashboards."""
        metadata = self.session.metadata
        return {
            "opal_deploy": __version__, "file": self.path.name, "model_sha256": self.options.model_sha256 or "",
            "session": self.session.description, "evidence": metadata.evidence, "precision": metadata.precision,
            "backbone": metadata.backbone, "unverified": metadata.unverified,
            "signing_key": "" if self.signer is None else self.signer.fingerprint,
        }  # fmt: skip

    def specs(self, *, explains: bool) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
        """Return the inputs and outputs of the model, or of its explain model."""
        if explains:
            return _EXPLAIN_SPECS
        # the session normalises where the graph does not; in Triton every tensor has a dimension besides N
        return [TensorSpec(INPUT, "UINT8", (-1, *self.session.metadata.input_size, 3))], [
            TensorSpec(name, _DATATYPES[np.dtype(dtype)], (-1, *(shape or (1,))))
            for name, (shape, dtype) in tensor_specs(self.session.metadata).items()
            if name != INPUT
        ]


class ServerState:
    """The state that all requests share; `models` are in the order of the command line.

    `token` is the one that clients must send, None for none. `problem` says why no requests should be sent here, and is
    empty while the server is healthy. `failed`: only a restart can help. `stopping`: the end has begun.
    """

    def __init__(self, options: ServeOptions, *, token: str | None = None) -> None:
        self.options = options
        self.models: list[ServedModel] = []
        self.bodies = BodyReader(options)
        self.metrics = Metrics()
        self.log = ServerLog(options.log_format)
        self.records = None if options.records is None else RecordFile(Path(options.records), self.log)
        self.signer = None if options.sign is None else Signer(options.sign, self.log.message)
        self.token = token
        self.problem, self.failed, self.stopping = "", False, False

    def find(self, name: str) -> tuple[ServedModel, bool]:
        """Return the model of a name (HTTPException without one), and whether the name is its explain model's."""
        for model in self.models:
            if name in (model.name, model.name + EXPLAIN_SUFFIX):
                return model, name != model.name
        known = ", ".join(f"{model.name}, {model.name}{EXPLAIN_SUFFIX}" for model in self.models)
        raise HTTPException(HTTPStatus.NOT_FOUND, f"model {name[:80]!r} not found; available: {known}")

    def load(self, name: str, path: Path, sessions: Sequence[Session], sha256: str | None) -> ServedModel:
        """Warm up a model with the server's options, one session per device.

        Raises UsageError for an unsupported option, StoppedEarly if a device was lost or no decoder starts.
        """
        options, metadata, log = self.options, sessions[0].metadata, self.log.message
        check_model(path, metadata, explain=False, boxed=True, top=options.top, log=log)
        if metadata.crop == "boxes":
            log(f"{name}: trained on images cropped to boxes; send crops")
        inference = InferenceOptions(
            batch=options.batch or default_batch(sessions[0]), workers=options.workers or default_workers(),
            max_pixels=options.max_pixels, decode=Decoding(options.decode), isolate=True,
            decode_timeout=options.decode_timeout, top=options.top,
            decision=Decision.of(options).resolve(path, metadata, log), model_sha256=sha256,
        )  # fmt: skip
        # blank batches of 1, 2, 4, ... and all images: an engine plans each size when it first meets it
        for size in sorted({min(1 << power, inference.batch) for power in range(inference.batch.bit_length() + 1)}):
            for session in sessions:
                session.run(np.zeros((size, *metadata.input_size, 3), np.uint8))
        service = Service(
            sessions, inference, max_wait=options.max_wait / 1e3,
            capacity=options.queue or _QUEUED_BATCHES * inference.batch,
            observe=partial(self.metrics.observe, name),
        )  # fmt: skip
        # one file per decode process starts them all
        blank = InputImage(None, b"no image")
        for future in service.submit_requests([blank] * min(inference.workers, service.capacity), lambda result: None):
            future.result()
        model = ServedModel(name, path, sessions[0], inference, service, self.signer)
        self.models.append(model)
        self.metrics.images_in_flight.labels(name).set_function(lambda: service.in_flight)
        self.metrics.model.labels(name).info(model.facts())
        return model

    def close(self) -> None:
        """Finish the images in flight, and end threads and processes."""
        for model in self.models:
            model.service.close()
        if self.records is not None:
            self.records.stream.close()
