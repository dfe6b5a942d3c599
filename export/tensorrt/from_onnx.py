"""`export model.onnx --trt`: one of our ONNX files to engines, without torch, on the machine that is to run them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from opal_deploy.artifact import onnx_file
from opal_deploy.errors import UsageError
from opal_deploy.export.candidate import ExportOptions, Say
from opal_deploy.export.onnx_export import ExportedModel, file_name, onnx_candidate, staged
from opal_deploy.export.tensorrt.engine_export import EngineExport, EngineJob, staged_engines
from opal_deploy.runtime.nvml import Driver
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import verify_test_vectors


@dataclass(frozen=True)
class Deployment:
    """What one call wrote: ONNX files, each verified, and the engines built from the last of them."""

    files: list[ExportedModel]
    engines: list[EngineExport]


def deploy_onnx(
    source: Path, options: ExportOptions, folder: Path, job: EngineJob, driver: Driver, say: Say = lambda _: None
) -> Deployment:
    """Engines from an ONNX file; where another precision than its own is asked for, that file is written first.

    Nothing gets its name before everything has passed.

    Args:
        source: one of our ONNX files.
        options: `precision` of the engines; fp32, or the file's own, builds from the file itself.
        folder: where everything goes.
        job: what to build.
        driver: the machine's.
        say: told what happens.

    Raises:
        ArtifactError: the source is not ours or damaged, or TensorRT's parser refuses it. VerificationError: a gate
        failed. UsageError: the builder gave up.
    """
    metadata = onnx_file.read_metadata(source)
    if options.precision == metadata.precision:
        onnx_file.check_digest(source, metadata)
        if options.attention or options.input_kind != metadata.input_kind:
            raise UsageError(f"{source}: inputs and outputs are fixed in an ONNX file; export the checkpoint again")
        if options.pictures is not None or options.calibrate is not None:
            raise UsageError(
                f"{source}: it is {metadata.precision} already and built as it is: nothing to verify or calibrate on "
                "pictures; leave out --pictures and --calibrate"
            )
        if metadata.unverified:
            say(f"NOT VERIFIED: {source.name} was {metadata.unverified}")
        if metadata.precision != "bf16" and options.verify:
            say(f"Checking {source.name} against its own test vectors")
            verify_test_vectors(OnnxSession(source, device="cpu", threads=options.threads), str(source))
        with staged_engines(source, source.name, folder, job, driver, say) as engines:
            pass
        return Deployment([], engines)
    candidate = onnx_candidate(source, options, say)
    out = folder / file_name(source, options.precision).name
    with ExitStack() as stack:
        file = stack.enter_context(staged(candidate, out, say, options.threads, verify=options.verify))
        engines = stack.enter_context(staged_engines(file.temporary, out.name, folder, job, driver, say))
    return Deployment([file.export], engines)
