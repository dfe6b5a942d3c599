"""From pictures to the content of their evidence sheets: one forward pass each, with all that it computed kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.explain.sheet.content import SheetContent, content_of
from opal_deploy.explain.slot_names import SlotNames
from opal_deploy.pipeline.decoding.prepare import Request
from opal_deploy.preprocess.decode import MAX_PIXELS, decode
from opal_deploy.preprocess.resize import lay_out, normalise, to_input
from opal_deploy.runtime.session import ImageBatch, Session


@dataclass(frozen=True)
class Seen:
    """One picture and what a model made of it. `photograph`: RGB, whole, oriented."""

    content: SheetContent
    photograph: Image.Image


class SheetMaker:
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
        check_exact(session.metadata, model)
        self._run = _with_attention(session, model) if heatmap else _without_attention(session)
        self._metadata = session.metadata
        self._min_margin, self._names, self._max_pixels = min_margin, names, max_pixels

    def see(self, request: Request) -> Seen:
        """What the model makes of one picture.

        Raises:
            ImageError: the picture cannot be used, or the answer is not finite. StoppedEarly: the device was lost.
        """
        if isinstance(request.box, ImageError):
            raise request.box
        photograph = decode(request.source, max_pixels=self._max_pixels)
        geometry = lay_out(photograph, request.box)
        outputs = self._run(to_input(photograph, geometry, self._metadata.input_size)[None])
        if not np.isfinite(outputs.logits).all():
            raise ImageError("not_finite", "the model's answer for it is not a finite number")
        content = content_of(
            request.name, geometry, outputs, 0, self._metadata, min_margin=self._min_margin, names=self._names
        )
        return Seen(content, photograph)


def check_exact(metadata: Metadata, model: str) -> None:
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
