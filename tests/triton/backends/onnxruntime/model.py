"""A stand-in for Triton's ONNX Runtime backend, which no wheel brings: the same file, by the onnxruntime package."""

import json
from pathlib import Path

import onnxruntime
import triton_python_backend_utils as backend


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"]) / args["model_version"] / config["default_model_filename"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.outputs = [output["name"] for output in config["output"]]

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        images = backend.get_input_tensor_by_name(request, "images").as_numpy()
        arrays = self.session.run(self.outputs, {"images": images})
        return backend.InferenceResponse([backend.Tensor(*pair) for pair in zip(self.outputs, arrays, strict=True)])
