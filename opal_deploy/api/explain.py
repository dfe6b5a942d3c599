"""Write evidence sheets, one per image: the work of `opal-deploy explain`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from opal_deploy.api.explanation import format_line
from opal_deploy.api.options import ExplainOptions
from opal_deploy.artifact.files import atomic_write, check_output, check_sha256
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.logs import as_progress, one_line
from opal_deploy.options import StrPath, keywords
from opal_deploy.predict import setup
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.prepare import InferenceOptions, Result, raise_pillow_limit
from opal_deploy.records.decision import Decision
from opal_deploy.records.names import read_slot_names
from opal_deploy.records.record import Failed
from opal_deploy.records.run_files import overlay_name
from opal_deploy.run.drawing import Sheet, build_sheet, check_exact_evidence
from opal_deploy.run.setup import Inputs
from opal_deploy.runtime.select import open_sessions
from opal_deploy.sources import discovery
from opal_deploy.sources.annotations import annotate, read_boxes, read_labels
from opal_deploy.sources.archives import is_archive_name
from opal_deploy.sources.image import Skipped

FORMATS = ("png", "svg")


@dataclass(frozen=True)
class WrittenSheets:
    """The outcome of `write_sheets`: each sheet's content for JSON, the failures, whether one image was given."""

    documents: list[dict[str, Any]]
    failed: int
    single: bool


@keywords(ExplainOptions)
def write_sheets(images: Sequence[str], model: StrPath | None, options: ExplainOptions) -> WrittenSheets:
    """Write an evidence sheet per image.

    Args:
        images: files, folders, globs, archives, or - for a list on stdin.
        model: an exported model or a checkpoint; None: found as by `opal-deploy infer`.

    Raises:
        UsageError: an input, the output or the model cannot be used. ImageError: the only image cannot be used.
    """
    images = list(images)
    discovery.check_inputs(images)
    output = _Output.parse(images, options)
    crops = read_boxes(Path(options.boxes), options.box_confidence) if options.boxes else None
    labels = read_labels(options.labels) if options.labels else None
    sessions, build = _open(model, options, boxed=crops is not None)
    inference = InferenceOptions(batch=1, workers=1, max_pixels=options.max_pixels, keep_images=True, keep_outputs=True)
    found = annotate(discovery.discover(images, Skipped(), sys.stdin), crops, labels)
    documents: list[dict[str, Any]] = []
    failed = 0
    progress = as_progress(options.progress)
    total = Inputs(images, boxes=crops).count()
    for index, result in enumerate(predict_stream(found, sessions, inference)):
        name = result.prepared.input.name
        try:
            path = output.name_sheet(index, name)
            output.check(path, name)
            documents.append({**_write_sheet(result, build, path, options), "sheet": path.as_posix()})
        except ImageError as error:
            if output.single:
                raise
            failed += 1
            options.log(one_line(f"{name}: {error.code}: {error}"))
        progress(index + 1, total, "")
    if not output.single:
        options.log(f"{len(documents)} sheets in {output.path}{f', {failed} failed' if failed else ''}")
    return WrittenSheets(documents, failed, output.single)


def _open(model: StrPath | None, options: ExplainOptions, *, boxed: bool) -> tuple[Any, Callable[[Result], Sheet]]:
    """Open the model, and return its session with the function that builds its sheets."""
    path = Path(model) if model is not None else setup.find_default_model(options.device, options.runtime, options.log)
    raise_pillow_limit(options.max_pixels)
    if options.expect_sha256 is not None:
        check_sha256(path, options.expect_sha256)
    sessions = open_sessions(path, device=options.device, threads=options.threads, runtime=options.runtime)[:1]
    metadata = sessions[0].metadata
    decision = Decision.of(options).resolve(path, metadata, options.log)
    names = None
    if options.slot_names is not None:
        names = read_slot_names(Path(options.slot_names), metadata.class_names, metadata.class_map)
    check_exact_evidence(metadata, str(path))
    setup.log_cautions(metadata, boxed=boxed, crop_hint="--boxes FILE", log=options.log)
    return sessions, partial(build_sheet, metadata=metadata, names=names, decision=decision)


def _write_sheet(
    result: Result, build: Callable[[Result], Sheet], path: Path, options: ExplainOptions
) -> dict[str, Any]:
    """Write one sheet and return its content for JSON; raise ImageError if the image cannot be used."""
    if isinstance(result.record, Failed):
        raise ImageError(result.record.error.code, result.record.error.message)
    sheet = build(result)
    with atomic_write(path) as temporary:
        temporary.write_bytes(sheet.drawing.encode(path.suffix.lower().lstrip(".")))
    options.log(one_line(f"{format_line(sheet.record)}: {path}"))
    return sheet.document


@dataclass(frozen=True)
class _Output:
    """Where sheets are written: one file, or a folder of PNG files."""

    path: Path
    single: bool
    overwrite: bool

    @staticmethod
    def parse(images: Sequence[str], options: ExplainOptions) -> _Output:
        """Return the output that the options ask for; raise UsageError if they contradict the images."""
        out = None if options.out is None else Path(options.out)
        is_file = Path(images[0]).is_file() and not is_archive_name(images[0])
        single = len(images) == 1 and is_file
        if out is not None and out.suffix and not out.is_dir():
            if out.suffix.lower().lstrip(".") not in FORMATS:
                raise UsageError(f"--out {out}: expected a .png or .svg file, or a folder")
            if not single:
                raise UsageError(f"--out {out}: is one file, but there may be several images; choose a folder")
        elif single and out is None:
            out = Path(f"{Path(images[0]).stem}.evidence.png")
        else:
            return _Output(out or Path("sheets"), single=False, overwrite=options.overwrite)
        output = _Output(out, single=True, overwrite=options.overwrite)
        output.check(out, images[0])
        return output

    def check(self, path: Path, image: str | None) -> None:
        """Raise UsageError unless an image's sheet may be written to this file."""
        check_output("--out", path, [f".{name}" for name in FORMATS], inputs=[image], overwrite=self.overwrite)

    def name_sheet(self, index: int, image_name: str | None) -> Path:
        """Return the file of one image's sheet."""
        return self.path if self.single else self.path / Path(overlay_name(index, image_name)).with_suffix(".png").name
