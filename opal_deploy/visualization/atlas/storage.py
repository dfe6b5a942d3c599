"""An atlas on disk: `atlas.json`, `atlas.html`, and `patches/` with one JPEG each, named by the digest of its bytes.

Names that come from content let a new atlas be written beside an old one: until `atlas.json` is replaced, in one step,
the old atlas is whole, and afterwards the new one is.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from opal_deploy.artifact.files import write_json
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.visualization.atlas.collector import AtlasCollector, PatchCandidate
from opal_deploy.visualization.atlas.entries import (
    Atlas,
    AtlasPatch,
    Finding,
    SlotEntry,
    SlotStatistics,
    list_findings,
)
from opal_deploy.visualization.atlas.page import PAGE_FILE, write_page

ATLAS_SCHEMA = 1
ATLAS_KIND = "opal-atlas"
ATLAS_FILE, PATCHES = "atlas.json", "patches"
_PATCH_NAME = re.compile(r"patches/[0-9a-f]{2}/[0-9a-f]{32}\.jpg")
# files that may lie in a folder that an atlas is written to, beside an earlier atlas
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
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read ({error.strerror or error}); {hint}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{file}: damaged, it is not JSON ({error}); {hint} again") from None
    if not isinstance(document, dict) or document.get("kind") != ATLAS_KIND:
        raise ArtifactError(f"{file}: not an atlas; {hint}")
    if document.get("schema") != ATLAS_SCHEMA:
        raise ArtifactError(f"{file}: schema {document.get('schema')!r} found, {ATLAS_SCHEMA} expected; {hint} again")
    try:
        return _parse_atlas(root, document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise ArtifactError(f"{file}: damaged ({reason}); {hint} again") from None


def load_patch(atlas: Atlas, patch: AtlasPatch) -> Image.Image:
    """Read the pixels of a patch, RGB.

    Raises:
        ArtifactError: the patch's file is missing or damaged.
    """
    path = atlas.root / patch.file
    try:
        encoded = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error}); build the atlas again") from None
    if _name_patch(encoded) != patch.file:
        raise ArtifactError(f"{path}: damaged, its bytes are not those that were written; build the atlas again")
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def check_out_dir(root: Path, *, overwrite: bool) -> None:
    """Check that an atlas may be written to a folder.

    Raises:
        UsageError: the folder holds an atlas already and `overwrite` is false, it holds other files, or it is a file.
    """
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root}: a file is there; give a folder for the atlas with --out")
    if (root / ATLAS_FILE).exists():
        if not overwrite:
            raise UsageError(f"{root}: an atlas is there already; give another --out, or --overwrite to replace it")
    elif root.is_dir() and any(entry.name not in _KNOWN_FILES for entry in root.iterdir()):
        raise UsageError(f"{root}: other files are there; give an empty folder, or one that does not exist, with --out")


def build_atlas(collector: AtlasCollector, root: Path, model: Mapping[str, Any], data: Mapping[str, Any]) -> Atlas:
    """Write the collected patches into `root` and return their atlas, which `save_atlas` then makes the folder's.

    Args:
        collector: all images' patches and statistics.
        root: the atlas's folder.
        model: the model's `file` and `sha256`.
        data: the data set: description, number of images, ...

    Raises:
        UsageError: a patch cannot be written.
    """
    metadata = collector.metadata
    entries: dict[tuple[int, int], SlotEntry] = {}
    findings: list[Finding] = []
    truths = collector.count_truths()
    shown: Counter[str] = Counter()
    for counts in truths.values():
        shown.update(counts)
    for class_id, label in enumerate(metadata.class_names):
        slots = range(metadata.prototypes_per_class)
        for slot in slots:
            patches = tuple(_write_candidate(candidate, root) for candidate in collector.best(class_id, slot))
            entries[class_id, slot] = SlotEntry(class_id, slot, collector.statistics(class_id, slot), patches)
        statistics = [entries[class_id, slot].statistics for slot in slots]
        findings += list_findings(class_id, label, statistics, shown[label] if shown else None)
    return Atlas(
        root,
        {**model, **collector.describe_model()},
        metadata.class_names,
        dict(data),
        collector.top,
        entries,
        tuple(findings),
        collector.count_cells(),
        truths,
    )


def save_atlas(atlas: Atlas) -> None:
    """Write `atlas.json` and `atlas.html` of an atlas whose patches are written, and remove an earlier atlas's patches.

    Raises:
        UsageError: a file cannot be written.
    """
    write_json(atlas.root / ATLAS_FILE, _to_document(atlas))
    _remove_unnamed(atlas.root, {patch.file for entry in atlas.entries.values() for patch in entry.patches})
    write_page(atlas)


def write_patch(root: Path, encoded: bytes) -> str:
    """Write an encoded patch, unless it is there already, and return its file's name relative to `root`.

    Raises:
        UsageError: the file cannot be written.
    """
    name = _name_patch(encoded)
    path = root / name
    # thousands of files are not synced to disk one by one: a patch that a crash damages no longer fits its name
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


def _name_patch(encoded: bytes) -> str:
    digest = hashlib.sha256(encoded).hexdigest()[:32]
    return f"{PATCHES}/{digest[:2]}/{digest}.jpg"


def _write_candidate(candidate: PatchCandidate, root: Path) -> AtlasPatch:
    slot = candidate.slot
    x0, y0, x1, y1 = slot["box"]
    return AtlasPatch(
        candidate.image,
        candidate.sha256,
        (slot["cell"][0], slot["cell"][1]),
        (x0, y0, x1, y1),
        slot["score"],
        slot["contribution"],
        write_patch(root, candidate.jpeg or b""),
        candidate.around,
        candidate.truth,
    )


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
    m = atlas.model["prototypes_per_class"]
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
                "label": label,
                "truths": dict(atlas.truths_of(class_id)),
                "slots": [atlas.entries[class_id, slot].to_dict() for slot in range(m)],
            }
            for class_id, label in enumerate(atlas.class_names)
        ],
    }


def _parse_atlas(root: Path, document: Mapping[str, Any]) -> Atlas:
    model = document["model"]
    if not all(isinstance(model[key], str) for key in ("file", "sha256")):
        raise TypeError("the model's file and sha256 are no texts")
    m = model["prototypes_per_class"]
    entries = {}
    for class_id, entry in enumerate(document["classes"]):
        if entry["class_id"] != class_id or not isinstance(entry["label"], str) or len(entry["slots"]) != m:
            raise ValueError(f"class {class_id} is not as it was written")
        for slot, slot_entry in enumerate(entry["slots"]):
            entries[class_id, slot] = _parse_entry(class_id, slot, slot_entry)
    return Atlas(
        root,
        model,
        tuple(entry["label"] for entry in document["classes"]),
        dict(document["data"]),
        int(document["top"]),
        entries,
        tuple(Finding(**finding) for finding in document["findings"]),
        tuple(int(count) for count in document["cells"]),
        # atlases of earlier versions have none
        {
            class_id: {str(truth): int(count) for truth, count in entry["truths"].items()}
            for class_id, entry in enumerate(document["classes"])
            if entry.get("truths")
        },
    )


def _parse_entry(class_id: int, slot: int, entry: Mapping[str, Any]) -> SlotEntry:
    if entry["slot"] != slot:
        raise ValueError(f"slot {slot} of class {class_id} is not as it was written")
    statistics = {name: entry[name] for name in SlotStatistics.__dataclass_fields__}
    if statistics["top_cell"] is not None:
        statistics["top_cell"] = _parse_numbers(statistics["top_cell"], 2, int)
    return SlotEntry(class_id, slot, SlotStatistics(**statistics), tuple(_parse_patches(entry["patches"])))


def _parse_patches(listed: Iterable[Mapping[str, Any]]) -> Iterable[AtlasPatch]:
    for each in listed:
        if not _PATCH_NAME.fullmatch(each["file"]):
            raise ValueError(f"{each['file']!r} is no patch's name")
        contribution = each["contribution"]
        yield AtlasPatch(
            str(each["image"]),
            str(each["sha256"]),
            _parse_numbers(each["cell"], 2, int),
            _parse_numbers(each["box"], 4, float),
            float(each["score"]),
            None if contribution is None else float(contribution),
            each["file"],
            # atlases of earlier versions show bare cells
            _parse_numbers(each["field"], 4, float) if each.get("field") else None,
            # and do not know what the images show
            None if each.get("truth") is None else str(each["truth"]),
        )


def _parse_numbers(values: Any, count: int, kind: type[int] | type[float]) -> Any:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{values!r} is not {count} numbers")
    return tuple(kind(value) for value in values)
