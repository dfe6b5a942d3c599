"""Export candidates: graphs with the reference that they must reproduce before they become files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import onnx

from opal_deploy.artifact.metadata import TOP_OUTPUTS, Metadata, Precision
from opal_deploy.artifact.outputs import PER_IMAGE
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.export.graph_edit import add_top_outputs
from opal_deploy.export.images import ImagePool, Pixels, VerificationImages, run_in_batches
from opal_deploy.export.int8 import refinements, store_weights, to_int8
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.precision import to_bf16, to_fp16
from opal_deploy.export.resizing import with_resizing
from opal_deploy.runtime.gates import Rounding


class Float64Comparison(NamedTuple):
    """How far the graph, and the network in float32, are from the network in float64 on the same images."""

    graph: Rounding
    float32: Rounding


@dataclass
class SampledReference:
    """The reference on a pool of images, computed as images are asked for and then kept for the next precision.

    Attributes:
        pool: the images.
        run: returns the reference with its outputs on uint8 [n, H0, W0, 3].
    """

    pool: ImagePool
    run: Callable[[Pixels], Reference]
    _parts: list[Reference] = field(default_factory=list)

    def first(self, count: int) -> tuple[VerificationImages, Reference]:
        """Return the first `count` images, or all if there are fewer, with the reference."""
        images = self.pool.first(count)
        done = sum(len(part.images) for part in self._parts)
        if done < len(images.pixels):
            self._parts.append(run_in_batches(self.run, images.pixels[done:], Reference.concatenate))
        return images, Reference.concatenate(self._parts).rows(0, len(images.pixels))


@dataclass(frozen=True)
class ExportCandidate:
    """A graph that is not a file yet, with the reference that it must reproduce.

    Attributes:
        model: the graph, of the contract's shape (docs/contract.md).
        metadata: metadata of the file, still without test vectors, verification report and digest.
        sample: the verification images with the reference's outputs.
        reference_name: the reference, for people: which runtime, where, in which precision.
        test_vectors: the images and outputs to store in the file.
        calibration: images that int8's ranges are measured on; None where int8 is not made.
        compare_in_float64: compares a graph with the network in float64 on images, uint8 [n, H0, W0, 3]; called only
            where the plain gate fails. None where the source is not a network.
        baseline: the float32 graph that `model` was made from; None where `model` is that graph.
        unverified: why the reference itself was never verified, recorded in the file too; empty if it was.
    """

    model: onnx.ModelProto
    metadata: Metadata
    sample: SampledReference
    reference_name: str
    test_vectors: Reference = field(repr=False)
    calibration: VerificationImages | None = field(default=None, repr=False)
    compare_in_float64: Callable[[onnx.ModelProto, Pixels], Float64Comparison] | None = None
    baseline: onnx.ModelProto | None = field(default=None, repr=False)
    unverified: str = ""


def convert_precision(candidate: ExportCandidate, precision: Precision, options: ExportOptions) -> ExportCandidate:
    """Return a float32 candidate with its body in another precision; its reference stays the same.

    int8 is made for processors, or with `trt` for TensorRT.

    Raises:
        ArtifactError: a weight is beyond the precision's range.
    """
    if precision == "fp32":
        return candidate
    metadata = replace(candidate.metadata, precision=precision)
    if precision == "int8":
        assert candidate.calibration is not None  # made with the candidate, for its precisions
        described = candidate.calibration.description
        options.log(f"Calibrating int8 on {described}")
        activations = options.int8_activations
        model = to_int8(
            candidate.model, candidate.calibration.pixels, metadata, activations=activations, threads=options.threads
        )
        exporter = {**metadata.exporter, "calibrated_on": described, "activations": activations}
        metadata = replace(metadata, exporter=exporter)
    else:
        model = to_fp16(candidate.model) if precision == "fp16" else to_bf16(candidate.model)
    return replace(candidate, model=model, metadata=metadata, compare_in_float64=None, baseline=candidate.model)


def refine_precision(candidate: ExportCandidate, threads: int | None = None) -> Iterator[ExportCandidate]:
    """Yield candidates to try in turn until one passes its gate: the given one, then ones closer to its reference.

    An int8 candidate computes more and more in float32; the file's metadata tells what is quantised. In other
    precisions the given candidate is the only one.
    """
    baseline, calibration = candidate.baseline, candidate.calibration
    if candidate.metadata.precision != "int8" or baseline is None or calibration is None:
        yield candidate
        return
    for quantised, model in refinements(candidate.model, baseline, calibration.pixels, candidate.metadata, threads):
        metadata = replace(candidate.metadata, exporter={**candidate.metadata.exporter, "quantised": quantised})
        if metadata.int8_activations == "uint8":
            model = store_weights(model)
        yield replace(candidate, model=model, metadata=metadata)


def with_top_classes(candidate: ExportCandidate, k: int) -> ExportCandidate:
    """Return a candidate that also outputs its `k` best classes, or all C if there are fewer."""
    metadata = candidate.metadata
    k = min(k, metadata.num_classes)
    model = add_top_outputs(candidate.model, metadata.class_map, k)
    outputs = (*metadata.outputs, *TOP_OUTPUTS)
    return replace(candidate, model=model, metadata=replace(metadata, outputs=outputs, top_k=k))


def with_image_input(candidate: ExportCandidate) -> ExportCandidate:
    """Return a candidate that takes images of any size, of one that takes uint8; others are returned as they are."""
    metadata = candidate.metadata
    if metadata.input_kind != "uint8":
        return candidate
    model = with_resizing(candidate.model, metadata.form)
    return replace(candidate, model=model, metadata=replace(metadata, input_kind="image"))


def drop_other_outputs(candidate: ExportCandidate) -> ExportCandidate:
    """Return a candidate of `with_top_classes` with its best classes and its outputs of one number per image only."""
    model = copy.deepcopy(candidate.model)
    names = tuple(name for name in candidate.metadata.outputs if name in (*TOP_OUTPUTS, *PER_IMAGE))
    values = {value.name: value for value in model.graph.output}
    del model.graph.output[:]
    model.graph.output.extend(values[name] for name in names)
    return replace(candidate, model=model, metadata=replace(candidate.metadata, outputs=names))
