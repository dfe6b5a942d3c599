"""What `infer` settles before a run that draws evidence sheets or calls slots by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.cli.infer import preparation

if TYPE_CHECKING:
    from opal_deploy.explain.slot_names import SlotNames
    from opal_deploy.pipeline.run.drawn_sheets import Sheets
    from opal_deploy.runtime.session import Session


@dataclass(frozen=True)
class Wanted:
    """What the call asks for.

    Attributes:
        sheets: what is on them; None: no sheets.
        names: of slots; None: nobody named one.
        sessions: that answer with all that the sheets show.
        identity: what of it decides the records and drawings. Only what was asked for is in it, so that a run without
            any of it is the run that it was before there were such options.
    """

    sheets: Sheets | None
    names: SlotNames | None
    sessions: list[Session]
    identity: dict[str, object] = field(default_factory=dict)


def settle(
    path: Path,
    sessions: list[Session],
    model: Mapping[str, str],
    *,
    sheets: bool,
    heatmap: bool,
    atlas: Path | None,
    slot_names: Path | None,
    min_margin: float | None,
) -> Wanted:
    """Check that the model can do what is asked for, and read what belongs to it.

    Args:
        path: of the model. model: its identity.
        sheets: draw them; `heatmap` and `atlas` ask for them too.

    Raises:
        UsageError: the model has no evidence of single cells, no attention maps, is not the atlas's, or the names do
            not fit it. ArtifactError: there is no such atlas, or it is damaged.
    """
    from opal_deploy.explain.atlas.folder import ATLAS
    from opal_deploy.pipeline.run.drawn_sheets import Sheets, with_maps
    from opal_deploy.pipeline.sheets import SheetMaker, check_exact

    sheets = sheets or heatmap or atlas is not None
    if not sheets and slot_names is None:
        return Wanted(None, None, sessions)
    metadata = sessions[0].metadata
    identity: dict[str, object] = {}
    check_exact(metadata, str(path))
    if heatmap:
        # it refuses a model that has no attention maps to show
        SheetMaker(sessions[0], heatmap=True, model=str(path))
        sessions = with_maps(sessions)
    if sheets:
        identity |= {"sheets": True} | ({"heatmap": True} if heatmap else {})
    neighbours = None if atlas is None else preparation.atlas_of(path, metadata, model, atlas)
    if atlas is not None:
        # it names every patch by the digest of its bytes
        identity["atlas"] = preparation.file_identity(atlas / ATLAS)
    slot_names = preparation.names_file(slot_names, atlas)
    names = preparation.names_of(metadata, slot_names)
    if slot_names is not None:
        identity["slot_names"] = preparation.file_identity(slot_names)
    drawn = Sheets(metadata, heatmap, neighbours, names, min_margin) if sheets else None
    return Wanted(drawn, names, sessions, identity)
