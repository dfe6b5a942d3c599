"""The overlays of results, the report of a run, and evidence sheets.

They are drawn from the forward pass that made the record. A run draws in separate processes: a drawing that crashes,
takes too long or runs out of memory is missing, and its record says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from msgspec import structs, to_builtins
from PIL import Image

from opal_deploy.artifact.measurements import list_evaluation
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.logs import one_line
from opal_deploy.predict.executor import prefetch
from opal_deploy.predict.prepare import InferenceOptions, Result
from opal_deploy.records.build import ImageInfo, build_records, class_evidence
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.records.lines import to_document
from opal_deploy.records.names import SlotNames
from opal_deploy.records.record import Answer, Answered, Failed, Label, Problem, Record
from opal_deploy.records.run_files import OVERLAYS, REPORT, overlay_name, remove_overlays, write_image_file
from opal_deploy.remote import redact
from opal_deploy.timing import StageTimer
from opal_deploy.visualization.drawing import Drawing
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg, paint_shares, show_photograph
from opal_deploy.visualization.report import (
    EMBED_LIMIT,
    ReportOptions,
    ReportWriter,
    Thumbnail,
    choose_image_mode,
    make_thumbnail,
)
from opal_deploy.visualization.sheet import OtherClass, draw_sheet
from opal_deploy.visualization.style import LABELS_SHOWN
from opal_deploy.worker_pool import WorkerCrashed, WorkerPool, WorkerTimeout

# by the image's number in the run
Thumbnails: TypeAlias = dict[int, Thumbnail]
# the overlay as JPEG, and the report's thumbnail, each None if it was not drawn; and why one is missing
Drawings: TypeAlias = tuple[bytes | None, Thumbnail | None, Problem | None]


@dataclass(frozen=True)
class Sheet:
    """The evidence sheet of one image: its record, the same as JSON with the runner-up's slots, and its picture."""

    record: Answered
    document: dict[str, Any]
    drawing: Drawing


def build_sheet(
    result: Result, metadata: Metadata, names: SlotNames | None = None, decision: Decision = NO_DECISION
) -> Sheet:
    """Return the sheet of a result with image and outputs (`keep_images`, `keep_outputs`).

    Args:
        result: of an answered image.
        metadata: the model's, after `check_exact_evidence`.
        names, decision: names of slots, and resolved thresholds that mark images.

    Raises:
        ImageError: memory was too short for the image.
    """
    prepared, outputs, geometry = result.prepared, result.outputs, result.prepared.geometry
    if geometry is None or outputs is None:
        raise ValueError("a sheet needs an answered image whose outputs were kept")
    info = ImageInfo(prepared.input.name, geometry, {"label": prepared.input.label})
    (record,) = build_records([info], outputs, metadata, top=2, decision=decision, slot_names=names)
    document = to_document(record)
    shown: Sequence[Answer | Label] = (record.labels or ())[1:LABELS_SHOWN] or record.top[1:2]
    others = [
        # the graph lists shares of classes in this order, too
        OtherClass(other, class_evidence(other.class_id, geometry, outputs, metadata, names), paint_evidence(result, i))
        for i, other in enumerate(shown, 1)
    ]
    if others:
        document["runner_up_evidence"] = to_builtins(others[0].slots)
    # without a letterbox's bars
    x0, y0, x1, y1 = geometry.crop
    seen = max(x0, 0), max(y0, 0), min(x1, geometry.width), min(y1, geometry.height)
    drawing = draw_sheet(paint_evidence(result), record, others, metadata, seen)
    return Sheet(record, document, drawing)


def paint_evidence(result: Result, place: int = 0) -> Image.Image:
    """Return the image to draw on; with evidence `regions` tinted by the shares of the answer, or of the runner-up.

    Raises ImageError if memory was too short for the image.
    """
    image, outputs, geometry = result.prepared.image, result.outputs, result.prepared.geometry
    if image is None:
        raise ImageError("drawing_failed", "there was not enough memory to keep its image")
    if outputs is None or outputs.shares is None or geometry is None:
        return image
    across, down = image.width / geometry.width, image.height / geometry.height
    x0, y0, x1, y1 = geometry.crop
    crop = round(x0 * across), round(y0 * down), round(x1 * across), round(y1 * down)
    return paint_shares(image, outputs.shares[0, place], crop)


def check_exact_evidence(metadata: Metadata, model: str) -> None:
    """Raise UsageError unless the model's evidence is single cells; messages call the model `model`."""
    if metadata.evidence in ("map", "none"):
        raise UsageError(f"{model}: no single cell is its evidence; expected a head with anchors and max pooling")


def prepare_overlays(out: Path, first: int = 0) -> None:
    """Make the folder of overlays, and remove those from the image `first` on; raise UsageError if that fails."""
    try:
        (out / OVERLAYS).mkdir(exist_ok=True)
        remove_overlays(out, first)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from None


def draw_results(
    results: Iterable[Result],
    out: Path,
    inference: InferenceOptions,
    processes: WorkerPool | None,
    *,
    first: int,
    thumbnails: Thumbnails,
    timer: StageTimer,
) -> Generator[Record, None, None]:
    """Draw and write the overlay of each result, and yield the records with the overlays' names, in order.

    Args:
        results: with images; the first one has the number `first` in the run.
        out: the run directory, after `prepare_overlays`.
        inference: `workers`, `decode_timeout` and `one_at_a_time` apply to drawing too.
        processes: where to draw; None: in threads of this process.
        thumbnails: receives those of the report's first images, while the photographs are in memory.
        timer: receives the times of drawing and writing, under the role `drawers`.

    Raises:
        StoppedEarly: the disk is full or gone, or no process can be started.
    """

    def draw(index: int, result: Result) -> Record:
        record = result.record
        if isinstance(record, Failed):
            return record
        arguments = timer, result, index < EMBED_LIMIT
        if processes is None:
            overlay, thumbnail, error = _draw(*arguments)
        else:
            overlay, thumbnail, error = _draw_isolated(*arguments, processes, inference.decode_timeout)
        if thumbnail is not None:
            thumbnails[index] = thumbnail
        if overlay is None:
            return structs.replace(record, drawing_error=error)
        name = overlay_name(index, record.image)
        with timer.stage("write"):
            write_image_file(out, name, overlay)
        return structs.replace(record, overlay=name, drawing_error=error)

    ahead = 0 if inference.one_at_a_time else 2 * inference.workers
    with ThreadPoolExecutor(
        inference.workers, "draw", initializer=timer.register_thread, initargs=("drawers",)
    ) as threads:
        futures = (threads.submit(draw, index, result) for index, result in enumerate(results, first))
        yield from prefetch(futures, ahead, lambda: timer.waiting("drawing"))


def _draw_isolated(
    timer: StageTimer, result: Result, with_thumbnail: bool, processes: WorkerPool, timeout: float | None
) -> Drawings:
    """Return the drawings of a result, drawn in a process; raise StoppedEarly if none can be started."""
    try:
        return processes.call_timed(timer, _draw, result, with_thumbnail)
    except WorkerCrashed as crash:
        return None, None, Problem(code="drawing_crashed", message=f"the process that drew it {crash}")
    except WorkerTimeout:
        limit = f"{timeout:g} s; raise --decode-timeout"
        return None, None, Problem(code="drawing_timeout", message=f"it was not drawn within {limit}")


def _draw(timer: StageTimer, result: Result, with_thumbnail: bool) -> Drawings:
    """Return the drawings of an answered result with its image."""
    overlay = thumbnail = None
    try:
        with timer.stage("draw"):
            image, record = paint_evidence(result), cast(Answered, result.record)
            others = [paint_evidence(result, place) for place, _ in enumerate((record.labels or ())[1:4], 1)]
            overlay = encode_jpeg(draw_overlay(image, record, others))
            if with_thumbnail:
                # the page shows boxes of all labels, and a tint would be of one
                plain = result.prepared.image if others else image
                thumbnail = make_thumbnail(show_photograph(plain or image, record), record)
    except ImageError as error:
        return overlay, thumbnail, Problem(code="drawing_failed", message=str(error))
    except MemoryError:
        reason = "drawing it needs more memory than there is; lower --workers"
        return overlay, thumbnail, Problem(code="drawing_failed", message=reason)
    return overlay, thumbnail, None


def describe_report(
    path: Path, metadata: Metadata, images: Sequence[str], *, runtime: str, command: str
) -> ReportOptions:
    """Return the title of a report and what it says of the model.

    The title names the first of `images`, the inputs, and the model, without the folders that they lie in. `runtime` is
    empty where shards open the model.
    """
    more = f" and {len(images) - 1} more" if len(images) > 1 else ""
    first = "standard input" if images[0] == "-" else Path(redact(images[0])).resolve().name
    head = f"{path.name}: {metadata.backbone}, {metadata.num_classes} classes, {metadata.describe_head()}"
    digest = metadata.file_sha256 if metadata.file_sha256.strip("0") else ""
    facts = [
        ("Model", head), ("Runtime", runtime), ("Model digest", digest), ("Not verified", metadata.unverified),
        ("Command", command),
    ]  # fmt: skip
    evidence = []
    if metadata.evidence == "exact":
        name = Path(path.name)
        checkpoint = metadata.find_checkpoint(name)
        evidence = list_evaluation(metadata.evaluation, name, metadata.receptive_field, export_of=checkpoint)
    return ReportOptions(
        facts=tuple((name, value) for name, value in facts if value),
        evidence=tuple((name, one_line(value)) for name, value in evidence),
        field=metadata.effective_field,
        patches=metadata.known_patches,
        noun="region" if metadata.evidence == "regions" else "slot",
        reach=metadata.reach,
        title=f"{first}{more}, explained by {path.name}",
        class_names=frozenset(metadata.class_names),
    )


@contextmanager
def open_report(
    out: Path, options: ReportOptions, images: int, folder: str = "", thumbnails: Mapping[int, bytes] | None = None
) -> Iterator[Callable[[Record], None]]:  # fmt: skip
    """Yield a function that adds the next record to report.html, which is written when the block ends.

    Args:
        out, options: the run directory, and the page's content.
        images: number of records that will be added.
        folder: prefix to leave out of images' names, see `find_common_folder`.
        thumbnails: those in memory; the others are made from the overlays.

    Raises:
        StoppedEarly: the disk is full; the records are safe.
    """
    numbers = itertools.count()
    image_mode = choose_image_mode(images)

    def add(record: Record) -> None:
        overlay = (thumbnails or {}).get(next(numbers))
        name = record.overlay if isinstance(record, Answered) else None
        if overlay is None and name is not None and writer.embeds_images:
            # one that was removed is missing on its card
            with suppress(OSError):
                overlay = (out / name).read_bytes()
        writer.add(record, overlay)

    try:
        with ReportWriter(out / REPORT, options, image_mode=image_mode, folder=folder) as writer:
            yield add
    except OSError as error:
        raise StoppedEarly(
            f"the report cannot be written ({error.strerror or error}); make room and run again"
        ) from None
