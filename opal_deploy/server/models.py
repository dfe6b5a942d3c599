"""The models that a server serves, and the state that all its requests share."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opal_deploy._version import __version__
from opal_deploy.api.service import Service
from opal_deploy.artifact.files import ENGINE_SUFFIX, ONNX_SUFFIX
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import tensor_specs
from opal_deploy.predict.explain_tensors import BOX, EXPLAIN_SUFFIX, IMAGE, NAME, RECORD
from opal_deploy.predict.setup import check_model
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.preprocess.decode import parse_decoding
from opal_deploy.records.decision import Decision
from opal_deploy.records.record import Record
from opal_deploy.records.signatures import Signer
from opal_deploy.run.drawing import DrawingPool
from opal_deploy.run.sheets import SheetBuilder, SheetOptions
from opal_deploy.runtime.devices import default_batch, default_workers
from opal_deploy.runtime.session import Session
from opal_deploy.server.admission import AdmissionLimit, HttpError
from opal_deploy.server.options import ServeOptions
from opal_deploy.server.telemetry import Metrics, MetricsTimer, RecordFile, ServerLog
from opal_deploy.server.tensors import DTYPES, TensorSpec
from opal_deploy.sources.image import InputImage

_EXPLAIN_INPUTS = [
    TensorSpec(IMAGE, "BYTES", (-1, 1)), TensorSpec(NAME, "BYTES", (-1, 1), optional=True),
    TensorSpec(BOX, "FP32", (-1, 4), optional=True),
]  # fmt: skip
_EXPLAIN_SPECS = (_EXPLAIN_INPUTS, [TensorSpec(RECORD, "BYTES", (-1, 1))])
# images in flight per model, by default
_QUEUED_BATCHES = 8
_PLATFORMS = {ONNX_SUFFIX: "onnxruntime_onnx", ENGINE_SUFFIX: "tensorrt_plan"}


@dataclass(frozen=True)
class ServedModel:
    """A model file under its name in URLs, with its service and its drawing processes.

    `signer` signs the records that leave the server; None: they are not signed.
    """

    name: str
    path: Path
    session: Session
    options: InferenceOptions
    service: Service
    drawings: DrawingPool
    signer: Signer | None = None

    @property
    def metadata(self) -> Metadata:
        """The model's metadata."""
        return self.session.metadata

    def facts(self) -> dict[str, str]:
        """Return facts about the model for clients and dashboards."""
        metadata = self.metadata
        facts = {name: str(getattr(metadata, name)) for name in ("evidence", "precision", "backbone", "unverified")}
        return facts | {
            "opal_deploy": __version__, "file": self.path.name, "model_sha256": self.options.model_sha256 or "",
            "session": self.session.description,
            "signing_key": "" if self.signer is None else self.signer.fingerprint,
        }  # fmt: skip

    def platform(self, *, explains: bool) -> str:
        """Return the engine in the protocol's words."""
        return "opal_explain" if explains else _PLATFORMS.get(self.path.suffix, "pytorch_libtorch")

    def config(self, *, explains: bool) -> dict[str, Any]:
        """Return the config of the model, or of its explain model, in Triton's format."""

        def describe(spec: TensorSpec) -> dict[str, Any]:
            kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
            described = {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape[1:])}
            return described | ({"optional": True} if spec.optional else {})

        inputs, outputs = self.specs(explains=explains)
        facts = self.facts() | {"class_names": json.dumps(self.metadata.class_names)}
        return {
            "name": self.name + (EXPLAIN_SUFFIX if explains else ""),
            "platform": self.platform(explains=explains),
            "max_batch_size": self.service.capacity,
            "input": [describe(spec) for spec in inputs],
            "output": [describe(spec) for spec in outputs],
            "parameters": {name: {"string_value": text} for name, text in facts.items() if text},
        }

    def specs(self, *, explains: bool) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
        """Return the inputs and outputs of the model, or of its explain model."""
        return _EXPLAIN_SPECS if explains else self._specs

    @cached_property
    def _specs(self) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
        metadata = self.metadata
        names = {dtype: name for name, dtype in DTYPES.items()}
        shapes = tensor_specs(metadata)
        # in Triton every tensor has a dimension besides N
        outputs = []
        for name in metadata.outputs:
            shape, dtype = shapes[name]
            outputs.append(TensorSpec(name, names[np.dtype(dtype)], (-1, *(shape or (1,)))))
        # the session normalises where the graph does not
        return [TensorSpec("images", "UINT8", (-1, *metadata.input_size, 3))], outputs


class ServerState:
    """The state that all requests share; `models` are in the order of the command line.

    `token` is the one that clients must send, None for none. `problem` says why no requests should be sent here, and is
    empty while the server is healthy. `failed` is whether only a restart can help.
    """

    def __init__(
        self, options: ServeOptions | None = None, *, token: str | None = None, log: ServerLog | None = None
    ) -> None:
        self.options = options or ServeOptions()
        self.models: list[ServedModel] = []
        self.admission = AdmissionLimit(self.options)
        self.metrics = Metrics()
        self.log = log or ServerLog("off")
        self.records = None if self.options.records is None else RecordFile(Path(self.options.records), self.log)
        self.token = token
        self.problem, self.failed = "", False

    def note_record(self, model: str, record: Record) -> None:
        """Count an image's record in the metrics, and write it to the file of records."""
        self.metrics.count_record(model, record)
        if self.records is not None:
            self.records.write(record)

    def find(self, name: str) -> tuple[ServedModel, bool]:
        """Return the model of a name (HttpError without one), and whether the name is its explain model's."""
        for model in self.models:
            if name in (model.name, model.name + EXPLAIN_SUFFIX):
                return model, name != model.name
        known = ", ".join(f"{model.name}, {model.name}{EXPLAIN_SUFFIX}" for model in self.models)
        raise HttpError(HTTPStatus.NOT_FOUND, f"model {name[:80]!r} not found; available: {known}")

    def load(
        self, name: str, path: Path, sessions: Sequence[Session], sha256: str | None, signer: Signer | None = None
    ) -> ServedModel:
        """Start a model with the server's options, and serve it.

        Raises:
            UsageError: the model does not support an option.
            StoppedEarly: the device was lost, or no decoder can be started.
        """
        options, metadata, log = self.options, sessions[0].metadata, self.log.message
        check_model(path, metadata, explain=False, boxed=True, top=options.top, log=log)
        if metadata.crop == "boxes":
            log(f"{name}: trained on images cropped to boxes; send crops")
        inference = InferenceOptions(
            batch=options.batch or default_batch(sessions[0]), workers=options.workers or default_workers(),
            max_pixels=options.max_pixels, decode=parse_decoding(options.decode), isolate=True,
            decode_timeout=options.decode_timeout, top=options.top,
            decision=Decision.of(options).resolve(path, metadata, log), model_sha256=sha256,
        )  # fmt: skip
        return self.start(name, path, sessions, inference, signer)

    def start(
        self, name: str, path: Path, sessions: Sequence[Session], inference: InferenceOptions,
        signer: Signer | None = None,
    ) -> ServedModel:  # fmt: skip
        """Warm up a model, one session per device, and serve it; raise StoppedEarly as `load`."""
        # blank batches of 1, 2, 4, ... and all images: an engine plans each size when it first meets it
        for size in sorted({min(1 << power, inference.batch) for power in range(inference.batch.bit_length() + 1)}):
            for session in sessions:
                session.run(np.zeros((size, *session.metadata.input_size, 3), np.uint8))
        metrics, timer = self.metrics, MetricsTimer(self.metrics, name)
        service = Service(
            sessions, inference, max_wait=self.options.max_wait / 1e3,
            capacity=self.options.queue or _QUEUED_BATCHES * inference.batch, timer=timer,
            observe=partial(metrics.observe, name), log=self.log.message,
        )  # fmt: skip
        metadata, sheets = sessions[0].metadata, None
        if metadata.evidence == "exact":
            sheets = SheetBuilder(metadata, SheetOptions(names=inference.slot_names, decision=inference.decision))
        # one image per decode process starts them all
        stream = io.BytesIO()
        Image.new("RGB", (8, 8)).save(stream, "PNG")
        blank = InputImage(None, stream.getvalue())
        for future in service.submit_requests([blank] * min(inference.workers, service.capacity)):
            future.result()
        drawings = DrawingPool(sheets, inference, service.processes, timer)
        model = ServedModel(name, path, sessions[0], inference, service, drawings, signer)
        self.models.append(model)
        metrics.images_in_flight.labels(name).set_function(lambda: service.in_flight)
        metrics.capacity.labels(name).set(service.capacity)
        metrics.model.labels(name).info(model.facts())
        return model

    def close(self) -> None:
        """Finish the images in flight, and end threads and processes."""
        for model in self.models:
            model.service.close()
        if self.records is not None:
            self.records.close()
