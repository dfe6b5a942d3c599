"""`opal-deploy infer`: explain pictures."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import emit_json, one_line, progress, say
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.pipeline.discover import Skipped
    from opal_deploy.pipeline.infer import Summary
    from opal_deploy.runtime.session import Session

SOME_IMAGES_FAILED = 3
_CPU_BATCH, _GPU_BATCH = 8, 64


def infer(
    images: Annotated[
        list[str], typer.Argument(help="Folders (with their subfolders), files, globs, or - for a list on stdin.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="An exported model, or a checkpoint; default: the one in this directory.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Draw an overlay per image and write report.html.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; default: explanations, explanations-2, ...")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run's files in --out.")] = False,
    boxes: Annotated[
        Path | None, typer.Option(help="Crop first: CSV (image,x0,y0,x1,y1 or image,x,y,width,height) or COCO JSON.")
    ] = None,
    min_margin: Annotated[float | None, typer.Option(help="Mark answers with a smaller margin as abstained.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Classes listed in each record.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, or GPU numbers such as 0,1.")] = "auto",
    batch: Annotated[
        int | None, typer.Option(min=1, help=f"Images a forward pass; default: {_CPU_BATCH}, on a GPU {_GPU_BATCH}.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the runtime on the CPU; default: all cores.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads that decode and draw; default: as many as cores, at most 8.")
    ] = None,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Engines: record the kernels once a batch size, launch them as one.")
    ] = False,
    expect_sha256: Annotated[
        str | None, typer.Option("--expect-sha256", help="Of the model's file, as given to you by a trusted way.")
    ] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse pictures with more pixels than this.")] = 100_000_000,
    shard: Annotated[str | None, typer.Option(help="i/n: explain every n-th image, beginning with the i-th.")] = None,
    report_limit: Annotated[int, typer.Option(min=0, help="Images shown in report.html.")] = 200,
    recursive: Annotated[
        bool, typer.Option("--recursive/--no-recursive", help="Look into the subfolders of folders.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Write the summary to stdout as JSON.")] = False,
) -> None:
    """Classify pictures and say why: one record an image, in results.jsonl.

    With --explain also an overlay an image (the forward pass's own evidence for its answer) and report.html.
    """
    from opal_deploy.artifact.files import check_pinned
    from opal_deploy.pipeline import discover as finding
    from opal_deploy.pipeline.boxes import read_boxes
    from opal_deploy.pipeline.engine import EngineOptions
    from opal_deploy.pipeline.infer import Job, run
    from opal_deploy.pipeline.output import REPORT, RESULTS, new_folder
    from opal_deploy.runtime.onnx_session import available_cpus
    from opal_deploy.runtime.select import open_sessions

    finding.check_inputs(images)
    index, count = parse_shard(shard) if shard else (1, 1)
    crops = read_boxes(boxes) if boxes else None
    path = model or _found(device)
    _raise_pillows_limit(max_pixels)
    if expect_sha256 is not None:
        check_pinned(path, expect_sha256)
    sessions = open_sessions(path, device=device, threads=threads, cuda_graphs=cuda_graphs)
    metadata = sessions[0].metadata
    _check_model(path, metadata, explain=explain, margin=min_margin is not None, boxed=crops is not None)
    skipped = finding.Skipped()
    found = finding.discover(images, skipped, sys.stdin, recursive=recursive)
    # a call that names no image at all fails here, before anything is written
    items = finding.shard(itertools.chain([next(found)], found), index, count)
    folder = new_folder(out, overwrite=overwrite)
    options = EngineOptions(
        batch=batch or (_CPU_BATCH if "on cpu" in sessions[0].description.lower() else _GPU_BATCH),
        workers=workers or min(8, available_cpus()),
        max_pixels=max_pixels,
        top=top,
        min_margin=min_margin,
        keep_pictures=explain,
    )
    job = Job(folder, explain, crops, options, tuple(_facts(path, metadata, sessions)), report_limit)
    say(f"Explaining with {path} in {'; '.join(s.description for s in sessions)}, batches of {options.batch}")
    with progress("images") as advance:
        summary = run(items, sessions, job, lambda done: advance(done.total, note=_rate(done)))
    _tell(summary, skipped, folder / RESULTS, folder / REPORT if explain else None)
    if as_json:
        emit_json(_document(summary, folder))
    if summary.errors:
        raise typer.Exit(SOME_IMAGES_FAILED)


def parse_shard(text: str) -> tuple[int, int]:
    """`i/n`, i from 1 to n.

    Raises:
        UsageError: something else.
    """
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise UsageError(f"shard {text!r}: expected i/n with i from 1 to n, such as 1/4")
    return int(parts[0]), int(parts[1])


def _raise_pillows_limit(max_pixels: int) -> None:
    from PIL import Image

    # Pillow refuses twice its own limit before ours is asked
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)


def _found(device: str) -> Path:
    from opal_deploy.runtime.onnx_session import cuda_is_usable
    from opal_deploy.runtime.select import find_model
    from opal_deploy.runtime.tensorrt.fitness import misfit_here

    if device == "cpu":
        choice = find_model(Path(), gpu=False, engine_misfit=lambda _: "an engine runs on a GPU, and --device is cpu")
    else:
        # of several devices the first stands for all: they are of one kind, or the session of another refuses
        number = device.split(",")[0].rpartition(":")[2]
        index = int(number) if number.isdigit() else 0
        choice = find_model(Path(), gpu=cuda_is_usable(), engine_misfit=lambda s: misfit_here(s, index))
    say(f"Model: {choice.path} ({choice.reason})")
    return choice.path


def _check_model(path: Path, metadata: Metadata, *, explain: bool, margin: bool, boxed: bool) -> None:
    if metadata.evidence == "none" and explain:
        raise UsageError(
            f"{path}: it has no anchors, so a dense layer mixes all channels and no evidence can be shown; "
            "leave out --explain, or train the OPAL head"
        )
    if metadata.evidence == "none" and margin:
        raise UsageError(f"{path}: it has no cosines, so no margin; leave out --min-margin")
    if metadata.evidence == "map" and explain:
        say("This model averages over cells: no single cell is its evidence, so overlays show no boxes")
    if metadata.unverified:
        say(f"NOT VERIFIED: this model was {metadata.unverified}: nobody compared its answers with the reference's")
    if metadata.crop == "boxes" and not boxed:
        say("This model was trained on pictures cropped to boxes; without --boxes expect it to lose accuracy")


def _facts(path: Path, metadata: Metadata, sessions: list[Session]) -> list[tuple[str, str]]:
    facts = [
        ("Model", f"{path.name}: {metadata.backbone}, {metadata.num_classes} classes, "
         f"{metadata.prototypes_per_class} slots a class, distance {metadata.distance}"),
        ("Runtime", "; ".join(session.description for session in sessions)),
    ]  # fmt: skip
    if metadata.file_sha256.strip("0"):
        facts.append(("Model digest", metadata.file_sha256))
    if metadata.source.get("sha256"):
        facts.append(("Checkpoint", f"{metadata.source.get('file')}, sha256 {metadata.source['sha256']}"))
    if metadata.unverified:
        facts.append(("Not verified", metadata.unverified))
    if metadata.verification.get("reference"):
        facts.append(
            ("Verified", f"against {metadata.verification['reference']} on {metadata.verification['pictures']}")
        )
    command = shlex.join([Path(sys.argv[0]).name, *map(os.fspath, sys.argv[1:])])
    return [*facts, ("Command", command)]


def _rate(summary: Summary) -> str:
    failed = summary.statuses["error"]
    return f"{failed} failed" if failed else ""


def _tell(summary: Summary, skipped: Skipped, results: Path, report: Path | None) -> None:
    rate = f", {summary.total / summary.seconds:.1f} images/s" if summary.seconds else ""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items()))
    say(f"{summary.total} images in {summary.seconds:.1f} s{rate}: {counts or 'nothing to do'}")
    for code, count in summary.errors.most_common():
        say(f"  {code}: {count}")
    if skipped.count:
        examples = one_line(", ".join(skipped.examples))
        say(f"Passed over {skipped.count} files that are hidden or no images by name ({examples})")
    say(f"Records: {results}")
    if report is not None:
        say(f"Report: {report}")


def _document(summary: Summary, folder: Path) -> dict[str, object]:
    return {
        "out": str(folder),
        "images": summary.total,
        "statuses": dict(summary.statuses),
        "errors": dict(summary.errors),
        "seconds": summary.seconds,
        "seconds_to_first_record": summary.to_first,
    }
