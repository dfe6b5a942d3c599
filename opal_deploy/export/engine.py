"""Engines with their sidecars from a verified ONNX file; the same engine is not built twice."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
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
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.metadata import BLANK_DIGEST, Metadata
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.export.builder import EngineTarget, Network, SerializedEngine
from opal_deploy.export.files import EngineTargets, ExportedEngine, engine_name
from opal_deploy.export.options import ExportOptions
from opal_deploy.logs import as_progress
from opal_deploy.runtime.devices import Driver
from opal_deploy.runtime.engine_session import EngineSession
from opal_deploy.runtime.tensorrt import Bindings, load, platform_name

NEVER_RUN = "never run: no matching GPU where it was built"


@dataclass(frozen=True)
class _OnnxInput:
    """The ONNX file that engines are built from: current path, final name, metadata, bytes, digest of its graph."""

    path: Path
    name: str
    metadata: Metadata
    content: bytes
    graph_sha256: str


@contextmanager
def stage_engines(
    path: Path, name: str, engines: EngineTargets, options: ExportOptions
) -> Iterator[list[ExportedEngine]]:
    """Build engines from an ONNX file under temporary names; they get their names when the block ends without an error.

    `path` is where the ONNX file is now, `name` its final name.

    Raises:
        ArtifactError: the file is not ours or damaged, or the parser refuses the graph.
        UsageError: the builder fails, or a file cannot be written.
        VerificationError: an engine does not reproduce its test vectors on this machine's GPU.
    """
    onnx_input = _read_input(path, name)
    networks: dict[str, Network] = {}
    staged: list[ExportedEngine] = []

    def log_message(level: str, message: str) -> None:
        options.log(f"  {level.lower()}: {message}")

    def report_progress(phase: str, step: int, steps: int) -> None:
        as_progress(options.progress)(step, steps, phase)

    with ExitStack() as stack:
        for target in engines.targets:
            if target.builder not in networks:
                library = load(target.builder, "export --trt")
                on_message = log_message if options.verbose else None
                networks[target.builder] = Network(library, onnx_input.content, name, on_message)
            network = networks[target.builder]
            title = network.library.title
            out = engines.folder / engine_name(Path(name).stem, onnx_input.metadata.precision, target)
            build = _Build(onnx_input, network.library, target, engines.driver, options)
            sidecar = None if options.rebuild else _read_reusable(out, build.key)
            reused = sidecar is not None
            if sidecar is not None:
                options.log(f"Reusing {out}: same graph, {title} for {target.sm}, same options")
                sidecar = _follow_onnx(stack, out, sidecar, onnx_input.metadata)
            elif out.exists() and not (options.overwrite or options.rebuild):
                found = "the file exists, from another graph, builder, GPU or options"
                raise UsageError(f"{out}: {found}; pass --overwrite to replace it")
            else:
                options.log(f"Building for {target.sm} with {title} ({target.reason}), batches {options.batch_range}")
                sidecar = _stage_engine(stack, out, build, network.build(target, options, report_progress))
            staged.append(ExportedEngine(out, sidecar, reused))
        yield staged
    for exported in staged:
        state = exported.sidecar.state
        if not exported.reused and state["state"] == VERIFIED:
            sha256 = str(exported.sidecar.engine["sha256"])
            record_check(exported.path, Check(sha256, state["machine"], state["when"], True, state["report"]))


def _read_input(path: Path, name: str) -> _OnnxInput:
    metadata = onnx_file.read_metadata(path)
    onnx_file.check_digest(path, metadata)
    content = path.read_bytes()
    # of graph and opset only: the verification in the metadata may change while the graph does not
    model = onnx.ModelProto.FromString(content)
    del model.metadata_props[:]
    graph_sha256 = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    return _OnnxInput(path, name, metadata, content, graph_sha256)


@dataclass(frozen=True)
class _Build:
    """An engine to build."""

    onnx_input: _OnnxInput
    library: Bindings
    target: EngineTarget
    driver: Driver
    options: ExportOptions

    @cached_property
    def key(self) -> str:
        """A digest of everything that the engine and its sidecar depend on."""
        metadata, gpu = self.onnx_input.metadata, self.target.gpu
        # what is measured and recorded later leaves the engine as it is
        kept = replace(metadata, verification={}, exporter={}, calibration={}, evaluation={}, file_sha256=BLANK_DIGEST)
        document: dict[str, Any] = {
            "graph": self.onnx_input.graph_sha256,
            "metadata": kept.to_dict(),
            "verified": metadata.unverified == "",
            "builder": [self.library.name, self.library.version],
            "target": [self.target.sm, None if gpu is None else [gpu.name, self.driver.version]],
            "options": self.options.to_dict(),
        }
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def describe(self, path: Path, engine: SerializedEngine) -> Sidecar:
        """Return the sidecar of the engine, which was never run."""
        source, library, target = self.onnx_input, self.library, self.target
        sha256 = hashlib.sha256(engine.content).hexdigest()
        return Sidecar(
            engine={"file": path.name, "sha256": sha256, "bytes": len(engine.content)},
            builder={
                "name": library.name, "version": library.version, "cuda": library.cuda, "platform": platform_name()
            },
            target={"sm": target.sm, "gpu": target.gpu.name if target.gpu else None, "current": target.current},
            options=self.options.to_dict(),
            onnx={"file": source.name, "sha256": source.metadata.file_sha256, "graph": source.graph_sha256},
            key=self.key,
            built={
                "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "seconds": round(engine.seconds, 3),
                "opal_deploy": __version__,
                "driver": self.driver.version,
            },
            state={"state": UNVERIFIED, "why": NEVER_RUN},
            metadata=source.metadata,
        )  # fmt: skip


def _read_reusable(engine: Path, key: str) -> Sidecar | None:
    """Return the sidecar of an existing intact engine, if it is the one that would be built."""
    try:
        sidecar = check_engine(engine)
    except ArtifactError:
        return None
    return sidecar if sidecar.key == key else None


def _follow_onnx(stack: ExitStack, engine: Path, sidecar: Sidecar, metadata: Metadata) -> Sidecar:
    """Stage a sidecar that names the ONNX file anew where that file was rewritten around the same graph."""
    if sidecar.onnx["sha256"] == metadata.file_sha256:
        return sidecar
    followed = replace(sidecar, onnx={**sidecar.onnx, "sha256": metadata.file_sha256}, metadata=metadata)
    temporary = stack.enter_context(atomic_write(sidecar_path(engine)))
    temporary.write_text(followed.to_json(), "utf-8")
    return followed


def _stage_engine(stack: ExitStack, path: Path, build: _Build, engine: SerializedEngine) -> Sidecar:
    """Stage an engine and its sidecar; where the engine can run here, its test vectors run first."""
    # entered first, so that it gets its name last: a sidecar never describes an engine that does not exist
    beside = stack.enter_context(atomic_write(sidecar_path(path)))
    temporary = stack.enter_context(atomic_write(path))
    temporary.write_bytes(engine.content)
    sidecar = build.describe(path, engine)
    if build.target.gpu is not None:
        sidecar = _verify_here(sidecar, temporary, build.onnx_input, build.options)
    beside.write_text(sidecar.to_json(), "utf-8")
    return sidecar


def _verify_here(sidecar: Sidecar, engine: Path, onnx_input: _OnnxInput, options: ExportOptions) -> Sidecar:
    """Run a new engine's test vectors on this machine's GPU, and return the sidecar with the outcome.

    Raises:
        VerificationError: the engine does not reproduce them.
    """
    folder = engine.parent / f".{engine.name}.trial"
    folder.mkdir()
    try:
        trial = folder / str(sidecar.engine["file"])
        shutil.copyfile(engine, trial)
        if sidecar.options["strip_weights"]:
            shutil.copyfile(onnx_input.path, folder / onnx_input.name)
        write_sidecar(trial, sidecar)
        session = EngineSession(trial)
        options.log(f"Test vectors reproduced in {session.description}")
        check = read_checks(trial)[-1]
        session.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    state = {"state": VERIFIED, "machine": check.machine, "when": check.when, "report": check.report}
    return replace(sidecar, state=state)
