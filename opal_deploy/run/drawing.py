"""The overlays and evidence sheets of results, and the report of a run.

They are drawn from the forward pass that made the record. A run draws in separate processes: a drawing that crashes,
takes too long or runs out of memory is missing, and its record says why.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias, cast

from msgspec import structs
from PIL import Image

from opal_deploy.artifact.measurements import list_evaluation
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.logs import one_line
from opal_deploy.options import StrPath
from opal_deploy.predict.executor import prefetch
from opal_deploy.predict.prepare import InferenceOptions, Prepared, Result, content_sha256
from opal_deploy.records.build import ImageInfo
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.records.names import SlotNames, read_slot_names
from opal_deploy.records.record import Answered, Failed, Problem, Record
from opal_deploy.records.run_files import (
    OVERLAYS,
    REPORT,
    SHEETS,
    overlay_name,
    remove_image_files,
    sheet_name,
    write_image_file,
)
from opal_deploy.remote import redact
from opal_deploy.timing import NO_OP_TIMER, StageTime, StageTimer
from opal_deploy.visualization.atlas.entries import Atlas, Exemplars, find_exemplars
from opal_deploy.visualization.atlas.storage import load_atlas as load_atlas_folder
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg, show_photograph
from opal_deploy.visualization.report import (
    EMBED_LIMIT,
    Fact,
    ReportOptions,
    ReportWriter,
    Thumbnail,
    choose_image_mode,
    make_thumbnail,
)
from opal_deploy.visualization.sheet.content import SheetContent, build_sheet_content
from opal_deploy.visualization.sheet.drawing import Drawing, encode_png, encode_svg
from opal_deploy.visualization.sheet.layout import layout_sheet
from opal_deploy.worker_pool import WorkerCrashed, WorkerPool, WorkerTimeout

# by the image's number in the run
Thumbnails: TypeAlias = dict[int, Thumbnail]
# JPEGs of the overlay, and of the photograph for the report; PNG of the sheet
Part: TypeAlias = Literal["overlay", "thumbnail", "sheet"]
# the encoded drawings of one result, and why one is missing
Drawings: TypeAlias = tuple[dict[Part, bytes], Problem | None]

_NAMES = "names.toml"


@dataclass(frozen=True)
class SheetOptions:
    """The content of evidence sheets.

    Attributes:
        atlas: the model's atlas, for exemplars from other images; None: none.
        exemplar_rows: maximum number of exemplars per slot.
        names: names of slots.
        decision: thresholds that mark images, resolved.
    """

    atlas: Atlas | None = None
    exemplar_rows: int = 4
    names: SlotNames | None = None
    decision: Decision = NO_DECISION


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
        """Raise UsageError unless the model, which messages call `model`, has what the sheets show."""
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
        info = ImageInfo(prepared.input.name, prepared.geometry, label=prepared.input.label)
        content = build_sheet_content(info, outputs, self._metadata, decision=options.decision, names=options.names)
        exemplars = None if options.atlas is None else self._find_exemplars(options.atlas, content, result)
        return Sheet(content, layout_sheet(content, image, exemplars))

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


def load_atlas(path: Path, metadata: Metadata, model: Mapping[str, str], folder: Path) -> Atlas:
    """Load the atlas in `folder` for a model; raise ArtifactError if it is damaged, UsageError if it is another's."""
    atlas = load_atlas_folder(folder)
    atlas.check_model({**model, "checkpoint_sha256": metadata.source.get("sha256")}, str(path))
    return atlas


def load_slot_names(metadata: Metadata, path: StrPath | None, atlas: StrPath | None = None) -> SlotNames | None:
    """Return the names of a model's slots from a file, else names.toml of the atlas; None without either.

    Raises UsageError if they do not fit the model.
    """
    if path is None and atlas is not None and (Path(atlas) / _NAMES).is_file():
        path = Path(atlas) / _NAMES
    return None if path is None else read_slot_names(Path(path), metadata.class_names, metadata.class_map)


def _draw(sheets: SheetBuilder | None, result: Result, parts: Sequence[Part], timer: StageTimer) -> Drawings:
    """Return the drawings `parts` of a result with its image, for a sheet also its outputs."""
    drawn: dict[Part, bytes] = {}
    try:
        with timer.stage("draw"):
            if "overlay" in parts:
                drawn["overlay"] = encode_jpeg(draw_overlay(get_image(result.prepared), result.record))
            if "thumbnail" in parts:
                photograph = show_photograph(get_image(result.prepared), cast(Answered, result.record))
                drawn["thumbnail"] = make_thumbnail(photograph, result.record)
            if sheets is not None:
                drawn["sheet"] = sheets.build(result).encode()
    except ImageError as error:
        return drawn, Problem(code="drawing_failed", message=str(error))
    except MemoryError:
        reason = "drawing it needs more memory than there is; lower --workers"
        return drawn, Problem(code="drawing_failed", message=reason)
    return drawn, None


def _draw_in_process(
    sheets: bytes, result: Result, parts: Sequence[Part], *, timed: bool
) -> tuple[Drawings, tuple[StageTime, ...]]:
    timer = StageTimer() if timed else NO_OP_TIMER
    return _draw(_load_builder(sheets), result, parts, timer), timer.read().stages


@functools.lru_cache(maxsize=1)
def _load_builder(pickled: bytes) -> SheetBuilder | None:
    builder: SheetBuilder | None = pickle.loads(pickled)  # noqa: S301 (the caller wrote it)
    return builder


def prepare_folders(out: Path, *, overlays: bool, sheets: bool, first: int) -> None:
    """Make the folders of drawings, and remove drawings from the image `first` on; raise UsageError if that fails."""
    try:
        for folder, needed in ((OVERLAYS, overlays), (SHEETS, sheets)):
            if needed:
                (out / folder).mkdir(exist_ok=True)
                remove_image_files(out, folder, first)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from None


class Drawer:
    """Draws and writes the overlay and the sheet of each result, from any thread; a context manager."""

    def __init__(
        self,
        out: Path,
        report: ReportOptions | None,
        sheets: SheetBuilder | None,
        inference: InferenceOptions,
        processes: WorkerPool | None,
        *,
        thumbnails: Thumbnails,
        timer: StageTimer,
    ) -> None:
        """Start nothing yet.

        Args:
            out: the run directory, with the folders of `prepare_folders`.
            report, sheets: draw overlays, and evidence sheets; None: none.
            inference: `workers`, `decode_timeout` and `one_at_a_time` apply to drawing too.
            processes: where to draw; None: in threads of this process.
            thumbnails: receives those of the report's first images, while the overlays are in memory.
            timer: receives the times of drawing and writing, under the role `drawers`.
        """
        self._out, self._has_report, self._sheets, self._processes = out, report is not None, sheets, processes
        # read once per process
        self._pickled = b"" if processes is None else pickle.dumps(sheets)
        self._timeout = inference.decode_timeout
        self._ahead = 0 if inference.one_at_a_time else 2 * inference.workers
        self._thumbnails, self._timer = thumbnails, timer
        self._threads = ThreadPoolExecutor(
            inference.workers, "draw", initializer=timer.register_thread, initargs=("drawers",)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        # an interrupted run drops what has not begun
        self._threads.shutdown(wait=True, cancel_futures=True)

    def draw_all(self, results: Iterable[Result], first: int) -> Iterator[Record]:
        """Yield the records with the names of their drawings, in order.

        Args:
            results: with images, and for sheets with outputs.
            first: number of the first image in the run.

        Raises:
            StoppedEarly: the disk is full or gone, or no process can be started.
        """
        futures = (self._threads.submit(self.draw, index, result) for index, result in enumerate(results, first))
        return prefetch(futures, self._ahead, lambda: self._timer.waiting("drawing"))

    def draw(self, index: int, result: Result) -> Record:
        """Return a record that names the drawings that were written, or says why one is missing."""
        record = result.record
        if isinstance(record, Failed):
            return record
        parts: list[Part] = ["overlay"] if self._has_report else []
        if self._has_report and index < EMBED_LIMIT:
            parts.append("thumbnail")
        drawn, error = self._draw(result, parts)
        if "thumbnail" in drawn:
            self._thumbnails[index] = Thumbnail(drawn["thumbnail"])
        overlay = overlay_name(index, record.image) if "overlay" in drawn else None
        sheet = sheet_name(index, record.image) if "sheet" in drawn else None
        with self._timer.stage("write"):
            if overlay is not None:
                write_image_file(self._out, overlay, drawn["overlay"])
            if sheet is not None:
                write_image_file(self._out, sheet, drawn["sheet"])
        return structs.replace(record, overlay=overlay, sheet=sheet, drawing_error=error)

    def _draw(self, result: Result, parts: Sequence[Part]) -> Drawings:
        """Return the drawings of a result; raise StoppedEarly if no process can be started.

        A process that crashes gets the result a second time: the system may have killed it for lack of memory.
        """
        if self._processes is None:
            return _draw(self._sheets, result, parts, self._timer)
        for attempt in range(2):
            try:
                drawings, stages = self._processes.call(
                    _draw_in_process, self._pickled, result, parts, timed=self._timer.enabled
                )
            except WorkerCrashed as crash:
                if attempt:
                    return {}, Problem(code="drawing_crashed", message=f"the process that drew it {crash}")
            except WorkerTimeout:
                limit = f"{self._timeout:g} s; raise --decode-timeout"
                return {}, Problem(code="drawing_timeout", message=f"it was not drawn within {limit}")
            else:
                for stage in stages:
                    self._timer.add(stage.stage, stage.wall, stage.cpu, stage.calls)
                return drawings
        raise AssertionError("unreachable")


def report_title(inputs: Sequence[str], model: Path) -> str:
    """Return the title of a report: the first input and the model, without the folders that they lie in."""
    more = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
    name = "standard input" if inputs[0] == "-" else Path(redact(inputs[0])).resolve().name
    return f"{name}{more}, explained by {model.name}"


def report_facts(path: Path, metadata: Metadata, runtime: str, command: str) -> tuple[Fact, ...]:
    """Return the (name, value) pairs at the head of the report."""
    head = [("Model", f"{path.name}: {metadata.backbone}, {metadata.num_classes} classes, {metadata.describe_head()}")]
    # shards open the model elsewhere
    if runtime:
        head.append(("Runtime", runtime))
    if metadata.file_sha256.strip("0"):
        head.append(("Model digest", metadata.file_sha256))
    if metadata.unverified:
        head.append(("Not verified", metadata.unverified))
    return (*head, ("Command", command))


def list_evidence(path: Path, metadata: Metadata) -> tuple[Fact, ...]:
    """Return (name, value) pairs on the model's evidence as measured; none if it is not single cells."""
    if metadata.evidence != "exact":
        return ()
    checkpoint = metadata.find_checkpoint(path)
    rows = list_evaluation(metadata.evaluation, path, metadata.receptive_field, export_of=checkpoint)
    return tuple((name, one_line(value)) for name, value in rows)


@contextmanager
def open_report(
    out: Path, options: ReportOptions, images: int, folder: str = "", thumbnails: Mapping[int, bytes] | None = None,
) -> Iterator[Callable[[Record], None]]:  # fmt: skip
    """Yield a function that adds the next record to report.html, which is written when the block ends.

    Args:
        out: the run directory.
        options: the content.
        images: number of records that will be added.
        folder: prefix to leave out of images' names, see `find_common_folder`.
        thumbnails: those in memory; the others are made from the overlays.

    Raises:
        StoppedEarly: the disk is full; the records are safe.
    """
    numbers = itertools.count()
    image_mode = choose_image_mode(images)
    with _writing_report(), ReportWriter(out / REPORT, options, image_mode=image_mode, folder=folder) as writer:

        def add(record: Record) -> None:
            overlay = (thumbnails or {}).get(next(numbers))
            name = record.overlay if isinstance(record, Answered) else None
            if overlay is None and name is not None and writer.embeds_images:
                # one that was removed is missing on its card
                with suppress(OSError):
                    overlay = (out / name).read_bytes()
            with _writing_report():
                writer.add(record, overlay)

        yield add


@contextmanager
def _writing_report() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoppedEarly(
            f"the report cannot be written ({error.strerror or error}); make room and run again"
        ) from None
