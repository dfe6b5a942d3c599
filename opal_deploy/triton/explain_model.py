"""The explain model of a Triton repository: image files in, records out, by the tensor model of the same server.

`<name>_explain/1/model.py` hands `TritonPythonModel` to Triton's Python backend, which runs it in a process of its own.
Decoding, prediction and records are `infer`'s. Images are decoded in processes, so that a decoder that crashes costs
one image. An image that cannot be classified is answered by an error record; an error is a fault of the server.
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
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ArtifactError, OpalError, StoppedEarly, UsageError
from opal_deploy.inference.decoding.budget import raise_pillow_limit
from opal_deploy.inference.decoding.pool import DecoderPool
from opal_deploy.inference.prediction import BatchPredictor
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.preprocess.resize import normalise
from opal_deploy.records.lines import to_json_line
from opal_deploy.records.record import Record
from opal_deploy.runtime.pipeline import INPUT
from opal_deploy.runtime.session import ImageBatch, check_batch
from opal_deploy.runtime.verification import verify_test_vectors
from opal_deploy.triton.model_config import BOX, IMAGE, MODEL_SHA256, NAME, RECORD, TENSOR_MODEL

METADATA_FILE = "metadata.json"
# returns the outputs of the tensor model by name, for its input of at most `max_batch_size` images
Infer = Callable[[NDArray[Any]], Mapping[str, NDArray[Any]]]


class TensorModelSession:
    """The `Session` of a model that another server process runs.

    Attributes:
        metadata: of the model.
        description: for errors.
    """

    def __init__(self, metadata: Metadata, infer: Infer, max_batch: int, description: str) -> None:
        """Connect to nothing yet.

        Args:
            metadata: of the model.
            infer: runs a batch.
            max_batch: images that `infer` takes at most.
            description: where the model runs, in one line.
        """
        self.metadata, self.description = metadata, description
        self._infer, self._max_batch = infer, max_batch

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        check_batch(images, self.metadata)
        starts = range(0, len(images), self._max_batch)
        parts = [self._run(images[start : start + self._max_batch]) for start in starts]
        return parts[0] if len(parts) == 1 else Outputs.concatenate(parts)

    def _run(self, images: ImageBatch) -> Outputs:
        metadata = self.metadata
        if metadata.input_kind == "float32":
            arrays = self._infer(normalise(images, metadata.mean, metadata.std))
        else:
            arrays = self._infer(np.ascontiguousarray(images))
        # Triton has no tensors without a dimension beside N
        return Outputs.from_arrays({
            name: array.reshape(-1) if name == "score_norm" else array for name, array in arrays.items()
        })  # fmt: skip


class Explainer:
    """A session with the processes that decode its images; used by one thread at a time."""

    def __init__(self, session: TensorModelSession, options: InferenceOptions) -> None:
        """Start nothing yet; the processes start with the first images."""
        self._session, self._batch, self._verified = session, options.batch, False
        self._predictor = BatchPredictor(session, options)
        self._decoders = DecoderPool(options, session.metadata.input_size, slots=1, rows=options.batch)

    def explain(self, requests: Sequence[Request]) -> list[Record]:
        """Return the record of each image.

        The first call compares the model with the test vectors of its metadata: the server that runs it was not there
        when it was exported.

        Raises:
            VerificationError: the model does not reproduce its test vectors. StoppedEarly: it cannot be run now.
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

    def close(self) -> None:
        """End the processes."""
        self._decoders.close()


class TritonPythonModel:
    """The class that Triton's Python backend looks for: one instance of the explain model."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the model; Triton calls this once, and its log has the reason of a failure.

        Args:
            args: of the Python backend: `model_config`, `model_repository`, `model_version`, ...
        """
        import triton_python_backend_utils as backend

        self._backend = backend
        try:
            self._open(args)
        except OpalError as error:
            raise backend.TritonModelException(str(error)) from None

    def _open(self, args: Mapping[str, str]) -> None:
        """Read the files.

        Raises:
            OpalError: they are damaged, or of another version.
        """
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        metadata = read_metadata(folder / METADATA_FILE)
        options = parse_options(parameters, int(config["max_batch_size"]))
        raise_pillow_limit(options.max_pixels)
        self._model, self._version = parameters[TENSOR_MODEL], int(args["model_version"])
        # no record needs the attention maps, which are large
        self._outputs = [name for name in metadata.outputs if name != "attention"]
        where = f"Triton, model {self._model}, version {self._version}"
        self._explainer = Explainer(TensorModelSession(metadata, self._infer, options.batch, where), options)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for each request, with a record for each of its images."""
        backend = self._backend
        images = [self._read(request) for request in requests]
        try:
            records = self._explainer.explain([image for group in images for image in group])
        except OpalError as error:
            # none of them is at fault, and each may be sent again
            problem = backend.TritonError(str(error), backend.TritonError.UNAVAILABLE)
            return [backend.InferenceResponse(error=problem) for _ in requests]
        answers = iter(records)
        return [self._respond([next(answers) for _ in group]) for group in images]

    def finalize(self) -> None:
        """End the processes, before Triton ends this one."""
        self._explainer.close()

    def _read(self, request: Any) -> list[Request]:
        """Return the images of a request: N of them, with names and boxes where it has these inputs."""

        def read(name: str) -> Any:
            tensor = self._backend.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()

        files, names, boxes = read(IMAGE), read(NAME), read(BOX)
        return build_requests(files, names, boxes)

    def _respond(self, records: Sequence[Record]) -> Any:
        lines = np.array([[to_json_line(record).rstrip()] for record in records], np.object_)
        return self._backend.InferenceResponse(output_tensors=[self._backend.Tensor(RECORD, lines)])

    def _infer(self, images: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the tensor model's outputs, all of one call.

        Raises:
            StoppedEarly: it is not loaded, or failed.
        """
        backend = self._backend
        response = backend.InferenceRequest(
            model_name=self._model,
            model_version=self._version,
            requested_output_names=self._outputs,
            inputs=[backend.Tensor(INPUT, images)],
            # a model on a GPU would leave them there
            preferred_memory=backend.PreferredMemory(backend.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise StoppedEarly(f"model {self._model} did not answer: {response.error().message()}")
        tensors = {name: backend.get_output_tensor_by_name(response, name) for name in self._outputs}
        return {name: tensor.as_numpy() for name, tensor in tensors.items()}


def read_metadata(path: Path) -> Metadata:
    """Return the metadata that `export --triton` wrote beside model.py.

    Raises:
        ArtifactError: the file is missing, or of another schema than this version of opal-deploy reads.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ArtifactError(
            f"{path}: cannot be read ({error.strerror or error}); export the repository again"
        ) from None
    return Metadata.from_json(text, str(path))


def parse_options(parameters: Mapping[str, str], batch: int) -> InferenceOptions:
    """Return the options that the parameters of config.pbtxt give.

    Args:
        parameters: as `explain_config` writes them, and perhaps a person edited.
        batch: images a forward pass at most.

    Raises:
        UsageError: a parameter is missing or has no such value.
    """

    def parse(name: str, convert: Callable[[str], Any], expected: str) -> Any:
        text = parameters.get(name, "")
        try:
            return convert(text)
        except ValueError:
            raise UsageError(f"config.pbtxt: parameter {name} is {text!r}; expected {expected}") from None

    return InferenceOptions(
        batch=batch,
        top=parse("top", _positive, "a positive number of classes"),
        min_margin=parse("min_margin", _optional_number, "a margin, or none"),
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


def build_requests(
    files: NDArray[np.object_], names: NDArray[np.object_] | None, boxes: NDArray[np.float32] | None
) -> list[Request]:
    """Return the images of one call of the explain model.

    Args:
        files: bytes [N, 1], the image files.
        names: bytes [N, 1] in UTF-8, each the `image` of a record; empty or None: it has none.
        boxes: float32 [N, 4], see `Request.box`; a row of NaN, or None: the whole image.
    """
    requests = []
    for row, data in enumerate(files[:, 0]):
        name = b"" if names is None else names[row, 0]
        box = None if boxes is None or np.isnan(boxes[row]).all() else tuple(boxes[row].tolist())
        requests.append(Request(name.decode("utf-8", "backslashreplace") or None, data, box))
    return requests
