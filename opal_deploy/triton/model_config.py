"""The contents of `config.pbtxt`: Triton's ModelConfig in protobuf's text format, written without protobuf."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opal_deploy._version import __version__
from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, TensorSpec, tensor_specs
from opal_deploy.predict.explain_tensors import BOX, EXPLAIN_SUFFIX, IMAGE, NAME, RECORD
from opal_deploy.predict.prepare import InferenceOptions

# smallest, preferred and largest batch of an ONNX file: sizes that `cuda_session.BATCH_SIZES` has
ONNX_BATCH = BatchRange(1, 8, 64)
# keys of parameters that the explain model reads
MODEL_SHA256, TENSOR_MODEL = "model_sha256", "model"
_TYPES = {"uint8": "UINT8", "int32": "INT32", "float32": "FP32"}
# Triton refuses further requests
_QUEUE = {"default_queue_policy": {"max_queue_size": 256}}
# on a GPU, ONNX Runtime would round the inputs of float32 convolutions to 10 bits (TF32)
_NO_TF32 = {"execution_accelerators": {"gpu_execution_accelerator": {"name": "cuda", "parameters": {
    "key": "use_tf32", "value": "0"}}}}  # fmt: skip


class _Word(str):
    """A name or a number of the text format, which is written without quotes."""


@dataclass(frozen=True)
class TensorModel:
    """A model file as Triton serves it, by the backend `onnxruntime` or `tensorrt`, with further parameters."""

    backend: str
    batch: BatchRange
    metadata: Metadata
    sha256: str
    details: Mapping[str, str]


def tensor_config(name: str, model: TensorModel) -> str:
    """Return the config of the model that maps pixels to the graph's outputs (docs/contract.md)."""
    metadata, batch = model.metadata, model.batch
    sizes = sorted({batch.opt, batch.max})
    specs = tensor_specs(metadata)
    pixels = specs.pop(INPUT)
    kind, dims = _type(pixels)
    zeros = {"key": INPUT, "value": {"data_type": _Word(f"TYPE_{kind}"), "dims": dims, "zero_data": _Word("true")}}
    facts = {
        "opal_deploy": __version__, MODEL_SHA256: model.sha256, "unverified": metadata.unverified,
        "evidence": metadata.evidence, "precision": metadata.precision, "backbone": metadata.backbone,
        "prototypes_per_class": str(metadata.prototypes_per_class), "grid": json.dumps(metadata.grid),
        "class_names": json.dumps(metadata.class_names),
    }  # fmt: skip
    outputs = {output: _tensor(output, *_type(spec)) for output, spec in specs.items()}
    for output in (output for output, (shape, _) in specs.items() if not shape):
        # in the graph, N is its only dimension
        outputs[output]["reshape"] = {"shape": []}
    return _to_text({
        "name": name,
        "backend": model.backend,
        "max_batch_size": batch.max,
        "input": _tensor(INPUT, kind, dims),
        "output": list(outputs.values()),
        "dynamic_batching": {"preferred_batch_size": sizes, **_QUEUE},
        # one per GPU, or one on the CPU
        "instance_group": {"count": 1},
        "optimization": _NO_TF32 if model.backend == "onnxruntime" else [],
        # the first batch of a size is slow: Triton runs these sizes before it reports the model ready
        "model_warmup": [
            {"name": f"batch {size}", "batch_size": size, "inputs": zeros} for size in sorted({1, *sizes})
        ],
        "parameters": _parameters({**facts, **model.details}),
    })  # fmt: skip


def explain_config(name: str, model: TensorModel, options: InferenceOptions) -> str:
    """Return the config of the explain model of a tensor model called `name`, which maps image files to records.

    The options of decoding and of records can be edited in the file.
    """
    optional = {"optional": _Word("true")}
    return _to_text({
        "name": name + EXPLAIN_SUFFIX,
        "backend": "python",
        "max_batch_size": model.batch.max,
        "input": [
            _tensor(IMAGE, "STRING", [1]), _tensor(NAME, "STRING", [1]) | optional, _tensor(BOX, "FP32", [4]) | optional
        ],
        "output": _tensor(RECORD, "STRING", [1]),
        "dynamic_batching": _QUEUE,
        # one process decodes while another waits for the tensor model
        "instance_group": {"count": 2, "kind": _Word("KIND_CPU")},
        "parameters": _parameters({
            TENSOR_MODEL: name,
            MODEL_SHA256: model.sha256,
            "opal_deploy": __version__,
            "top": str(options.top),
            **{limit: _optional(value) for limit, value in options.decision.limits.items()},
            "max_pixels": str(options.max_pixels),
            "decode_workers": str(options.workers),
            "decode_timeout": _optional(options.decode_timeout),
        }),
    })  # fmt: skip


def _type(spec: TensorSpec) -> tuple[str, list[int]]:
    """Return the type, and the shape without N; in Triton every tensor has a dimension besides N."""
    shape, dtype = spec
    return _TYPES[dtype.name], list(shape) or [1]


def _tensor(name: str, kind: str, dims: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "data_type": _Word(f"TYPE_{kind}"), "dims": list(dims)}


def _optional(value: float | None) -> str:
    return "null" if value is None else f"{value:g}"


def _parameters(values: Mapping[str, str]) -> list[dict[str, Any]]:
    # Triton refuses empty values
    return [{"key": key, "value": {"string_value": value}} for key, value in values.items() if value]


def _to_text(message: Mapping[str, Any]) -> str:
    """Return a message as text, one field per line; a field that is repeated has a list."""
    return "".join(f"{field}\n" for field in _format_fields(message))


def _format_fields(message: Mapping[str, Any]) -> Iterator[str]:
    for name, values in message.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, Mapping):
                yield f"{name} {{ {' '.join(_format_fields(value))} }}"
            else:
                is_text = isinstance(value, str) and not isinstance(value, _Word)
                yield f"{name}: {_quote(value) if is_text else value}"


def _quote(text: str) -> str:
    """Return a string literal of protobuf's text format: printable ASCII unchanged, other bytes in octal."""
    plain = {byte: chr(byte) for byte in range(0x20, 0x7F)} | {ord(mark): f"\\{mark}" for mark in '"\\'}
    return '"' + "".join(plain.get(byte, f"\\{byte:03o}") for byte in text.encode()) + '"'
