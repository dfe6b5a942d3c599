"""`opal-deploy diff`: what changed between two models, or two results?"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.cli.options import default_batch, default_workers
from opal_deploy.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

    from opal_deploy.auditing.model_diff import Changes
    from opal_deploy.records.record import Record

_LISTED = 10


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A model; or results.jsonl, or its folder.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The same, of what is to be compared with it.")],
    images: Annotated[
        list[str] | None, typer.Argument(help="Images for a model to answer, as for `infer`.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a page with the worst changes, both drawings side by side.", show_default=False),
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
        Path | None, typer.Option(help="Crop first, for models: CSV or COCO JSON, as for `infer`.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Of the runtime on the CPU; default: all cores.")] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse pictures with more pixels than this.")] = 100_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report to stdout as JSON.")] = False,
) -> None:
    """Say what changed between two models, or two results of the same images, the worst first.

    Predictions, cells and contributions are compared, image by image: what one reads before replacing a model.
    """
    from opal_deploy.artifact.files import atomic_write
    from opal_deploy.auditing.model_diff import KINDS, compare_records
    from opal_deploy.auditing.model_diff_page import page
    from opal_deploy.auditing.results_reader import RecordIndex, all_records, is_results, results_file
    from opal_deploy.cli.infer import setup

    if fail_on is not None and fail_on not in (*KINDS[:-1], "any"):
        raise UsageError(f"--fail-on {fail_on!r}: expected {', '.join(KINDS[:-1])} or any")
    setup.raise_pillows_limit(max_pixels)
    sides: list[Path] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opal-deploy-diff-")))
        for number, side in enumerate((before, after)):
            if is_results(side) or side.is_dir():
                sides.append(results_file(side))
                continue
            if not images:
                raise UsageError(f"{side}: a model answers images; give them after A and B")
            sides.append(folder / f"{number}.jsonl")
            _answer(side, images, sides[-1], boxes, device, threads, max_pixels)
        index = RecordIndex(sides[1])
        stack.callback(index.close)
        changes = compare_records(all_records(sides[0]), index, tolerance, worst)
        if not changes.paired:
            raise UsageError(f"{before}, {after}: no image is in both; expected results of the same images")
        if out is not None:
            text = page(changes, (str(before), str(after)), _pictures(images or [], changes, root, max_pixels))
            with atomic_write(out) as temporary:
                temporary.write_text(text, encoding="utf-8")
    _tell(changes, out)
    if as_json:
        print_json({"before": str(before), "after": str(after), "tolerance": tolerance, **changes.to_dict()})
    if fail_on is not None and changes.has(fail_on):
        raise VerificationError(f"{after}: {changes.changed} images changed, some by {fail_on} or worse")


def _answer(
    model: Path, images: list[str], out: Path, boxes: Path | None, device: str, threads: int | None, max_pixels: int
) -> None:
    """Write a model's records to a file."""
    from opal_deploy.artifact.files import compute_sha256
    from opal_deploy.inference.executor import InferenceOptions, predict_stream
    from opal_deploy.inference.run.results import RecordWriter
    from opal_deploy.inference.run.run import requests
    from opal_deploy.inference.sources import discovery
    from opal_deploy.inference.sources.annotations import read_boxes
    from opal_deploy.inference.sources.items import Skipped
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
    asked = requests(discovery.discover(images, Skipped(), sys.stdin), crops)
    with RecordWriter(out) as writer, progress(model.name) as advance:
        for result in predict_stream(asked, sessions, options, say=print_message):
            writer.write(result.record)
            advance(writer.count)


def _pictures(images: list[str], changes: Changes, root: Path, max_pixels: int) -> Callable[[Record], Image | None]:
    """Finds the photographs of the worst changes: among `images`, else by their records' names."""
    from opal_deploy.auditing.verify_records import wanted_items
    from opal_deploy.inference.explanation import load_record_image
    from opal_deploy.inference.sources import discovery
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.records.names import unescape_name

    names = frozenset(change.image for change, _, _ in changes.worst)
    items = wanted_items(discovery.discover(images, Skipped(), sys.stdin), names) if images and names else {}

    def find(record: Record) -> Image | None:
        name = record["image"] or ""
        source = items[name].source if name in items else root / unescape_name(name)
        return load_record_image(record, source, max_pixels)

    return find


def _tell(changes: Changes, out: Path | None) -> None:
    print_message(f"{changes.changed} of {changes.paired} images changed")
    for kind, count in changes.kinds.items():
        if count and kind != "same":
            print_message(f"  {kind}: {count}")
    if changes.slots:
        print_message(f"  {changes.moved} of {changes.slots} slots compared moved")
        print_message(f"  largest change of a contribution: {changes.largest_contribution:.2g}")
    for count, what in (
        (changes.only_before, "images are only in A"),
        (changes.only_after, "images are only in B"),
        (changes.unpaired, "records have no name or one that occurred before, and were not compared"),
        (changes.file_changed, "image files are others in B, so their changes say nothing of the models"),
    ):
        if count:
            print_message(f"{count} {what}")
    for change, _, _ in changes.worst[:_LISTED]:
        print_message(one_line(f"{change.kind}: {change.image}: {change}"))
    if out is not None:
        print_message(f"Report: {out}")
