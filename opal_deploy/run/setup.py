"""The check of a whole call of `infer`, before anything is written: inputs, model, thresholds, drawings, output."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import compute_sha256, read_json
from opal_deploy.errors import UsageError, require
from opal_deploy.logs import Log
from opal_deploy.options import StrPath, to_arguments
from opal_deploy.predict.prepare import InferenceOptions, raise_pillow_limit
from opal_deploy.predict.setup import LoadedModel, check_model, load_model
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.records.decision import Decision
from opal_deploy.records.names import read_slot_names, unescape_name
from opal_deploy.records.run_files import REPORT, RESULTS, SHARDS, SUMMARY
from opal_deploy.records.signatures import Signer
from opal_deploy.records.tables import TABLES, Format, check_formats, write_table
from opal_deploy.remote import check_output, is_url, redact, remove_folder, upload_folder
from opal_deploy.run.directory import IMAGES, InferenceRun, RunDirectory, read_records
from opal_deploy.run.drawing import check_exact_evidence, describe_report
from opal_deploy.run.options import InferOptions
from opal_deploy.run.summary import Summary
from opal_deploy.runtime.devices import default_batch, default_workers, split_devices
from opal_deploy.sources import discovery
from opal_deploy.sources.annotations import FOLDERS, Crops, FolderLabels, Labels, annotate, read_boxes, read_labels
from opal_deploy.sources.image import InputImage, Skipped, is_image_name
from opal_deploy.sources.video import NO_VIDEOS, Sampling, VideoOptions
from opal_deploy.visualization.report import ReportOptions


@dataclass(frozen=True)
class Inputs:
    """The images of a run.

    Attributes:
        images: folders, files, globs, archives, lists.
        recursive: include subfolders.
        boxes, labels: crops and labels by image; None: none.
        video: how videos are read, and which of their frames.
        part: the shard's positions in the list of images, in which a video counts as one; None: all.
        skipped: counts the other files that `find_images` met.
    """

    images: list[str]
    recursive: bool = True
    boxes: Crops | None = None
    labels: Labels | None = None
    video: VideoOptions = NO_VIDEOS
    part: range | None = None
    skipped: Skipped = field(default_factory=Skipped)

    @staticmethod
    def read(images: list[str], options: InferOptions) -> Inputs:
        """Check the inputs, and read the files of boxes and labels; raise UsageError if any cannot be used."""
        video = VideoOptions(
            None if options.every is None else Sampling.parse(str(options.every)),
            max_pixels=options.max_pixels, isolate=options.isolate, timeout=options.decode_timeout or None,
        )  # fmt: skip
        discovery.check_inputs(images, video.sampling)
        if video.sampling is not None:
            require("av", "video", "reading videos", pip_name="PyAV (av)")
        boxes = None if options.boxes is None else read_boxes(Path(options.boxes), options.box_confidence)
        if boxes is not None and boxes.note:
            options.log(boxes.note)
        labels = None if options.labels is None else read_labels(options.labels)
        return Inputs(images, options.recursive, boxes, labels, video)

    def find_images(self) -> Iterator[InputImage]:
        """Yield the images in order, with crops and labels; raise UsageError if there is none."""
        items = self._list_items(self.skipped)
        if self.part is None:
            images = discovery.expand(items, self.video)
        else:
            first = sum(map(self._count_records, itertools.islice(items, self.part.start)))
            items = itertools.islice(items, len(self.part))
            images = discovery.expand(items, self.video, first, is_part=True)
        # searched now, so that a call without images ends before anything is written
        head = list(itertools.islice(images, 1))
        images = itertools.chain(head, images)
        return images if self.boxes is None and self.labels is None else annotate(images, self.boxes, self.labels)

    def take_shard(self, shard: tuple[int, int], batch: int) -> Inputs:
        """Return the i-th of n contiguous shards of the list; all but the last are whole batches."""
        index, count = shard
        num_items = sum(1 for _ in self._list_items(Skipped()))
        length = -(-num_items // (count * batch)) * batch
        return replace(self, part=range((index - 1) * length, index * length))

    def count(self) -> int | None:
        """Return the number of records; None unless all inputs are folders and image files, without videos.

        Listing names takes some 10 µs per image.
        """
        if self.video.sampling is not None:
            return None
        if not all(os.path.isdir(text) or (os.path.isfile(text) and is_image_name(text)) for text in self.images):
            return None
        return sum(map(self._count_records, self._list_items(Skipped())))

    def _list_items(self, skipped: Skipped) -> Iterator[InputImage]:
        videos = self.video.sampling is not None
        return discovery.list_items(self.images, skipped, sys.stdin, recursive=self.recursive, videos=videos)

    def _count_records(self, item: InputImage) -> int:
        """Return the number of records of a listed image; a video counts as one."""
        if self.boxes is None or item.error is not None:
            return 1
        return self.boxes.count(unescape_name(item.name or ""))


@dataclass(frozen=True)
class RunOptions:
    """The files that a run writes, and when it ends.

    Attributes:
        out: the run directory.
        inference: how images are classified; `keep_images` where they are drawn.
        report: draw an overlay per image and write report.html; None: neither.
        formats: tables to write at the end.
        max_errors: end the run if more images failed; None: never.
        log: receives messages, from any thread.
    """

    out: Path
    inference: InferenceOptions
    report: ReportOptions | None = None
    formats: tuple[Format, ...] = ()
    max_errors: int | None = None
    log: Log = lambda _: None


@dataclass
class RunSetup:
    """A checked call, with everything that its run needs.

    Attributes:
        options, inputs: of the call.
        model: the model; without sessions where shards open it.
        run: the files that the run writes; the report without the engines of shards.
        signer: signs records; None: no record is signed.
        upload_to: the URL to which the run directory is uploaded when the run ends; None: nowhere.
        command: the call as others may read it.
        devices: those of the shards, see `plan_shards`; None: this process classifies all images.
        runtime: the engines and devices in one line.
        images: the images to classify, which shards find anew.
    """

    options: InferOptions
    inputs: Inputs
    model: LoadedModel
    run: RunOptions
    signer: Signer | None
    upload_to: str | None
    command: str
    devices: tuple[str, ...] | None
    runtime: str
    images: Iterator[InputImage]

    @property
    def config(self) -> dict[str, Any]:
        """The options that determine records and drawings; only a run with equal ones is resumed."""
        inputs, options = self.inputs, self.options
        names = None if options.slot_names is None else Path(options.slot_names)
        return {
            IMAGES: list(map(redact, inputs.images)),
            "model": self.model.fingerprint,
            "explain": options.explain,
            "boxes": None if inputs.boxes is None else inputs.boxes.identity,
            "labels": None if inputs.labels is None else inputs.labels.identity,
            **self.run.inference.decision.limits,
            "top": options.top,
            "max_pixels": options.max_pixels,
            "decode": options.decode,
            "shard": options.shard,
            "recursive": options.recursive,
            # only where it was given, so that other runs do not depend on it
            **({"slot_names": f"{names.name}, sha256 {compute_sha256(names)}"} if names is not None else {}),
            **({"every": str(inputs.video.sampling)} if inputs.video.sampling is not None else {}),
            **({"sign": self.signer.fingerprint} if self.signer is not None else {}),
        }

    def write_summary(self, directory: RunDirectory, summary: Summary, stopped: str | None = None) -> dict[str, Any]:
        """Sign run.json if asked to, and write summary.json; `stopped` is why the run ended early."""
        if self.signer is not None:
            directory.sign_config(summary, self.signer, complete=stopped is None)
        context = {"model": self.model.fingerprint, "runtime": self.runtime, "command": self.command}
        return directory.write_summary(summary, context, stopped)

    def upload(self, directory: RunDirectory) -> None:
        """Upload the run directory, if it is to be in a bucket; raise StoppedEarly if that fails."""
        if self.upload_to is not None:
            upload_folder(directory.root, self.upload_to)
            self.options.log(f"Uploaded to {redact(self.upload_to)}")

    def remove_shards(self) -> None:
        """Remove the folders of shards, whose records and drawings have been joined in the run directory."""
        shutil.rmtree(self.run.out / SHARDS, ignore_errors=True)
        if self.devices is not None and self.upload_to is not None:
            remove_folder(f"{self.upload_to.rstrip('/')}/{SHARDS}")

    def return_finished(self, directory: RunDirectory) -> InferenceRun:
        """Return a run that is complete already, and write any of its tables that are missing."""
        log, root = self.options.log, directory.root
        document = read_json(root / SUMMARY)
        log(
            f"{root}: this run is finished ({document['images']} images, ended {document['ended']}); --overwrite "
            "computes it again"
        )
        for kind in self.run.formats:
            if not (root / TABLES[kind]).exists():
                write_table(read_records(root / RESULTS), root, kind)
                log(f"Table: {root}/{TABLES[kind]}")
        self.upload(directory)
        return InferenceRun(root, document, (f"Summary: {root}/{SUMMARY}",))

    def describe_run(self, directory: RunDirectory, summary: Summary, document: dict[str, Any]) -> InferenceRun:
        """Return a run that has just been completed, with what the command prints about it."""
        lines = [*summary.describe(), *self.inputs.skipped.describe()]
        files = [("Records", RESULTS), *(("Table", TABLES[kind]) for kind in self.run.formats)]
        files += [("Report", REPORT)] * self.options.explain
        lines += [f"{title}: {directory.root}/{name}" for title, name in files]
        return InferenceRun(directory.root, document, tuple(lines))


def prepare_run(images: Sequence[str], model: StrPath | LoadedModel | None, options: InferOptions) -> RunSetup:
    """Check the call, open the model and find the first image; nothing is written."""
    # everything is checked before the model is loaded
    inputs = Inputs.read(list(images), options)
    formats = check_formats(options.formats)
    out, upload_to = _parse_out(options)
    signer = None if options.sign is None else Signer(options.sign, options.log)
    devices = plan_shards(images, options, model_is_open=isinstance(model, LoadedModel))
    raise_pillow_limit(options.max_pixels)

    loaded = (
        model
        if isinstance(model, LoadedModel)
        else load_model(
            None if model is None else Path(model), device=options.device, threads=options.threads,
            cuda_graphs=options.cuda_graphs, expect_sha256=options.expect_sha256, runtime=options.runtime,
            log=options.log, elsewhere=devices is not None,
        )
    )  # fmt: skip
    path, metadata = loaded.path, loaded.metadata
    if options.labels is None and FolderLabels.fit(inputs.images, metadata.class_names):
        options.log("The folders are named as classes: counting right answers, as with --labels folders")
        options, inputs = replace(options, labels=FOLDERS), replace(inputs, labels=FolderLabels())
    check_model(
        path, metadata, explain=options.explain, boxed=inputs.boxes is not None, top=options.top, log=options.log
    )
    decision = Decision.of(options).resolve(path, metadata, options.log)
    slot_names = None
    if options.slot_names is not None:
        check_exact_evidence(metadata, str(path))
        slot_names = read_slot_names(Path(options.slot_names), metadata.class_names, metadata.class_map)
    sessions = loaded.sessions
    inference = InferenceOptions(
        batch=options.batch or (default_batch(sessions[0]) if sessions else 1), fixed_batch=True,
        workers=options.workers or default_workers(), max_pixels=options.max_pixels, top=options.top,
        decode=Decoding(options.decode), isolate=options.isolate, decode_timeout=options.decode_timeout or None,
        decision=decision, model_sha256=loaded.fingerprint["sha256"], slot_names=slot_names,
        keep_images=options.explain,
    )  # fmt: skip
    if options.shard is not None:
        inputs = inputs.take_shard(parse_shard(options.shard), inference.batch)
    arguments = [*images, *(["--model", str(path)] if model else []), *to_arguments(options)]
    # others may read it, and need not know the folders
    names = [Path(argument).name if os.path.isabs(argument) else argument for argument in arguments]
    command = redact(shlex.join(["opal-deploy", "infer", *names]))
    runtime = "; ".join(session.description for session in sessions)
    report = None
    if options.explain:
        report = describe_report(path, metadata, inputs.images, runtime=runtime, command=command)
    run = RunOptions(out, inference, report, formats, options.max_errors, options.log)
    # raises if there is no image
    all_images = inputs.find_images()
    return RunSetup(options, inputs, loaded, run, signer, upload_to, command, devices, runtime, all_images)


def plan_shards(images: Sequence[str], options: InferOptions, *, model_is_open: bool) -> tuple[str, ...] | None:
    """Return the device of each shard of a call; None if this process classifies all images.

    There is none yet on a cluster, whose size is not known.

    Raises:
        UsageError: options contradict each other, or an open model.
    """
    if options.ray is None and options.ray_cpus is not None:
        raise UsageError("--ray-cpus without --ray: it is the size of a shard there; give --ray auto or HOST:PORT")
    if options.ray is not None and options.device != "auto":
        raise UsageError(
            f"--device {options.device} with --ray: every shard has one GPU, or with --ray-cpus N that many CPUs; "
            "leave out --device"
        )
    asked = options.ray is not None or (options.shards or 1) > 1
    if options.shard is not None and (asked or options.sign is not None):
        raise UsageError(
            f"--shard {options.shard} runs one shard; --shards, --ray and --sign belong to the call that joins them"
        )
    if discovery.STDIN in images and (asked or options.shard is not None):
        raise UsageError("-: every shard reads the list; write it to a file, and give @FILE")
    if asked and model_is_open:
        raise UsageError("model: other processes open it; give the path of the model file")
    if options.ray is not None:
        return ()
    devices = split_devices(options.device)
    alone = options.shard is not None or model_is_open or discovery.STDIN in images
    count = 1 if alone else options.shards or len(devices)
    if count == 1:
        return None
    # GPUs in turn: of more processes than GPUs, several share one
    return tuple(devices[number % len(devices)] for number in range(count))


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `i/n`, i from 1 to n; raise UsageError for anything else."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise UsageError(f"shard {text!r}: expected i/n with i from 1 to n, such as 1/4")
    return int(parts[0]), int(parts[1])


def shard_dir(out: Path, index: int, count: int) -> Path:
    """Return the run directory of a shard of the run in `out`."""
    return out / SHARDS / f"{index}-of-{count}"


def part_url(url: str, folder: Path) -> str:
    """Return the URL of a shard in the run at `url`."""
    return f"{url.rstrip('/')}/{SHARDS}/{folder.name}"


def _parse_out(options: InferOptions) -> tuple[Path, str | None]:
    """Return the run directory and the URL to upload it to, which can be written to."""
    out = os.fspath(options.out)
    upload_to = out if is_url(out) else None
    if upload_to is not None:
        # uploaded from a folder of the same name
        out = check_output(out).name
    path = Path(out)
    if options.shard is None:
        return path, upload_to
    path = shard_dir(path, *parse_shard(options.shard))
    return path, upload_to and part_url(upload_to, path)
