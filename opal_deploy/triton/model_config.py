"""The contents of `config.pbtxt`: Triton's ModelConfig in protobuf's text format, written without protobuf."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opal_deploy._version import __version__
from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, TensorSpec, tensor_specs
from opal_deploy.predict.explain_tensors import BOX, EXPLAIN_SUFFIX, IMAGE, NAME, RECORD
from opal_deploy.predict.types import InferenceOptions

# smallest, preferred and largest batch of an ONNX file: sizes that `cuda_session.BATCH_SIZES` has
ONNX_BATCH = BatchRange(1, 8, 64)
# keys of parameters that the explain model reads
MODEL_SHA256, TENSOR_MODEL = "model_sha256", "model"
LABELS_FILE = "labels.txt"


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
    warmup = "".join(_warmup(size, pixels) for size in sorted({1, *sizes}))
    return "".join([
        _header(name, model.backend, batch.max),
        "# RGB; normalisation is in the graph\n" if metadata.input_kind == "uint8" else "# RGB, already normalised\n",
        _tensor("input", INPUT, *_type(pixels)),
        *(_tensor("output", output, *_type(spec), _describe_output(output, spec)) for output, spec in specs.items()),
        f"dynamic_batching {{\n  preferred_batch_size: {sizes}\n{_QUEUE}}}\n",
        "# one per GPU, or one on the CPU\ninstance_group [ { count: 1 } ]\n",
        _NO_TF32 if model.backend == "onnxruntime" else "",
        "# the first batch of a size is slow: Triton runs these sizes before it reports the model ready\n",
        warmup,
        _parameters({**_describe(model), **model.details}),
    ])  # fmt: skip


def explain_config(name: str, model: TensorModel, options: InferenceOptions) -> str:
    """Return the config of the explain model of a tensor model called `name`, which maps image files to records.

    The options of decoding and of records can be edited in the file.
    """
    return "".join([
        _header(name + EXPLAIN_SUFFIX, "python", model.batch.max),
        "# an image file's bytes, such as those of a .jpg\n",
        _tensor("input", IMAGE, "STRING", [1]),
        "# `image` of the record; empty: null\n",
        _tensor("input", NAME, "STRING", [1], "optional: true"),
        "# x0, y0, x1, y1 in pixels of the oriented image, to crop to; NaN: the whole image\n",
        _tensor("input", BOX, "FP32", [4], "optional: true"),
        "# one record of `opal-deploy infer` per image, as JSON; an error record for an unreadable image\n",
        _tensor("output", RECORD, "STRING", [1]),
        f"dynamic_batching {{\n{_QUEUE}}}\n",
        "# one process decodes while another waits for the tensor model\n",
        "instance_group [ { count: 2 kind: KIND_CPU } ]\n",
        _parameters({
            TENSOR_MODEL: name,
            MODEL_SHA256: model.sha256,
            "opal_deploy": __version__,
            "top": str(options.top),
            **{name: _optional(limit) for name, limit in options.decision.limits.items()},
            "max_pixels": str(options.max_pixels),
            "decode_workers": str(options.workers),
            "decode_timeout": _optional(options.decode_timeout),
        }),
    ])  # fmt: skip


_TYPES = {"uint8": "UINT8", "int32": "INT32", "float32": "FP32"}
# Triton refuses further requests
_QUEUE = "  default_queue_policy { max_queue_size: 256 }\n"
_NO_TF32 = """# on a GPU, ONNX Runtime would round the inputs of float32 convolutions to 10 bits (TF32)
optimization {
  execution_accelerators {
    gpu_execution_accelerator: [ { name: "cuda" parameters { key: "use_tf32" value: "0" } } ]
  }
}
"""


def _header(name: str, backend: str, max_batch_size: int) -> str:
    return f"name: {_quote(name)}\nbackend: {_quote(backend)}\nmax_batch_size: {max_batch_size}\n"


def _tensor(field: str, name: str, kind: str, dims: Sequence[int], more: str = "") -> str:
    end = f" {more}" if more else ""
    return f"{field} [ {{ name: {_quote(name)} data_type: TYPE_{kind} dims: {list(dims)}{end} }} ]\n"


def _describe_output(name: str, spec: TensorSpec) -> str:
    """Return the extra fields of an output: its labels, or that N is its only dimension."""
    if name == "logits":
        return f'label_filename: "{LABELS_FILE}"'
    shape, _ = spec
    return "" if shape else "reshape { shape: [] }"


def _type(spec: TensorSpec) -> tuple[str, list[int]]:
    """Return the type, and the shape without N; in Triton every tensor has a dimension besides N."""
    shape, dtype = spec
    return _TYPES[dtype.name], list(shape) or [1]


def _warmup(size: int, pixels: TensorSpec) -> str:
    kind, dims = _type(pixels)
    tensor = f'key: "{INPUT}" value {{ data_type: TYPE_{kind} dims: {dims} zero_data: true }}'
    return f'model_warmup [ {{ name: "batch {size}" batch_size: {size} inputs {{ {tensor} }} }} ]\n'


def _describe(model: TensorModel) -> dict[str, str]:
    """Return facts about the model for clients; lists are JSON."""
    metadata = model.metadata
    return {
        "opal_deploy": __version__,
        MODEL_SHA256: model.sha256,
        "file_sha256": metadata.file_sha256,
        "checkpoint_sha256": str(metadata.source.get("sha256") or ""),
        "unverified": metadata.unverified,
        "evidence": metadata.evidence,
        "precision": metadata.precision,
        "backbone": metadata.backbone,
        "distance": metadata.distance,
        "prototypes_per_class": str(metadata.prototypes_per_class),
        "grid": json.dumps(metadata.grid),
        "class_names": json.dumps(metadata.class_names),
    }


def _optional(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _parameters(values: Mapping[str, str]) -> str:
    # Triton refuses empty values
    return "".join(
        f"parameters {{ key: {_quote(key)} value {{ string_value: {_quote(value)} }} }}\n"
        for key, value in values.items()
        if value
    )


def labels_text(class_names: Iterable[str]) -> str:
    """Return labels.txt, one class name per line, for Triton's classification extension."""
    return "".join(" ".join(name.split()) + "\n" for name in class_names)


def _quote(text: str) -> str:
    """Return a string literal of protobuf's text format: printable ASCII unchanged, other bytes in octal."""
    escaped = "".join(
        ("\\" if byte in b'"\\' else "") + chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}"
        for byte in text.encode()
    )
    return f'"{escaped}"'
