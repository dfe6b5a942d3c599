"""From pictures to the content of their evidence sheets: one forward pass each, with all that it computed kept.

Evidence sheets of a run: drawn from the outputs of the forward pass that answered, whatever else the run draws."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ArtifactError, ImageError, StoppedEarly, UsageError
from opal_deploy.inference.decoding.prepare import content_sha256
from opal_deploy.inference.types import Request, Result
from opal_deploy.preprocess.decode import MAX_PIXELS, decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import normalise, to_input
from opal_deploy.runtime.session import ImageBatch, Session
from opal_deploy.visualization.atlas.exemplars import find_exemplars
from opal_deploy.visualization.atlas.storage import Atlas
from opal_deploy.visualization.sheet.content import SheetContent, build_sheet_content
from opal_deploy.visualization.sheet.layout import Exemplars, layout_sheet
from opal_deploy.visualization.sheet.rendering import encode_png
from opal_deploy.visualization.slot_names import SlotNames


@dataclass(frozen=True)
class SheetInput:
    """One picture and what a model made of it. `photograph`: RGB, whole, oriented."""

    content: SheetContent
    photograph: Image.Image


class SheetBuilder:
    """Answers pictures one by one, with the runner-up's evidence and, on request, the attention maps."""

    def __init__(
        self,
        session: Session,
        *,
        heatmap: bool = False,
        min_margin: float | None = None,
        names: SlotNames | None = None,
        max_pixels: int = MAX_PIXELS,
        model: str = "the model",
    ) -> None:
        """Check that the model can say what a sheet shows.

        Raises:
            UsageError: no cell of it is evidence, or `heatmap` without attention maps.
        """
        check_exact_evidence(session.metadata, model)
        self._run = _with_attention(session, model) if heatmap else _without_attention(session)
        self._metadata = session.metadata
        self._min_margin, self._names, self._max_pixels = min_margin, names, max_pixels

    def see(self, request: Request) -> SheetInput:
        """What the model makes of one picture.

        Raises:
            ImageError: the picture cannot be used, or the answer is not finite. StoppedEarly: the device was lost.
        """
        if request.error is not None:
            raise request.error
        photograph = decode(request.source, max_pixels=self._max_pixels)
        geometry = compute_geometry(photograph, request.box)
        outputs = self._run(to_input(photograph, geometry, self._metadata.input_size)[None])
        if not np.isfinite(outputs.logits).all():
            raise ImageError("not_finite", "the model's logits for it are NaN or infinite")
        content = build_sheet_content(
            request.name, geometry, outputs, 0, self._metadata, min_margin=self._min_margin, names=self._names
        )
        return SheetInput(content, photograph)


def check_exact_evidence(metadata: Metadata, model: str) -> None:
    """Refuse a model whose answers do not come from single cells.

    Raises:
        UsageError: says why not.
    """
    if metadata.evidence == "map":
        raise UsageError(f"{model}: it averages over cells, so no single cell is its evidence; expected max pooling")
    if metadata.evidence == "none":
        raise UsageError(
            f"{model}: it has no anchors, so a dense layer mixes all channels and no evidence can be shown; "
            "train the OPAL head"
        )


def _without_attention(session: Session) -> Callable[[ImageBatch], Outputs]:
    def run(images: ImageBatch) -> Outputs:
        found = session.run(images)
        return Outputs(found.logits, found.argmax, found.scores)

    return run


def _with_attention(session: Session, model: str) -> Callable[[ImageBatch], Outputs]:
    metadata = session.metadata
    if "attention" in metadata.outputs:
        return session.run
    # a checkpoint's session is in memory only if PyTorch is
    reference = sys.modules.get("opal_deploy.runtime.torch_session")
    if reference is None or not isinstance(session, reference.TorchSession):
        source = metadata.source.get("file") or "ckpt.pt"
        raise UsageError(
            f"{model}: it was exported without attention maps, which --heatmap needs; "
            f"opal-deploy export {source} --outputs attention, or give the checkpoint"
        )
    run_normalised: Callable[[np.ndarray[tuple[int, ...], np.dtype[np.float32]]], Outputs] = session.run_normalised
    return lambda images: run_normalised(normalise(images, metadata.mean, metadata.std))


@dataclass(frozen=True)
class SheetOptions:
    """What is on the sheets of a run.

    Attributes:
        metadata: the model's, whose evidence is `exact`.
        heatmap: show the attention maps that the outputs have.
        atlas: of the model: patches of other pictures are shown.
        names: what people call the slots.
        min_margin: answers below it are marked as abstained.
    """

    metadata: Metadata
    heatmap: bool = False
    atlas: Atlas | None = None
    names: SlotNames | None = None
    min_margin: float | None = None

    def encode(self, result: Result, photograph: Image.Image) -> bytes:
        """The sheet of an answered picture as a PNG file: the one that `opal-deploy explain` writes.

        Args:
            result: with outputs.
            photograph: RGB, whole, oriented, of the size that the record says.

        Raises:
            ImageError: its file, whose digest keeps it from being its own neighbour, is gone. StoppedEarly: a patch of
                the atlas is missing or damaged.
        """
        prepared, outputs = result.prepared, result.outputs
        if prepared.geometry is None or outputs is None:
            raise ValueError("a sheet of a picture that was not answered, or whose outputs were not kept")
        if not self.heatmap:
            outputs = Outputs(outputs.logits, outputs.argmax, outputs.scores)
        content = build_sheet_content(
            prepared.request.name,
            prepared.geometry,
            outputs,
            0,
            self.metadata,
            min_margin=self.min_margin,
            names=self.names,
        )
        looks = None if self.atlas is None else self._looks(self.atlas, content, result)
        return encode_png(layout_sheet(content, photograph, looks))

    def _looks(self, atlas: Atlas, content: SheetContent, result: Result) -> Exemplars:
        own = result.prepared.file_sha256 or content_sha256(result.prepared.request.source)
        try:
            return find_exemplars(atlas, content, exclude={own})
        except ArtifactError as error:
            raise StoppedEarly(str(error)) from None


def with_attention(sessions: Sequence[Session]) -> list[Session]:
    """The same models, answering with attention maps.

    Args:
        sessions: of exports that have them as an output, or of checkpoints, which can always give them.
    """
    return [session if "attention" in session.metadata.outputs else _WithMaps(session) for session in sessions]


@runtime_checkable
class _Reference(Session, Protocol):
    """A checkpoint's session: its answers to normalised pictures have the attention maps."""

    def run_normalised(self, images: NDArray[np.float32]) -> Outputs: ...


class _WithMaps:
    """A checkpoint's session whose every answer has the attention maps."""

    def __init__(self, session: Session) -> None:
        if not isinstance(session, _Reference):
            raise TypeError(f"{session.description} has no attention maps")
        self._session = session
        self.metadata, self.description = session.metadata, session.description

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        return self._session.run_normalised(normalise(images, self.metadata.mean, self.metadata.std))
