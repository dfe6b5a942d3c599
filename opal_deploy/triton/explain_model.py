"""The explain model of a Triton repository: image files in, records out, through the server's tensor model.

`<name>_explain/1/model.py` passes `TritonPythonModel` to Triton's Python backend. Decoding (in worker processes),
prediction and records are `infer`'s: an image that cannot be classified gets an error record, and its request succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.files import read_text
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, Outputs, tensor_specs
from opal_deploy.errors import OpalError, StoppedEarly, UsageError
from opal_deploy.predict.decoder_pool import DecoderPool
from opal_deploy.predict.executor import BatchPredictor
from opal_deploy.predict.explain_tensors import BOX, IMAGE, NAME, RECORD, build_explain_requests
from opal_deploy.predict.prepare import InferenceOptions, raise_pillow_limit
from opal_deploy.preprocess.resize import normalise
from opal_deploy.records.decision import THRESHOLDS, Decision
from opal_deploy.records.lines import to_json_line
from opal_deploy.records.record import Record
from opal_deploy.runtime.session import ImageBatch, check_batch
from opal_deploy.runtime.verification import verify_test_vectors
from opal_deploy.sources.image import InputImage

METADATA_FILE = "metadata.json"
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class TritonPythonModel:
    """One instance of the explain model, and the `Session` that calls the tensor model.

    Triton's Python backend looks for a class of this name.
    """

    # Triton alone knows where
    device = "triton"

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the model; Triton logs the reason of a failure."""
        import triton_python_backend_utils as backend

        self._backend = backend
        try:
            self._open(args)
        except (OpalError, OSError) as error:
            raise backend.TritonModelException(str(error)) from None

    def _open(self, args: Mapping[str, str]) -> None:
        parameters, options = _parse_parameters(json.loads(args["model_config"]))
        path = Path(args["model_repository"]) / args["model_version"] / METADATA_FILE
        self.metadata = Metadata.from_json(read_text(path), str(path))
        raise_pillow_limit(options.max_pixels)
        self._model, self._version = parameters.model, int(args["model_version"])
        self.description = f"Triton, model {self._model}, version {self._version}"
        self._batch, self._verified = options.batch, False
        self._predictor = BatchPredictor(self, options)
        # its processes start with the first images
        self._decoders = DecoderPool(options, self.metadata.form, slots=1, rows=options.batch)

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`; raise StoppedEarly if the tensor model is not loaded, or failed."""
        metadata = self.metadata
        check_batch(images, metadata)
        parts = []
        for start in range(0, len(images), self._batch):
            part = np.ascontiguousarray(images[start : start + self._batch])
            as_float = metadata.input_kind == "float32"
            parts.append(self._call(normalise(part, metadata.mean, metadata.std) if as_float else part))
        return Outputs.concatenate(parts)

    def _call(self, images: NDArray[Any]) -> Outputs:
        backend = self._backend
        # records do not need the attention maps, which are large
        names = [name for name in self.metadata.outputs if name != "attention"]
        response = backend.InferenceRequest(
            model_name=self._model,
            model_version=self._version,
            requested_output_names=names,
            inputs=[backend.Tensor(INPUT, images)],
            # or a model on a GPU would leave its outputs there
            preferred_memory=backend.PreferredMemory(backend.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise StoppedEarly(f"model {self._model} did not answer: {response.error().message()}")
        specs = tensor_specs(self.metadata)
        arrays = {name: backend.get_output_tensor_by_name(response, name).as_numpy() for name in names}
        # in Triton every tensor has a dimension besides N
        return Outputs.from_arrays({name: array.reshape(-1, *specs[name][0]) for name, array in arrays.items()})

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
            verify_test_vectors(self, "the model")
            self._verified = True
        records: list[Record] = []
        for start in range(0, len(requests), self._batch):
            batch = self._decoders.submit(requests[start : start + self._batch]).result()
            try:
                outputs = self._predictor.submit(batch.images, batch.pixels)()
                results = self._predictor.build_results(batch.images, outputs)
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


class _Parameters(msgspec.Struct):
    """The parameters of config.pbtxt, which may have been edited by hand; `null` is no limit."""

    model: str
    model_sha256: str
    top: _Positive
    max_pixels: _Positive
    decode_workers: _Positive
    decode_timeout: Annotated[float, msgspec.Meta(gt=0)] | None


def _parse_parameters(config: Mapping[str, Any]) -> tuple[_Parameters, InferenceOptions]:
    texts = {key: value["string_value"] for key, value in config["parameters"].items()}
    limits = {name: text for name, text in texts.items() if name in THRESHOLDS}
    try:
        parameters = msgspec.convert(texts, _Parameters, strict=False)
        decision = Decision.read(msgspec.convert(limits, dict[str, float | None], strict=False))
    except msgspec.ValidationError as error:
        raise UsageError(f"config.pbtxt: parameters: {error}") from None
    return parameters, InferenceOptions(
        batch=int(config["max_batch_size"]), top=parameters.top, decision=decision, max_pixels=parameters.max_pixels,
        workers=parameters.decode_workers, decode_timeout=parameters.decode_timeout, isolate=True,
        model_sha256=parameters.model_sha256,
    )  # fmt: skip
