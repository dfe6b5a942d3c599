"""An atlas on disk: `atlas.json`, `atlas.html`, and one JPEG per patch in `patches/`, named by the digest of its bytes.

Names by digest let a new atlas be written next to an old one: the old atlas stays whole until `atlas.json` is replaced,
in one step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.files import read_json, write_json
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.visualization.atlas.collector import AtlasCollector, PatchCandidate
from opal_deploy.visualization.atlas.entries import (
    PATCHES,
    Atlas,
    AtlasPatch,
    Finding,
    SlotEntry,
    SlotStatistics,
    list_findings,
    name_patch,
)
from opal_deploy.visualization.atlas.page import PAGE_FILE, write_page

ATLAS_SCHEMA = 1
ATLAS_KIND = "opal-atlas"
ATLAS_FILE = "atlas.json"
_PATCH_NAME = re.compile(r"patches/[0-9a-f]{2}/[0-9a-f]{32}\.jpg")
# files allowed in the folder of a new atlas
_KNOWN_FILES = (PATCHES, PAGE_FILE, ".lock", "names.toml")


def load_atlas(path: str | Path) -> Atlas:
    """Read an atlas from its folder.

    Raises:
        ArtifactError: there is no atlas, it is damaged, or it has another schema.
    """
    root = Path(path)
    file = root / ATLAS_FILE
    hint = "build one with `opal-deploy atlas`"
    try:
        document = read_json(file)
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read ({error.strerror or error}); {hint}") from None
    except ValueError as error:
        raise ArtifactError(f"{file}: damaged, not valid JSON ({error}); {hint}") from None
    if not isinstance(document, dict) or document.get("kind") != ATLAS_KIND:
        raise ArtifactError(f"{file}: not an atlas; {hint}")
    if document.get("schema") != ATLAS_SCHEMA:
        raise ArtifactError(f"{file}: schema {document.get('schema')!r}, expected {ATLAS_SCHEMA}; {hint}")
    try:
        return _parse_atlas(root, document)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise ArtifactError(f"{file}: damaged ({reason}); {hint}") from None


def check_out_dir(root: Path, *, overwrite: bool) -> None:
    """Check that an atlas may be written to a folder.

    Raises:
        UsageError: the folder holds an atlas and `overwrite` is false, it holds other files, or it is a file.
    """
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root}: is a file; choose a folder for the atlas with --out")
    if (root / ATLAS_FILE).exists():
        if not overwrite:
            raise UsageError(f"{root}: already holds an atlas; choose another --out, or replace it with --overwrite")
    elif root.is_dir() and any(entry.name not in _KNOWN_FILES for entry in root.iterdir()):
        raise UsageError(f"{root}: holds other files; choose an empty or a new folder with --out")


def build_atlas(collector: AtlasCollector, root: Path, model: Mapping[str, Any], data: Mapping[str, Any]) -> Atlas:
    """Write the collected patches to `root` and return their atlas; `save_atlas` completes it.

    Raises:
        UsageError: a patch cannot be written.
    """
    metadata = collector.metadata
    entries: dict[tuple[int, int], SlotEntry] = {}
    findings: list[Finding] = []
    labels = collector.count_labels()
    shown: Counter[str] = Counter()
    for counts in labels.values():
        shown.update(counts)
    for class_id, label in enumerate(metadata.class_names):
        slots = metadata.class_map.slots(class_id)
        for slot in slots:
            patches = tuple(_write_candidate(candidate, root) for candidate in collector.best(class_id, slot))
            entries[class_id, slot] = SlotEntry(class_id, slot, collector.statistics(class_id, slot), patches)
        statistics = {slot: entries[class_id, slot].statistics for slot in slots}
        images_of = shown[label] if shown else None
        findings += list_findings(class_id, label, statistics, images_of, shared=not metadata.is_opal)
    return Atlas(
        root, {**model, **collector.describe_model()}, metadata.class_names, dict(data), collector.top, entries,
        tuple(findings), collector.count_cells(), labels,
    )  # fmt: skip


def save_atlas(atlas: Atlas) -> None:
    """Write `atlas.json` and `atlas.html` of an atlas whose patches are written, and remove other patches.

    Raises:
        UsageError: a file cannot be written.
    """
    write_json(atlas.root / ATLAS_FILE, _to_document(atlas))
    _remove_unnamed(atlas.root, {patch.file for entry in atlas.entries.values() for patch in entry.patches})
    write_page(atlas)


def write_patch(root: Path, encoded: bytes) -> str:
    """Write an encoded patch unless it exists, and return its file name relative to `root`.

    Raises:
        UsageError: the file cannot be written.
    """
    name = name_patch(encoded)
    path = root / name
    # not synced to disk, which takes long for thousands of files: a damaged patch no longer matches its name
    temporary = path.with_name(f".{path.name}.part")
    try:
        if path.exists() and path.read_bytes() == encoded:
            return name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(encoded)
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error}); choose another --out") from None
    return name


def _write_candidate(candidate: PatchCandidate, root: Path) -> AtlasPatch:
    slot = candidate.slot
    return AtlasPatch(
        candidate.image, candidate.sha256, slot.cell, slot.box, slot.score,
        slot.contribution, write_patch(root, candidate.jpeg or b""), candidate.around, candidate.label,
    )  # fmt: skip


def _remove_unnamed(root: Path, named: Collection[str]) -> None:
    for folder in sorted(path for path in (root / PATCHES).glob("[0-9a-f][0-9a-f]") if path.is_dir()):
        for path in folder.iterdir():
            name = f"{PATCHES}/{folder.name}/{path.name}"
            ours = _PATCH_NAME.fullmatch(name) or path.name.startswith(".")
            if ours and name not in named:
                path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _to_document(atlas: Atlas) -> dict[str, Any]:
    return {
        "schema": ATLAS_SCHEMA,
        "kind": ATLAS_KIND,
        "model": dict(atlas.model),
        "data": dict(atlas.data),
        "top": atlas.top,
        "cells": list(atlas.cells),
        "findings": [vars(finding) for finding in atlas.findings],
        "classes": [
            {
                "class_id": class_id,
                "name": name,
                "labels": dict(atlas.labels_of(class_id)),
                "slots": [atlas.entries[class_id, slot].to_dict() for slot in atlas.slots[class_id]],
            }
            for class_id, name in enumerate(atlas.class_names)
        ],
    }


def _parse_atlas(root: Path, document: Mapping[str, Any]) -> Atlas:
    model, classes = document["model"], document["classes"]
    if not all(isinstance(model[key], str) for key in ("file", "sha256")):
        raise TypeError("file and sha256 of the model must be texts")
    listed, m = sum(len(each["slots"]) for each in classes), model["prototypes_per_class"]
    # a damaged number would fill the memory
    class_map = ClassMap.blocks(len(classes), min(m, listed + len(model["dropped"])), model["dropped"])
    if class_map.counts.sum() != listed:
        raise ValueError("slots are missing or not the model's")
    entries = {}
    for class_id, each in enumerate(classes):
        slots = each["slots"]
        if each["class_id"] != class_id or not isinstance(each["name"], str):
            raise ValueError(f"class {class_id} is missing or has no name")
        if [entry["slot"] for entry in slots] != class_map.slots(class_id):
            raise ValueError(f"slots of class {class_id} are missing, repeated or not the model's")
        entries.update({(class_id, entry["slot"]): _parse_entry(class_id, entry) for entry in slots})
    return Atlas(
        root, model, tuple(each["name"] for each in classes), dict(document["data"]), int(document["top"]), entries,
        tuple(Finding(**finding) for finding in document["findings"]),
        tuple(int(count) for count in document["cells"]),
        {class_id: dict(each["labels"]) for class_id, each in enumerate(classes) if each["labels"]},
    )  # fmt: skip


def _parse_entry(class_id: int, entry: Mapping[str, Any]) -> SlotEntry:
    statistics = {name: entry[name] for name in SlotStatistics.__dataclass_fields__}
    statistics["top_cell"] = _parse_numbers(statistics["top_cell"], 2, int)
    patches = tuple(_parse_patch(patch) for patch in entry["patches"])
    return SlotEntry(class_id, entry["slot"], SlotStatistics(**statistics), patches)


def _parse_patch(patch: Mapping[str, Any]) -> AtlasPatch:
    # a file name from outside must not lead out of the folder
    if not _PATCH_NAME.fullmatch(patch["file"]):
        raise ValueError(f"{patch['file']!r} is not the name of a patch")
    numbers = {
        "cell": _parse_numbers(patch["cell"], 2, int),
        "box": _parse_numbers(patch["box"], 4, float),
        "field": _parse_numbers(patch["field"], 4, float),
        "score": float(patch["score"]),
    }
    return AtlasPatch(**{**patch, **numbers})


def _parse_numbers(values: Any, count: int, kind: type[int] | type[float]) -> Any:
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{values!r}: expected {count} numbers")
    return tuple(kind(value) for value in values)
