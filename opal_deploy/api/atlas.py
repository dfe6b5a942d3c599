"""Build atlases from data sets: the work of `opal-deploy atlas`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.api.options import AtlasOptions
from opal_deploy.artifact.files import lock_directory
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import display_path
from opal_deploy.errors import ImageError, MissingExtra, UsageError, install_command, is_installed
from opal_deploy.logs import Progress, WarningLine, as_progress, no_progress, one_line
from opal_deploy.options import (
    StrPath,
    keywords,
)
from opal_deploy.predict import setup
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.prepare import InferenceOptions, content_sha256, raise_pillow_limit
from opal_deploy.records.build import error_record
from opal_deploy.records.names import escape_name
from opal_deploy.records.record import Answered
from opal_deploy.run.drawing import check_exact_evidence
from opal_deploy.runtime.devices import default_batch, default_workers
from opal_deploy.runtime.select import open_sessions
from opal_deploy.sources.annotations import FolderLabels, annotate
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.image import InputImage, Skipped
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.storage import build_atlas, check_out_dir, save_atlas

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.predict.prepare import InferenceOptions
    from opal_deploy.runtime.session import Session
    from opal_deploy.sources.image import InputImage
    from opal_deploy.visualization.atlas.collector import AtlasCollector, ImageCounts
    from opal_deploy.visualization.atlas.entries import Atlas


@dataclass(frozen=True)
class CreatedAtlas:
    """The outcome of `create_atlas`: the atlas, the images it was built from, and the seconds that it took."""

    atlas: Atlas
    counts: ImageCounts
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return counts and findings for JSON."""
        return {
            "atlas": self.atlas.root.as_posix(),
            "model": dict(self.atlas.model),
            "data": dict(self.atlas.data),
            "patches": self.atlas.count_patches(),
            "seconds": self.seconds,
            "findings": [vars(finding) for finding in self.atlas.findings],
        }


@keywords(AtlasOptions)
def create_atlas(data: StrPath, model: StrPath | None, options: AtlasOptions) -> CreatedAtlas:
    """Collect the patches with the strongest evidence for each class and slot, and write them as an atlas.

    Args:
        data: a data set as for `train`, or any folder or archive with a folder per class.
        model: an exported model or a checkpoint; None: found as by `opal-deploy infer`.

    Raises:
        UsageError: the data, the model or the output folder cannot be used. StoppedEarly: a device was lost.
    """

    data, out, log = Path(data), Path(options.out), options.log
    if not data.exists():
        raise UsageError(f"{data}: no such file or folder")
    check_out_dir(out, overwrite=options.overwrite)
    path = Path(model) if model is not None else setup.find_default_model(options.device, log=log)
    raise_pillow_limit(options.max_pixels)
    sessions = open_sessions(path, device=options.device, threads=options.threads)
    metadata = sessions[0].metadata
    check_exact_evidence(metadata, str(path))
    images = _read_images(data, options)
    _check_labels(images, metadata, data, options)
    setup.log_cautions(metadata, boxed=True, crop_hint="", log=log)
    if metadata.crop == "boxes" and not images.cropped:
        log("This model was trained on images cropped to boxes, and these are not cropped; expect lower cosines")
    inference = InferenceOptions(
        batch=options.batch or default_batch(sessions[0]),
        workers=options.workers or default_workers(),
        max_pixels=options.max_pixels,
    )
    log(one_line(f"Building an atlas of {images.description} with {path} in {sessions[0].description}"))
    with lock_directory(out):
        started = time.perf_counter()
        collector = AtlasCollector(metadata, options.top, only_correct=options.only_correct)
        requests = _limit_per_label(images.requests, options.limit)
        collect_images(requests, sessions, inference, collector, as_progress(options.progress), images.total)
        counts = collector.counts
        if not counts.used:
            raise UsageError(
                f"{data}: none of {counts.images} images can be used ({explain_unused(counts)}); nothing is written"
            )
        about = {
            "description": images.description,
            "counted": "correct" if options.only_correct else "predicted",
            "images": counts.images, "answered": counts.used, "failed": counts.failed,
            "wrong": counts.wrong, "unlabelled": counts.unlabelled,
        }  # fmt: skip
        atlas = build_atlas(collector, out, setup.fingerprint_model(path), about)
        save_atlas(atlas)
        return CreatedAtlas(atlas, counts, time.perf_counter() - started)


def collect_images(
    requests: Iterable[InputImage],
    sessions: Sequence[Session],
    options: InferenceOptions,
    collector: AtlasCollector,
    progress: Progress = no_progress,
    total: int | None = None,
) -> None:
    """Run the model on every image and hand the records to the collector; raise StoppedEarly if a device is lost.

    Args:
        requests: the images, with their labels.
        sessions: sessions of one model with `exact` evidence.
        options: how images are decoded and batched.
        collector: receives the records.
        progress: receives the number of images done after each image, and `total`.
        total: number of images, if it is known.
    """

    for result in predict_stream(requests, sessions, replace(options, keep_images=True)):
        record, prepared = result.record, result.prepared
        sha256 = prepared.image_sha256
        if sha256 is None and isinstance(record, Answered):
            try:
                sha256 = content_sha256(prepared.input.source)
            except ImageError as error:
                record = error_record(record.image, error.code, str(error))
        collector.add(record, label=prepared.input.label, sha256=sha256 or "", image=prepared.image)
        progress(collector.counts.images, total, "")


def explain_unused(counts: ImageCounts) -> str:
    """Return in words how many images were left out, by reason."""
    reasons = [(counts.failed, "failed"), (counts.wrong, "predicted wrong"), (counts.unlabelled, "without a label")]
    return ", ".join(f"{count:,} {reason}" for count, reason in reasons if count) or "there are none"


@dataclass(frozen=True)
class _ImageSet:
    """The images of a data set, with their labels; `total` and `labels` are None if they are not known."""

    requests: Iterator[InputImage]
    description: str
    total: int | None
    labels: frozenset[str] | None
    cropped: bool


def _read_images(data: Path, options: AtlasOptions) -> _ImageSet:
    """Read a data set as the trainer does; without scikit-learn, no validation images are set aside.

    Raises UsageError if the data set cannot be read, or lacks the split.
    """

    if options.plain or (options.dataset is None and not data.is_dir()):
        return _read_plain(data)
    sets_aside = options.split == "val" or (options.split == "train" and is_installed("sklearn"))
    try:
        dataset = read_dataset(
            data, options.dataset, partition=options.partition, skip_missing=options.skip_missing,
            needs_validation=sets_aside, progress=as_progress(options.progress),
        )  # fmt: skip
    except MissingExtra as error:
        raise UsageError(f"{error}; or use every image, labelled by its folder, with --plain") from None
    if options.split == "train" and not (sets_aside or dataset.val):
        options.log(
            WarningLine(
                "warning: the images that training set aside for validation are used too; install scikit-learn to "
                f"leave them out: {install_command('train')}"
            )
        )
    for line in dataset.warnings:
        options.log(WarningLine(one_line(f"warning: {line}")))
    samples = {"train": dataset.train, "val": dataset.val, "test": dataset.test}[options.split]
    if not samples:
        raise UsageError(f"{data}: has no {options.split} split; choose another --split")

    def requests() -> Iterator[InputImage]:

        for sample in samples:
            name = escape_name(display_path(sample.path, dataset.root))
            box = sample.box if options.boxes else None
            yield InputImage(name, sample.path, box, dataset.class_names[sample.label])

    cropped = options.boxes and dataset.crop == "boxes"
    crop_note = ", cropped to boxes" if cropped else ""
    description = f"{data.name or data} ({dataset.layout}, {options.split} split{crop_note})"
    return _ImageSet(requests(), description, len(samples), frozenset(dataset.class_names), cropped)


def _read_plain(data: Path) -> _ImageSet:

    def requests() -> Iterator[InputImage]:
        for image in annotate(discover([str(data)], Skipped()), None, FolderLabels()):
            yield replace(image, name=escape_name(image.relative), index=None)

    return _ImageSet(requests(), f"{data.name or data} (a folder per class)", None, None, cropped=False)


def _check_labels(images: _ImageSet, metadata: Metadata, data: Path, options: AtlasOptions) -> None:
    known = set(metadata.class_names)
    if images.labels is None or images.labels == known:
        return
    unknown = sorted(images.labels - known)
    if options.only_correct and not images.labels & known:
        raise UsageError(f"{data}: the model has none of its classes ({unknown[0]!r}); leave out --only-correct")
    if unknown:
        lacks = f"warning: the model lacks {len(unknown)} of its classes ({', '.join(unknown[:3])})"
        options.log(WarningLine(one_line(lacks)))


def _limit_per_label(requests: Iterator[InputImage], limit: int | None) -> Iterator[InputImage]:
    counts: Counter[str | None] = Counter()
    for request in requests:
        counts[request.label] += 1
        if limit is None or counts[request.label] <= limit:
            yield request
