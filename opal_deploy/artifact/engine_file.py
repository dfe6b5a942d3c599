"""An engine and what is known of it: the sidecar `<name>.engine.json` beside the plan `<name>.engine`.

A plan stays exactly what the builder wrote, since a prefix would break NVIDIA's own tools. Everything else is in the
sidecar: the plan's sha256, who built it for what, the ONNX file that it came from, the model's metadata and its test
vectors. The sidecar is never changed after the build, so that its own sha256 can be handed on by a trusted way; how the
test vectors went on the machines that loaded the engine is kept in a file of its own, `<name>.engine.checks.json`.

An engine is executable code. The digests here find damage, not tampering.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ArtifactError, UsageError

SIDECAR_SCHEMA = 1

UNVERIFIED = "unverified"
VERIFIED = "verified"


@dataclass(frozen=True)
class BatchRange:
    """The batch sizes that an engine takes, and the one that it was tuned for."""

    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}"


@dataclass(frozen=True)
class Sidecar:
    """What is known of an engine.

    Attributes:
        engine: file name, sha256 and bytes of the plan.
        builder: `name` (`tensorrt` or `tensorrt-rtx`), `version`, and `cuda`, the CUDA major version it is made for.
        target: `sm` (such as `sm80`) and, where it was built on one, `gpu`, the GPU's name.
        options: what the builder was told: batch, workspace, flags.
        onnx: file name and digest of the ONNX file that the engine was built from, and `graph`, the sha256 of its
            graph alone.
        key: equal for two builds from the same graph, metadata, builder, target and options.
        built: when, in how many seconds, by which opal-deploy, with which driver.
        state: `unverified` (never run when it left the builder) or `verified`, with where and when.
        metadata: the model's, with its test vectors.
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

    @property
    def batch(self) -> BatchRange:
        """The batch sizes that it takes."""
        return BatchRange(*self.options["batch"])

    def rebuild(self, engine: Path) -> str:
        """The command that builds this engine again, with the same options, on the machine that it is to run on."""
        source = engine.with_name(str(self.onnx["file"]))
        words = ["opal-deploy", "export", str(source), "--trt", "--rebuild", "--batch", str(self.batch)]
        for name in ("workspace", "optimization_level", "hardware_compatible"):
            if self.options.get(name) is not None:
                words += [f"--{name.replace('_', '-')}", str(self.options[name])]
        words += [
            f"--{n.replace('_', '-')}" for n in ("version_compatible", "strip_weights", "refit") if self.options.get(n)
        ]
        return shlex.join(words)

    def to_json(self) -> str:
        """Indented JSON with a digest of its own."""
        document = asdict(self)
        return json.dumps({**document, "digest": _digest(document)}, indent=1, ensure_ascii=True) + "\n"


def sidecar_path(engine: Path) -> Path:
    """`ckpt.fp16.sm80.rtx.engine.json` for `ckpt.fp16.sm80.rtx.engine`."""
    return engine.with_name(engine.name + ".json")


def read_sidecar(engine: Path) -> Sidecar:
    """What is known of an engine, without looking at the plan itself.

    Raises:
        ArtifactError: there is no sidecar, it is damaged, or of another schema.
    """
    return _parse(engine, _read(engine))


def load_engine(engine: Path) -> tuple[Sidecar, bytes]:
    """What is known of an engine, and its plan, which is what the builder wrote.

    The plan's digest is compared first, then the sidecar's schema: nothing native has seen a byte of the plan yet.

    Raises:
        ArtifactError: no such file, no sidecar, one of them is damaged, or the schema is another.
    """
    document = _read(engine)
    expected = document.get("engine")
    expected = str(expected.get("sha256")) if isinstance(expected, dict) else "none"
    try:
        plan = engine.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{engine}: cannot be read ({error.strerror or error})") from None
    found = hashlib.sha256(plan).hexdigest()
    if found != expected:
        raise ArtifactError(
            f"{engine}: sha256 {found[:12]}..., but its sidecar says {expected[:12]}...; the engine is damaged or not "
            f"the one that was built: copy both files again, or rebuild it with: {_rebuild(document, engine)}"
        )
    return _parse(engine, document), plan


def check_engine(engine: Path) -> Sidecar:
    """What is known of an engine whose plan is what the builder wrote; see `load_engine`."""
    return load_engine(engine)[0]


def write_sidecar(engine: Path, sidecar: Sidecar) -> None:
    """Write it beside an engine's final name.

    Raises:
        UsageError: the place cannot be written to.
    """
    with atomic_write(sidecar_path(engine)) as temporary:
        temporary.write_text(sidecar.to_json(), "utf-8")


def _read(engine: Path) -> dict[str, Any]:
    if not engine.is_file():
        raise ArtifactError(f"{engine}: no such engine; expected a file that `opal-deploy export --trt` wrote")
    path = sidecar_path(engine)
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            f"{engine}: its sidecar {path.name} is missing, and without it nothing is known of the engine; copy both "
            "files, or build it again with: opal-deploy export MODEL.onnx --trt"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"it cannot be read as JSON: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise _damaged(path, "it is not a JSON object")
    stated = document.pop("digest", None)
    if stated != _digest(document):
        raise _damaged(path, "it does not match its own digest")
    return document


def _parse(engine: Path, document: dict[str, Any]) -> Sidecar:
    path = sidecar_path(engine)
    if document.get("schema") != SIDECAR_SCHEMA:
        raise ArtifactError(
            f"{path}: sidecar schema {document.get('schema')!r} found, {SIDECAR_SCHEMA} expected; use the opal-deploy "
            f"version that wrote it, or rebuild with: {_rebuild(document, engine)}"
        )
    missing = sorted({f.name for f in fields(Sidecar)} - document.keys())
    if missing:
        raise _damaged(path, f"it lacks {', '.join(missing)}")
    metadata = Metadata.from_json(json.dumps(document["metadata"]), str(path))
    values = {f.name: document[f.name] for f in fields(Sidecar)} | {"metadata": metadata}
    sidecar = Sidecar(**values)
    wrong = _wrong_parts(sidecar)
    if wrong:
        raise _damaged(path, f"of wrong type or missing: {', '.join(wrong)}")
    return sidecar


# what the readers of a sidecar rely on, by field
_PARTS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "engine": {"file": str, "sha256": str, "bytes": int},
    "builder": {"name": str, "version": str},
    "target": {"sm": str},
    "options": {"batch": list},
    "onnx": {"file": str, "sha256": str},
    "built": {"when": str, "seconds": (int, float), "opal_deploy": str},
    "state": {"state": str},
}


def _wrong_parts(sidecar: Sidecar) -> list[str]:
    wrong = []
    for name, parts in _PARTS.items():
        found = getattr(sidecar, name)
        for part, kind in parts.items():
            if not isinstance(found, dict) or not isinstance(found.get(part), kind):
                wrong.append(f"{name}.{part}")
    batch = sidecar.options.get("batch") if not wrong else None
    if batch is not None and not (len(batch) == 3 and all(type(size) is int and size > 0 for size in batch)):
        wrong.append("options.batch")
    if not wrong and sidecar.state["state"] == VERIFIED and not isinstance(sidecar.state.get("machine"), dict):
        wrong.append("state.machine")
    return wrong


def _rebuild(document: dict[str, Any], engine: Path) -> str:
    onnx = document.get("onnx")
    source = onnx.get("file") if isinstance(onnx, dict) else None
    path = str(engine.with_name(source)) if isinstance(source, str) else "MODEL.onnx"
    return shlex.join(["opal-deploy", "export", path, "--trt", "--rebuild"])


def _damaged(path: Path, why: str) -> ArtifactError:
    return ArtifactError(f"{path}: damaged or not a sidecar of ours ({why}); copy it again, or build the engine again")


def _digest(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True)
class Check:
    """How the test vectors went when one machine loaded the engine.

    Attributes:
        engine_sha256: of the plan that was checked.
        machine: what the outcome depends on: GPU, compute capability, driver, runtime and its version.
        when: UTC, ISO 8601.
        passed: whether the engine answered as its reference.
        report: the comparison's figures, or what failed.
    """

    engine_sha256: str
    machine: dict[str, Any]
    when: str
    passed: bool
    report: dict[str, Any]


def checks_path(engine: Path) -> Path:
    """`ckpt.fp16.sm80.rtx.engine.checks.json` for `ckpt.fp16.sm80.rtx.engine`."""
    return engine.with_name(engine.name + ".checks.json")


def read_checks(engine: Path) -> list[Check]:
    """Earlier outcomes, oldest first; none where the file is missing or unreadable: they are then made again."""
    try:
        found = json.loads(checks_path(engine).read_text("utf-8"))
        return [Check(**entry) for entry in found["checks"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def record_check(engine: Path, check: Check) -> bool:
    """Keep an outcome beside the engine, instead of the same machine's earlier one; False if that is impossible."""
    others = [c for c in read_checks(engine) if (c.engine_sha256, c.machine) != (check.engine_sha256, check.machine)]
    document = {"schema": 1, "checks": [asdict(c) for c in (*others, check)]}
    try:
        with atomic_write(checks_path(engine)) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    except UsageError:
        return False
    return True


def find_passed_check(engine: Path, sha256: str, machine: dict[str, Any]) -> Check | None:
    """The outcome that spares this machine the test vectors: the same plan, the same machine, and it passed."""
    for check in read_checks(engine):
        if check.engine_sha256 == sha256 and check.machine == machine and check.passed:
            return check
    return None
