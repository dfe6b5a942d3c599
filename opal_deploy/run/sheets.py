"""Evidence sheets of results, drawn from the outputs of the forward pass that made the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.predict.prepare import content_sha256
from opal_deploy.predict.types import Prepared, Result
from opal_deploy.records.build import ImageInfo
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.records.names import SlotNames, read_slot_names
from opal_deploy.visualization.atlas.entries import Atlas, Exemplars, find_exemplars
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
    if metadata.evidence in ("map", "none"):
        raise UsageError(f"{model}: no single cell is its evidence; expected a head with anchors and max pooling")


def check_effective_field(metadata: Metadata, model: str) -> None:
    """Raise UsageError unless the model's effective receptive field was measured."""
    if metadata.effective_field is None:
        raise UsageError(
            f"{model}: its effective receptive field was not measured; leave --receptive-field out, or train and "
            "export with this version"
        )


def check_attention(metadata: Metadata, model: str) -> None:
    """Raise UsageError unless the model's outputs have attention maps."""
    if "attention" not in metadata.outputs:
        raise UsageError(
            f"{model}: it was exported without attention maps, which --heatmap needs; "
            f"opal-deploy export {metadata.checkpoint_name} --outputs attention"
        )


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
