"""`export ckpt.pt --trt`: a checkpoint to fp32 ONNX, the engines' precision, and the engines, in one go."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from opal_deploy.artifact.metadata import Precision
from opal_deploy.export.candidate import ExportOptions, Say, in_precision
from opal_deploy.export.checkpoint_export import build_candidate
from opal_deploy.export.onnx_export import file_name, staged
from opal_deploy.export.tensorrt.engine_export import EngineJob, staged_engines
from opal_deploy.export.tensorrt.from_onnx import Deployment
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.runtime.nvml import Driver


def deploy_checkpoint(
    checkpoint: Checkpoint,
    source: Path,
    options: ExportOptions,
    folder: Path,
    job: EngineJob,
    driver: Driver,
    say: Say = lambda _: None,
) -> Deployment:
    """The fp32 ONNX file, that of `options.precision`, and engines built from the latter.

    Both files are compared with PyTorch on the same pictures; nothing gets its name before everything has passed.

    Raises:
        VerificationError: a gate failed; nothing was written. ArtifactError: TensorRT's parser refuses the graph.
        UsageError: the builder gave up, or the place cannot be written to.
    """
    candidate, calibration = build_candidate(checkpoint, options, say)
    wanted: tuple[Precision, ...] = ("fp32",) if options.precision == "fp32" else ("fp32", options.precision)
    with ExitStack() as stack:
        files = []
        for precision in wanted:
            out = folder / file_name(source, precision).name
            lowered = in_precision(candidate, precision, calibration, say)
            files.append(stack.enter_context(staged(lowered, out, say, options.threads, verify=options.verify)))
        last = files[-1]
        engines = stack.enter_context(staged_engines(last.temporary, last.export.path.name, folder, job, driver, say))
    return Deployment([file.export for file in files], engines)
