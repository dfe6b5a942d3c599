"""Evidence sheets of a run: drawn from the outputs of the forward pass that answered, whatever else the run draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ArtifactError, StoppedEarly
from opal_deploy.explain.atlas.folder import Atlas
from opal_deploy.explain.atlas.looks import looks_of
from opal_deploy.explain.sheet.content import SheetContent, content_of
from opal_deploy.explain.sheet.layout import Looks, lay_out
from opal_deploy.explain.sheet.png import encode_png
from opal_deploy.explain.slot_names import SlotNames
from opal_deploy.pipeline.answering import Result
from opal_deploy.pipeline.atlas import content_sha256
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import ImageBatch, Session


@dataclass(frozen=True)
class Sheets:
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
        content = content_of(
            prepared.request.name,
            prepared.geometry,
            outputs,
            0,
            self.metadata,
            min_margin=self.min_margin,
            names=self.names,
        )
        looks = None if self.atlas is None else self._looks(self.atlas, content, result)
        return encode_png(lay_out(content, photograph, looks))

    def _looks(self, atlas: Atlas, content: SheetContent, result: Result) -> Looks:
        own = result.prepared.file_sha256 or content_sha256(result.prepared.request.source)
        try:
            return looks_of(atlas, content, exclude={own})
        except ArtifactError as error:
            raise StoppedEarly(str(error)) from None


def with_maps(sessions: Sequence[Session]) -> list[Session]:
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
