"""Settings of ONNX Runtime's CUDA provider that trade memory, start-up or last bits for speed.

All are off by default: none has been measured on hardware yet. `bench latency --ort-option NAME=VALUE` times one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from opal_deploy.errors import UsageError, suggest_names

_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
_FLAGS = {"0": False, "1": True}


@dataclass(frozen=True)
class CudaOptions:
    """Options of the CUDA provider, under the provider's own names.

    Attributes:
        prefer_nhwc: lay convolutions out as NHWC, the layout of tensor cores; NCHW costs two transpositions a layer in
            half precision.
        fuse_conv_bias: add a convolution's bias in its own kernel; cuDNN compiles such a kernel at the first run.
        cudnn_conv_algo_search: how cuDNN chooses kernels since ONNX Runtime 1.20: EXHAUSTIVE asks its slower, better
            heuristic, HEURISTIC its fast one, DEFAULT takes its fallback kernels, which may be extremely slow.
        enable_cuda_graph: launch all kernels of a batch as one CUDA graph, recorded once for each batch size and set of
            buffers; pays for small batches, whose kernels are shorter than their launches.
    """

    prefer_nhwc: bool = False
    fuse_conv_bias: bool = False
    cudnn_conv_algo_search: str = "EXHAUSTIVE"
    enable_cuda_graph: bool = False

    def provider_options(self) -> dict[str, str]:
        """Return the options as ONNX Runtime takes them."""
        return {name: str(int(value)) if isinstance(value, bool) else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        """Return the options that are not the default, as `NAME=VALUE`; empty if all are."""
        default = CudaOptions().provider_options()
        return ", ".join(f"{name}={value}" for name, value in self.provider_options().items() if value != default[name])


def parse_cuda_options(texts: Sequence[str]) -> CudaOptions:
    """Parse `--ort-option NAME=VALUE`, given any number of times; flags are 0 or 1.

    Raises:
        UsageError: not of that form, another name or value, or a name twice.
    """
    known = {field.name: field for field in fields(CudaOptions)}
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if name not in known or not equals:
            raise UsageError(
                f"--ort-option {text!r}: expected NAME=VALUE with a name of {', '.join(known)}"
                f"{suggest_names(name, list(known))}"
            )
        choices: Sequence[str] = _SEARCHES if name == "cudnn_conv_algo_search" else tuple(_FLAGS)
        if value not in choices:
            raise UsageError(f"--ort-option {text!r}: {name} is one of {', '.join(choices)}")
        if name in values:
            raise UsageError(f"--ort-option {name} is given twice")
        values[name] = _FLAGS.get(value, value)
    return CudaOptions(**values)
