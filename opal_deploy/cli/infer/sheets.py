"""Turn the parameters of `infer` that concern evidence sheets into options: atlas, names of slots, attention maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.cli.infer.setup import LoadedModel, fingerprint_file
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.inference.sheets import SheetBuilder
    from opal_deploy.runtime.session import Session
    from opal_deploy.visualization.atlas.entries import Atlas
    from opal_deploy.visualization.slot_names import SlotNames

_NAMES = "names.toml"


def load_atlas(path: Path, metadata: Metadata, model: Mapping[str, str], folder: Path) -> Atlas:
    """Load a model's atlas.

    Args:
        path: the model's file.
        metadata: the model's.
        model: name and digest of its file, see `fingerprint_model`.
        folder: of the atlas.

    Raises:
        ArtifactError: there is no atlas, or it is damaged.
        UsageError: it was built with another model.
    """
    from opal_deploy.visualization.atlas import storage

    atlas = storage.load_atlas(folder)
    atlas.check_model({**model, "checkpoint_sha256": metadata.source.get("sha256")}, str(path))
    return atlas


def find_names_file(path: Path | None, atlas: Path | None) -> Path | None:
    """Return the file that names slots: `path`, or else the atlas's own, if it has one."""
    if path is None and atlas is not None and (atlas / _NAMES).is_file():
        return atlas / _NAMES
    return path


def load_slot_names(metadata: Metadata, path: Path | None) -> SlotNames | None:
    """Read the names of a model's slots; None without a file.

    Raises:
        UsageError: the file cannot be read, or does not fit the model.
    """
    from opal_deploy.visualization.slot_names import read_slot_names

    return None if path is None else read_slot_names(path, metadata.class_names, metadata.prototypes_per_class)


@dataclass(frozen=True)
class SheetSetup:
    """The requirements of a run with evidence sheets or named slots.

    Attributes:
        sheets: what is on the sheets; None: draw none.
        slot_names: names of slots; None: none has one.
        sessions: with all outputs that the sheets show.
        config: its part of the run's configuration. It holds only options that were given, so that a run without them
            is the run that it was before there were such options.
    """

    sheets: SheetBuilder | None
    slot_names: SlotNames | None
    sessions: list[Session]
    config: dict[str, object]


def prepare_sheets(
    model: LoadedModel,
    *,
    sheets: bool,
    heatmap: bool,
    atlas: Path | None,
    slot_names: Path | None,
    min_margin: float | None,
    receptive_field: bool,
    explain: bool,
) -> SheetSetup:
    """Check that the model can draw the sheets of a call, and read the files that belong to them.

    Args:
        model: the model.
        sheets: draw evidence sheets; `heatmap` and `atlas` imply it.
        heatmap: show attention maps on them.
        atlas: show patches of this atlas on them.
        slot_names: names slots on them and in the records.
        min_margin: predictions with a smaller margin abstain.
        receptive_field: draw effective receptive fields on them, and on overlays.
        explain: draw overlays.

    Raises:
        UsageError: no single cell of the model is evidence, it has no attention maps, it is not the atlas's, the
            names do not fit it, or its effective receptive field is not known.
        ArtifactError: there is no such atlas, or it is damaged.
    """
    from opal_deploy.inference.sheets import (
        SheetBuilder,
        SheetOptions,
        check_effective_field,
        check_exact_evidence,
        with_attention,
    )
    from opal_deploy.visualization.atlas.storage import ATLAS_FILE

    sheets = sheets or heatmap or atlas is not None
    config: dict[str, object] = {}
    if receptive_field:
        if not (explain or sheets):
            raise UsageError("--receptive-field without --explain or --sheets: it would be drawn on nothing")
        check_effective_field(model.metadata, str(model.path))
        config["receptive_field"] = True
    if not sheets and slot_names is None:
        return SheetSetup(None, None, model.sessions, config)
    path, metadata, sessions = model.path, model.metadata, model.sessions
    check_exact_evidence(metadata, str(path))
    if heatmap:
        sessions = with_attention(sessions, str(path))
    if sheets:
        config |= {"sheets": True} | ({"heatmap": True} if heatmap else {})
    loaded_atlas = None
    if atlas is not None:
        loaded_atlas = load_atlas(path, metadata, model.fingerprint, atlas)
        # it names every patch by the digest of its bytes
        config["atlas"] = fingerprint_file(atlas / ATLAS_FILE)
    slot_names = find_names_file(slot_names, atlas)
    names = load_slot_names(metadata, slot_names)
    if slot_names is not None:
        config["slot_names"] = fingerprint_file(slot_names)
    options = SheetOptions(heatmap, loaded_atlas, names=names, min_margin=min_margin, fields=receptive_field)
    return SheetSetup(SheetBuilder(metadata, options) if sheets else None, names, sessions, config)
