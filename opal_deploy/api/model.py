"""The public `Model`: `opal_deploy.load(path).predict(images)`."""

from __future__ import annotations

import inspect
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, overload, runtime_checkable

import numpy as np
from PIL import Image

from opal_deploy.api.explanation import Explanation, Explanations, Origin
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ImageError, UsageError, suggest_names
from opal_deploy.logs import ProgressChoice, WarningLine, as_progress, log_line, show_progress
from opal_deploy.options import RuntimeName, StrPath
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.predict.setup import find_default_model, log_cautions
from opal_deploy.preprocess.decode import MAX_PIXELS, Decoding, FileSource, Source, check_array
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.decision import THRESHOLDS, Decision
from opal_deploy.records.names import source_name
from opal_deploy.records.record import Failed
from opal_deploy.runtime.devices import default_batch
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import Session
from opal_deploy.sources.discovery import check_inputs, discover
from opal_deploy.sources.image import InputImage, Skipped

if TYPE_CHECKING:
    from opal_deploy.api.service import Service


class Model:
    """A loaded model that classifies and explains images; its methods may be called from any thread.

    Functions that take a model's path, such as `verify` and `find_drift(baseline=)`, take the model, too.

    Attributes:
        metadata: class names, prototypes per class, grid, input size, kind of evidence, verification report, ...
        description: engine, device, threads and precision, in one line.
        sha256, path: hex digest and path of the model file; None for a model without a file.
        sessions: run the model, one per device.
    """

    def __init__(self, sessions: Sequence[Session], sha256: str | None = None, path: Path | None = None) -> None:
        """Wrap open sessions of one model; `load` opens them."""
        if isinstance(sessions, str | os.PathLike):
            raise TypeError("a Model is made by opal_deploy.load(path)")
        self.sessions, self._opened_with = list(sessions), dict[str, Any]()
        self._cautioned: set[bool] = set()
        self.sha256, self.path = sha256, path
        self.metadata: Metadata = sessions[0].metadata
        self.description: str = sessions[0].description

    @property
    def names(self) -> dict[int, str]:
        """The label of each class by its id, the index of its logit, as in `class_id` and `label` of a record."""
        return dict(enumerate(self.metadata.class_names))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as path and options: another process opens the file again."""
        return partial(load, os.fspath(self), **self._opened_with), ()

    def __fspath__(self) -> str:
        """Return the path of the model's file, for functions that take a path; raise UsageError if it has none."""
        if self.path is None:
            raise UsageError("this model has no file; load one with opal_deploy.load")
        return str(self.path)

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is a sequence of str, and means one path
        self,
        images: Source,
        *,
        boxes: Box | Sequence[Box | None] | None = None,
        top: int = 5,
        batch: int | None = None,
        max_pixels: int = MAX_PIXELS,
        progress: ProgressChoice | None = None,
        **thresholds: float | str | None,
    ) -> Explanation: ...

    @overload
    def predict(
        self,
        images: Sequence[Source | Tensor],
        *,
        boxes: Sequence[Box | None] | None = None,
        top: int = 5,
        batch: int | None = None,
        max_pixels: int = MAX_PIXELS,
        progress: ProgressChoice | None = None,
        **thresholds: float | str | None,
    ) -> Explanations: ...

    @overload
    def predict(self, images: Tensor, **options: Any) -> Explanation | Explanations: ...

    def predict(
        self,
        images: Source | Tensor | Sequence[Source | Tensor],
        *,
        boxes: Sequence[Box | None] | Box | None = None,
        top: int = 5,
        batch: int | None = None,
        max_pixels: int = MAX_PIXELS,
        progress: ProgressChoice | None = None,
        **thresholds: float | str | None,
    ) -> Explanation | Explanations:
        """Return the records that `opal-deploy infer` writes, without their index, for one image or many.

        Args:
            images: a path, a file's bytes, a PIL image, or uint8 [H, W, 3] RGB; or a sequence of these. A uint8 array
                [N, H, W, 3] is a sequence of N, as is a PyTorch tensor uint8 [N, 3, H, W].
            boxes: (x0, y0, x1, y1) to crop to first, in pixels of the whole oriented image; one per image, None for no
                crop. For one image a sequence of one box is accepted.
            top: maximum number of classes in the record's `top`.
            batch: batch size; None: the device's default, as on the command line.
            max_pixels: width times height above which an image gets an error record.
            progress: True shows a bar; or a function that receives the number of images done, of all, and a note.
            thresholds: fields of `Decision`, such as `min_margin=0.05` or `unknown="5%"`, which give records their
                status.

        Returns:
            A record, or a list of records in the order of the images, which print in one line per image, display
            themselves in a notebook and save their drawings, see `Explanation`. `image` is the path that was given,
            else None. An image that cannot be classified has an error record; nothing is raised. See `stream` for
            folders and globs.

        Raises:
            ValueError: not boxes, or not as many as images. StoppedEarly: the device was lost.
            UsageError: a folder or a pattern (use `stream`), an array or tensor of another type or shape, or a
                threshold that the model does not support.
        """
        one = _is_one(images)
        sources = [_to_source(image) for image in ([cast(Source, images)] if one else _list_sources(images))]
        _check_sources(sources, one=one)
        box_list = _parse_boxes(boxes, len(sources), one=one)
        self._caution(boxed=boxes is not None)
        options = self._make_options(self.predict, thresholds, batch, top=top, max_pixels=max_pixels)
        inputs = [InputImage(source_name(source), source, box) for source, box in zip(sources, box_list, strict=True)]
        records = Explanations()
        with show_progress("predict") if progress is True else nullcontext(as_progress(progress)) as report:
            for image, result in zip(inputs, predict_stream(iter(inputs), self.sessions, options), strict=True):
                records.append(Explanation(result.record, Origin(self, image.source, image.crop, options)))
                report(len(records), len(inputs), "")
        return records[0] if one else records

    def stream(
        self,
        images: Source | Tensor | Iterable[Source | Tensor],
        *,
        top: int = 5,
        batch: int | None = None,
        workers: int = 2,
        max_pixels: int = MAX_PIXELS,
        progress: ProgressChoice | None = None,
        **thresholds: float | str | None,
    ) -> Iterator[Explanation]:
        """Yield one record per image, in order, while the next images are decoded; for inputs of any size.

        `top`, `batch`, `max_pixels`, `progress` and `thresholds` are those of `predict`. How many images there are is
        not known.

        Args:
            images: a folder, a glob, an archive or their URL, searched as `opal-deploy infer` does; or any iterable of
                images as `predict` takes them, which may be endless.
            workers: images decoded in parallel.

        Raises:
            UsageError: the input does not exist or holds no image. StoppedEarly: the device was lost.
        """
        self._caution(boxed=False)
        options = self._make_options(self.stream, thresholds, batch, workers=workers, top=top, max_pixels=max_pixels)
        if isinstance(images, str | os.PathLike):
            places = [os.fspath(images)]
            check_inputs(places)
            inputs = discover(places, Skipped())
        else:
            several = cast(Iterable[Source | Tensor], [images] if _is_one(images) else images)
            inputs = (InputImage(source_name(source), source) for source in map(_to_source, several))
        return self._stream(inputs, options, progress)

    def _stream(
        self, inputs: Iterator[InputImage], options: InferenceOptions, progress: ProgressChoice | None
    ) -> Iterator[Explanation]:
        with show_progress("predict") if progress is True else nullcontext(as_progress(progress)) as report:
            for number, result in enumerate(predict_stream(inputs, self.sessions, options), 1):
                source = result.prepared.input.source
                # pixels of all images that were streamed would fill the memory of a caller who keeps the records
                kept = source if isinstance(source, str | os.PathLike) else None
                report(number, None, "")
                yield Explanation(result.record, Origin(self, kept, None, options))

    def encode_sheet(
        self, image: InputImage, path: str | os.PathLike[str], options: InferenceOptions | None = None
    ) -> bytes:
        """Return the evidence sheet of an image as the bytes of a .png or .svg file, by the suffix of `path`.

        `max_pixels` and `decision` of `options` apply.

        Raises:
            ImageError: the image cannot be classified.
            UsageError: the model's evidence is not single cells, or the suffix is another one.
        """
        # slow to import
        from opal_deploy.run.drawing import build_sheet, check_exact_evidence

        options = options or InferenceOptions()
        file_format = Path(path).suffix.lower().lstrip(".")
        if file_format not in ("png", "svg"):
            raise UsageError(f"{os.fspath(path)}: expected a .png or .svg file")
        check_exact_evidence(self.metadata, str(self.path or "the model"))
        options = replace(options, batch=1, workers=1, keep_images=True, keep_outputs=True)
        (result,) = predict_stream([image], self.sessions[:1], options)
        if isinstance(result.record, Failed):
            raise ImageError(result.record.error.code, result.record.error.message)
        return build_sheet(result, self.metadata, decision=options.decision).drawing.encode(file_format)

    def serve(
        self,
        *,
        batch: int | None = None,
        max_wait_ms: float = 5.0,
        capacity: int = 256,
        workers: int = 2,
        top: int = 5,
        max_pixels: int = MAX_PIXELS,
        decode: Decoding = Decoding.default,
        decode_timeout: float | None = 30.0,
        isolate: bool = False,
        **thresholds: float | str | None,
    ) -> Service:
        """Start a service that classifies images as they arrive, from any thread; see `Service.submit`.

        Close it, or use it as a context manager. `predict` may be called at the same time.

        `top`, `max_pixels` and `thresholds` are those of `predict`.

        Args:
            batch: maximum batch size; None: the device's default.
            max_wait_ms: longest time that an image waits for others in flight to fill its batch, in milliseconds.
            capacity: maximum in-flight images; `submit` waits or raises beyond that.
            workers: parallel decode threads or processes.
            decode: the decode path.
            decode_timeout: seconds per image, with `isolate`; None: no limit.
            isolate: decode in processes, so that a decoder that crashes or hangs costs one image.
        """
        from opal_deploy.api.service import Service

        options = self._make_options(
            self.serve, thresholds, batch, workers=workers, max_pixels=max_pixels, top=top, decode=decode,
            decode_timeout=decode_timeout, isolate=isolate,
        )  # fmt: skip
        return Service(self.sessions, options, max_wait=max_wait_ms / 1e3, capacity=capacity)

    def _caution(self, *, boxed: bool) -> None:
        """Warn once of a model that is not verified, or that expects crops."""
        if boxed not in self._cautioned:
            self._cautioned.add(boxed)
            hint = "predict(image, boxes=(x0, y0, x1, y1))"
            log_cautions(self.metadata, boxed=boxed, crop_hint=hint, log=lambda line: log_line(WarningLine(line)))

    def _make_options(
        self, method: Callable[..., Any], thresholds: Mapping[str, float | str | None], batch: int | None, **others: Any
    ) -> InferenceOptions:
        """Return the options of a prediction; raise TypeError for a keyword that is not one of the method's."""
        if unknown := thresholds.keys() - THRESHOLDS:
            own = inspect.signature(method).parameters.items()
            known = [*(name for name, parameter in own if parameter.kind is parameter.KEYWORD_ONLY), *THRESHOLDS]
            hint = suggest_names(min(unknown), known)
            raise TypeError(
                f"unexpected keyword {min(unknown)!r}{hint}; keywords are {', '.join(known)}; threads, device and "
                "runtime are those of opal_deploy.load, drawings those of the answer"
            )
        path = self.path or Path("the model")
        decision = Decision(**thresholds).resolve(path, self.metadata, lambda _: None)
        batch = default_batch(self.sessions[0]) if batch is None else batch
        return InferenceOptions(batch=batch, decision=decision, model_sha256=self.sha256, **others)

    def __repr__(self) -> str:
        metadata = self.metadata
        return f"<opal_deploy.Model {metadata.backbone}, {metadata.num_classes} classes, {self.description}>"


def _list_sources(images: Any) -> list[Source | Tensor]:
    """Return the images of a sequence; raise UsageError for anything that is no image, such as an open file."""
    expected = "expected paths, bytes, PIL images or uint8 arrays [H, W, 3]"
    if not isinstance(images, Iterable) or hasattr(images, "read"):
        raise UsageError(f"predict: {type(images).__name__} found; {expected}")
    sources = images.tolist() if isinstance(images, np.ndarray) and images.dtype.kind in "UO" else list(images)
    for source in sources:
        if not isinstance(source, str | bytes | os.PathLike | FileSource | Image.Image | np.ndarray | Tensor):
            raise UsageError(f"predict: images of type {type(source).__name__} found; {expected}")
    return sources


@runtime_checkable
class Tensor(Protocol):
    """A PyTorch tensor, without importing torch."""

    @property
    def ndim(self) -> int: ...

    def detach(self) -> Any: ...

    def permute(self, *dimensions: int, **options: Any) -> Any: ...


def _to_source(image: Source | Tensor) -> Source:
    """Return an image as it is, or the pixels of a tensor [3, H, W] as an array [H, W, 3]."""
    if not isinstance(image, Tensor):
        return image
    pixels = image.detach().cpu()
    if pixels.ndim == 3 and len(pixels) == 3:
        pixels = pixels.permute(1, 2, 0).contiguous()
    return cast(Source, (pixels.float() if str(pixels.dtype) == "torch.bfloat16" else pixels).numpy())


def _check_sources(sources: Sequence[Source], *, one: bool) -> None:
    """Raise UsageError for a folder, for a pattern that is the `one` image, and for pixels of another type or shape.

    These are the caller's mistakes, not an image's.
    """
    for source in sources:
        if isinstance(source, str | os.PathLike):
            name = os.fspath(source)
            if os.path.isdir(name) or (one and _is_pattern(name)):
                raise UsageError(f"{name}: a folder or a pattern; use model.stream({name!r})")
        if isinstance(source, np.ndarray) and 0 not in source.shape:
            try:
                check_array(source)
            except ImageError as error:
                raise UsageError(f"predict: {error}") from None


def _parse_boxes(boxes: object, images: int, *, one: bool) -> list[Box | None]:
    """Return a box or None per image; `one`: a single image was given; raise ValueError if they do not fit."""
    if boxes is None:
        return [None] * images
    entries = list(boxes) if isinstance(boxes, Sequence | np.ndarray) else [boxes]
    if one and len(entries) == 4:
        entries = [entries]
    if len(entries) != images:
        expected = "one, (x0, y0, x1, y1)" if one else "one for each, None for none"
        raise ValueError(f"{len(entries)} boxes for {images} {'image' if images == 1 else 'images'}; give {expected}")
    return [None if entry is None else _parse_box(entry) for entry in entries]


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[") and "://" not in name and not os.path.exists(name)


def _parse_box(box: object) -> Box:
    try:
        x0, y0, x1, y1 = map(float, cast("Iterable[float]", box))
    except (TypeError, ValueError):
        raise ValueError(f"box {reprlib.repr(box)}: expected four numbers (x0, y0, x1, y1), in pixels") from None
    return x0, y0, x1, y1


def _is_one(images: Any) -> bool:
    """Return whether this is one image, and not several."""
    is_array = isinstance(images, np.ndarray) and images.dtype.kind not in "UO"
    if is_array or isinstance(images, Tensor):
        return bool(images.ndim < 4)
    return isinstance(images, str | bytes | os.PathLike | Image.Image)


def load(path: StrPath | None = None, *, device: str, threads: int | None, runtime: RuntimeName) -> Model:
    """Return the model of a file that this package wrote; see `opal_deploy.load`."""
    options: dict[str, Any] = {"device": device, "threads": threads, "runtime": runtime}
    if path is None or Path(path).is_dir():
        path = find_default_model(device, runtime, folder=Path(path or ""), option="opal_deploy.load(FILE)")
    model = Model(open_sessions(Path(path), **options), compute_sha256(Path(path)), Path(path))
    model._opened_with = options
    return model
