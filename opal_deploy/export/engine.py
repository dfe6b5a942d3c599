"""Engines with their sidecars from a verified ONNX file; the same engine is not built twice."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import time
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
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.metadata import BLANK_DIGEST, Metadata
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.export.builder import EngineTarget, Network
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.plan import EngineTargets, ExportedEngine, engine_name
from opal_deploy.logs import as_progress
from opal_deploy.runtime.cuda import CUDA_VERSION
from opal_deploy.runtime.devices import Driver
from opal_deploy.runtime.engine_session import EngineSession
from opal_deploy.runtime.tensorrt import load, platform_name

NEVER_RUN = "never run: no matching GPU where it was built"


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
    build = _read_onnx(path, name, engines, options)
    title = build.network.library.title
    staged: list[ExportedEngine] = []
    with ExitStack() as stack:
        for target in engines.targets:
            out = engines.folder / engine_name(Path(name).stem, build.metadata.precision, target)
            sidecar = None if options.rebuild else _read_reusable(out, build.key(target))
            reused = sidecar is not None
            if sidecar is not None:
                options.log(f"Reusing {out}: same graph, {title} for {target.sm}, same options")
                sidecar = _follow_onnx(stack, out, sidecar, build.metadata)
            elif out.exists() and not (options.overwrite or options.rebuild):
                raise UsageError(f"{out}: exists, from another graph, builder, GPU or options; --overwrite replaces it")
            else:
                options.log(f"Building for {target.sm} with {title} ({target.reason}), batches {options.batch_range}")
                sidecar = _stage_engine(stack, out, build, target)
            staged.append(ExportedEngine(out, sidecar, reused))
        yield staged
    for exported in staged:
        state = exported.sidecar.state
        if not exported.reused and state["state"] == VERIFIED:
            sha256 = str(exported.sidecar.engine["sha256"])
            record_check(exported.path, Check(sha256, state["machine"], state["when"], True, state["report"]))


@dataclass(frozen=True)
class _Build:
    """An ONNX file, by its final name, in its builder; `graph_sha256` is the digest of only the graph and its opset."""

    name: str
    metadata: Metadata
    graph_sha256: str
    network: Network
    driver: Driver
    options: ExportOptions

    def key(self, target: EngineTarget) -> str:
        """Return a digest of everything that an engine and its sidecar depend on."""
        metadata, gpu, library = self.metadata, target.gpu, self.network.library
        # what is measured and recorded later leaves the engine as it is
        kept = replace(metadata, verification={}, exporter={}, calibration={}, evaluation={}, file_sha256=BLANK_DIGEST)
        document: dict[str, Any] = {
            "graph": self.graph_sha256,
            "metadata": kept.to_dict(),
            "verified": metadata.unverified == "",
            "builder": [library.name, library.version],
            "target": [target.sm, None if gpu is None else [gpu.name, self.driver.version]],
            "options": self.options.to_dict(),
        }
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def describe(self, path: Path, target: EngineTarget, content: bytes, seconds: float) -> Sidecar:
        """Return the sidecar of an engine, which was never run."""
        library = self.network.library
        sha256 = hashlib.sha256(content).hexdigest()
        return Sidecar(
            engine={"file": path.name, "sha256": sha256, "bytes": len(content)},
            builder={
                "name": library.name, "version": library.version, "cuda": CUDA_VERSION[0], "platform": platform_name()
            },
            target={"sm": target.sm, "gpu": target.gpu.name if target.gpu else None},
            options=self.options.to_dict(),
            onnx={"file": self.name, "sha256": self.metadata.file_sha256, "graph": self.graph_sha256},
            key=self.key(target),
            built={
                "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "seconds": round(seconds, 3),
                "opal_deploy": __version__,
                "driver": self.driver.version,
            },
            state={"state": UNVERIFIED, "why": NEVER_RUN},
            metadata=self.metadata,
        )  # fmt: skip


def _read_onnx(path: Path, name: str, engines: EngineTargets, options: ExportOptions) -> _Build:
    metadata = onnx_file.read_metadata(path)
    onnx_file.check_digest(path, metadata)
    content = path.read_bytes()
    model = onnx.ModelProto.FromString(content)
    # the verification in the metadata may change while the graph does not
    del model.metadata_props[:]
    graph_sha256 = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    # all engines of a call have one builder
    network = Network(load(engines.targets[0].builder, "export --trt"), content, name)
    return _Build(name, metadata, graph_sha256, network, engines.driver, options)


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


def _stage_engine(stack: ExitStack, path: Path, build: _Build, target: EngineTarget) -> Sidecar:
    """Build and stage an engine and its sidecar; where the engine can run here, its test vectors run first."""
    started = time.monotonic()
    content = build.network.build(target, build.options, as_progress(build.options.progress))
    seconds = time.monotonic() - started
    # entered first, so that it gets its name last: a sidecar never describes an engine that does not exist
    beside = stack.enter_context(atomic_write(sidecar_path(path)))
    temporary = stack.enter_context(atomic_write(path))
    temporary.write_bytes(content)
    sidecar = build.describe(path, target, content, seconds)
    if target.gpu is not None:
        sidecar = _verify_here(sidecar, temporary, build.options)
    beside.write_text(sidecar.to_json(), "utf-8")
    return sidecar


def _verify_here(sidecar: Sidecar, engine: Path, options: ExportOptions) -> Sidecar:
    """Run a new engine's test vectors here, and return the sidecar with the outcome; VerificationError if they fail."""
    folder = engine.parent / f".{engine.name}.trial"
    folder.mkdir()
    try:
        trial = folder / str(sidecar.engine["file"])
        shutil.copyfile(engine, trial)
        write_sidecar(trial, sidecar)
        session = EngineSession(trial)
        options.log(f"Test vectors reproduced in {session.description}")
        check = read_checks(trial)[-1]
        session.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    state = {"state": VERIFIED, "machine": check.machine, "when": check.when, "report": check.report}
    return replace(sidecar, state=state)
