"""The public `Model`: `opal_deploy.load(path).explain(images)`."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast, overload

import numpy as np
from PIL import Image

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.explanation import Explanations, to_explanations
from opal_deploy.inference.service import Service
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.preprocess.decode import MAX_PIXELS, Decoding, Source
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import source_name
from opal_deploy.records.record import Record
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import Session


class Model:
    """A loaded model that classifies and explains images; its methods may be called from any thread.

    Attributes:
        metadata: class names, prototypes per class, grid, input size, kind of evidence, verification report, ...
        description: engine, device, threads and precision, in one line.
        sha256: hex digest of the model's file; None for a model without one.
        path: of that file; None for a model without one.
        sessions: what runs the model, one a device.
    """

    def __init__(self, sessions: Sequence[Session], sha256: str | None = None, path: Path | None = None) -> None:
        """Wrap open sessions of one model; `load` opens them."""
        self.sessions = list(sessions)
        self.sha256, self.path = sha256, path
        self.metadata: Metadata = sessions[0].metadata
        self.description: str = sessions[0].description

    @property
    def names(self) -> dict[int, str]:
        """The label of each class by its id, the index of its logit, as in `class_id` and `label` of a record."""
        return dict(enumerate(self.metadata.class_names))

    @overload
    def explain(  # type: ignore[overload-overlap]  # a str is a sequence of str, and means one path
        self,
        images: Source,
        *,
        boxes: Box | Sequence[Box | None] | None = None,
        top: int = 5,
        min_margin: float | None = None,
        batch: int = 16,
        max_pixels: int = MAX_PIXELS,
    ) -> Record: ...

    @overload
    def explain(
        self,
        images: Sequence[Source],
        *,
        boxes: Sequence[Box | None] | None = None,
        top: int = 5,
        min_margin: float | None = None,
        batch: int = 16,
        max_pixels: int = MAX_PIXELS,
    ) -> Explanations: ...

    def explain(
        self,
        images: Source | Sequence[Source],
        *,
        boxes: Sequence[Box | None] | Box | None = None,
        top: int = 5,
        min_margin: float | None = None,
        batch: int = 16,
        max_pixels: int = MAX_PIXELS,
    ) -> Record | Explanations:
        """Return the records that `opal-deploy infer` writes, without their index, for one image or many.

        Args:
            images: a path, a file's bytes, a PIL image, or uint8 [H, W, 3] RGB; or a sequence of such. A uint8 array
                [N, H, W, 3] is a sequence of N.
            boxes: (x0, y0, x1, y1) to crop to first, in pixels of the whole oriented image; one an image, None for no
                crop. For one image a sequence of one box will do.
            top: classes listed in the record's `top`; all that the model lists if there are fewer.
            min_margin: a prediction with a smaller margin has the status `abstained`; None: none has.
            batch: images a forward pass.
            max_pixels: width times height above which an image gets an error record.

        Returns:
            A record, or a list of records in the order of the images: plain dictionaries and a plain list in every
            respect, which print in a line each and show themselves in a notebook. `image` is the path where one was
            given, else None. An image that cannot be classified has an error record and raises nothing.

        Raises:
            ValueError: not boxes, or not as many as images.
            StoppedEarly: the device was lost.
        """
        one = isinstance(images, str | bytes | os.PathLike | Image.Image) or (
            isinstance(images, np.ndarray) and images.ndim < 4
        )
        sources = [cast(Source, images)] if one else list(cast(Sequence[Source], images))
        box_list = _parse_boxes(boxes, len(sources), one=one)
        options = InferenceOptions(
            batch=batch, top=top, min_margin=min_margin, max_pixels=max_pixels, model_sha256=self.sha256
        )
        requests = (Request(source_name(source), source, box) for source, box in zip(sources, box_list, strict=True))
        records = to_explanations(result.record for result in predict_stream(requests, self.sessions, options))
        return records[0] if one else records

    def serve(
        self,
        *,
        batch: int = 16,
        max_wait_ms: float = 5.0,
        capacity: int = 256,
        workers: int = 2,
        top: int = 5,
        min_margin: float | None = None,
        max_pixels: int = MAX_PIXELS,
        decode: Decoding = Decoding.default,
        decode_timeout: float | None = 30.0,
        isolate: bool = False,
    ) -> Service:
        """Start a service that classifies images as they come, from any thread; its `submit` takes them.

        Args:
            batch: images a forward pass at most.
            max_wait_ms: milliseconds that an image waits at most until its batch is full.
            capacity: images that may be in work; `submit` waits or raises beyond that.
            workers: images that are decoded at a time, in threads or processes.
            top: classes listed in a record's `top`; all that the model lists if there are fewer.
            min_margin: a prediction with a smaller margin has the status `abstained`; None: none has.
            max_pixels: width times height above which an image gets an error record.
            decode: the decode path.
            decode_timeout: seconds for one image, with `isolate`; None: no limit.
            isolate: decode in processes, so that a decoder that crashes or hangs costs one image.

        Returns:
            A service; close it, or use it as a context manager. `explain` may be called beside it.
        """
        options = InferenceOptions(
            batch=batch,
            workers=workers,
            max_pixels=max_pixels,
            top=top,
            min_margin=min_margin,
            decode=decode,
            decode_timeout=decode_timeout,
            isolate=isolate,
            model_sha256=self.sha256,
        )
        return Service(self.sessions, options, max_wait=max_wait_ms / 1e3, capacity=capacity)

    def __repr__(self) -> str:
        metadata = self.metadata
        return f"<opal_deploy.Model {metadata.backbone}, {metadata.num_classes} classes, {self.description}>"


def _parse_boxes(boxes: object, images: int, *, one: bool) -> list[Box | None]:
    """Return a box or None for each image.

    Args:
        boxes: as for `Model.explain`.
        images: their number.
        one: a single image was given, not a sequence of one.

    Raises:
        ValueError: something else, or of another number.
    """
    if boxes is None:
        return [None] * images
    entries = list(boxes) if isinstance(boxes, Sequence | np.ndarray) else [boxes]
    if one and len(entries) == 4 and not any(isinstance(entry, Sequence | np.ndarray) for entry in entries):
        entries = [entries]
    if len(entries) != images:
        expected = "one, (x0, y0, x1, y1)" if one else "one for each, None for none"
        raise ValueError(f"{len(entries)} boxes for {images} {'image' if images == 1 else 'images'}; give {expected}")
    return [None if entry is None else _parse_box(entry) for entry in entries]


def _parse_box(box: object) -> Box:
    try:
        x0, y0, x1, y1 = map(float, cast("Iterable[float]", box))
    except (TypeError, ValueError):
        raise ValueError(f"box {reprlib.repr(box)}: expected four numbers (x0, y0, x1, y1), in pixels") from None
    return x0, y0, x1, y1


def load(path: str | os.PathLike[str], *, device: str = "auto", threads: int | None = None) -> Model:
    """Load a model: an ONNX file or engine that `opal-deploy export` wrote, or a checkpoint (which needs torch).

    Args:
        path: the model's file.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, or `0,1` for several GPUs.
        threads: of the runtime on the CPU; None: as many as this process may use.

    Raises:
        ArtifactError: there is no such file, or it is damaged or no model of opal-deploy.
        MissingExtra: its runtime is not installed.
        UsageError: there is no such device.
    """
    sessions = open_sessions(Path(path), device=device, threads=threads)
    return Model(sessions, compute_sha256(Path(path)), Path(path))
