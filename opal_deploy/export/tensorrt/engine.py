"""Engines with their sidecars from a verified ONNX file; the same engine is not built twice."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import (
    UNVERIFIED,
    VERIFIED,
    Check,
    Sidecar,
    check_engine,
    read_checks,
    record_check,
    sidecar_path,
    write_sidecar,
)
from opal_deploy.artifact.files import ENGINE_SUFFIX, atomic_write
from opal_deploy.artifact.metadata import BLANK_DIGEST, Metadata, Precision
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.export.options import PRECISION_ENDINGS, Report
from opal_deploy.export.tensorrt.builder import Network, SerializedEngine
from opal_deploy.export.tensorrt.options import EngineRequest, EngineTarget
from opal_deploy.runtime.tensorrt.bindings import SHORT_NAMES, Bindings, load
from opal_deploy.runtime.tensorrt.compatibility import platform_name
from opal_deploy.runtime.tensorrt.session import EngineSession

NEVER_RUN = "never run: no GPU of its kind where it was built"


@dataclass(frozen=True)
class ExportedEngine:
    """An engine of an export; `reused` where the same engine was there already."""

    path: Path
    sidecar: Sidecar
    reused: bool

    def to_dict(self) -> dict[str, Any]:
        """Return what the sidecar says of the engine for JSON."""
        sidecar = self.sidecar
        return {
            "path": str(self.path),
            "sha256": sidecar.engine["sha256"],
            "bytes": sidecar.engine["bytes"],
            "builder": sidecar.builder,
            "target": sidecar.target,
            "options": sidecar.options,
            "seconds": sidecar.built["seconds"],
            "state": sidecar.state,
            "reused": self.reused,
        }


@dataclass(frozen=True)
class _OnnxInput:
    """The ONNX file that engines are built from: current path, final name, metadata, bytes, digest of its graph."""

    path: Path
    name: str
    metadata: Metadata
    content: bytes
    graph_sha256: str


def engine_name(stem: str, precision: Precision, target: EngineTarget) -> str:
    """Return `ckpt.fp16.sm80.rtx.engine` for the stem `ckpt` or `ckpt.fp16`."""
    for ending in PRECISION_ENDINGS:
        stem = stem.removesuffix(ending)
    return f"{stem}.{precision}.{target.sm}.{SHORT_NAMES[target.builder]}{ENGINE_SUFFIX}"


@contextmanager
def stage_engines(path: Path, name: str, request: EngineRequest, report: Report) -> Iterator[list[ExportedEngine]]:
    """Build engines under temporary names; they get their names when the block ends without an error.

    Args:
        path: the ONNX file, possibly still under a temporary name.
        name: final name of the ONNX file.
        request: the engines to build.
        report: receives progress messages.

    Raises:
        ArtifactError: the file is not ours or damaged, or the parser refuses the graph.
        UsageError: the builder fails, or a file cannot be written.
        VerificationError: an engine does not reproduce its test vectors on the GPU that is here.
    """
    onnx_input = _read_input(path, name)
    networks: dict[str, Network] = {}
    engines: list[ExportedEngine] = []
    with ExitStack() as stack:
        for target in request.targets:
            if target.builder not in networks:
                library = load(target.builder, "export --trt")
                networks[target.builder] = Network(library, onnx_input.content, name, request.on_message)
            network = networks[target.builder]
            out = request.folder / engine_name(Path(name).stem, onnx_input.metadata.precision, target)
            key = _compute_key(onnx_input, network.library, target, request)
            sidecar = None if request.rebuild else _read_reusable(out, key)
            reused = sidecar is not None
            if sidecar is not None:
                report(
                    f"Reusing {out}: built from the same graph by {network.library.title} for {target.sm}, same options"
                )
                sidecar = _follow_onnx(stack, out, sidecar, onnx_input.metadata)
            elif out.exists() and not (request.overwrite or request.rebuild):
                raise UsageError(
                    f"{out}: it is there already, of another graph, builder, GPU or options; replace it with "
                    "--overwrite"
                )
            else:
                report(
                    f"Building for {target.sm} with {network.library.title} ({target.reason}), "
                    f"batches {request.build.batch}"
                )
                plan = network.build(target, request.build, request.on_progress)
                sidecar = _describe(out, plan, onnx_input, network.library, target, request, key)
                sidecar = _stage_engine(stack, out, plan, sidecar, onnx_input if target.gpu else None, report)
            engines.append(ExportedEngine(out, sidecar, reused))
        yield engines
    for engine in engines:
        state = engine.sidecar.state
        if not engine.reused and state["state"] == VERIFIED:
            sha256 = str(engine.sidecar.engine["sha256"])
            record_check(engine.path, Check(sha256, state["machine"], state["when"], True, state["report"]))


def _read_input(path: Path, name: str) -> _OnnxInput:
    metadata = onnx_file.read_metadata(path)
    onnx_file.check_digest(path, metadata)
    content = path.read_bytes()
    # of the graph and opset alone: the verification report in the metadata changes, the graph does not
    model = onnx.ModelProto.FromString(content)
    del model.metadata_props[:]
    graph_sha256 = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    return _OnnxInput(path, name, metadata, content, graph_sha256)


def _compute_key(onnx_input: _OnnxInput, library: Bindings, target: EngineTarget, request: EngineRequest) -> str:
    """Return a digest of everything that an engine and its sidecar depend on."""
    kept = replace(onnx_input.metadata, verification={}, exporter={}, calibration={}, file_sha256=BLANK_DIGEST)
    metadata = kept.to_dict()
    # recorded later, like `calibration`, and unknown to earlier versions, whose engines stay reusable
    del metadata["evaluation"]
    gpu = None if target.gpu is None else [target.gpu.name, request.driver.version]
    document: dict[str, Any] = {
        "graph": onnx_input.graph_sha256,
        "metadata": metadata,
        "verified": onnx_input.metadata.unverified == "",
        "builder": [library.name, library.version],
        "target": [target.sm, gpu],
        "options": request.build.to_dict(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _read_reusable(engine: Path, key: str) -> Sidecar | None:
    """Return the sidecar of an intact engine that is there already, if it is the one that would be built."""
    try:
        sidecar = check_engine(engine)
    except ArtifactError:
        return None
    return sidecar if sidecar.key == key else None


def _follow_onnx(stack: ExitStack, engine: Path, sidecar: Sidecar, metadata: Metadata) -> Sidecar:
    """Stage a sidecar that names the ONNX file anew where that file was written again around the same graph."""
    if sidecar.onnx["sha256"] == metadata.file_sha256:
        return sidecar
    followed = replace(sidecar, onnx={**sidecar.onnx, "sha256": metadata.file_sha256}, metadata=metadata)
    temporary = stack.enter_context(atomic_write(sidecar_path(engine)))
    temporary.write_text(followed.to_json(), "utf-8")
    return followed


def _describe(
    engine: Path,
    plan: SerializedEngine,
    onnx_input: _OnnxInput,
    library: Bindings,
    target: EngineTarget,
    request: EngineRequest,
    key: str,
) -> Sidecar:
    """Return the sidecar of an engine that was never run."""
    return Sidecar(
        engine={"file": engine.name, "sha256": hashlib.sha256(plan.content).hexdigest(), "bytes": len(plan.content)},
        builder={"name": library.name, "version": library.version, "cuda": library.cuda, "platform": platform_name()},
        target={"sm": target.sm, "gpu": target.gpu.name if target.gpu else None, "current": target.current},
        options=request.build.to_dict(),
        onnx={
            "file": onnx_input.name,
            "sha256": onnx_input.metadata.file_sha256,
            "graph": onnx_input.graph_sha256,
        },
        key=key,
        built={
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(plan.seconds, 3),
            "opal_deploy": __version__,
            "driver": request.driver.version,
        },
        state={"state": UNVERIFIED, "why": NEVER_RUN},
        metadata=onnx_input.metadata,
    )


def _stage_engine(
    stack: ExitStack,
    engine: Path,
    plan: SerializedEngine,
    sidecar: Sidecar,
    runnable: _OnnxInput | None,
    report: Report,
) -> Sidecar:
    """Stage an engine and its sidecar; where the engine can run here (`runnable`), its test vectors run first."""
    # entered first, so that it gets its name last: a sidecar never speaks of an engine that is not there
    beside = stack.enter_context(atomic_write(sidecar_path(engine)))
    temporary = stack.enter_context(atomic_write(engine))
    temporary.write_bytes(plan.content)
    if runnable is not None:
        sidecar = _verify_here(sidecar, temporary, runnable, report)
    beside.write_text(sidecar.to_json(), "utf-8")
    return sidecar


def _verify_here(sidecar: Sidecar, plan: Path, onnx_input: _OnnxInput, report: Report) -> Sidecar:
    """Run a new engine's test vectors on the GPU that is here, and return the sidecar with the outcome.

    Raises:
        VerificationError: the engine does not reproduce them.
    """
    folder = plan.parent / f".{plan.name}.trial"
    folder.mkdir()
    try:
        trial = folder / str(sidecar.engine["file"])
        shutil.copyfile(plan, trial)
        if sidecar.options["strip_weights"]:
            shutil.copyfile(onnx_input.path, folder / onnx_input.name)
        write_sidecar(trial, sidecar)
        session = EngineSession(trial)
        report(f"Test vectors reproduced in {session.description}")
        check = read_checks(trial)[-1]
        session.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    state = {"state": VERIFIED, "machine": check.machine, "when": check.when, "report": check.report}
    return replace(sidecar, state=state)
