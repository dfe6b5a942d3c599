"""Sessions on an ONNX file in OpenVINO, on the CPU."""

from __future__ import annotations

from pathlib import Path

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, Outputs
from opal_deploy.errors import ArtifactError, OutOfMemory, StoppedEarly, UsageError, first_line, require
from opal_deploy.runtime.devices import available_cpus, parse_device
from opal_deploy.runtime.onnx_session import is_out_of_memory, prepare_input
from opal_deploy.runtime.session import ImageBatch


class OpenvinoSession:
    """An exported graph in OpenVINO, in the precision of its file.

    OpenVINO rounds float32 to bfloat16 by default where the processor has it; that is off. A bf16 file computes in
    bfloat16 there, and elsewhere in float32 what its bfloat16 weights give.

    Attributes:
        threads: of a batch.
        version: of OpenVINO.
        batch_invariant: see `OnnxSession`; OpenVINO chooses kernels by the batch's size.
    """

    device = "cpu"
    batch_invariant = False

    def __init__(self, path: Path, *, device: str = "auto", threads: int | None = None) -> None:
        """Load a file of `opal-deploy export` on the CPU; `threads` None: as many as this process may use.

        Raises:
            ArtifactError: not an exported file, damaged, or refused by OpenVINO.
            MissingExtra: openvino is not installed.
            UsageError: the device is a GPU.
        """
        require("openvino", "openvino", "--runtime openvino, or a bf16 file on a CPU,")
        if parse_device(device)[0] == "cuda":
            raise UsageError(f"device {device}: --runtime openvino runs on the CPU; give --device cpu, or leave it out")
        self.metadata: Metadata = onnx_file.read_metadata(path)
        onnx_file.check_digest(path, self.metadata)
        self.threads = threads or available_cpus()
        import openvino

        core = openvino.Core()
        try:
            model = core.read_model(path)
            compiled = core.compile_model(
                model,
                "CPU",
                {
                    "INFERENCE_PRECISION_HINT": "f32",
                    "INFERENCE_NUM_THREADS": self.threads,
                    # one batch at a time on all threads
                    "PERFORMANCE_HINT": "LATENCY",
                },
            )
        except RuntimeError as error:
            raise ArtifactError(f"{path}: OpenVINO refuses it ({first_line(error)}); export it again") from None
        self._request = compiled.create_infer_request()
        self.version: str = openvino.__version__.partition("-")[0]
        self.description = f"OpenVINO {self.version} on CPU, {self.threads} threads, {self.metadata.precision}"

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        feed = prepare_input(images, self.metadata)
        try:
            values = self._request.infer({INPUT: feed}, share_inputs=True)
        except RuntimeError as error:
            message = f"OpenVINO failed on a batch of {len(images)} ({first_line(error)})"
            if is_out_of_memory(error):
                raise OutOfMemory(f"{message}; use a smaller --batch") from None
            raise StoppedEarly(f"{message}; see `opal-deploy doctor`") from None
        return Outputs.from_arrays({name: values[name] for name in self.metadata.outputs})
