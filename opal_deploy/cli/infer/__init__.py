"""`opal-deploy infer`: explain pictures."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.cli.options import CPU_BATCH, GPU_BATCH, default_batch, default_workers
from opal_deploy.errors import StoppedEarly, UsageError

if TYPE_CHECKING:
    from opal_deploy.inference.run.directory import RunDirectory
    from opal_deploy.inference.run.interrupt import Interrupt
    from opal_deploy.inference.run.run import RunOptions
    from opal_deploy.inference.run.summary import Summary
    from opal_deploy.inference.sources.items import Item
    from opal_deploy.runtime.session import Session

SOME_IMAGES_FAILED = 3
INTERRUPTED = 130


def infer(
    images: Annotated[
        list[str],
        typer.Argument(
            help="Folders (with their subfolders), files, globs, tar and zip archives, or - for a list on stdin."
        ),
    ],
    model: Annotated[
        Path | None, typer.Option(help="An exported model, or a checkpoint; default: the one in this directory.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Draw an overlay per image and write report.html.")
    ] = False,
    sheets: Annotated[
        bool, typer.Option("--sheets", help="Draw an evidence sheet per image, with the runner-up beside the answer.")
    ] = False,
    atlas: Annotated[
        Path | None,
        typer.Option(
            help="Of `opal-deploy atlas`: sheets show patches of other images of the class; implies --sheets.",
            show_default=False,
        ),
    ] = None,
    heatmap: Annotated[
        bool,
        typer.Option(
            "--heatmap", help="Sheets show attention maps; an export needs --outputs attention; implies --sheets."
        ),
    ] = False,
    slot_names: Annotated[
        Path | None,
        typer.Option(
            help="TOML file that names slots, for records and sheets; default: names.toml in --atlas.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to; default: this run's, if it was interrupted, else explanations, -2, ..."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run's files in --out.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Go on where a run of the same model, images and options ended."),
    ] = True,
    boxes: Annotated[
        Path | None, typer.Option(help="Crop first: CSV (image,x0,y0,x1,y1 or image,x,y,width,height) or COCO JSON.")
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="What images really show: `folders` (their folders' names), or CSV (image,label)."),
    ] = None,
    min_margin: Annotated[
        str | None,
        typer.Option(
            help="Mark answers with a smaller margin as abstained. Or an error rate such as 5%: the margin that "
            "keeps it, by the validation pictures that the model remembers.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Classes listed in each record.")] = 5,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="parquet or csv, made of results.jsonl at the end; may be given twice."),
    ] = None,
    max_errors: Annotated[
        str | None, typer.Option(help="Stop once more images failed: a number, or P% (from 100 images on).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, or GPU numbers such as 0,1.")] = "auto",
    batch: Annotated[
        int | None, typer.Option(min=1, help=f"Images a forward pass; default: {CPU_BATCH}, on a GPU {GPU_BATCH}.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the runtime on the CPU; default: all cores.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Images decoded and drawn at a time; default: as many as cores, at most 8."),
    ] = None,
    decode: Annotated[
        str,
        typer.Option(
            help="default: within 1 count of Pillow's pixels; exact: Pillow's; fast: scaled JPEG; gpu: JPEG on the GPU."
        ),
    ] = "default",
    decode_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that decoding one image may take; 0: no limit; needs --isolate.")
    ] = 30.0,
    isolate: Annotated[
        bool,
        typer.Option("--isolate/--no-isolate", help="Decode in processes: a decoder that crashes costs one image."),
    ] = True,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Engines: record the kernels once a batch size, launch them as one.")
    ] = False,
    expect_sha256: Annotated[
        str | None, typer.Option("--expect-sha256", help="Of the model's file, as given to you by a trusted way.")
    ] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse pictures with more pixels than this.")] = 100_000_000,
    shard: Annotated[str | None, typer.Option(help="i/n: explain every n-th image, beginning with the i-th.")] = None,
    report_limit: Annotated[int, typer.Option(min=0, help="Images shown in report.html.")] = 10_000,
    report_images: Annotated[
        str | None,
        typer.Option(help="embed (one file), files (overlays/ beside it); default: embed up to 200 images."),
    ] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive/--no-recursive", help="Look into the subfolders of folders.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Write summary.json's document to stdout too.")] = False,
) -> None:
    """Classify pictures and say why: one record an image, in results.jsonl.

    With --explain also an overlay an image (the forward pass's own evidence for its answer) and report.html; with
    --sheets an evidence sheet an image, as `opal-deploy explain` draws it.
    A run that ended early, however it ended, goes on when the same command is given again.
    """
    from opal_deploy.artifact.files import check_sha256
    from opal_deploy.cli.infer import output, setup
    from opal_deploy.cli.infer.setup import settle
    from opal_deploy.inference.executor import InferenceOptions
    from opal_deploy.inference.run.directory import IMAGES, acquire_run_dir
    from opal_deploy.inference.run.interrupt import signals
    from opal_deploy.inference.run.run import RunOptions
    from opal_deploy.inference.run.summary import ErrorLimit
    from opal_deploy.inference.sources import discovery
    from opal_deploy.inference.sources.annotations import read_boxes, read_labels
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.preprocess.decode import Decoding, parse_decoding
    from opal_deploy.preprocess.gpu import GpuDecoder, open_gpu_decoders
    from opal_deploy.records.tables import check_formats
    from opal_deploy.runtime.devices import gpu_names
    from opal_deploy.runtime.select import open_sessions

    with signals(print_message) as interrupt:
        discovery.check_inputs(images)
        index, count = parse_shard(shard) if shard else (1, 1)
        path_of_pixels = parse_decoding(decode)
        tables = check_formats(formats or [])
        pictures = setup.check_pictures(report_images)
        limit = None if max_errors is None else ErrorLimit.parse(max_errors)
        if overwrite and out is None:
            raise UsageError("--overwrite without --out: give the folder whose run is to be replaced")
        crops = read_boxes(boxes) if boxes else None
        truths = read_labels(labels) if labels else None
        path = model or setup.found_model(device)
        setup.raise_pillows_limit(max_pixels)
        if expect_sha256 is not None:
            check_sha256(path, expect_sha256)
        sessions = open_sessions(path, device=device, threads=threads, cuda_graphs=cuda_graphs)
        readers = workers or default_workers()
        gpus: tuple[GpuDecoder, ...] = ()
        if path_of_pixels is Decoding.gpu:
            gpus = open_gpu_decoders(gpu_names(device), readers, "leave --decode out to decode on the CPU")
        metadata = sessions[0].metadata
        setup.check_model(path, metadata, explain=explain, margin=min_margin is not None, boxed=crops is not None)
        least = None if min_margin is None else setup.least_margin(min_margin, path, metadata)
        identity_of_model = setup.model_identity(path)
        wanted = settle(
            path, sessions, identity_of_model,
            sheets=sheets, heatmap=heatmap, atlas=atlas, slot_names=slot_names, min_margin=least,
        )  # fmt: skip
        sessions = wanted.sessions
        identity = {
            IMAGES: images,
            "model": identity_of_model,
            "explain": explain,
            "boxes": setup.file_identity(boxes),
            "labels": None if truths is None else truths.identity,
            "min_margin": least,
            "top": top,
            "max_pixels": max_pixels,
            "decode": decode,
            "shard": f"{index}/{count}" if count > 1 else None,
            "recursive": recursive,
            **wanted.identity,
        }
        skipped = Skipped()
        found = discovery.discover(images, skipped, sys.stdin, recursive=recursive)
        # a call that names no image at all fails here, before anything is written
        items = discovery.shard(itertools.chain([next(found)], found), index, count)
        options = InferenceOptions(
            batch=batch or default_batch(sessions[0]),
            fixed_batch=True,
            workers=readers,
            max_pixels=max_pixels,
            top=top,
            min_margin=least,
            keep_pictures=explain or wanted.sheets is not None,
            decode=path_of_pixels,
            gpus=gpus,
            decode_timeout=decode_timeout or None,
            isolate=isolate,
            model_sha256=identity_of_model["sha256"],
            keep_outputs=wanted.sheets is not None,
        )
        with acquire_run_dir(out, identity, resume=resume, overwrite=overwrite) as folder:
            if folder.state == "finished":
                document = output.tell_finished(folder, tables)
            else:
                print_message(f"Explaining with {path} in {output.runtime(sessions)}, batches of {options.batch}")
                job = RunOptions(
                    folder.root,
                    explain,
                    crops,
                    options,
                    tuple(output.facts(path, metadata, sessions)),
                    report_limit,
                    truths,
                    limit,
                    tables,
                    folder.state == "unfinished",
                    print_message,
                    pictures,
                    wanted.sheets,
                    wanted.names,
                )
                about = output.about(identity, sessions)
                document, summary = _run(items, sessions, job, folder, interrupt, about)
                output.tell(summary, skipped, folder.root, job)
        if as_json:
            print_json(document)
        if document["errors"]:
            raise typer.Exit(SOME_IMAGES_FAILED)


def _run(
    items: Iterator[Item],
    sessions: list[Session],
    job: RunOptions,
    folder: RunDirectory,
    interrupt: Interrupt,
    about: dict[str, object],
) -> tuple[dict[str, object], Summary]:
    """Run, and write down what came of it, however it ends.

    Raises:
        typer.Exit: it was interrupted. StoppedEarly: the run was; both say how it is resumed.
    """
    from opal_deploy.cli.infer import output
    from opal_deploy.inference.run.run import run
    from opal_deploy.inference.run.summary import Summary

    summary = Summary()
    folder.begin()
    stopped: str | None = None
    try:
        with progress("images") as advance:
            report = lambda done: advance(done.total, note=output.note(done))  # noqa: E731
            run(items, sessions, job, report, None, summary, interrupt)
        if interrupt.stopped:
            stopped = "interrupted"
        else:
            return folder.end(summary, about), summary
    except KeyboardInterrupt:
        stopped = "interrupted"
    except StoppedEarly as error:
        stopped = str(error)
        output.note_end(folder, summary, about, stopped)
        raise StoppedEarly(f"{error}; {output.how_to_resume()}") from None
    output.note_end(folder, summary, about, stopped)
    print_message(f"Interrupted: {summary.total} records are in {folder.root}; {output.how_to_resume()}")
    raise typer.Exit(INTERRUPTED)


def parse_shard(text: str) -> tuple[int, int]:
    """`i/n`, i from 1 to n.

    Raises:
        UsageError: something else.
    """
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise UsageError(f"shard {text!r}: expected i/n with i from 1 to n, such as 1/4")
    return int(parts[0]), int(parts[1])
