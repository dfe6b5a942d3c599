"""TensorRT engines with their sidecars: `<name>.engine.json` next to `<name>.engine`.

An engine stays exactly what the builder wrote, since a prefix would break NVIDIA's own tools. Everything else is in the
sidecar: the engine's sha256, its builder and target, its ONNX file, the model's metadata and test vectors. After the
build only `evaluate --record` changes the sidecar, so its own sha256 can be passed on through a trusted channel.
Outcomes of the test vectors on machines that loaded the engine are in `<name>.engine.checks.json`.

An engine is executable code. The digests find damage, not tampering.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from opal_deploy.artifact.documents import check_values
from opal_deploy.artifact.files import atomic_write, read_json
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ArtifactError, UsageError

SIDECAR_SCHEMA = 1

UNVERIFIED = "unverified"
VERIFIED = "verified"

# the parts of a sidecar's fields that its readers rely on
_PARTS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "engine": {"file": str, "sha256": str, "bytes": int},
    "builder": {"name": str, "version": str},
    "target": {"sm": str},
    "options": {"batch": list},
    "onnx": {"file": str, "sha256": str},
    "built": {"when": str, "seconds": (int, float), "opal_deploy": str},
    "state": {"state": str},
}


@dataclass(frozen=True)
class BatchRange:
    """The smallest and largest batch that an engine takes, and the one that it was tuned for."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}"


@dataclass(frozen=True)
class Sidecar:
    """The description of an engine.

    Attributes:
        engine: file name, sha256 and size in bytes.
        builder: `name` (`tensorrt` or `tensorrt-rtx`), `version`, and `cuda`, its CUDA major version.
        target: `sm`, such as `sm80`, and `gpu`, the name of the GPU that it was built on, if any.
        options: options of the build.
        onnx: file name and digest of its ONNX file, and `graph`, the sha256 of only the graph.
        key: equal for two builds from the same graph, metadata, builder, target and options.
        built: time, seconds, version of opal-deploy and driver of the build.
        state: `unverified` (never run where it was built) or `verified`, with machine and time.
        metadata: the model's metadata, with its test vectors.
        unknown: keys that this version does not know, kept where the sidecar is written again.
    """

    engine: dict[str, Any]
    builder: dict[str, Any]
    target: dict[str, Any]
    options: dict[str, Any]
    onnx: dict[str, Any]
    key: str
    built: dict[str, Any]
    state: dict[str, Any]
    metadata: Metadata
    schema: int = SIDECAR_SCHEMA
    unknown: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> BatchRange:
        """The batch sizes that the engine takes."""
        return BatchRange(*self.options["batch"])

    def rebuild_command(self, engine: Path) -> str:
        """Return the command that builds this engine again with the same options, to be run on the target machine."""
        source = engine.with_name(str(self.onnx["file"]))
        words = ["opal-deploy", "export", str(source), "--trt", "--rebuild", "--batch", str(self.batch)]
        # a switch that was on
        words += [f"--{name}" for name, value in self.options.items() if value is True]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the document without its digest."""
        document = asdict(self)
        unknown = document.pop("unknown")
        return {**document, "metadata": self.metadata.to_dict(), **unknown}

    def to_json(self) -> str:
        """Return the sidecar as indented JSON with a digest of its own."""
        document = self.to_dict()
        return json.dumps({**document, "digest": _compute_digest(document)}, indent=1, ensure_ascii=True) + "\n"


def sidecar_path(engine: Path) -> Path:
    """Return `ckpt.fp16.sm80.rtx.engine.json` for `ckpt.fp16.sm80.rtx.engine`."""
    return engine.with_name(engine.name + ".json")


def read_sidecar(engine: Path) -> Sidecar:
    """Return the sidecar of an engine; the engine itself is not read.

    Raises:
        ArtifactError: the engine or its sidecar is missing, or the sidecar is damaged or of another schema.
    """
    path, document = sidecar_path(engine), _read_document(engine)
    if document.get("schema") != SIDECAR_SCHEMA:
        raise ArtifactError(
            f"{path}: sidecar schema {document.get('schema')!r} found, {SIDECAR_SCHEMA} expected; use the opal-deploy "
            "version that wrote it, or rebuild the engine: opal-deploy export MODEL.onnx --trt --rebuild"
        )
    if wrong := _find_wrong_parts(document):
        raise _damaged(path, f"of wrong type or missing: {', '.join(wrong)}")
    metadata = Metadata.from_json(json.dumps(document.get("metadata")), str(path))
    known = {f.name for f in fields(Sidecar)} - {"unknown"}
    unknown = {name: value for name, value in document.items() if name not in known}
    values = {name: value for name, value in document.items() if name in known}
    return Sidecar(**{**values, "metadata": metadata, "unknown": unknown})


def load_engine(engine: Path) -> tuple[Sidecar, bytes]:
    """Return the sidecar and content of an engine after comparing the content with its digest.

    Native code cannot be protected from damaged engines, so it reads the content only after this check.

    Raises:
        ArtifactError: the engine or its sidecar is missing or damaged, or the sidecar has another schema.
    """
    sidecar = read_sidecar(engine)
    try:
        content = engine.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{engine}: cannot be read ({error.strerror or error})") from None
    digest, expected = hashlib.sha256(content).hexdigest(), sidecar.engine["sha256"]
    if digest != expected:
        raise ArtifactError(
            f"{engine}: sha256 {digest[:12]}..., but its sidecar says {expected[:12]}...; the engine is damaged or not "
            f"the one that was built: copy both files again, or rebuild it with: {sidecar.rebuild_command(engine)}"
        )
    return sidecar, content


def check_engine(engine: Path) -> Sidecar:
    """Return the sidecar of an engine after comparing the engine with its digest."""
    return load_engine(engine)[0]


def write_sidecar(engine: Path, sidecar: Sidecar) -> None:
    """Write a sidecar next to its engine; raise UsageError if that fails."""
    with atomic_write(sidecar_path(engine)) as temporary:
        temporary.write_text(sidecar.to_json(), "utf-8")


def _read_document(engine: Path) -> dict[str, Any]:
    if not engine.is_file():
        raise ArtifactError(f"{engine}: no such engine; expected a file that `opal-deploy export --trt` wrote")
    path = sidecar_path(engine)
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise ArtifactError(f"{engine}: its sidecar {path.name} is missing; copy both, or build it again") from None
    except (OSError, ValueError) as error:
        raise _damaged(path, f"it cannot be read as JSON: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise _damaged(path, "it is not a JSON object")
    for name, value in document.items():
        try:
            check_values(value, name)
        except ArtifactError as error:
            raise _damaged(path, str(error)) from None
    if document.pop("digest", None) != _compute_digest(document):
        raise _damaged(path, "it does not match its own digest")
    return document


def _find_wrong_parts(document: dict[str, Any]) -> list[str]:
    wrong = [] if isinstance(document.get("key"), str) else ["key"]
    wrong += [
        f"{name}.{part}"
        for name, parts in _PARTS.items()
        for part, kind in parts.items()
        if not isinstance(document.get(name), dict) or not isinstance(document[name].get(part), kind)
    ]
    if wrong:
        return wrong
    batch, state = document["options"]["batch"], document["state"]
    name = document["onnx"]["file"]
    if name in ("", ".") or Path(name).name != name:
        return ["onnx.file"]
    if len(batch) != 3 or not all(type(size) is int and size > 0 for size in batch):
        return ["options.batch"]
    if state["state"] != VERIFIED:
        return [] if state.get("why") and isinstance(state["why"], str) else ["state.why"]
    machine = state.get("machine")
    return [] if isinstance(machine, dict) and isinstance(machine.get("gpu"), str) else ["state.machine"]


def _damaged(path: Path, why: str) -> ArtifactError:
    return ArtifactError(
        f"{path}: damaged, or not written by opal-deploy ({why}); copy it again, or rebuild the engine"
    )


def _compute_digest(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True)
class Check:
    """The outcome of the test vectors on a machine that loaded an engine.

    `machine` has what the outcome depends on (GPU, driver, runtime and its version), `when` is UTC in ISO 8601, and
    `report` holds the measurements of the comparison, or what failed.
    """

    engine_sha256: str
    machine: dict[str, Any]
    when: str
    passed: bool
    report: dict[str, Any]


def checks_path(engine: Path) -> Path:
    """Return `ckpt.fp16.sm80.rtx.engine.checks.json` for `ckpt.fp16.sm80.rtx.engine`."""
    return engine.with_name(engine.name + ".checks.json")


def read_checks(engine: Path) -> list[Check]:
    """Return recorded outcomes, oldest first; none where their file is missing or damaged."""
    try:
        document = read_json(checks_path(engine))
        known = {f.name for f in fields(Check)}
        return [Check(**{name: entry[name] for name in known}) for entry in document["checks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def record_check(engine: Path, check: Check) -> bool:
    """Write an outcome next to the engine, replacing the same machine's earlier one; return whether that succeeded."""
    others = [c for c in read_checks(engine) if (c.engine_sha256, c.machine) != (check.engine_sha256, check.machine)]
    document = {"schema": 1, "checks": [asdict(c) for c in (*others, check)]}
    try:
        with atomic_write(checks_path(engine)) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    except UsageError:
        return False
    return True


def find_passed_check(engine: Path, sha256: str, machine: dict[str, Any]) -> Check | None:
    """Return the outcome of an earlier load on the same machine, if it passed."""
    checks = [check for check in read_checks(engine) if check.passed]
    return next((check for check in checks if (check.engine_sha256, check.machine) == (sha256, machine)), None)
