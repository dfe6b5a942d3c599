"""The work of `opal-deploy diff`: what changed between two models, or two results of the same images.

Light to import.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.logs import Log, ProgressChoice, WarningLine, log_line
from opal_deploy.options import CropFile, Device, MaxPixels, Option, Options, StrPath, Threads, keywords

if TYPE_CHECKING:
    from PIL.Image import Image

    from opal_deploy.auditing.model_diff import DiffReport
    from opal_deploy.records.record import Record


@dataclass(frozen=True, kw_only=True)
class DiffOptions(Options):
    """The options of `diff` and `opal-deploy diff`."""

    out: Annotated[
        StrPath | None, Option("Write an HTML page of the largest changes, with both overlays.", cli=Path)
    ] = None
    overwrite: Annotated[bool, Option("Replace --out if it exists.")] = False
    worst: Annotated[int, Option("Largest changes on the page and in --json.", min=0)] = 20
    tolerance: Annotated[
        float, Option("Largest difference of contributions and margins that counts as equal.", min=0)
    ] = 1e-3
    fail_on: Annotated[
        Literal["error", "class", "cell", "contribution", "margin", "any"] | None,
        Option("Exit with 4 if any image has this kind of change or a larger one."),
    ] = None
    root: Annotated[StrPath, Option("Folder that the results' image names are relative to.", cli=Path)] = Path()
    boxes: CropFile = None
    device: Device = "auto"
    threads: Threads = None
    max_pixels: MaxPixels = 100_000_000
    images: Sequence[StrPath] = ()
    log: Log = log_line
    progress: ProgressChoice | None = None


@keywords(DiffOptions)
def diff(before: StrPath, after: StrPath, options: DiffOptions) -> DiffReport:
    """Compare two models on images, or two results of the same images, and write the page if `out` is given.

    Args:
        before: a model; or results.jsonl, or its folder.
        after: the same, to compare with it.

    Raises:
        UsageError: a file cannot be read, or no image is in both results.
    """
    from opal_deploy.artifact.files import atomic_write, check_output
    from opal_deploy.auditing.model_diff import compare_results, render_page
    from opal_deploy.auditing.results import RecordIndex, find_results, is_results
    from opal_deploy.predict.prepare import raise_pillow_limit

    if options.out is not None:
        inputs = (before, after, options.boxes, *options.images)
        check_output("--out", Path(options.out), [".html"], inputs=inputs, overwrite=options.overwrite)
    raise_pillow_limit(options.max_pixels)
    sides: list[Path] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opal-deploy-diff-")))
        for number, side in enumerate(map(Path, (before, after))):
            if is_results(side) or side.is_dir():
                sides.append(find_results(side))
                continue
            if not options.images:
                raise UsageError(f"{side}: comparing models needs images; list them after A and B")
            if number and not is_results(Path(before)):
                _log_edits(Path(before), side, options.log)
            sides.append(_write_records(side, folder / str(number), options))
        indices = [RecordIndex(side) for side in sides]
        for index in indices:
            stack.callback(index.close)
        report = compare_results(indices[0], indices[1], options.tolerance, options.worst)
        if not report.paired:
            raise UsageError(f"{before}, {after}: no image is in both; expected results of the same images")
        if options.out is not None:
            text = render_page(report, (str(before), str(after)), _image_loader(report, options))
            with atomic_write(Path(options.out), replace=options.overwrite) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return report


def _log_edits(before: Path, after: Path, log: Log) -> None:
    """Log what `edit` did to the second model since it was the first, if it did."""
    from opal_deploy.artifact.measurements import describe_edits
    from opal_deploy.runtime.select import read_model_metadata

    old, new = (list(read_model_metadata(model).edits) for model in (before, after))
    if len(new) > len(old) and new[: len(old)] == old:
        for line in describe_edits(new[len(old) :]):
            log(f"{after} was edited: {line}")


def _write_records(model: Path, out: Path, options: DiffOptions) -> Path:
    """Write a model's records of the images into the folder `out`, and return their file."""
    from opal_deploy.api.infer import run_inference
    from opal_deploy.records.run_files import RESULTS

    if "-" in options.images:
        raise UsageError("-: standard input can be read only once; give a list as @FILE")
    run_inference(
        options.images, model, out=out, boxes=options.boxes, device=options.device, threads=options.threads,
        max_pixels=options.max_pixels, progress=options.progress,
        log=lambda line: options.log(line) if isinstance(line, WarningLine) else None,
    )  # fmt: skip
    return out / RESULTS


def _image_loader(report: DiffReport, options: DiffOptions) -> Callable[[Record], Image | None]:
    """Return a function that loads the images of the largest changes: from the images given, else by name."""
    from opal_deploy.api.explanation import load_record_image
    from opal_deploy.auditing.images import RecordSources, locate
    from opal_deploy.records.names import unescape_name
    from opal_deploy.sources import discovery
    from opal_deploy.sources.items import Skipped

    shown = [record for _, old, new in report.worst for record in (old, new)]
    images = [os.fspath(image) for image in options.images]
    sources = RecordSources(discovery.discover(images, Skipped(), sys.stdin) if images and shown else (), shown)

    def load(record: Record) -> Image | None:
        item = sources.find(record)
        try:
            source = locate(unescape_name(record.image or ""), Path(options.root)) if item is None else item.source
            return load_record_image(record, source, options.max_pixels)
        except ImageError:
            return None

    return load
