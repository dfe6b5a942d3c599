"""An atlas on disk: `atlas.json`, `atlas.html`, and one JPEG per patch in `patches/`, named by the digest of its bytes.

Names by digest let a new atlas be written next to an old one: the old atlas stays whole until `atlas.json` is replaced,
in one step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from msgspec import convert

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.files import read_json, write_json
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.visualization.atlas.collector import AtlasCollector, PatchCandidate
from opal_deploy.visualization.atlas.entries import (
    PATCH_NAME,
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
        raise ArtifactError(f"{file}: damaged ({' '.join(str(error).split())[:100]}); {hint}") from None


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
    metadata, labels = collector.metadata, collector.count_labels()
    entries: dict[tuple[int, int], SlotEntry] = {}
    findings: list[Finding] = []
    shown = sum(map(Counter, labels.values()), Counter[str]())
    for class_id, label in enumerate(metadata.class_names):
        statistics = {slot: collector.statistics(class_id, slot) for slot in metadata.class_map.slots(class_id)}
        for slot, figures in statistics.items():
            patches = tuple(_write_candidate(candidate, root) for candidate in collector.best(class_id, slot))
            entries[class_id, slot] = SlotEntry(class_id, slot, figures, patches)
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
            ours = re.fullmatch(PATCH_NAME, name) or path.name.startswith(".")
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


def _parse_atlas(root: Path, document: dict[str, Any]) -> Atlas:
    model, classes = document["model"], document["classes"]
    convert([model["file"], model["sha256"], *(each["name"] for each in classes)], list[str])
    listed, m = sum(len(each["slots"]) for each in classes), model["prototypes_per_class"]
    # a damaged number would fill the memory
    class_map = ClassMap.blocks(len(classes), min(m, listed + len(model["dropped"])), model["dropped"])
    entries = {}
    for class_id, each in enumerate(classes):
        if each["class_id"] != class_id or [entry["slot"] for entry in each["slots"]] != class_map.slots(class_id):
            raise ValueError(f"class {class_id} or its slots are missing, repeated or not the model's")
        for entry in each["slots"]:
            statistics = convert({field.name: entry[field.name] for field in fields(SlotStatistics)}, SlotStatistics)
            patches = convert(entry["patches"], tuple[AtlasPatch, ...])
            entries[class_id, entry["slot"]] = SlotEntry(class_id, entry["slot"], statistics, patches)
    return Atlas(
        root, model, tuple(each["name"] for each in classes), dict(document["data"]), int(document["top"]), entries,
        convert(document["findings"], tuple[Finding, ...]), convert(document["cells"], tuple[int, ...]),
        {class_id: dict(each["labels"]) for class_id, each in enumerate(classes) if each["labels"]},
    )  # fmt: skip
