"""An atlas on the disk: `atlas.json`, `atlas.html`, and `patches/` with a JPEG each, named by the digest of its bytes.

Names that come from content let a new atlas be written beside the old one: until `atlas.json` is replaced, in one step,
the old one is whole, and afterwards the new one.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from opal_deploy.artifact.files import write_json
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.visualization.atlas.entries import AtlasPatch, Finding, SlotEntry, SlotStatistics

ATLAS_SCHEMA = 1
ATLAS_KIND = "opal-atlas"
ATLAS, PATCHES, PAGE = "atlas.json", "patches", "atlas.html"
_PATCH_NAME = re.compile(r"patches/[0-9a-f]{2}/[0-9a-f]{32}\.jpg")


@dataclass(frozen=True)
class Atlas:
    """An atlas that lies in a folder.

    Attributes:
        root: the folder.
        model: of the model that it was built with: file, sha256, checkpoint_sha256, backbone, precision,
            prototypes_per_class, grid, distance.
        class_names: the model's.
        data: what it was built of: description, images, answered, kept, failed.
        top: patches a slot at most.
        entries: by (class, slot); every slot of the model is there.
        findings: the to-do list.
        cells: how often each cell of the grid was chosen, row by row.
    """

    root: Path
    model: Mapping[str, Any]
    class_names: tuple[str, ...]
    data: Mapping[str, Any]
    top: int
    entries: Mapping[tuple[int, int], SlotEntry]
    findings: tuple[Finding, ...]
    cells: tuple[int, ...] = field(default=())

    @staticmethod
    def load(path: str | Path) -> Atlas:
        """Read an atlas.

        Args:
            path: its folder.

        Raises:
            ArtifactError: there is none, it is damaged, or of another schema.
        """
        root = Path(path)
        hint = "build one with `opal-deploy atlas`"
        try:
            document = json.loads((root / ATLAS).read_text(encoding="utf-8"))
        except OSError as error:
            raise ArtifactError(f"{root / ATLAS}: cannot be read ({error.strerror or error}); {hint}") from None
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{root / ATLAS}: damaged, it is not JSON ({error}); {hint} again") from None
        if not isinstance(document, dict) or document.get("kind") != ATLAS_KIND:
            raise ArtifactError(f"{root / ATLAS}: not an atlas; {hint}")
        if document.get("schema") != ATLAS_SCHEMA:
            raise ArtifactError(
                f"{root / ATLAS}: schema {document.get('schema')!r} found, {ATLAS_SCHEMA} expected; {hint} again"
            )
        try:
            return _parsed(root, document)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ArtifactError(
                f"{root / ATLAS}: damaged ({type(error).__name__}: {' '.join(str(error).split())[:100]}); {hint} again"
            ) from None

    def check_model(self, model: Mapping[str, Any], name: str) -> None:
        """Refuse a model that the atlas does not belong to. Other exports of the same checkpoint belong to it.

        Args:
            model: its `sha256`, and `checkpoint_sha256` where it is known.
            name: what to call it.

        Raises:
            UsageError: it is another model.
        """
        if model["sha256"] == self.model["sha256"]:
            return
        checkpoint = model.get("checkpoint_sha256")
        if checkpoint is not None and checkpoint == self.model.get("checkpoint_sha256"):
            return
        raise UsageError(
            f"{self.root}: this atlas was built with {self.model['file']} (sha256 {self.model['sha256'][:12]}…), and "
            f"{name} is another model (sha256 {model['sha256'][:12]}…); build its own with `opal-deploy atlas`"
        )

    def rows(self, class_id: int, slot: int, *, exclude: Collection[str] = ()) -> list[AtlasPatch]:
        """Patches of a slot, best first.

        Args:
            class_id, slot: of the model.
            exclude: names or file digests (sha256) of pictures that are not to be shown.

        Raises:
            KeyError: the model has no such slot.
        """
        found = self.entries[class_id, slot].patches
        return [patch for patch in found if patch.image not in exclude and patch.sha256 not in exclude]

    def picture(self, patch: AtlasPatch) -> Image.Image:
        """The pixels of a patch, RGB.

        Raises:
            ArtifactError: its file is missing or damaged.
        """
        path = self.root / patch.file
        try:
            encoded = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror or error}); build the atlas again") from None
        if patch_name(encoded) != patch.file:
            raise ArtifactError(f"{path}: damaged, its bytes are not those that were written; build the atlas again")
        return Image.open(io.BytesIO(encoded)).convert("RGB")


def patch_name(encoded: bytes) -> str:
    """The file of a patch, relative to the atlas's folder."""
    digest = hashlib.sha256(encoded).hexdigest()[:32]
    return f"{PATCHES}/{digest[:2]}/{digest}.jpg"


def check_out_dir(root: Path, *, overwrite: bool) -> None:
    """Refuse a folder that an atlas should not be written to.

    Raises:
        UsageError: it holds an atlas already, unless `overwrite`; it holds something else; it is a file.
    """
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root}: a file is there; give a folder for the atlas with --out")
    if (root / ATLAS).exists():
        if not overwrite:
            raise UsageError(f"{root}: an atlas is there already; give another --out, or --overwrite to replace it")
    elif root.is_dir() and any(entry.name not in (PATCHES, PAGE, ".lock", "names.toml") for entry in root.iterdir()):
        raise UsageError(f"{root}: other files are there; give an empty folder, or one that does not exist, with --out")


def write_patch(root: Path, encoded: bytes) -> str:
    """Write a patch if it is not there yet; returns its name.

    Raises:
        UsageError: it cannot be written.
    """
    name = patch_name(encoded)
    path = root / name
    # not synced to the disk one by one, of which there may be many thousands: what a crash damages, its name tells
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


def write_atlas(atlas: Atlas) -> None:
    """Write `atlas.json`; its patches are written already. What an earlier atlas had besides them is removed.

    Raises:
        UsageError: it cannot be written.
    """
    write_json(atlas.root / ATLAS, _document(atlas))
    _remove_unnamed(atlas.root, {patch.file for entry in atlas.entries.values() for patch in entry.patches})


def _remove_unnamed(root: Path, named: Collection[str]) -> None:
    for folder in sorted(path for path in (root / PATCHES).glob("[0-9a-f][0-9a-f]") if path.is_dir()):
        for path in folder.iterdir():
            name = f"{PATCHES}/{folder.name}/{path.name}"
            ours = _PATCH_NAME.fullmatch(name) or path.name.startswith(".")
            if ours and name not in named:
                path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _document(atlas: Atlas) -> dict[str, Any]:
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
                "slots": [atlas.entries[class_id, slot].to_dict() for slot in range(m)],
            }
            for class_id, label in enumerate(atlas.class_names)
        ],
    }


def _parsed(root: Path, document: Mapping[str, Any]) -> Atlas:
    model = document["model"]
    if not all(isinstance(model[key], str) for key in ("file", "sha256")):
        raise TypeError("the model's file and sha256 are no texts")
    m = model["prototypes_per_class"]
    entries = {}
    for class_id, about in enumerate(document["classes"]):
        if about["class_id"] != class_id or not isinstance(about["label"], str) or len(about["slots"]) != m:
            raise ValueError(f"class {class_id} is not as it was written")
        for slot, entry in enumerate(about["slots"]):
            entries[class_id, slot] = _entry(class_id, slot, entry)
    return Atlas(
        root,
        model,
        tuple(about["label"] for about in document["classes"]),
        dict(document["data"]),
        int(document["top"]),
        entries,
        tuple(Finding(**finding) for finding in document["findings"]),
        tuple(int(count) for count in document["cells"]),
    )


def _entry(class_id: int, slot: int, entry: Mapping[str, Any]) -> SlotEntry:
    if entry["slot"] != slot:
        raise ValueError(f"slot {slot} of class {class_id} is not as it was written")
    figures = {name: entry[name] for name in SlotStatistics.__dataclass_fields__}
    if figures["top_cell"] is not None:
        figures["top_cell"] = _numbers(figures["top_cell"], 2, int)
    return SlotEntry(class_id, slot, SlotStatistics(**figures), tuple(_patches(entry["patches"])))


def _patches(listed: Iterable[Mapping[str, Any]]) -> Iterable[AtlasPatch]:
    for each in listed:
        if not _PATCH_NAME.fullmatch(each["file"]):
            raise ValueError(f"{each['file']!r} is no patch's name")
        contribution = each["contribution"]
        yield AtlasPatch(
            str(each["image"]),
            str(each["sha256"]),
            _numbers(each["cell"], 2, int),
            _numbers(each["box"], 4, float),
            float(each["score"]),
            None if contribution is None else float(contribution),
            each["file"],
        )


def _numbers(values: Any, count: int, kind: type[int] | type[float]) -> Any:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{values!r} is not {count} numbers")
    return tuple(kind(value) for value in values)
