"""From a verified ONNX file to engines with their sidecars; an engine that is there already is not built again."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
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
    checks_path,
    record_check,
    sidecar_path,
    write_sidecar,
)
from opal_deploy.artifact.files import ENGINE_SUFFIX, atomic_write, compute_sha256
from opal_deploy.artifact.metadata import BLANK_DIGEST, Metadata
from opal_deploy.errors import ArtifactError
from opal_deploy.export.tensorrt.builder import Advance, Listen, Network
from opal_deploy.export.tensorrt.options import BuildOptions, Choice
from opal_deploy.runtime.nvml import Driver
from opal_deploy.runtime.tensorrt.bindings import SHORT_NAMES, Bindings, load
from opal_deploy.runtime.tensorrt.compatibility import platform_name
from opal_deploy.runtime.tensorrt.session import EngineSession

Say = Callable[[str], None]

NEVER_RUN = "never run: no GPU of its kind where it was built"
_PRECISION_SUFFIXES = (".fp16", ".bf16", ".int8")


@dataclass(frozen=True)
class EngineExport:
    """One engine: where it is, what is known of it, and whether it was built now or found."""

    path: Path
    sidecar: Sidecar
    reused: bool


@dataclass(frozen=True)
class EngineJob:
    """What to build.

    Attributes:
        choices: builder and target of each engine.
        options: of every build.
        rebuild: build even where the same engine is there already.
        listen: told everything that the builder says.
        advance: told how far the builder is.
    """

    choices: Sequence[Choice]
    options: BuildOptions
    rebuild: bool = False
    listen: Listen | None = None
    advance: Advance = lambda *_: None


def engine_name(stem: str, metadata: Metadata, choice: Choice) -> str:
    """`ckpt.fp16.sm80.rtx.engine` for the stem `ckpt` or `ckpt.fp16`."""
    for suffix in _PRECISION_SUFFIXES:
        stem = stem.removesuffix(suffix)
    return f"{stem}.{metadata.precision}.{choice.target}.{SHORT_NAMES[choice.builder]}{ENGINE_SUFFIX}"


@contextmanager
def staged_engines(
    source: Path, name: str, folder: Path, job: EngineJob, driver: Driver, say: Say
) -> Iterator[list[EngineExport]]:
    """Engines built from a verified ONNX file, under temporary names; they get their names when the block ends.

    Args:
        source: the ONNX file, maybe under a temporary name still.
        name: its final name.
        folder: where engines and sidecars go.
        job: what to build.
        driver: the machine's.
        say: told what happens.

    Raises:
        ArtifactError: the parser refuses the graph. UsageError: the builder gives up. VerificationError: an engine
            does not reproduce its test vectors on the GPU that is here.
    """
    metadata = onnx_file.read_metadata(source)
    onnx_file.check_digest(source, metadata)
    model = source.read_bytes()
    graph = _graph_digest(model)
    done: list[EngineExport] = []
    networks: dict[str, tuple[Bindings, Network]] = {}
    fresh: list[EngineExport] = []
    with ExitStack() as stack:
        for choice in job.choices:
            out = folder / engine_name(Path(name).stem, metadata, choice)
            job.options.check_for(choice.builder, gpu=bool(driver.gpus))
            if choice.builder not in networks:
                library = load(choice.builder, "export --trt")
                networks[choice.builder] = (library, Network(library, model, name, job.listen))
            library, network = networks[choice.builder]
            key = _key(graph, metadata, library, choice, job.options, driver)
            found = None if job.rebuild else _reusable(out, key)
            if found is not None:
                say(f"Reusing {out}: built from the same graph by {library.title} for {choice.target}, same options")
                if found.onnx["sha256"] != metadata.file_sha256:
                    # the ONNX file was written anew around the same graph: the sidecar follows it
                    found = replace(found, onnx={**found.onnx, "sha256": metadata.file_sha256}, metadata=metadata)
                    stack.enter_context(_sidecar_file(out, found))
                done.append(EngineExport(out, found, True))
                continue
            say(f"Building for {choice.target} with {library.title} ({choice.reason}), batches {job.options.batch}")
            plan = network.build(choice, job.options, job.advance)
            # entered first, so that it gets its name last: a sidecar never speaks of an engine that is not there
            beside = stack.enter_context(atomic_write(sidecar_path(out)))
            temporary = stack.enter_context(atomic_write(out))
            temporary.write_bytes(plan.content)
            sidecar = Sidecar(
                engine={"file": out.name, "sha256": compute_sha256(temporary), "bytes": len(plan.content)},
                builder={
                    "name": library.name,
                    "version": library.version,
                    "cuda": library.cuda,
                    "platform": platform_name(),
                },
                target={"sm": choice.target, "gpu": choice.gpu.name if choice.gpu else None, "current": choice.current},
                options=job.options.recorded(),
                onnx={"file": name, "sha256": metadata.file_sha256, "graph": graph},
                key=key,
                built={
                    "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "seconds": round(plan.seconds, 3),
                    "opal_deploy": __version__,
                    "driver": driver.version,
                },
                state={"state": UNVERIFIED, "why": NEVER_RUN},
                metadata=metadata,
            )
            if choice.gpu is not None:
                sidecar = _run_here(sidecar, temporary, source, name, say)
            done.append(EngineExport(out, sidecar, False))
            fresh.append(done[-1])
            beside.write_text(sidecar.to_json(), "utf-8")
        yield done
    for export in fresh:
        if export.sidecar.state["state"] == VERIFIED:
            state = export.sidecar.state
            record_check(
                export.path,
                Check(str(export.sidecar.engine["sha256"]), state["machine"], state["when"], True, state["report"]),
            )


@contextmanager
def _sidecar_file(engine: Path, sidecar: Sidecar) -> Iterator[None]:
    with atomic_write(sidecar_path(engine)) as temporary:
        temporary.write_text(sidecar.to_json(), "utf-8")
        yield


def _run_here(sidecar: Sidecar, plan: Path, source: Path, name: str, say: Say) -> Sidecar:
    """Load the new engine on the GPU that is here: its test vectors run, or it is not written."""
    folder = plan.parent / f".{plan.name}.trial"
    folder.mkdir()
    try:
        trial = folder / str(sidecar.engine["file"])
        shutil.copyfile(plan, trial)
        if sidecar.options["strip_weights"]:
            shutil.copyfile(source, folder / name)
        write_sidecar(trial, sidecar)
        session = EngineSession(trial)
        say(f"Test vectors reproduced in {session.description}")
        checks = json.loads(checks_path(trial).read_text("utf-8"))["checks"]
        session.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    check = checks[-1]
    state = {"state": VERIFIED, "machine": check["machine"], "when": check["when"], "report": check["report"]}
    return replace(sidecar, state=state)


def _reusable(engine: Path, key: str) -> Sidecar | None:
    """What is known of an engine that is there already, intact, and the one that would be built."""
    try:
        sidecar = check_engine(engine)
    except ArtifactError:
        return None
    return sidecar if sidecar.key == key else None


def _graph_digest(model: bytes) -> str:
    """sha256 of an ONNX file's graph and opset, without its metadata: the report in it changes, the graph does not."""
    parsed = onnx.ModelProto.FromString(model)
    del parsed.metadata_props[:]
    return hashlib.sha256(parsed.SerializeToString(deterministic=True)).hexdigest()


def _key(
    graph: str, metadata: Metadata, library: Bindings, choice: Choice, options: BuildOptions, driver: Driver
) -> str:
    """Everything that an engine and its sidecar depend on."""
    lasting = asdict(replace(metadata, verification={}, exporter={}, file_sha256=BLANK_DIGEST))
    gpu = None if choice.gpu is None else [choice.gpu.name, driver.version]
    document: dict[str, Any] = {
        "graph": graph,
        "metadata": lasting,
        "verified": metadata.unverified == "",
        "builder": [library.name, library.version],
        "target": [choice.target, gpu],
        "options": options.recorded(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
