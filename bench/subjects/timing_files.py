"""Files made only to be timed: the graphs that the exporter writes, without its gates.

Whether a file answers rightly is the exporter's question and takes long; what it costs does not depend on it. The
file's own metadata says that nobody compared it with anything.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.bench.engines import settle
from opal_deploy.bench.subjects.network import NamedNetwork
from opal_deploy.demo import example_pictures
from opal_deploy.errors import UsageError
from opal_deploy.export.candidate import ExportOptions
from opal_deploy.export.gate import write_model
from opal_deploy.export.precision import to_bf16, to_fp16
from opal_deploy.export.quantise import to_int8
from opal_deploy.export.tensorrt.choice import choose
from opal_deploy.export.tensorrt.engine_export import EngineJob
from opal_deploy.export.tensorrt.from_checkpoint import deploy_checkpoint
from opal_deploy.export.tensorrt.options import BuildOptions
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.runtime.tensorrt.cuda import visible_driver

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
# enough for ranges; they change what int8 answers, not what it costs
_CALIBRATION_PICTURES = 8
_SETTLING_PICTURES = 16


def write_onnx(network: NamedNetwork, precision: str, path: Path) -> Metadata:
    """A network as an ONNX file, all outputs that its head explains with; int8 is calibrated on generated creatures.

    Raises:
        UsageError: no such precision of ONNX files, or over ONNX's 2 GB.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision {precision} in an ONNX file: expected {', '.join(PRECISIONS)}")
    metadata = replace(
        network.described,
        outputs=network.graph.output_names,
        exporter={"torch": torch.__version__},
        precision=precision,  # type: ignore[arg-type]  # checked above
        verification={"skipped": "made to be timed"},
    )
    model = network.traced
    if precision == "fp16":
        model = to_fp16(model)
    elif precision == "bf16":
        model = to_bf16(model)
    elif precision == "int8":
        model = to_int8(model, example_pictures(_CALIBRATION_PICTURES, *metadata.input_size), metadata)
    write_model(model, metadata, path)
    return replace(metadata, file_sha256=onnx_file.seal(path))


def write_engine(checkpoint: Checkpoint, precision: str, folder: Path, *, random: bool) -> Path:
    """A network as an engine for the GPU that is here.

    An engine reproduces its test vectors before it answers anything. With random weights the answers are all alike,
    which no lower precision can reproduce; so they are settled on pictures first.

    Raises:
        UsageError: no GPU, or the builder gave up. MissingExtra: no TensorRT for it.
    """
    driver = visible_driver()
    if not driver.gpus:
        raise UsageError(f"tensorrt: no GPU here ({driver.problem}); engines run on NVIDIA GPUs only")
    job = EngineJob(choose(None, [], driver), BuildOptions())
    if random:
        checkpoint = copy.deepcopy(checkpoint)
        settle(checkpoint.network, example_pictures(_SETTLING_PICTURES, *checkpoint.network.config.input_size))
    options = ExportOptions(precision=precision, verify=False)  # type: ignore[arg-type]  # as above
    deployment = deploy_checkpoint(checkpoint, folder / "timed.pt", options, folder, job, driver)
    return deployment.engines[0].path
