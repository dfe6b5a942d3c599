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
from opal_deploy.artifact.files import atomic_write, check_output
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.logs import as_progress, one_line
from opal_deploy.options import StrPath, keywords
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.prepare import InferenceOptions, Result, raise_pillow_limit
from opal_deploy.predict.setup import load_model, log_cautions
from opal_deploy.records.decision import Decision
from opal_deploy.records.names import read_slot_names
from opal_deploy.records.record import Failed
from opal_deploy.records.run_files import overlay_name
from opal_deploy.run.drawing import Sheet, build_sheet, check_exact_evidence
from opal_deploy.run.setup import Inputs
from opal_deploy.sources import discovery
from opal_deploy.sources.annotations import annotate, read_boxes, read_labels
from opal_deploy.sources.archives import is_archive_name
from opal_deploy.sources.image import Skipped

FORMATS = (".png", ".svg")


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
    output, single = _parse_output(images, options)
    crops = read_boxes(Path(options.boxes), options.box_confidence) if options.boxes else None
    labels = read_labels(options.labels) if options.labels else None
    sessions, build = _open(model, options, boxed=crops is not None)
    inference = InferenceOptions(batch=1, workers=1, max_pixels=options.max_pixels, keep_images=True, keep_outputs=True)
    inputs = annotate(discovery.discover(images, Skipped(), sys.stdin), crops, labels)
    documents: list[dict[str, Any]] = []
    failed = 0
    progress = as_progress(options.progress)
    total = Inputs(images, boxes=crops).count()
    for index, result in enumerate(predict_stream(inputs, sessions, inference)):
        name = result.prepared.input.name
        try:
            path = output if single else output / Path(overlay_name(index, name)).with_suffix(".png").name
            check_output("--out", path, FORMATS, inputs=[name], overwrite=options.overwrite)
            documents.append({**_write_sheet(result, build, path, options), "sheet": path.as_posix()})
        except ImageError as error:
            if single:
                raise
            failed += 1
            options.log(one_line(f"{name}: {error.code}: {error}"))
        progress(index + 1, total, "")
    if not single:
        options.log(f"{len(documents)} sheets in {output}{f', {failed} failed' if failed else ''}")
    return WrittenSheets(documents, failed, single)


def _open(model: StrPath | None, options: ExplainOptions, *, boxed: bool) -> tuple[Any, Callable[[Result], Sheet]]:
    """Open the model, and return its session with the function that builds its sheets."""
    raise_pillow_limit(options.max_pixels)
    loaded = load_model(
        None if model is None else Path(model), device=options.device, threads=options.threads,
        expect_sha256=options.expect_sha256, runtime=options.runtime, log=options.log,
    )  # fmt: skip
    path, metadata, names = loaded.path, loaded.metadata, None
    decision = Decision.of(options).resolve(path, metadata, options.log)
    if options.slot_names is not None:
        names = read_slot_names(Path(options.slot_names), metadata.class_names, metadata.class_map)
    check_exact_evidence(metadata, str(path))
    log_cautions(metadata, boxed=boxed, crop_hint="--boxes FILE", log=options.log)
    return loaded.sessions[:1], partial(build_sheet, metadata=metadata, names=names, decision=decision)


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


def _parse_output(images: Sequence[str], options: ExplainOptions) -> tuple[Path, bool]:
    """Return the only image's file and True, or the folder of several and False; UsageError if it does not fit."""
    single = len(images) == 1 and Path(images[0]).is_file() and not is_archive_name(images[0])
    if options.out is None and not single:
        return Path("sheets"), False
    out = Path(options.out or f"{Path(images[0]).stem}.evidence.png")
    if not out.suffix or out.is_dir():
        return out, False
    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"--out {out}: expected a .png or .svg file, or a folder")
    if not single:
        raise UsageError(f"--out {out}: is one file, but there may be several images; choose a folder")
    check_output("--out", out, FORMATS, inputs=images, overwrite=options.overwrite)
    return out, True
