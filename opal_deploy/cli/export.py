"""`opal-deploy export`: verified ONNX files, TensorRT engines and Triton repositories."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.artifact.engine_file import read_checks
from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.export.options import ExportOptions

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.export.plan import ExportedEngine, ExportedOnnx
    from opal_deploy.runtime.verification import Comparison
    from opal_deploy.triton.repository import WrittenRepository
    from opal_deploy.web.site import WrittenSite


def export(
    source: Annotated[
        Path,
        typer.Argument(
            help="Checkpoint: ours, the OPAL authors', or with --arch another prototype network's. Or an exported "
            ".onnx file; for --triton an .engine too."
        ),
    ],
    options: ExportOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Write the result to stdout as JSON.")] = False,
) -> None:
    """Export a model to verified ONNX, and with --trt to TensorRT engines.

    A file gets its name only after its outputs were compared with PyTorch's on images, in several batch sizes.
    With --triton the file, or an .onnx or .engine file as it is, becomes a model repository for NVIDIA Triton.
    docs/howto/export.md compares the formats: their files, what they run on, and where they have been run.
    """
    from opal_deploy.export.api import run_export

    with progress("building") as advance:
        result = run_export(source, replace(options, log=print_message, progress=advance))
    for exported in result.onnx:
        _print_onnx(exported)
    for engine in result.engines:
        _print_engine(engine)
    document = result.to_dict()
    if result.repository is not None:
        _print_repository(result.repository)
        document = result.repository.to_dict()
    elif result.site is not None:
        _print_site(result.site)
        document = result.site.to_dict()
    elif result.engines:
        # the best model of the working directory is found without a name
        _print_next(result.engines[0].sidecar.metadata, result.engines[0].path, "")
    else:
        (exported,) = result.onnx
        _print_next(exported.metadata, exported.path, f" --model {exported.path}")
        document = exported.to_dict()
    if as_json:
        print_json(document)


def _print_next(metadata: Metadata, path: Path, model: str) -> None:
    # a model without evidence cannot be explained
    explain = "" if metadata.evidence == "none" else " --explain"
    boxes = " --boxes FILE" if metadata.crop == "boxes" else ""
    runtime = ""
    if metadata.is_for_openvino:
        runtime = " --runtime openvino"
        if find_spec("openvino") is None:
            print_message("On a CPU, run it in OpenVINO: pip install 'opal-deploy[openvino]'")
    print_message(f"Next: opal-deploy infer images/{explain}{model}{boxes}{runtime}")


def _print_onnx(exported: ExportedOnnx) -> None:
    metadata, comparison = exported.metadata, exported.comparison
    if exported.kept:
        print_message(f"Kept {exported.path}: same checkpoint, same options; --overwrite exports it again")
        return
    if metadata.unverified:
        print_message(f"NOT VERIFIED: {metadata.unverified}: its outputs were never compared with PyTorch's")
    if comparison is not None:
        evidence = _describe_evidence(comparison, metadata.precision)
        images = metadata.verification["image_set"]
        print_message(f"Verified on {images}: largest differences: logit {comparison.max_logit:.2g}{evidence}")
        if (resizing := metadata.verification.get("resizing")) is not None:
            equal = resizing["block_cells"] - resizing["block_cells_different"]
            cells = f"; {equal} of {resizing['block_cells']} cells equal" if resizing["block_cells"] else ""
            logit = f"{resizing['max_logit']:.2g}"
            print_message(f"Resized in the graph instead of before it: largest difference of a logit {logit}{cells}")
    megabytes = exported.path.stat().st_size / 1e6
    print_message(f"Wrote {exported.path} ({megabytes:.1f} MB, {metadata.precision}, evidence {metadata.evidence})")


def _describe_evidence(comparison: Comparison, precision: str) -> str:
    if comparison.max_cosine is None:
        return ""
    text = f", cosine {comparison.max_cosine:.2g}, score {comparison.max_score:.2g}; "
    if precision == "fp32":
        ties = f", {comparison.cells_tied} tied" if comparison.cells_tied else ""
        return f"{text}{comparison.cells - comparison.cells_different} of {comparison.cells} cells equal{ties}"
    equal = comparison.block_cells - comparison.block_cells_different
    text += f"{equal} of {comparison.block_cells} cells of the predicted classes equal"
    if (agreement := comparison.agreement) is not None:
        known = "" if agreement.shown else f", too few cells to confirm the {agreement.required:.1%} required"
        text += f" ({agreement.share:.2%}, at least {agreement.low:.2%} with 95 % confidence{known})"
    near = comparison.block_near_ties
    return f"{text}, and {near} near {'tie' if near == 1 else 'ties'} resolved differently" if near else text


def _print_engine(engine: ExportedEngine) -> None:
    sidecar = engine.sidecar
    megabytes = f"{sidecar.engine['bytes'] / 1e6:.1f} MB"
    if engine.reused:
        print_message(f"Kept {engine.path} ({megabytes})")
    else:
        print_message(f"Wrote {engine.path} ({megabytes}, built in {sidecar.built['seconds']:.1f} s)")
    passed = [check for check in read_checks(engine.path) if check.passed] if engine.reused else []
    if sidecar.state["state"] == "verified":
        print_message(f"  verified on {sidecar.state['machine']['gpu']}: it reproduces its test vectors")
    elif passed:
        print_message(f"  checked on {passed[-1].machine.get('gpu')} on {passed[-1].when[:10]}")
    else:
        print_message(
            f"  unverified: never run on hardware; {sidecar.target['sm']} machines first run its test vectors"
        )


def _print_repository(repository: WrittenRepository) -> None:
    model = repository.model
    tensor, explain = (repository.folder / name for name in repository.models)
    print_message(f"Wrote {tensor} ({model.backend}, {model.metadata.precision}, batches up to {model.batch.max})")
    print_message(f"Wrote {explain} (image files to records)")
    print_message(f"Next: tritonserver --model-repository={repository.folder.absolute()}")


def _print_site(site: WrittenSite) -> None:
    if not site.examples:
        print_message("The page has no pictures to try; --examples FOLDER adds six of yours")
    print_message(f"Wrote {site.folder} ({site.size / 1e6:.1f} MB): serve it with any web server, such as")
    print_message(f"Next: cd {site.folder}; python -m http.server 8000; open http://localhost:8000")
