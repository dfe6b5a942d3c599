"""Evidence sheets of results, drawn from the outputs of the forward pass that made the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.predict.prepare import content_sha256
from opal_deploy.predict.setup import LoadedModel, fingerprint_file
from opal_deploy.predict.types import Prepared, Result
from opal_deploy.records.build import ImageInfo
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.records.names import SlotNames, read_slot_names
from opal_deploy.run.options import InferOptions
from opal_deploy.runtime.session import AttentionSession, ImageBatch, Session
from opal_deploy.visualization.atlas.entries import Atlas, Exemplars, find_exemplars
from opal_deploy.visualization.atlas.storage import ATLAS_FILE
from opal_deploy.visualization.atlas.storage import load_atlas as load_atlas_folder
from opal_deploy.visualization.sheet.content import SheetContent, build_sheet_content
from opal_deploy.visualization.sheet.drawing import Drawing, encode_png, encode_svg
from opal_deploy.visualization.sheet.layout import layout_sheet

_NAMES = "names.toml"


@dataclass(frozen=True)
class SheetOptions:
    """The content of evidence sheets.

    Attributes:
        heatmap: the outputs' attention maps.
        atlas: the model's atlas, for exemplars from other images; None: none.
        exemplar_rows: maximum number of exemplars per slot.
        names: names of slots.
        decision: thresholds that mark images, resolved.
        fields: draw effective receptive fields on the photographs.
    """

    heatmap: bool = False
    atlas: Atlas | None = None
    exemplar_rows: int = 4
    names: SlotNames | None = None
    decision: Decision = NO_DECISION
    fields: bool = False


@dataclass(frozen=True)
class Sheet:
    """The evidence sheet of one image: its content as data, and laid out as a drawing."""

    content: SheetContent
    drawing: Drawing

    def encode(self, file_format: str = "png") -> bytes:
        """Return the sheet as a `png` or `svg` file; the same sheet gives the same bytes."""
        return encode_svg(self.drawing) if file_format == "svg" else encode_png(self.drawing)


class SheetBuilder:
    """Builds the evidence sheets of one model's results, for `opal-deploy explain` and `infer --sheets`."""

    def __init__(self, metadata: Metadata, options: SheetOptions | None = None, *, model: str = "the model") -> None:
        """Check that the model's evidence is single cells; raise UsageError if not; messages call the model `model`."""
        check_exact_evidence(metadata, model)
        self._metadata, self._options = metadata, options or SheetOptions()

    def build(self, result: Result) -> Sheet:
        """Return the sheet of a result with image and outputs (`keep_images`, `keep_outputs`).

        Raises:
            ImageError: memory was too short for the image, or its file, which must not be its own exemplar, is gone.
            ArtifactError: a patch of the atlas is missing or damaged.
        """
        prepared, outputs, options = result.prepared, result.outputs, self._options
        if prepared.geometry is None or outputs is None:
            raise ValueError("a sheet needs an answered image whose outputs were kept")
        image = get_image(prepared)
        if not options.heatmap:
            outputs = replace(outputs, attention=None)
        info = ImageInfo(prepared.input.name, prepared.geometry, label=prepared.input.label)
        content = build_sheet_content(info, outputs, self._metadata, decision=options.decision, names=options.names)
        exemplars = None if options.atlas is None else self._find_exemplars(options.atlas, content, result)
        return Sheet(content, layout_sheet(content, image, exemplars, fields=options.fields))

    def _find_exemplars(self, atlas: Atlas, content: SheetContent, result: Result) -> Exemplars:
        prepared, predicted = result.prepared, content.predicted
        own = {prepared.image_sha256 or content_sha256(prepared.input.source), content.image or ""}
        slots = [slot.slot for slot in predicted.slots]
        return find_exemplars(atlas, predicted.class_id, slots, exclude=own, rows=self._options.exemplar_rows)


def get_image(prepared: Prepared) -> Image.Image:
    """Return the image to draw on; raise ImageError if memory was too short for it."""
    if prepared.image is None:
        raise ImageError("drawing_failed", "there was not enough memory to keep its image")
    return prepared.image


def check_exact_evidence(metadata: Metadata, model: str) -> None:
    """Raise UsageError unless the model's evidence is single cells; messages call the model `model`."""
    if metadata.evidence == "map":
        raise UsageError(f"{model}: it averages over cells, so no single cell is its evidence; expected max pooling")
    if metadata.evidence == "none":
        raise UsageError(
            f"{model}: it has no anchors, so a dense layer mixes all channels and no evidence can be shown; "
            "train the OPAL head"
        )


def check_effective_field(metadata: Metadata, model: str) -> None:
    """Raise UsageError unless the model's effective receptive field was measured."""
    if metadata.effective_field is None:
        raise UsageError(
            f"{model}: its effective receptive field was not measured; leave --receptive-field out, or train and "
            "export with this version"
        )


def with_attention(sessions: Sequence[Session], model: str = "the model") -> list[Session]:
    """Return sessions of the same model whose outputs have attention maps.

    Args:
        sessions: of an export with attention maps among its outputs, or of a checkpoint.
        model: what messages call the model.

    Raises:
        UsageError: the model was exported without attention maps.
    """
    return [_with_attention(session, model) for session in sessions]


def _with_attention(session: Session, model: str) -> Session:
    if "attention" in session.metadata.outputs:
        return session
    if isinstance(session, AttentionSession):
        return _AlwaysAttention(session)
    source = session.metadata.checkpoint_name
    raise UsageError(
        f"{model}: it was exported without attention maps, which --heatmap needs; "
        f"opal-deploy export {source} --outputs attention, or give the checkpoint"
    )


class _AlwaysAttention:
    """A session that always returns the attention maps, which it otherwise gives on request."""

    def __init__(self, session: AttentionSession) -> None:
        self._session = session
        self.metadata, self.device, self.description = session.metadata, session.device, session.description

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        return self._session.run_with_attention(images)


def load_atlas(path: Path, metadata: Metadata, model: Mapping[str, str], folder: Path) -> Atlas:
    """Load the atlas in `folder` for a model; raise ArtifactError if it is damaged, UsageError if it is another's."""
    atlas = load_atlas_folder(folder)
    atlas.check_model({**model, "checkpoint_sha256": metadata.source.get("sha256")}, str(path))
    return atlas


def load_slot_names(metadata: Metadata, path: Path | None) -> SlotNames | None:
    """Read the names of a model's slots, None without a file; raise UsageError if they do not fit the model."""
    return None if path is None else read_slot_names(path, metadata.class_names, metadata.class_map)


def find_names_file(path: Path | None, atlas: Path | None) -> Path | None:
    """Return the file that names slots: `path`, else names.toml of the atlas if it has one."""
    if path is None and atlas is not None and (atlas / _NAMES).is_file():
        return atlas / _NAMES
    return path


@dataclass(frozen=True)
class SheetSetup:
    """The evidence sheets and slot names of a run.

    Attributes:
        builder: builds the sheets; None: none are drawn.
        slot_names: names of slots; None: no slot has one.
        sessions: have all outputs that the sheets show.
        config: the part of run.json; only options that were given, so that other runs do not depend on them.
    """

    builder: SheetBuilder | None
    slot_names: SlotNames | None
    sessions: list[Session]
    config: dict[str, object]


def prepare_sheets(model: LoadedModel, options: InferOptions, decision: Decision) -> SheetSetup:
    """Check that the model can draw the sheets of a run, and read the files that they need.

    Raises:
        UsageError: the model does not support the options, or the atlas or the names belong to another model.
        ArtifactError: the atlas does not exist or is damaged.
    """
    path, metadata, sessions = model.path, model.metadata, model.sessions
    atlas = None if options.atlas is None else Path(options.atlas)
    slot_names = None if options.slot_names is None else Path(options.slot_names)
    sheets = options.sheets or options.heatmap or atlas is not None
    config: dict[str, object] = {}
    if options.receptive_field:
        if not (options.explain or sheets):
            raise UsageError("--receptive-field without --explain or --sheets: it would be drawn on nothing")
        check_effective_field(metadata, str(path))
        config["receptive_field"] = True
    if not sheets and slot_names is None:
        return SheetSetup(None, None, sessions, config)
    check_exact_evidence(metadata, str(path))
    if options.heatmap:
        sessions = with_attention(sessions, str(path))
    if sheets:
        config |= {"sheets": True} | ({"heatmap": True} if options.heatmap else {})
    loaded_atlas = None
    if atlas is not None:
        loaded_atlas = load_atlas(path, metadata, model.fingerprint, atlas)
        # the file lists every patch with its digest
        config["atlas"] = fingerprint_file(atlas / ATLAS_FILE)
    slot_names = find_names_file(slot_names, atlas)
    names = load_slot_names(metadata, slot_names)
    if slot_names is not None:
        config["slot_names"] = fingerprint_file(slot_names)
    sheet_options = SheetOptions(
        options.heatmap,
        loaded_atlas,
        names=names,
        decision=decision,
        fields=options.receptive_field,
    )
    return SheetSetup(SheetBuilder(metadata, sheet_options) if sheets else None, names, sessions, config)
