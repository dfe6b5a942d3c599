"""`opal-deploy diff`: what changed between two models, or two results of the same images."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.cli.options import default_batch, default_workers
from opal_deploy.errors import ImageError, UsageError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

    from opal_deploy.auditing.model_diff import DiffReport
    from opal_deploy.records.record import Record

# changes printed
_LISTED = 10


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A model; or results.jsonl, or its folder.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The same, of what is to be compared with it.")],
    images: Annotated[
        list[str] | None, typer.Argument(help="Images for a model to answer, as for `infer`.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a page with the worst changes, both overlays side by side.", show_default=False),
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="Changed images to show on the page and in --json.")] = 20,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Contributions and margins that differ by no more count as equal.")
    ] = 1e-3,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="Exit with 4 if any image changed so much or worse: error, class, cell, contribution, margin, any.",
            show_default=False,
        ),
    ] = None,
    root: Annotated[Path, typer.Option(help="The folder that the results' images' names are relative to.")] = Path(),
    boxes: Annotated[
        Path | None, typer.Option(help="Crop first, for models: a file as for `infer`.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the runtime; default: all cores.")] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse images with more pixels than this.")] = 100_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report to stdout as JSON.")] = False,
) -> None:
    """Say what changed between two models, or two results of the same images, the worst first.

    Predictions, cells and contributions are compared, image by image: what one reads before replacing a model.
    """
    from opal_deploy.artifact.files import atomic_write
    from opal_deploy.auditing.model_diff import KINDS, compare_results
    from opal_deploy.auditing.model_diff_page import render_page
    from opal_deploy.auditing.results_reader import RecordIndex, find_results, is_results
    from opal_deploy.inference.decoding.budget import raise_pillow_limit

    if fail_on is not None and fail_on not in (*KINDS[:-1], "any"):
        raise UsageError(f"--fail-on {fail_on!r}: expected {', '.join(KINDS[:-1])} or any")
    raise_pillow_limit(max_pixels)
    sides: list[Path] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opal-deploy-diff-")))
        for number, side in enumerate((before, after)):
            if is_results(side) or side.is_dir():
                sides.append(find_results(side))
                continue
            if not images:
                raise UsageError(f"{side}: a model answers images; give them after A and B")
            sides.append(folder / f"{number}.jsonl")
            _write_records(side, images, sides[-1], boxes, device, threads, max_pixels)
        indices = [RecordIndex(side) for side in sides]
        for index in indices:
            stack.callback(index.close)
        report = compare_results(indices[0], indices[1], tolerance, worst)
        if not report.paired:
            raise UsageError(f"{before}, {after}: no image is in both; expected results of the same images")
        if out is not None:
            load_image = _image_loader(images or [], report, root, max_pixels)
            text = render_page(report, (str(before), str(after)), load_image)
            with atomic_write(out) as temporary:
                temporary.write_text(text, encoding="utf-8")
    _print_report(report, out)
    if as_json:
        print_json({"before": str(before), "after": str(after), "tolerance": tolerance, **report.to_dict()})
    if fail_on is not None and report.has(fail_on):
        raise VerificationError(f"{after}: {report.changed} images changed, some by {fail_on} or worse")


def _write_records(
    model: Path, images: list[str], out: Path, boxes: Path | None, device: str, threads: int | None, max_pixels: int
) -> None:
    """Write a model's records of the images to `out`."""
    from opal_deploy.artifact.files import compute_sha256
    from opal_deploy.inference.executor import predict_stream
    from opal_deploy.inference.run.results import RecordWriter
    from opal_deploy.inference.sources import discovery
    from opal_deploy.inference.sources.annotations import read_boxes
    from opal_deploy.inference.sources.counting import ImageCounter
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.inference.types import InferenceOptions, build_requests
    from opal_deploy.runtime.select import open_sessions

    if "-" in images:
        raise UsageError("-: standard input can be read only once; give a list as @FILE")
    discovery.check_inputs(images)
    crops = read_boxes(boxes) if boxes else None
    sessions = open_sessions(model, device=device, threads=threads)
    options = InferenceOptions(
        batch=default_batch(sessions[0]),
        fixed_batch=True,
        workers=default_workers(),
        max_pixels=max_pixels,
        isolate=True,
        model_sha256=compute_sha256(model),
    )
    requests = build_requests(discovery.discover(images, Skipped(), sys.stdin), crops)
    with RecordWriter(out) as writer, progress(model.name) as advance, ImageCounter(images) as counter:
        for result in predict_stream(requests, sessions, options, print_message=print_message):
            writer.write(result.record)
            advance(writer.count, counter.total)


def _image_loader(
    images: list[str], report: DiffReport, root: Path, max_pixels: int
) -> Callable[[Record], Image | None]:
    """Return a function that loads the images of the worst changes: from `images`, else by their records' names."""
    from opal_deploy.auditing.record_sources import RecordSources, locate
    from opal_deploy.inference.explanation import load_record_image
    from opal_deploy.inference.sources import discovery
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.records.names import unescape_name

    shown = [record for _, old, new in report.worst for record in (old, new)]
    sources = RecordSources(discovery.discover(images, Skipped(), sys.stdin) if images and shown else (), shown)

    def load(record: Record) -> Image | None:
        item = sources.find(record)
        try:
            source = locate(unescape_name(record["image"] or ""), root) if item is None else item.source
        except ImageError:
            return None
        return load_record_image(record, source, max_pixels)

    return load


def _print_report(report: DiffReport, out: Path | None) -> None:
    print_message(f"{report.changed} of {report.paired} images changed")
    for kind, count in report.kinds.items():
        if count and kind != "same":
            print_message(f"  {kind}: {count}")
    if report.slots:
        print_message(f"  {report.moved} of {report.slots} slots compared moved")
        print_message(f"  largest change of a contribution: {report.largest_contribution:.2g}")
    for count, text in (
        (report.only_before, "images are only in A"),
        (report.only_after, "images are only in B"),
        (report.unpaired, "records have no name, and were not compared"),
        (report.file_changed, "image files are others in B, so their changes say nothing about the models"),
    ):
        if count:
            print_message(f"{count} {text}")
    for change, _, _ in report.worst[:_LISTED]:
        print_message(one_line(f"{change.kind}: {change.image}: {change}"))
    if out is not None:
        print_message(f"Report: {out}")
