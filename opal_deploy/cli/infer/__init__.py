"""`opal-deploy infer`: classify images and explain the predictions."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.cli.options import CPU_BATCH, GPU_BATCH, default_batch, default_workers
from opal_deploy.errors import ExitCode, StoppedEarly, UsageError
from opal_deploy.options import RuntimeName

if TYPE_CHECKING:
    from opal_deploy.inference.run.backend import Backend, RunOptions
    from opal_deploy.inference.run.directory import RunDirectory
    from opal_deploy.inference.run.interrupt import Interrupt
    from opal_deploy.inference.run.summary import Summary
    from opal_deploy.inference.sources.counting import ImageCounter
    from opal_deploy.inference.types import Request


def infer(
    images: Annotated[
        list[str],
        typer.Argument(
            help="Folders (with subfolders), files, globs, tar and zip archives, or URLs of them (s3://, gs://, az://, "
            "https://); - or @FILE for a list; with --every videos too."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            help="An exported model, or a checkpoint; default: the one here, or of the newest run in runs/.",
            show_default=False,
        ),
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
            help="Folder of `opal-deploy atlas`: sheets show patches of other images of the class; implies --sheets.",
            show_default=False,
        ),
    ] = None,
    heatmap: Annotated[
        bool,
        typer.Option(
            "--heatmap", help="Sheets show attention maps; an export needs --outputs attention; implies --sheets."
        ),
    ] = False,
    receptive_field: Annotated[
        bool,
        typer.Option("--receptive-field", help="Overlays and sheets show what each cell mostly depends on, dashed."),
    ] = False,
    slot_names: Annotated[
        Path | None,
        typer.Option(
            help="TOML file that names slots, for records and sheets; default: names.toml in --atlas.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Output folder, or its URL in a bucket; default: the matching interrupted run's, else explanations, "
            "explanations-2, ..."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run's files in --out.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Go on where a run of the same model, images and options ended."),
    ] = True,
    boxes: Annotated[
        Path | None,
        typer.Option(
            help="Crop first: CSV (image,x0,y0,x1,y1 or image,x,y,width,height), COCO JSON, CUB's bounding_boxes.txt, "
            "or Stanford Dogs' Annotation folder."
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="True labels: `folders` (the folders' names), or a CSV file (image,label)."),
    ] = None,
    min_margin: Annotated[
        str | None,
        typer.Option(
            help="Mark answers with a smaller margin as abstained. Or an error rate such as 5%: the margin that "
            "keeps it, by the validation images that the model remembers.",
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
    runtime: Annotated[
        RuntimeName,
        typer.Option(help="auto: by the model's file; compiled: a checkpoint by torch.compile."),
    ] = "auto",
    batch: Annotated[
        int | None, typer.Option(min=1, help=f"Images a forward pass; default: {CPU_BATCH}, on a GPU {GPU_BATCH}.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the runtime; default: all cores.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Images decoded and drawn at a time; default: all cores but two."),
    ] = None,
    decode: Annotated[
        str,
        typer.Option(help="default: within 1 count of Pillow's pixels; exact: Pillow's; fast: scaled JPEG."),
    ] = "default",
    decode_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that decoding one image may take; 0: no limit; needs --isolate.")
    ] = 30.0,
    isolate: Annotated[
        bool,
        typer.Option("--isolate/--no-isolate", help="Decode in processes: a decoder that crashes costs one image."),
    ] = True,
    cuda_graphs: Annotated[
        bool,
        typer.Option("--cuda-graphs", help="Engines, --runtime compiled: replay a batch size as a CUDA graph."),
    ] = False,
    expect_sha256: Annotated[
        str | None, typer.Option("--expect-sha256", help="Expected SHA-256 of the model's file; any other is refused.")
    ] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse images with more pixels than this.")] = 100_000_000,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Predict with actors of a Ray cluster: auto (on one of its nodes), HOST:PORT, or local to start one.",
            show_default=False,
        ),
    ] = None,
    ray_cpus: Annotated[
        int | None, typer.Option(min=1, help="CPU actors of so many cores; default: one actor a GPU.")
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            help="Take frames of videos: 10 is every tenth, 0.5s one each half second by their time stamps.",
            show_default=False,
        ),
    ] = None,
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
    """Classify images and say why: one record an image, in results.jsonl.

    With --explain also an overlay an image (the forward pass's own evidence for its prediction) and report.html; with
    --sheets an evidence sheet an image, as `opal-deploy explain` draws it.
    A run that ended early, however it ended, goes on when the same command is given again.
    """
    from opal_deploy.cli.infer import cluster, output, setup
    from opal_deploy.cli.infer import sheets as sheet_setup
    from opal_deploy.inference.decoding.budget import raise_pillow_limit
    from opal_deploy.inference.run.backend import LocalBackend, RunOptions
    from opal_deploy.inference.run.directory import IMAGES
    from opal_deploy.inference.run.drawing import ReportOptions
    from opal_deploy.inference.run.interrupt import handle_signals
    from opal_deploy.inference.run.summary import Accuracy, ErrorLimit, Summary
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.inference.sources.video import VideoOptions
    from opal_deploy.inference.types import InferenceOptions
    from opal_deploy.preprocess.decode import parse_decoding
    from opal_deploy.preprocess.video import Sampling
    from opal_deploy.records.tables import check_formats
    from opal_deploy.storage.urls import redact

    with handle_signals(print_message) as interrupt, ExitStack() as stack:
        # everything that the call may have wrong is checked before the model is loaded
        video = VideoOptions(
            Sampling.parse(every) if every else None, max_pixels=max_pixels, isolate=isolate,
            timeout=decode_timeout or None,
        )  # fmt: skip
        if ray is not None and video.sampling is not None:
            raise UsageError("--every with --ray: videos are decoded on one machine; leave out --ray")
        inputs = setup.Inputs.read(images, shard=shard, recursive=recursive, boxes=boxes, labels=labels, video=video)
        decoding = parse_decoding(decode)
        tables = check_formats(formats or [])
        embedding = setup.parse_report_images(report_images)
        error_limit = None if max_errors is None else ErrorLimit.parse(max_errors)
        out_path, remote = output.parse_out(out)
        if overwrite and out is None:
            raise UsageError("--overwrite without --out: give the folder whose run is to be replaced")
        cluster.check_options(ray, ray_cpus, device)
        raise_pillow_limit(max_pixels)

        plan = None if ray is None else stack.enter_context(cluster.open_cluster(ray, ray_cpus))
        if plan is not None:
            loaded = cluster.describe_model(model, plan, expect_sha256, runtime)
        else:
            loaded = setup.load_model(
                model, device=device, threads=threads, cuda_graphs=cuda_graphs, expect_sha256=expect_sha256,
                runtime=runtime,
            )  # fmt: skip
        metadata = loaded.metadata
        setup.check_model(
            loaded.path,
            metadata,
            explain=explain,
            margin=min_margin is not None,
            boxed=inputs.boxes is not None,
            top=top,
        )
        margin = None if min_margin is None else setup.parse_min_margin(min_margin, loaded.path, metadata)
        drawing = sheet_setup.prepare_sheets(
            loaded,
            sheets=sheets,
            heatmap=heatmap,
            atlas=atlas,
            slot_names=slot_names,
            min_margin=margin,
            receptive_field=receptive_field,
            explain=explain,
        )
        sessions = drawing.sessions
        inference = InferenceOptions(
            batch=batch or (default_batch(sessions[0]) if plan is None else cluster.default_batch(plan)),
            fixed_batch=True,
            workers=workers or default_workers(None if plan is None else plan.cpus),
            max_pixels=max_pixels, decode=decoding,
            isolate=isolate, decode_timeout=decode_timeout or None,
            top=top, min_margin=margin, model_sha256=loaded.fingerprint["sha256"], slot_names=drawing.slot_names,
        )  # fmt: skip
        backend: Backend
        if plan is None:
            backend = LocalBackend(sessions)
        else:
            backend = cluster.open_backend(plan, loaded, runtime, threads, cuda_graphs, heatmap, atlas)
        # the options that decide the records and drawings: a run with other ones is another run
        config = {
            IMAGES: list(map(redact, images)),
            "model": loaded.fingerprint,
            "explain": explain,
            "boxes": None if inputs.boxes is None else inputs.boxes.identity,
            "labels": None if inputs.labels is None else inputs.labels.identity,
            "min_margin": margin,
            "top": top,
            "max_pixels": max_pixels,
            "decode": decode,
            "shard": "{}/{}".format(*inputs.shard) if inputs.shard[1] > 1 else None,
            "recursive": recursive,
            **drawing.config,
            # its arithmetic is another, and on a GPU half precision
            **({"runtime": runtime} if runtime == "compiled" else {}),
            **({"every": str(video.sampling)} if video.sampling is not None else {}),
        }
        skipped = Skipped()
        # a call without a single image fails here, before anything is written
        requests = inputs.build_requests(skipped)
        if overwrite:
            # what cannot be compiled removes no earlier run
            setup.prepare_batch_size(loaded.path, sessions, inference.batch, runtime)
        with output.open_run_dir(out_path, remote, config, resume=resume, overwrite=overwrite) as directory:
            if directory.state == "finished":
                document = output.print_finished(directory, tables)
            else:
                # before anything is written; a finished run needs none of it
                if not overwrite:
                    setup.prepare_batch_size(loaded.path, sessions, inference.batch, runtime)
                described = backend.description
                print_message(f"Explaining with {loaded.path} in {described}, batches of {inference.batch}")
                facts = tuple(output.report_facts(loaded.path, metadata, described))
                evidence = output.describe_evidence(loaded.path, metadata) if explain else ""
                if evidence:
                    print_message(f"Evidence: {evidence}")
                    # the report may be handed on, and its reader has the model elsewhere
                    evidence = output.describe_evidence(Path(loaded.path.name), metadata)
                options = RunOptions(
                    directory.root, inference,
                    report=ReportOptions(
                        facts, report_limit, embedding, evidence, metadata.effective_field, receptive_field
                    ) if explain else None,
                    sheets=drawing.sheets, formats=tables, max_errors=error_limit,
                    resume=directory.state == "unfinished", remote=remote, print_message=print_message,
                )  # fmt: skip
                summary = Summary()
                if inputs.labels is not None:
                    summary.accuracy = Accuracy(frozenset(metadata.class_names))
                document = _run(
                    requests, backend, options, summary, directory, interrupt, inputs.counter(),
                    lambda: output.summary_context(loaded.fingerprint, backend),
                )  # fmt: skip
                output.print_summary(summary, skipped, options, backend)
        if as_json:
            print_json(document)
        if document["errors"]:
            raise typer.Exit(ExitCode.SOME_IMAGES_FAILED)


def _run(
    requests: Iterator[Request],
    backend: Backend,
    options: RunOptions,
    summary: Summary,
    directory: RunDirectory,
    interrupt: Interrupt,
    counter: ImageCounter,
    context: Callable[[], dict[str, object]],
) -> dict[str, object]:
    """Run, and write summary.json, however the run ends; return its document.

    Raises:
        typer.Exit: the run was interrupted.
        StoppedEarly: the run ended early; the message says how it is resumed.
    """
    from opal_deploy.cli.infer import output
    from opal_deploy.inference.run.run import run

    directory.write_config()
    # records are freed without the garbage collector, which would look through each batch of them several times
    gc.set_threshold(20_000)
    try:
        # the number is shown before the first batch is done
        with progress("images") as advance, counter.notify(lambda total: advance(summary.total, total)):

            def report_progress(done: Summary) -> None:
                advance(done.total, counter.total, note=output.progress_note(done, backend))
                directory.save_progress()

            run(
                requests, backend, options, summary=summary, interrupt=interrupt,
                report_progress=report_progress,
            )  # fmt: skip
        if not interrupt.stopped:
            return directory.write_summary(summary, context())
    except KeyboardInterrupt:
        pass
    except StoppedEarly as error:
        output.write_early_summary(directory, summary, context(), str(error))
        raise StoppedEarly(f"{error}; {output.resume_hint()}") from None
    output.write_early_summary(directory, summary, context(), "interrupted")
    print_message(f"Interrupted: {summary.total} records are in {directory.location}; {output.resume_hint()}")
    raise typer.Exit(ExitCode.INTERRUPTED)
