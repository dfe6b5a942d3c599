"""`opal-deploy atlas`: which patches of a training set each slot stands for, and which slots stand for nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.cli.options import (
    CPU_BATCH,
    GPU_BATCH,
    CropToBoxes,
    DatasetName,
    Partition,
    SkipMissing,
    default_batch,
    default_workers,
)
from opal_deploy.errors import ExitCode, ImageError, MissingExtra, UsageError

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.inference.types import InferenceOptions, Request
    from opal_deploy.runtime.session import Session
    from opal_deploy.visualization.atlas.collector import AtlasCollector, ImageCounts
    from opal_deploy.visualization.atlas.entries import Atlas
# findings of a kind printed on a terminal; all are in atlas.json
_LISTED_FINDINGS = 5


def atlas(
    data: Annotated[
        Path, typer.Argument(help="A data set as `train` takes it, or any folder or archive with a folder a class.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            help="An exported model, or a checkpoint; default: the one here, or of the newest run in runs/.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("atlas"),
    top: Annotated[int, typer.Option(min=1, max=100, help="Patches to keep of each slot.")] = 8,
    only_correct: Annotated[
        bool, typer.Option("--only-correct", help="Leave out images predicted as another class than their label's.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Take DATA as `infer` does: every image in it, labelled by its folder.")
    ] = False,
    dataset: DatasetName = None,
    partition: Partition = 1,
    skip_missing: SkipMissing = False,
    split: Annotated[Literal["test", "val", "train"], typer.Option(help="Which images of a data set.")] = "train",
    boxes: CropToBoxes = True,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many images of each label.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the atlas that is in --out.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, or GPU numbers such as 0,1.")] = "auto",
    batch: Annotated[
        int | None, typer.Option(min=1, help=f"Images a forward pass; default: {CPU_BATCH}, on a GPU {GPU_BATCH}.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the runtime; default: all cores.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Images decoded at a time; default: all cores but two.")
    ] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse images with more pixels than this.")] = 100_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Write counts and findings to stdout, as JSON.")] = False,
) -> None:
    """Go through a training set once, and keep for each class and slot the patches with the strongest evidence.

    `explain --atlas` shows them beside an image's own. Slots that do not do what a slot is for are listed.
    """
    from opal_deploy.artifact.files import lock_directory
    from opal_deploy.inference import setup
    from opal_deploy.inference.decoding.budget import raise_pillow_limit
    from opal_deploy.inference.sheets import check_exact_evidence
    from opal_deploy.inference.types import InferenceOptions
    from opal_deploy.runtime.select import open_sessions
    from opal_deploy.visualization.atlas.collector import AtlasCollector
    from opal_deploy.visualization.atlas.storage import build_atlas, check_out_dir, save_atlas

    if not data.exists():
        raise UsageError(f"{data}: no such file or folder")
    check_out_dir(out, overwrite=overwrite)
    path = model or setup.find_default_model(device, log=print_message)
    raise_pillow_limit(max_pixels)
    sessions = open_sessions(path, device=device, threads=threads)
    metadata = sessions[0].metadata
    check_exact_evidence(metadata, str(path))
    images = _read_images(data, _DataOptions(dataset, partition, skip_missing, split, boxes, plain=plain))
    _check_labels(images, metadata, data, only_correct=only_correct)
    if metadata.unverified:
        print_message(
            f"NOT VERIFIED: this model was {metadata.unverified}: nobody compared its answers with the reference's"
        )
    if metadata.crop == "boxes" and not images.cropped:
        print_message(
            "This model was trained on images cropped to boxes, and these are not cropped: expect lower cosines"
        )
    options = InferenceOptions(
        batch=batch or default_batch(sessions[0]),
        workers=workers or default_workers(),
        max_pixels=max_pixels,
    )
    print_message(one_line(f"Building an atlas of {images.description} with {path} in {sessions[0].description}"))
    with lock_directory(out):
        started = time.perf_counter()
        collector = AtlasCollector(metadata, top, only_correct=only_correct)
        with progress("images") as advance:
            collect_images(
                _limit_per_label(images.requests, limit),
                sessions,
                options,
                collector,
                lambda done: advance(done, images.total),
            )
        counts = collector.counts
        if not counts.used:
            reasons = _explain_unused(counts)
            raise UsageError(f"{data}: not one of {counts.images} images counts ({reasons}); nothing is written")
        about = {
            "description": images.description,
            "counted": "correct" if only_correct else "predicted",
            "images": counts.images, "answered": counts.used, "failed": counts.failed,
            "wrong": counts.wrong, "unlabelled": counts.unlabelled,
        }  # fmt: skip
        built = build_atlas(collector, out, setup.fingerprint_model(path), about)
        save_atlas(built)
        seconds = time.perf_counter() - started
    _report(built, counts, seconds)
    if as_json:
        print_json(_to_document(built, seconds))
    if counts.failed:
        raise typer.Exit(ExitCode.SOME_IMAGES_FAILED)


def collect_images(
    requests: Iterable[Request],
    sessions: Sequence[Session],
    options: InferenceOptions,
    collector: AtlasCollector,
    report: Callable[[int], None] = lambda _: None,
) -> None:
    """Run the model on every image and hand the records to the collector.

    Args:
        requests: the images, with their labels.
        sessions: sessions of one model with `exact` evidence.
        options: how the images are decoded and batched.
        collector: takes the records.
        report: called with the number of images done after each.

    Raises:
        StoppedEarly: a device was lost.
    """
    from opal_deploy.inference.decoding.prepare import content_sha256
    from opal_deploy.inference.executor import predict_stream
    from opal_deploy.records.record import error_record

    for result in predict_stream(requests, sessions, replace(options, keep_images=True)):
        record, prepared = result.record, result.prepared
        source, sha256 = prepared.request.source, prepared.image_sha256
        if sha256 is None and "error" not in record:
            try:
                sha256 = content_sha256(source)
            except ImageError as error:
                record = error_record(record["image"], error.code, str(error))
        label = prepared.request.label
        collector.add(record, label=label, sha256=sha256 or "", image=prepared.image)
        report(collector.counts.images)


@dataclass(frozen=True)
class _DataOptions:
    """How DATA is read."""

    dataset: str | None
    partition: int
    skip_missing: bool
    split: str
    boxes: bool
    plain: bool


@dataclass(frozen=True)
class _ImageSet:
    """The images of DATA.

    Attributes:
        requests: the images, with their labels.
        description: the set in a few words.
        total: the number of images, where it is known.
        labels: the labels that the images may have, where they are known.
        cropped: whether the images are cropped to boxes.
    """

    requests: Iterator[Request]
    description: str
    total: int | None
    labels: frozenset[str] | None
    cropped: bool


def _read_images(data: Path, options: _DataOptions) -> _ImageSet:
    """Read DATA as the trainer does; where it is no folder, or the trainer's packages are missing, as plain folders.

    Raises:
        UsageError: the data set cannot be used as it is.
    """
    from opal_deploy.datasets.registry import read_dataset

    if options.plain or (options.dataset is None and not data.is_dir()):
        return _read_plain(data)
    try:
        with progress("reading") as advance:
            dataset = read_dataset(
                data,
                options.dataset,
                partition=options.partition,
                skip_missing=options.skip_missing,
                progress=advance,
            )
    except MissingExtra as error:
        if options.dataset is not None:
            raise
        print_message(f"{error}; until then every image below {data} counts, labelled by its folder")
        return _read_plain(data)
    for line in dataset.warnings:
        print_message(one_line(f"warning: {line}"))
    samples = {"train": dataset.train, "val": dataset.val, "test": dataset.test}[options.split]
    if not samples:
        raise UsageError(f"{data}: it has no {options.split} split; choose another --split")

    def requests() -> Iterator[Request]:
        from opal_deploy.datasets.samples import display_path
        from opal_deploy.inference.types import Request
        from opal_deploy.records.names import escape_name

        for sample in samples:
            name = escape_name(display_path(sample.path, dataset.root))
            box = sample.box if options.boxes else None
            yield Request(name, sample.path, box, dataset.class_names[sample.label])

    cropped = options.boxes and dataset.crop == "boxes"
    crop_note = ", cropped to boxes" if cropped else ""
    description = f"{data.name or data} ({dataset.layout}, {options.split} split{crop_note})"
    return _ImageSet(requests(), description, len(samples), frozenset(dataset.class_names), cropped)


def _read_plain(data: Path) -> _ImageSet:
    from opal_deploy.inference.sources.annotations import FolderLabels
    from opal_deploy.inference.sources.discovery import discover
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.inference.types import Request
    from opal_deploy.records.names import escape_name

    labels = FolderLabels()

    def requests() -> Iterator[Request]:
        for item in discover([str(data)], Skipped()):
            label = labels.find(item.path.as_posix())
            yield Request(escape_name(item.relative), item.source, label=label, error=item.problem)

    return _ImageSet(requests(), f"{data.name or data} (a folder a class)", None, None, cropped=False)


def _check_labels(images: _ImageSet, metadata: Metadata, data: Path, *, only_correct: bool) -> None:
    if images.labels is None or images.labels == set(metadata.class_names):
        return
    unknown = sorted(images.labels - set(metadata.class_names))
    if only_correct and not images.labels & set(metadata.class_names):
        raise UsageError(
            f"{data}: none of its classes is one of the model's ({unknown[0]!r}); leave --only-correct out"
        )
    if unknown:
        print_message(
            one_line(f"warning: {len(unknown)} of its classes are none of the model's ({', '.join(unknown[:3])})")
        )


def _limit_per_label(requests: Iterator[Request], limit: int | None) -> Iterator[Request]:
    counts: Counter[str | None] = Counter()
    for request in requests:
        counts[request.label] += 1
        if limit is None or counts[request.label] <= limit:
            yield request


def _explain_unused(counts: ImageCounts) -> str:
    reasons = [(counts.failed, "failed"), (counts.wrong, "predicted wrong"), (counts.unlabelled, "without a label")]
    return ", ".join(f"{count:,} {reason}" for count, reason in reasons if count) or "there are none"


def _report(atlas: Atlas, counts: ImageCounts, seconds: float) -> None:
    unused = "" if counts.used == counts.images else f" ({_explain_unused(counts)})"
    print_message(
        f"{counts.images:,} images in {seconds:.1f} s{unused}: "
        f"{atlas.count_patches():,} patches of {len(atlas.entries):,} slots"
    )
    for line in counts.first_failures:
        print_message(one_line(f"  {line}"))
    from opal_deploy.visualization.atlas.entries import FINDING_KINDS

    total = sum(atlas.cells)
    most = max(range(len(atlas.cells)), key=lambda cell: (atlas.cells[cell], -cell))
    row, col = divmod(most, atlas.model["grid"][1])
    print_message(
        f"The cell chosen most often: {row}, {col}, {atlas.cells[most] / total:.1%} of all "
        f"(even: {1 / len(atlas.cells):.1%})"
    )
    if wrong := atlas.count_wrong():
        print_message(f"Predicted as another class than they show: {wrong:,} images; atlas.html marks their patches")
    if not atlas.findings:
        print_message("Findings: none")
    for kind, about in FINDING_KINDS.items():
        found = [finding for finding in atlas.findings if finding.kind == kind]
        if found:
            print_message(f"{'To do' if about.actionable else 'Noted'}: {len(found):,} {about.title}. {about.advice}")
        for finding in found[:_LISTED_FINDINGS]:
            print_message(one_line(f"  {finding.message}"))
        if len(found) > _LISTED_FINDINGS:
            print_message(f"  and {len(found) - _LISTED_FINDINGS:,} more in atlas.json")
    print_message(f"Atlas: {atlas.root}")


def _to_document(atlas: Atlas, seconds: float) -> dict[str, Any]:
    return {
        "atlas": atlas.root.as_posix(),
        "model": dict(atlas.model),
        "data": dict(atlas.data),
        "patches": atlas.count_patches(),
        "seconds": seconds,
        "findings": [vars(finding) for finding in atlas.findings],
    }
