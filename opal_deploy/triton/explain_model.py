"""The explain model of a Triton repository: image files in, records out, through the server's tensor model.

`<name>_explain/1/model.py` passes `TritonPythonModel` to Triton's Python backend. Decoding (in worker processes),
prediction and records are `infer`'s: an image that cannot be classified gets an error record, and its request succeeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, Outputs, tensor_specs
from opal_deploy.errors import ArtifactError, OpalError, StoppedEarly, UsageError
from opal_deploy.predict.decoder_pool import DecoderPool
from opal_deploy.predict.explain_tensors import BOX, IMAGE, NAME, RECORD, build_explain_requests
from opal_deploy.predict.prediction import BatchPredictor
from opal_deploy.predict.prepare import raise_pillow_limit
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.preprocess.resize import normalise
from opal_deploy.records.decision import THRESHOLDS, Decision
from opal_deploy.records.lines import to_json_line
from opal_deploy.records.record import Record
from opal_deploy.runtime.session import ImageBatch, check_batch
from opal_deploy.runtime.verification import verify_test_vectors
from opal_deploy.sources.image import InputImage
from opal_deploy.triton.model_config import MODEL_SHA256, TENSOR_MODEL

METADATA_FILE = "metadata.json"
# returns the tensor model's outputs by name, for at most `max_batch_size` images
Infer = Callable[[NDArray[Any]], Mapping[str, NDArray[Any]]]


class TensorModelSession:
    """A `Session` that calls a model in Triton."""

    # Triton alone knows where
    device = "triton"

    def __init__(self, metadata: Metadata, infer: Infer, max_batch: int, description: str) -> None:
        """Wrap a function that runs at most `max_batch` images."""
        self.metadata, self.description = metadata, description
        self._infer, self._max_batch = infer, max_batch

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        metadata = self.metadata
        check_batch(images, metadata)
        parts = []
        for start in range(0, len(images), self._max_batch):
            part = np.ascontiguousarray(images[start : start + self._max_batch])
            as_float = metadata.input_kind == "float32"
            arrays = dict(self._infer(normalise(part, metadata.mean, metadata.std) if as_float else part))
            # in Triton every tensor has a dimension besides N
            shapes = {name: shape for name, (shape, _) in tensor_specs(metadata).items()}
            parts.append(Outputs.from_arrays({name: each.reshape(-1, *shapes[name]) for name, each in arrays.items()}))
        return Outputs.concatenate(parts)


class TritonPythonModel:
    """One instance of the explain model; Triton's Python backend looks for a class of this name."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the model; Triton logs the reason of a failure."""
        import triton_python_backend_utils as backend

        self._backend = backend
        try:
            self._open(args)
        except OpalError as error:
            raise backend.TritonModelException(str(error)) from None

    def _open(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        metadata = _read_metadata(folder / METADATA_FILE)
        options = _parse_options(parameters, int(config["max_batch_size"]))
        raise_pillow_limit(options.max_pixels)
        self._model, self._version = parameters[TENSOR_MODEL], int(args["model_version"])
        # records do not need the attention maps, which are large
        self._outputs = [name for name in metadata.outputs if name != "attention"]
        where = f"Triton, model {self._model}, version {self._version}"
        self._session = TensorModelSession(metadata, self._infer, options.batch, where)
        self._batch, self._verified = options.batch, False
        self._predictor = BatchPredictor(self._session, options)
        # its processes start with the first images
        self._decoders = DecoderPool(options, metadata.input_size, slots=1, rows=options.batch)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response per request, with a record for each of its images."""
        backend = self._backend
        groups = [self._read(request) for request in requests]
        images = [image for group in groups if not isinstance(group, ValueError) for image in group]
        try:
            records = iter(self._explain(images))
        except OpalError as error:
            # not the requests' fault: each may be sent again
            problem = backend.TritonError(str(error), backend.TritonError.UNAVAILABLE)
            return [backend.InferenceResponse(error=problem) for _ in requests]
        return [
            backend.InferenceResponse(error=backend.TritonError(str(group), backend.TritonError.INVALID_ARG))
            if isinstance(group, ValueError)
            else self._respond([next(records) for _ in group])
            for group in groups
        ]

    def finalize(self) -> None:
        """End the processes before Triton ends this one."""
        self._decoders.close()

    def _explain(self, requests: Sequence[InputImage]) -> list[Record]:
        """Return the record of each image.

        The first call checks the model against its test vectors: this server was not part of the export.

        Raises:
            VerificationError: the model does not reproduce its test vectors.
            StoppedEarly: the model cannot be run now.
        """
        if not self._verified:
            verify_test_vectors(self._session, "the model")
            self._verified = True
        records: list[Record] = []
        for start in range(0, len(requests), self._batch):
            batch = self._decoders.submit(requests[start : start + self._batch]).result()
            try:
                outputs = self._predictor.run(batch.images, batch.pixels)
                results = self._predictor.build_results(batch.images, batch.pixels, outputs)
            finally:
                batch.release()
            records += [result.record for result in results]
        return records

    def _read(self, request: Any) -> list[InputImage] | ValueError:
        def read(name: str) -> Any:
            tensor = self._backend.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()

        names = read(NAME)
        try:
            return build_explain_requests(read(IMAGE)[:, 0], None if names is None else names[:, 0], read(BOX))
        except ValueError as error:
            return error

    def _respond(self, records: Sequence[Record]) -> Any:
        lines = np.array([[to_json_line(record).rstrip()] for record in records], np.object_)
        return self._backend.InferenceResponse(output_tensors=[self._backend.Tensor(RECORD, lines)])

    def _infer(self, images: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the tensor model's outputs; raise StoppedEarly if the model is not loaded, or failed."""
        backend = self._backend
        response = backend.InferenceRequest(
            model_name=self._model,
            model_version=self._version,
            requested_output_names=self._outputs,
            inputs=[backend.Tensor(INPUT, images)],
            # or a model on a GPU would leave its outputs there
            preferred_memory=backend.PreferredMemory(backend.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise StoppedEarly(f"model {self._model} did not answer: {response.error().message()}")
        tensors = {name: backend.get_output_tensor_by_name(response, name) for name in self._outputs}
        return {name: tensor.as_numpy() for name, tensor in tensors.items()}


def _read_metadata(path: Path) -> Metadata:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ArtifactError(
            f"{path}: cannot be read ({error.strerror or error}); export the repository again"
        ) from None
    return Metadata.from_json(text, str(path))


def _parse_options(parameters: Mapping[str, str], batch: int) -> InferenceOptions:
    """Return the options in the parameters of config.pbtxt, which may have been edited by hand."""

    def parse(name: str, convert: Callable[[str], Any], expected: str) -> Any:
        text = parameters.get(name, "")
        try:
            return convert(text)
        except ValueError:
            raise UsageError(f"config.pbtxt: parameter {name} is {text!r}; expected {expected}") from None

    return InferenceOptions(
        batch=batch,
        top=parse("top", _positive, "a positive number of classes"),
        decision=Decision(
            **{name: parse(name, _optional_number, "a number, or none") for name in THRESHOLDS if name in parameters}
        ),
        max_pixels=parse("max_pixels", _positive, "a positive number of pixels"),
        workers=parse("decode_workers", _positive, "a positive number of processes"),
        decode_timeout=parse("decode_timeout", _optional_number, "seconds, or none"),
        isolate=True,
        model_sha256=parameters.get(MODEL_SHA256),
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _optional_number(text: str) -> float | None:
    if text == "none":
        return None
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value
