"""A model that is served: its session, its service, and the tensors that it takes and gives."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opal_deploy._version import __version__
from opal_deploy.artifact.files import ENGINE_SUFFIX, ONNX_SUFFIX
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.inference.drawings import DrawingPool, DrawTask
from opal_deploy.inference.service import Service, ServiceObserver
from opal_deploy.inference.sheets import SheetBuilder, SheetOptions
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.runtime.pipeline import tensor_specs
from opal_deploy.runtime.session import Session
from opal_deploy.server.tensors import TensorSpec, datatype_of

# of the model that takes encoded images and gives records; beside NAME, which takes pixels
EXPLAIN_SUFFIX = "_explain"
EXPLAIN_INPUTS = (
    TensorSpec("image", "BYTES", (-1, 1)),
    TensorSpec("name", "BYTES", (-1, 1), optional=True),
    TensorSpec("box", "FP32", (-1, 4), optional=True),
)
EXPLAIN_OUTPUTS = (TensorSpec("record", "BYTES", (-1, 1)),)
_PLATFORMS = {ONNX_SUFFIX: "onnxruntime_onnx", ENGINE_SUFFIX: "tensorrt_plan"}


@dataclass(frozen=True)
class ServedModel:
    """A model with its service.

    Attributes:
        name: in addresses.
        path: of its file.
        sessions: one a device.
        options: how images are decoded, batched and predicted.
        service: classifies images as they come.
        drawings: draws on them.
    """

    name: str
    path: Path
    sessions: Sequence[Session]
    options: InferenceOptions
    service: Service
    drawings: DrawingPool

    def close(self) -> None:
        """Finish the images in work, and end threads and processes."""
        self.service.close()
        self.drawings.close()

    @property
    def metadata(self) -> Metadata:
        """The metadata of the model."""
        return self.sessions[0].metadata

    @property
    def platform(self) -> str:
        """The engine, in the protocol's words."""
        return _PLATFORMS.get(self.path.suffix, "pytorch_libtorch")

    def facts(self) -> dict[str, str]:
        """Return what a client may want to know of the model, as texts; lists are JSON."""
        metadata = self.metadata
        return {
            "opal_deploy": __version__,
            "file": self.path.name,
            "model_sha256": self.options.model_sha256 or "",
            "session": self.sessions[0].description,
            "evidence": metadata.evidence,
            "precision": metadata.precision,
            "backbone": metadata.backbone,
            "unverified": metadata.unverified,
        }

    def config(self, *, explains: bool) -> dict[str, Any]:
        """Return the config of the model, or of its explain model, as Triton's clients ask for it."""

        def describe(spec: TensorSpec) -> dict[str, Any]:
            kind = {"BYTES": "STRING"}.get(spec.datatype, spec.datatype)
            described = {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape[1:])}
            return described | ({"optional": True} if spec.optional else {})

        inputs, outputs = self.specs(explains=explains)
        facts = self.facts() | {"class_names": json.dumps(self.metadata.class_names)}
        return {
            "name": self.name + (EXPLAIN_SUFFIX if explains else ""),
            "platform": "opal_explain" if explains else self.platform,
            "max_batch_size": self.service.capacity,
            "input": [describe(spec) for spec in inputs],
            "output": [describe(spec) for spec in outputs],
            "parameters": {name: {"string_value": text} for name, text in facts.items() if text},
        }

    def specs(self, *, explains: bool) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
        """Return inputs and outputs of the model, or of its explain model."""
        return (EXPLAIN_INPUTS, EXPLAIN_OUTPUTS) if explains else (self.inputs, self.outputs)

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The input of the model: pixels, which the session normalises where the graph does not."""
        return (TensorSpec("images", "UINT8", (-1, *self.metadata.input_size, 3)),)

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the graph; as Triton has them, each has a dimension beside N."""
        specs = tensor_specs(self.metadata)
        return tuple(
            TensorSpec(name, datatype_of(specs[name][1]), (-1, *(specs[name][0] or (1,))))
            for name in self.metadata.outputs
        )


def start_model(
    name: str,
    path: Path,
    sessions: Sequence[Session],
    options: InferenceOptions,
    *,
    max_wait: float,
    capacity: int,
    timer: StageTimer = NO_OP_TIMER,
    observer: ServiceObserver | None = None,
    print_message: Callable[[str], None] = lambda _: None,
) -> ServedModel:
    """Start the service of a model, and run each size of batch once; see `Service` for the arguments.

    Raises:
        StoppedEarly: the device was lost, or no decoder can be started.
    """
    for session in sessions:
        warm_up(session, options.batch)
    service = Service(
        sessions, options, max_wait=max_wait, capacity=capacity, timer=timer, observer=observer,
        print_message=print_message,
    )  # fmt: skip
    metadata = sessions[0].metadata
    sheets = None
    if metadata.evidence == "exact":
        sheets = SheetBuilder(metadata, SheetOptions(names=options.slot_names, min_margin=options.min_margin))
    _start_decoders(service, options.workers)
    drawings = DrawingPool(DrawTask(sheets=sheets), options, timer)
    return ServedModel(name, path, sessions, options, service, drawings)


def _start_decoders(service: Service, workers: int) -> None:
    """Have each decode process start, by giving it something to do."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    blank = Request(None, stream.getvalue())
    for future in service.submit_requests([blank] * min(workers, service.capacity)):
        future.result()


def warm_up(session: Session, batch: int) -> None:
    """Run blank batches of 1, 2, 4, ... and `batch` images: an engine plans a size when it first meets it."""
    sizes = {min(1 << power, batch) for power in range(batch.bit_length() + 1)}
    for size in sorted(sizes):
        session.run(np.zeros((size, *session.metadata.input_size, 3), np.uint8))
