"""Somebody's classifier, exported by other tools: explained as it is, with its predictions unchanged.

The file is checked before anything runs, its end is found (`classifier_tail`), and it gets the outputs `share_classes`
and `shares` and our metadata. The gate compares it with the original on the same images: the same logits, and shares
that add up to them with the bias.
"""

from __future__ import annotations

import ast
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.documents import pack_array
from opal_deploy.artifact.files import atomic_write, compute_sha256
from opal_deploy.artifact.heads import find_totals
from opal_deploy.artifact.metadata import LINEAR_SCHEMA, Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.preprocessing import PRESETS, Preprocessing, ResizeRule, from_config, read_preprocessing
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import ArtifactError, StoppedEarly, UsageError, VerificationError, first_line, require
from opal_deploy.export.classifier_tail import OwnInput, Tail, add_shares, check_graph, find_tail, set_input
from opal_deploy.export.graph_edit import with_outputs
from opal_deploy.export.onnx_source import reference_runner
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.plan import ExportedOnnx, ExportResult
from opal_deploy.preprocess.resize import normalise
from opal_deploy.records.regions import MOST_REGIONS
from opal_deploy.runtime.onnx_session import CPU, OnnxSession, session_options, translate_errors
from opal_deploy.runtime.verification import verify_test_vectors
from opal_deploy.synthetic import example_images
from opal_deploy.synthetic.dataset import test_vector_images

# of a logit's size: how far runtimes may fuse differently, and how far shares and bias may be off
_SAME, _ADDS_UP = 1e-6, 1e-5
_IMAGES = 16
# a file whose tensors are larger than any classifier's is not opened
_MAX_SIDE = 4096


def export_classifier(
    path: Path, options: ExportOptions, name: str = "", preprocessing: Preprocessing | None = None
) -> ExportResult:
    """Write a classifier's ONNX file with the shares of its cells; see `opal-deploy export`.

    Args:
        name: of the source, where `path` is only its ONNX file.
        preprocessing: where the source tells it.

    Raises:
        ArtifactError: not an ONNX file, or damaged.
        UsageError: its cells have no exact share, or classes or preprocessing are not known.
        VerificationError: it does not answer as the original.
    """
    name = name or path.name
    header = onnx_file.read_header(path)
    onnx_file.check_operators(header, name)
    model = _load(path)
    value = check_graph(model, name)
    try:
        tail = find_tail(model, name)
    except (ValueError, IndexError) as error:
        raise ArtifactError(
            f"{name}: its last nodes do not fit each other ({first_line(error)}); export it again"
        ) from None
    preprocessing = preprocessing or _find_preprocessing(header.properties, options, path, name)
    own = _read_input(value, preprocessing, options, name)
    names = _name_classes(header.properties, options, path, len(tail.weights), name)
    is_half = any(tensor.data_type == TensorProto.FLOAT16 for tensor in model.graph.initializer)
    rule = preprocessing.rule or ResizeRule("shortest_edge", "bilinear", min(own.size))
    run_logits = _make_runner(model, tail.logits, own, options, name)
    if tail.is_binary:
        options.log(f"{name}: one logit found, read as two classes: the second one where it is above 0")
    grid = _measure_grid(model, tail, own, options, name)
    metadata = Metadata(
        tuple(names),
        MOST_REGIONS,
        {"kind": "additive", "biases": pack_array(tail.biases.astype(np.float32)), "activation": tail.activation},
        "regions",
        Path(name).stem,
        grid,
        own.size,
        "float32",
        preprocessing.mean,
        preprocessing.std,
        str(rule),
        options.crop,
        "fp16" if is_half else "fp32",
        source={"file": name, "sha256": compute_sha256(path), "format": "classifier"},
        exporter={"opal_deploy": __version__, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__},
        outputs=("logits", "share_classes", "shares"),
        schema=LINEAR_SCHEMA,
    )

    def answer(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the original's logits for images uint8 [n, H0, W0, 3]; with an activation at its end, those before."""
        logits = run_logits(normalise(images, metadata.mean, metadata.std)).reshape(len(images), -1)
        return logits * np.array([-0.5, 0.5], np.float32) if tail.is_binary else logits

    changed = add_shares(model, tail, metadata)
    if own.batch is not None:
        _make_dynamic(changed.graph, own.batch)
    set_input(changed, own)
    if options.slots is not None:
        if metadata.is_multi_label:
            raise UsageError(f"{name}: gives several labels per image; --slots takes a classifier of one: leave it out")
        for package, pip_name in (("torch", None), ("sklearn", "scikit-learn")):
            require(package, "train", "--slots", pip_name=pip_name)
        from opal_deploy.export.classifier_slots import divide_shares

        changed, metadata = divide_shares(changed, metadata, tail, options, partial(_open, options=options, name=name))
    out = path.with_name(f"{Path(name).stem}.opal.onnx") if options.out is None else Path(options.out)
    if out.resolve() == path.resolve():
        raise UsageError(f"--out {out}: is the classifier itself, which stays as it is; give another file")
    with atomic_write(out, replace=options.overwrite) as temporary:
        onnx_file.write_model(changed, metadata, temporary)
        session = OnnxSession(temporary, device="cpu", threads=options.threads, check_digest=False)
        report = _verify(session, answer, tail, own, name)
        vectors = test_vector_images(*own.size)
        reference = Reference(vectors, Outputs(answer(vectors)))
        if options.slots is not None:
            reference = reference_runner(changed, session)(vectors)
        metadata = replace(metadata, test_vectors=test_vectors.pack(reference), verification=report)
        onnx_file.write_model(changed, metadata, temporary)
        digest = onnx_file.embed_digest(temporary)
        verify_test_vectors(OnnxSession(temporary, device="cpu", threads=options.threads), name)
    listed = "the cells' shares" if options.slots is None else "the slots' scores"
    options.log(
        f"Compared with {name} on {report['images']} images: logits {report['logits']}; {listed} and the bias "
        f"add up to the logit within {report['sum_error']:.1g} of {report['largest_logit']:.3g}"
    )
    return ExportResult(path, [ExportedOnnx(out, replace(metadata, file_sha256=digest), None)], [])


def _load(path: Path) -> onnx.ModelProto:
    """Return a model with its weights; raise ArtifactError for weights outside the file's own folder."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's parser exports no base class of its errors
        raise ArtifactError(f"{path}: not a readable ONNX file ({first_line(error)}); export it again") from None
    folder = path.resolve().parent
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location" and not (folder / entry.value).resolve().is_relative_to(folder):
                raise ArtifactError(f"{path}: its weights lie outside its folder ({entry.value[:60]!r})")
        if any(side < 0 or side > 1 << 28 for side in tensor.dims):
            raise ArtifactError(f"{path}: a weight has the shape {list(tensor.dims)[:6]}; the file is damaged")
    try:
        onnx.load_external_data_for_model(model, str(folder))
    except Exception as error:  # a missing or short side file raises what onnx, protobuf or numpy meets first
        raise ArtifactError(f"{path}: its weights cannot be read ({first_line(error)}); copy them next to it") from None
    return model


def _find_preprocessing(properties: Mapping[str, str], options: ExportOptions, path: Path, name: str) -> Preprocessing:
    beside = path.with_name("preprocessor_config.json")
    if options.preprocess is not None or beside.is_file():
        return read_preprocessing(options.preprocess or str(beside))
    if properties.get("author") == "Ultralytics":
        return PRESETS["ultralytics"]
    raise UsageError(f"{name}: give --preprocess {', '.join(PRESETS)}, or a .json file of timm or Hugging Face")


def _name_classes(
    properties: Mapping[str, str], options: ExportOptions, path: Path, count: int, name: str
) -> Sequence[str]:
    names: Sequence[str]
    if isinstance(options.classes, str | os.PathLike):
        from opal_deploy.model.checkpoint import read_class_names

        names = read_class_names(Path(options.classes))
    elif options.classes is not None:
        names = list(options.classes)
    else:
        # a file that says how to prepare images lies beside the one with the names
        stated = Path(options.preprocess or "")
        names = _find_names(properties, (stated if stated.suffix == ".json" else path).parent)
        if not names:
            names = [f"class {number}" for number in range(count)]
            options.log(f"{name}: does not name its classes, which are numbered; name them with --classes FILE")
    if len(names) != count:
        raise UsageError(f"{name}: {len(names)} class names for {count} classes; give one per class, in their order")
    return names


def _find_names(properties: Mapping[str, str], folder: Path) -> list[str]:
    """Return the class names in a file of Ultralytics, or in a `config.json` of Hugging Face or timm; none without."""
    stored: Any = ()
    with suppress(OSError, ValueError, SyntaxError, TypeError, AttributeError):
        if (names := properties.get("names")) is not None:
            # a dictionary as Python writes it
            stored = ast.literal_eval(names)
        else:
            raw = json.loads((folder / "config.json").read_text("utf-8"))
            stored = raw.get("id2label") or raw.get("label_names") or ()
        if isinstance(stored, dict):
            stored = [value for _, value in sorted((int(number), value) for number, value in stored.items())]
        return [str(value) for value in stored]
    return []


def _read_input(
    value: onnx.ValueInfoProto, preprocessing: Preprocessing, options: ExportOptions, name: str
) -> OwnInput:
    kind = value.type.tensor_type.elem_type
    sides = [dim.dim_value or None for dim in value.type.tensor_type.shape.dim]
    # exporters of PyTorch may leave all four sides open
    is_image = len(sides) == 4 and (3 in (sides[1], sides[3]) or sides[1] is sides[3] is None)
    if not is_image or kind not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        raise UsageError(f"{name}: input {value.name} is {sides}; expected float images [N, 3, H, W] or [N, H, W, 3]")
    channels_last = sides[3] == 3 != sides[1]
    height, width = sides[1:3] if channels_last else sides[2:4]
    side = preprocessing.size or 224
    size = options.input_size or (height or side, width or side)
    if (height or size[0], width or size[1]) != size or max(size) > _MAX_SIDE:
        raise UsageError(f"{name}: takes images of {height}x{width}, asked for {size[0]}x{size[1]}; leave out --size")
    return OwnInput(value.name, size, channels_last, preprocessing.is_bgr, kind, sides[0])


def _open(model: onnx.ModelProto, options: ExportOptions, name: str) -> Any:
    """Return ONNX Runtime's session of a model on the CPU."""
    settings = session_options(options.threads or 0)
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=[CPU])
    except Exception as error:  # ONNX Runtime exports no base class of its exceptions
        raise ArtifactError(f"{name}: ONNX Runtime refuses it ({first_line(error)})") from None


def _feed(own: OwnInput, images: NDArray[np.float32]) -> NDArray[Any]:
    """Return a classifier's own input of normalised images [N, 3, H0, W0]."""
    inputs = images[:, ::-1] if own.is_bgr else images
    inputs = inputs.transpose(0, 2, 3, 1) if own.channels_last else inputs
    return np.ascontiguousarray(inputs.astype(np.float16 if own.kind == TensorProto.FLOAT16 else np.float32))


def _make_runner(
    model: onnx.ModelProto, value: str, own: OwnInput, options: ExportOptions, name: str
) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Return a function from normalised images [n, 3, H0, W0] to a value of a classifier, run in its own batches."""
    session, size = _open(with_outputs(model, [value]), options, name), own.batch or 1

    def run(images: NDArray[np.float32]) -> NDArray[np.float32]:
        parts = []
        for start in range(0, len(images), size):
            # the last batch is filled up with copies
            rows = np.resize(np.arange(start, min(start + size, len(images))), size)
            with translate_errors(size):
                (part,) = session.run([value], {own.name: _feed(own, images[rows])})
            # a single image may have lost its axis
            parts.append(part if part.ndim > 1 else part[None])
        return np.concatenate(parts)[: len(images)].astype(np.float32)

    return run


def _measure_grid(
    model: onnx.ModelProto, tail: Tail, own: OwnInput, options: ExportOptions, name: str
) -> tuple[int, int]:
    """Return (H, W) of the feature map, from a run; tokens are taken as rows of a grid of the input's shape."""
    run, (height, width) = _make_runner(model, tail.features, own, options, name), own.size
    features = run(np.zeros((1, 3, height, width), np.float32))
    channels, axis = tail.weights.shape[1], features.ndim - 1 if tail.channels_last else 1
    sides = np.delete(features.shape, (0, axis))
    if features.ndim not in (3, 4) or features.shape[axis] != channels:
        shape = f"[N, {channels}, H, W] or [N, L, {channels}]"
        raise UsageError(f"{name}: the mean before its dense layer is of {list(features.shape)}; expected {shape}")
    if len(sides) == 2 and (sides.min() > 1 or sides.max() == 1):
        return int(sides[0]), int(sides[1])
    count = int(sides.prod())
    rows = max(1, round(math.sqrt(count * height / width)))
    grid = rows, count // rows
    if min(grid) == 1 or count % rows or not _are_in_rows(run, own.size, grid, axis):
        raise UsageError(f"{name}: the mean is over {count} tokens; expected those of a grid's cells, row by row")
    return grid


def _are_in_rows(
    run: Callable[[NDArray[np.float32]], NDArray[Any]], size: tuple[int, int], grid: tuple[int, int], axis: int
) -> bool:
    """Return whether tokens are a grid's cells: other noise in a quarter changes the cells of that quarter most.

    Args:
        run: from images [n, 3, H0, W0] to tokens, whose channels are at `axis`.
    """

    # the first and the last half of each side
    halves = [(slice(length // 2), slice(length - length // 2, None)) for length in (*grid, *size)]
    rows, cols, down, across = halves
    noise = np.random.default_rng(0).standard_normal((1, 3, *size), np.float32)
    before, quarters = run(noise), list(np.ndindex(2, 2))
    for place, (row, col) in enumerate(quarters):
        image = noise.copy()
        image[..., down[row], across[col]] *= -1
        changes = np.abs(run(image) - before).sum(axis=axis).reshape(grid)
        if np.argmax([changes[rows[row], cols[col]].sum() for row, col in quarters]) != place:
            return False
    return True


def _make_dynamic(graph: onnx.GraphProto, batch: int) -> None:
    """Let a graph take any number of images, in place: shapes traced for one batch are taken from the data."""
    shapes = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    tensors = [tensor for tensor in graph.initializer if tensor.name in shapes]
    tensors += [a.t for n in graph.node if n.op_type == "Constant" and n.output[0] in shapes for a in n.attribute]
    for tensor in tensors:
        shape = onnx.numpy_helper.to_array(tensor).copy()
        if len(shape) and shape[0] == batch:
            # 0 copies the size of the input's axis
            shape[0] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(shape, tensor.name))


def _verify(
    session: OnnxSession, answer: Callable[[NDArray[np.uint8]], NDArray[np.float32]], tail: Tail, own: OwnInput,
    name: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the report of the gate: the same logits as the original's `answer`, and parts that add up to them."""
    metadata, images = session.metadata, example_images(_IMAGES, *own.size)
    expected = answer(images)
    try:
        outputs = session.run(images)
    except StoppedEarly as error:
        raise UsageError(f"{name}: needs a dynamic batch, and has {own.batch} ({first_line(error)})") from None
    largest = float(np.abs(expected).max())
    difference = float(np.abs(outputs.logits - expected).max())
    coarser = 1e3 if metadata.precision == "fp16" else 1.0
    if not difference <= _SAME * coarser * largest:
        raise VerificationError(f"{name}: logits differ by {difference:.2g} of {largest:.3g} with shares; not written")
    if outputs.scores is not None:
        sums, logits = find_totals(outputs.scores, metadata), outputs.logits
    else:
        assert outputs.shares is not None
        assert outputs.share_classes is not None
        sums = outputs.shares.sum(axis=(2, 3), dtype=np.float64) + tail.biases[outputs.share_classes]
        logits = np.take_along_axis(outputs.logits, outputs.share_classes, axis=1)
    missed = float(np.abs(sums - logits).max())
    if not missed <= _ADDS_UP * coarser * largest:
        raise VerificationError(f"{name}: shares and bias miss the logit by {missed:.2g} of {largest:.3g}; not written")
    return {
        "image_set": f"{len(images)} generated creatures", "images": len(images), "sum_error": missed,
        "logits": "bit-equal" if difference == 0 else f"within {difference:.1g}", "largest_logit": largest,
    }  # fmt: skip


def export_state_dict(path: Path, options: ExportOptions) -> ExportResult:
    """Export a state dict of a classifier of torchvision or timm, which `options.arch` names; see `export_classifier`.

    Raises:
        UsageError: no such network, or the weights are another's.
    """
    from opal_deploy.model import state_dicts

    assert options.arch is not None  # decided by it
    library, _, network = options.arch.partition(":")
    require(library, "train", f"--arch {options.arch}")
    state = state_dicts.read_state_dict(path)
    count = next((len(value) for name, value in reversed(state.items()) if value.ndim == 1), 0)
    try:
        if library == "timm":
            import timm

            module = timm.create_model(network, num_classes=count)
        else:
            import torchvision

            extra = {"aux_logits": False, "init_weights": False} if network in ("googlenet", "inception_v3") else {}
            module = torchvision.models.get_model(network, num_classes=count, **extra)
    except (ValueError, RuntimeError, TypeError) as error:
        raise UsageError(f"--arch {options.arch}: {first_line(error)}; expected a network of {library}") from None
    state = state_dicts.strip_prefix(state, module.state_dict())
    problem = f"{path} does not fit {options.arch} with {count} classes"
    state_dicts.load_exactly(module, state, problem)
    return export_module(module, options, path)


def export_module(module: Any, options: ExportOptions, source: Path) -> ExportResult:
    """Export a PyTorch classifier in memory; see `export_classifier`.

    Args:
        source: names the file to write and the source in its metadata.
    """
    import torch

    module, name, preprocessing = module.eval(), source.name, None
    if options.preprocess is not None:
        preprocessing = read_preprocessing(options.preprocess)
    elif stated := getattr(module, "pretrained_cfg", None):
        # timm's networks say how their weights were trained
        preprocessing = from_config(stated)
    side = (preprocessing and preprocessing.size) or 224
    size = options.input_size or (side, side)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{Path(name).stem}.onnx"
        example = torch.zeros(2, 3, *size, device=next(module.parameters()).device)
        with torch.no_grad():
            torch.onnx.export(
                module, (example,), str(path), dynamo=True, input_names=["x"], output_names=["y"], verbose=False,
                dynamic_shapes=({0: torch.export.Dim("N")},), external_data=False,
            )  # fmt: skip
        out = options.out or source.with_name(f"{source.stem}.opal.onnx")
        return export_classifier(path, replace(options, out=out), name, preprocessing)
