"""Options of ONNX Runtime's CUDA provider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from opal_deploy.errors import UsageError, suggest_names

_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
_FLAGS = {"0": False, "1": True}


@dataclass(frozen=True)
class CudaOptions:
    """Options of the CUDA provider that trade memory, start-up or last bits for speed, under the provider's names.

    `bench latency --ort-option NAME=VALUE` times one. The provider's `fuse_conv_bias` is left out: on an H100, batches
    in flight had wrong outputs with it (ONNX Runtime 1.31).

    Attributes:
        prefer_nhwc: lay convolutions out as NHWC, the layout of tensor cores; None: in half precision, where NCHW costs
            two transpositions a layer.
        cudnn_conv_algo_search: how cuDNN chooses kernels since ONNX Runtime 1.20: EXHAUSTIVE asks its slower, better
            heuristic, HEURISTIC its fast one, DEFAULT takes its fallback kernels, which may be extremely slow.
        enable_cuda_graph: launch all kernels of a batch as one CUDA graph, recorded by the session once for each batch
            size and set of buffers; pays for small batches, whose kernels are shorter than their launches.
    """

    prefer_nhwc: bool | None = None
    cudnn_conv_algo_search: str = "EXHAUSTIVE"
    enable_cuda_graph: bool = False

    def provider_options(self, precision: str) -> dict[str, str]:
        """Return the options of the provider for a graph of a precision, as ONNX Runtime takes them."""
        nhwc = precision == "fp16" if self.prefer_nhwc is None else self.prefer_nhwc
        return {
            "prefer_nhwc": _to_text(nhwc),
            "cudnn_conv_algo_search": self.cudnn_conv_algo_search,
        }

    def __str__(self) -> str:
        """Return the options that are not the default, as `NAME=VALUE`; empty if all are."""
        default = asdict(CudaOptions())
        return ", ".join(f"{name}={_to_text(value)}" for name, value in asdict(self).items() if value != default[name])


def _to_text(value: bool | str) -> str:
    return str(int(value)) if isinstance(value, bool) else value


def parse_cuda_options(texts: Sequence[str]) -> CudaOptions:
    """Parse all values of `--ort-option NAME=VALUE`, flags as 0 or 1; UsageError for an unknown or repeated one."""
    known = [field.name for field in fields(CudaOptions)]
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if name not in known or not equals:
            expected = f"expected NAME=VALUE with a name of {', '.join(known)}"
            raise UsageError(f"--ort-option {text!r}: {expected}{suggest_names(name, known)}")
        choices: Sequence[str] = _SEARCHES if name == "cudnn_conv_algo_search" else tuple(_FLAGS)
        if value not in choices:
            raise UsageError(f"--ort-option {text!r}: {name} is one of {', '.join(choices)}")
        if name in values:
            raise UsageError(f"--ort-option {name} is given twice")
        values[name] = _FLAGS.get(value, value)
    return CudaOptions(**values)
