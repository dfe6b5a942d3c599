"""An atlas on disk: `atlas.json`, `atlas.html`, and one JPEG per patch in `patches/`, named by the digest of its bytes.

Names by digest let a new atlas be written next to an old one: the old atlas stays whole until `atlas.json` is replaced,
in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from msgspec import convert

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.files import atomic_write, read_json, write_json
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.entries import (
    PATCHES,
    Atlas,
    AtlasPatch,
    SlotEntry,
    SlotStatistics,
)
from opal_deploy.visualization.pages import render_page
from opal_deploy.visualization.style import count_of

ATLAS_SCHEMA = 1
ATLAS_KIND = "opal-atlas"
ATLAS_FILE, PAGE_FILE = "atlas.json", "atlas.html"
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
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file}: cannot be read ({error}); {hint}") from None
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


def write_atlas(collector: AtlasCollector, root: Path, model: Mapping[str, Any], data: Mapping[str, Any]) -> Atlas:
    """Write the collected atlas and its page to `root`, remove the patches of an earlier one, and return the atlas.

    Args:
        model: the model's `file` and `sha256`.
        data: the data set's description and counts.

    Raises:
        UsageError: a file cannot be written.
    """
    metadata = collector.metadata
    entries: dict[tuple[int, int], SlotEntry] = {}
    for class_id in range(metadata.num_classes):
        for slot in metadata.class_map.slots(class_id):
            entries[class_id, slot] = collector.entry(class_id, slot)
            for candidate in collector.best(class_id, slot):
                write_patch(root, candidate.patch.file, candidate.jpeg)
    about = {
        **model, "checkpoint_sha256": metadata.source.get("sha256"), "backbone": metadata.backbone,
        "precision": metadata.precision, "prototypes_per_class": metadata.prototypes_per_class,
        "distance": metadata.distance, "dropped": list(metadata.dropped), "grid": list(metadata.grid),
    }  # fmt: skip
    labels = {class_id: dict(sorted(counts.items())) for class_id, counts in sorted(collector.labels.items())}
    atlas = Atlas(
        root, about, metadata.class_names, dict(data), collector.top, entries,
        collector.count_cells(), labels,
    )  # fmt: skip
    save_atlas(atlas)
    return atlas


def save_atlas(atlas: Atlas) -> None:
    """Write `atlas.json` and `atlas.html` of an atlas whose patches are written, and remove other patches.

    Raises:
        UsageError: a file cannot be written.
    """
    write_json(atlas.root / ATLAS_FILE, _to_document(atlas))
    named = {atlas.root / patch.file for entry in atlas.entries.values() for patch in entry.patches}
    for path in set((atlas.root / PATCHES).glob("[0-9a-f][0-9a-f]/*.jpg")) - named:
        path.unlink(missing_ok=True)
    text = render_page(
        __package__, "atlas", images="'self' file:", atlas=atlas, labels=_describe_labels(atlas),
        describe_class=_describe_class,
        shows_fields=any(patch.field is not None for entry in atlas.entries.values() for patch in entry.patches),
    )  # fmt: skip
    with atomic_write(atlas.root / PAGE_FILE) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def write_patch(root: Path, name: str, encoded: bytes) -> None:
    """Write an encoded patch under its name in `root`; raise UsageError if the file cannot be written."""
    path = root / name
    try:
        # not synced to disk, which takes long for thousands of files: a damaged patch no longer matches its name
        if not (path.exists() and path.read_bytes() == encoded):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error}); choose another --out") from None


def _describe_labels(atlas: Atlas) -> str:
    if not atlas.labels:
        return "Images count for their predicted class; their labels are not known."
    wrong = atlas.count_wrong()
    if not wrong:
        return "Every prediction is correct."
    wrong_text = count_of(wrong, "prediction is", "predictions are")
    return f"Images count for their predicted class: {wrong_text} wrong. Patches of these images are left out."


def _describe_class(atlas: Atlas, class_id: int) -> str:
    """Return the number of images predicted as the class, and their labels."""
    images, labels = atlas.images_of(class_id), dict(atlas.labels_of(class_id))
    text = f"Predicted for {count_of(images, 'image')}"
    if not labels:
        return f"{text}."
    correct = labels.pop(atlas.class_names[class_id], 0)
    others = "".join(f", {label} {count:,}" for label, count in sorted(labels.items(), key=lambda item: -item[1]))
    return f"{text}: {correct:,} correct{others}."


def _to_document(atlas: Atlas) -> dict[str, Any]:
    return {
        "schema": ATLAS_SCHEMA,
        "kind": ATLAS_KIND,
        "model": dict(atlas.model),
        "data": dict(atlas.data),
        "top": atlas.top,
        "cells": list(atlas.cells),
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
    convert([model["file"], model["sha256"], *(row["name"] for row in classes)], list[str])
    listed, m = sum(len(row["slots"]) for row in classes), model["prototypes_per_class"]
    # a damaged number would fill the memory
    class_map = ClassMap.blocks(len(classes), min(m, listed + len(model["dropped"])), model["dropped"])
    entries = {}
    for class_id, row in enumerate(classes):
        if row["class_id"] != class_id or [entry["slot"] for entry in row["slots"]] != class_map.slots(class_id):
            raise ValueError(f"class {class_id} or its slots are missing, repeated or not the model's")
        for entry in row["slots"]:
            statistics = convert({field.name: entry[field.name] for field in fields(SlotStatistics)}, SlotStatistics)
            patches = convert(entry["patches"], tuple[AtlasPatch, ...])
            entries[class_id, entry["slot"]] = SlotEntry(class_id, entry["slot"], statistics, patches)
    return Atlas(
        root, model, tuple(row["name"] for row in classes), dict(document["data"]), int(document["top"]), entries,
        convert(document["cells"], tuple[int, ...]),
        {class_id: dict(row["labels"]) for class_id, row in enumerate(classes) if row["labels"]},
    )  # fmt: skip
